"""Placing through the agent: what it remembers, what it returns, and who comes at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import pytest

import agents.host.pmd
from agents.host import domains
from netplugin.api.domain_models import CheckRequest, DomainPolicy, RenderRequest
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    HostError,
    NotFound,
)
from netplugin.api.models import Finding, PortSpec, PortState
from netplugin.api.pmd_models import PmdChoice, PmdCore, PmdRequest, PmdState
from netplugin.host.ovs_rows import OvsRoot
from netplugin.host.shared import Host
from netplugin.host.usability import Usability
from netplugin.libvirt.domain import parse_domain
from netplugin.libvirt.pins import Placement
from netplugin.libvirt.values import parse_cpuset
from netplugin.tuning import read_live
from netplugin.tuning.facts import Live, OvsLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.placing.render import render_placed
from netplugin.tuning.root import Unknown
from tests.unit.agent import SPEC, Agent, agent, view_of
from tests.unit.tuning.machines import Tree, load
from tests.unit.tuning.placing.strategies import Vm
from tests.unit.tuning.trees import tree

PAGES = {
    f"/sys/devices/system/node/node{node}/hugepages/hugepages-1048576kB/{which}_hugepages": "64"
    for node in range(2)
    for which in ("nr", "free")
}
#: 2 nodes: 10 whole cores for VMs on the NIC's, 14 on the other.
INTENT = HostIntent(pmd_cores=4)


@cache
def machine() -> Tree:
    return Tree(tree(load("published")).files | PAGES, tree(load("published")).links)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Agent]:
    with agent(tmp_path, view=view_of(machine(), tmp_path, INTENT)) as made:
        yield made


def plug(running: Agent, number: int, port: str = "") -> None:
    spec = {**SPEC, "vm_id": f"vm-{number}", "mac": f"52:54:00:00:0{len(port)}:{number:02x}"}
    asyncio.run(running.service.ports.put(f"p{number}{port}", PortSpec.model_validate(spec)))


def render(running: Agent, vm: Vm, xml: str | None = None, **policy: Any) -> str:
    asked = DomainPolicy(**{"pin": True, **policy})
    request = RenderRequest(xml=xml or vm.xml, policy=asked)
    return asyncio.run(asyncio.run(running.service.domains()).render(vm.name, request)).xml


def pins(xml: str) -> frozenset[int]:
    found = parse_domain(xml, "t").iterfind("cputune/vcpupin")
    return frozenset(cpu for pin in found for cpu in parse_cpuset(pin.get("cpuset", "")))


def findings(running: Agent, vm: Vm, xml: str) -> list[Finding]:
    found = asyncio.run(asyncio.run(running.service.domains()).check(vm.name, CheckRequest(xml=xml)))
    return [each for each in found if each.status != "ok"]


def test_a_vm_has_its_cpus_until_its_last_port_goes(running: Agent) -> None:
    for number, port in ((1, ""), (1, "b"), (2, "")):
        plug(running, number, port)
    first, second = Vm(1, vcpus=4), Vm(2, vcpus=4)
    once = render(running, first)
    assert pins(once) == {6, 38, 7, 39}
    assert render(running, first) == once and render(running, first, once) == once
    assert not pins(render(running, second)) & pins(once)
    assert findings(running, first, once) == []
    asyncio.run(running.service.ports.delete("p1"))
    assert set(running.store.placements.all()) == {"vm-1", "vm-2"}
    asyncio.run(running.service.ports.delete("p1b"))
    assert set(running.store.placements.all()) == {"vm-2"}
    plug(running, 3)
    assert pins(render(running, Vm(3, vcpus=4))) == pins(once), "free again"


def test_places_outlive_the_agent(tmp_path: Path) -> None:
    with agent(tmp_path, view=view_of(machine(), tmp_path, INTENT)) as first:
        plug(first, 1)
        once = render(first, Vm(1))
    more = HostIntent(pmd_cores=5)
    with agent(tmp_path, view=view_of(machine(), tmp_path, more)) as second:
        assert set(second.store.placements.all()) == {"vm-1"}
        assert {f.id for f in findings(second, Vm(1), once)} >= {"vcpu-cpus"}
        again = render(second, Vm(1), once)
        assert not pins(again) & pins(once), "those are for PMD threads and emulators now"
        assert findings(second, Vm(1), again) == []


def test_many_at_once_get_different_cpus(tmp_path: Path) -> None:
    """As many VMs of a core as there are cores, and one more is refused."""
    view = view_of(machine(), tmp_path, HostIntent(pmd_cores=4, vm_cores=5))
    vms = [Vm(number) for number in range(1, 7)]
    with agent(tmp_path, view=view) as running:
        for vm in vms:
            plug(running, vm.number)

        def try_to(vm: Vm) -> frozenset[int] | None:
            try:
                return pins(render(running, vm))
            except CapacityExhausted as error:
                assert "node 0 has 0 of 10 CPUs" in error.detail
                return None

        with ThreadPoolExecutor(6) as threads:
            got = list(threads.map(try_to, vms))
    given = [cpus for cpus in got if cpus]
    assert len(given) == 5 and got.count(None) == 1
    assert len(frozenset().union(*given)) == 10


def test_nobody_chooses_while_another_does(running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that have both chosen before either has saved would meet here, with the same CPUs."""
    both = Barrier(2)

    def choose(*args: Any, **named: Any) -> Placement:
        placement = render_placed(*args, **named)
        try:
            both.wait(0.5)
        except BrokenBarrierError:
            pass  # the other is kept waiting, as it should be
        return placement

    monkeypatch.setattr(domains, "render_placed", choose)
    for number in (1, 2):
        plug(running, number)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda n: pins(render(running, Vm(n))), (1, 2))
    assert one and other and not one & other


def test_a_vm_keeps_off_the_cores_of_pmd_threads_that_run(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On VM cores too: PUT /v1/pmd may have given them some while they were free."""
    ovs = OvsLive("3.1.0", "DPDK 22.11", True, {"pmd-cpu-mask": "0xc0"})
    monkeypatch.setattr(read_live, "read_live", lambda *args: Live(ovs=ovs))
    plug(running, 1)
    assert pins(render(running, Vm(1, vcpus=4))) == {8, 40, 9, 41}
    # What the plan has for VMs is theirs where nothing else is left.
    everything = OvsLive("3.1.0", "DPDK 22.11", True, {"pmd-cpu-mask": hex((1 << 64) - 1)})
    monkeypatch.setattr(read_live, "read_live", lambda *args: Live(ovs=everything))
    assert pins(render(running, Vm(1, vcpus=4)))


def test_without_other_cpus_a_vm_keeps_off_pmd_threads_that_run(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask may have CPUs of a node where no port needs a thread."""
    threads = tuple(PmdCore(cpu=n, numa_node=0, isolated=False, busy_percent=None, queues=()) for n in (6, 7))
    everything = OvsLive("3.1.0", "DPDK 22.11", True, {"pmd-cpu-mask": hex((1 << 64) - 1)}, pmds=threads)
    monkeypatch.setattr(read_live, "read_live", lambda *args: Live(ovs=everything))
    plug(running, 1)
    assert pins(render(running, Vm(1, vcpus=4))) == {8, 40, 9, 41}


def test_a_real_time_vm_never_shares_a_cpu_with_a_pmd_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = {"pmd-cpu-mask": hex((1 << 64) - 1)}
    ovs = OvsLive("3.1.0", "DPDK 22.11", True, mask)
    monkeypatch.setattr(read_live, "read_live", lambda *args: Live(ovs=ovs))
    intent = HostIntent(pmd_cores=4, realtime=True)
    with agent(tmp_path, view=view_of(machine(), tmp_path, intent)) as running:
        plug(running, 1)
        with pytest.raises(CapacityExhausted, match="real-time vCPU") as refused:
            render(running, Vm(1), realtime=True)
        assert 'PUT /v1/pmd {"count": N}' in str(refused.value.fix)
        assert running.store.placements.all() == {}
        assert pins(render(running, Vm(1)))
        mask["pmd-cpu-mask"] = "0x1e"
        assert pins(render(running, Vm(1), realtime=True))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PmdChoice, ...]]:
    """The cores that were chosen for PMD threads, call by call; no OVS is set."""
    asked: list[tuple[PmdChoice, ...]] = []

    def set_pmd(ovs: object, request: PmdRequest, chosen: tuple[PmdChoice, ...]) -> PmdState:
        asked.append(chosen)
        return PmdState(cpus="", cores=())

    class View:
        root = OvsRoot(other_config={"pmd-cpu-mask": "0x6"})

        def interfaces(self) -> dict[str, object]:
            return {}

    ovs = SimpleNamespace(caught_up=View, usable=lambda: Usability(True))
    monkeypatch.setattr(Host, "ovs_of_others", property(lambda self: ovs))
    monkeypatch.setattr(agents.host.pmd, "set_pmd", set_pmd)
    monkeypatch.setattr(agents.host.pmd.cpus, "online", lambda: tuple(range(64)))
    return asked


def test_pmd_threads_keep_off_the_cores_of_placed_vms(
    running: Agent, asked: list[tuple[PmdChoice, ...]]
) -> None:
    plug(running, 1)
    assert pins(render(running, Vm(1, vcpus=4))) == {6, 38, 7, 39}

    def put(**request: Any) -> list[str]:
        asyncio.run(running.service.pmd.set(PmdRequest(**request)))
        return [core.cpus for core in asked[-1]]

    assert put(count=6) == ["1", "2", "3", "4", "8", "9"]
    assert put(cpus="1-4") == []
    for request in ({"count": 14}, {"cpus": "38"}, {"cpus": "1-6"}):
        with pytest.raises(Conflict, match="vm-1"):
            put(**request)


def test_without_the_requested_plan_no_core_is_chosen_for_pmd_threads(
    tmp_path: Path, asked: list[tuple[PmdChoice, ...]]
) -> None:
    """The cores that would be chosen may be those that VMs are to have. CPUs can still be named."""
    with agent(tmp_path, view=view_of(machine(), tmp_path, HostIntent(pmd_cores=99))) as running:
        with pytest.raises(Conflict, match=r"\[host\] pmd_cores: 99 whole cores") as refused:
            asyncio.run(running.service.pmd.set(PmdRequest(count=4)))
        assert refused.value.fix and asked == []
        asyncio.run(running.service.pmd.set(PmdRequest(cpus="1-4")))
        assert asked == [()]


def test_where_libvirt_cannot_be_asked_the_error_says_what_to_install(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug(running, 1)
    once = render(running, Vm(1))
    absent = Unknown("qemu:///system", "libvirt-python is not installed", fix="pip install it")
    monkeypatch.setattr(read_live, "read_live", lambda *args: Live(domains=absent))
    with pytest.raises(HostError, match="libvirt-python is not installed") as refused:
        render(running, Vm(1))
    assert refused.value.fix == "pip install it" and not refused.value.retryable
    [unseen] = findings(running, Vm(1), once)
    assert (unseen.id, unseen.status, unseen.fix) == ("libvirt", "warn", "pip install it")


def test_where_libvirt_does_not_answer_nobody_is_placed(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another VM may be pinned to any CPU: that none is known is no sign that there is none."""
    plug(running, 1)
    once = render(running, Vm(1))
    silent = Unknown("qemu:///system", "did not answer within 5 s")
    monkeypatch.setattr(read_live, "read_live", lambda *args: Live(domains=silent))
    with pytest.raises(BackendUnavailable, match="did not answer within 5 s") as refused:
        render(running, Vm(1))
    assert refused.value.step == "render-domain" and refused.value.fix
    plain = render(running, Vm(1), pin=False)
    assert not pins(plain), "without a place there is nothing to ask for"
    [unseen] = findings(running, Vm(1), once)
    assert (unseen.id, unseen.status) == ("libvirt", "warn") and unseen.fix
    absent = Live(domains=replace(silent, missing=True))
    monkeypatch.setattr(read_live, "read_live", lambda *args: absent)
    assert render(running, Vm(1)) == once


def test_what_the_host_has_counts_for_a_vm_that_is_not_placed(running: Agent) -> None:
    plug(running, 1)
    pages = "<memoryBacking><hugepages><page size='1' unit='G'/></hugepages></memoryBacking>"
    big = Vm(1, memory_mb=1 << 17, extra=pages)
    assert not pins(render(running, big, pin=False))
    with pytest.raises(Conflict, match=r"262144 MB on NUMA node 0-1 .* 131072 MB of 131072 are free"):
        render(running, replace(big, memory_mb=1 << 18), pin=False)
    with pytest.raises(Conflict, match="<memory> has 524288 KB"):
        render(running, replace(big, memory_mb=512), pin=False)
    for node in (5, 7):
        with pytest.raises(Conflict, match=f"NUMA node {node} is requested .* has node 0-1"):
            render(running, Vm(1), pin=False, numa_node=node)
    size = "<target><size unit='MiB'>64</size><node>0</node></target>"
    device = f"<memory model='dimm'><source><nodemask>5</nodemask></source>{size}</memory>"
    with pytest.raises(
        Conflict, match="<nodemask> of a memory device has NUMA node 5, and the host has node 0"
    ):
        render(running, Vm(1, extra=f"<devices>{device}</devices>"), pin=False)
    own = "<numatune><memory mode='preferred' nodeset='1'/></numatune>"
    kept = render(running, Vm(1, extra=own), pin=False, numa_node=1)
    assert '<memory mode="preferred" nodeset="1"/>' in kept
    with pytest.raises(Conflict, match="<numatune><memory>"):
        render(running, Vm(1, extra=own), pin=False, numa_node=0)
    wrong = render(running, big, pin=False).replace(">131072<", ">512<")
    assert {f.id: f.status for f in findings(running, Vm(1), wrong)}["memory-pages"] == "fail"


def test_what_is_refused_takes_nothing(running: Agent) -> None:
    plug(running, 1)
    private = "<memoryBacking><access mode='private'/></memoryBacking>"
    pinned = "<cputune><vcpupin vcpu='0' cpuset='9'/></cputune>"
    for extra in (pinned, f"{private}<cputune><vcpupin vcpu='0' cpuset='9'/></cputune>"):
        with pytest.raises(Conflict):
            render(running, Vm(1, extra=extra))
    with pytest.raises(Conflict):
        render(running, Vm(1), realtime=True)
    assert running.store.placements.all() == {}


def test_pins_onto_pmd_cores_are_refused_without_placing_too(running: Agent) -> None:
    plug(running, 1)
    for cpuset, refused in (("1", True), ("8", False), ("0-63", False)):
        vm = Vm(1, extra=f"<cputune><vcpupin vcpu='0' cpuset='{cpuset}'/></cputune>")
        if refused:
            with pytest.raises(Conflict):
                render(running, vm, pin=False)
        else:
            assert f'cpuset="{cpuset}"' in render(running, vm, pin=False)
    placed = render(running, Vm(1))
    with pytest.raises(Conflict) as again:
        render(running, Vm(1), placed, pin=False)
    assert "policy.pin" in str(again.value.fix)


def test_a_host_without_a_plan_says_what_to_set(tmp_path: Path) -> None:
    for intent, word in ((None, "[host] pmd_cores"), (HostIntent(pmd_cores=99), "at most")):
        with agent(tmp_path, view=view_of(machine(), tmp_path, intent)) as running:
            plug(running, 1)
            with pytest.raises(Conflict) as refused:
                render(running, Vm(1))
            assert word in str(refused.value.fix)
            assert "pmd_cores" in f"{refused.value.detail} {refused.value.fix}"
            plain = render(running, Vm(1), pin=False)
            [plan] = [f for f in findings(running, Vm(1), plain) if f.id == "plan"]
            assert plan.status == ("warn" if intent is None else "fail")
            pinned = Vm(1, extra="<cputune><vcpupin vcpu='0' cpuset='1'/></cputune>")
            assert pins(render(running, pinned, pin=False)) == {1}, "nobody knows better"


def test_a_vm_without_ports_is_not_known(running: Agent) -> None:
    with pytest.raises(NotFound):
        render(running, Vm(1))
    with pytest.raises(NotFound):
        findings(running, Vm(1), Vm(1).xml)
    plug(running, 1)
    place = render(running, Vm(1)) and running.store.placements.all()["vm-1"]
    with pytest.raises(NotFound):
        running.store.placements.save("vm-9", place)


def test_a_port_that_fails_is_a_finding(running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(running, 1)
    xml = render(running, Vm(1))
    port = running.service.ports.get("p1").model_copy(update={"state": PortState.FAILED})
    monkeypatch.setattr(asyncio.run(running.service.domains()), "_ports", lambda vm_id: [port])
    assert [f.id for f in findings(running, Vm(1), xml)] == ["port"]
    with pytest.raises(Conflict):
        render(running, Vm(1))

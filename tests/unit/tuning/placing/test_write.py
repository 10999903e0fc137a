"""What a placed domain has in it, element by element, and what of the operator's stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lxml import etree

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.errors import Conflict
from netplugin.libvirt.domain import parse_domain, written
from netplugin.libvirt.pins import is_marked, is_marked_realtime
from netplugin.tuning.placing.capacity import Held, HostCapacity
from netplugin.tuning.placing.render import refuse_stale_mark, render_placed
from tests.unit.tuning.placing.grounds import SMALL, TWO_NODES
from tests.unit.tuning.placing.strategies import Vm

REALTIME_ONLY = (
    "cputune/vcpusched",
    "cputune/emulatorsched",
    "memoryBacking/locked",
    "features/pmu",
    "clock/timer",
    "devices/memballoon",
)


def rendered(vm: Vm, ground: HostCapacity = TWO_NODES) -> etree._Element:
    domain = vm.domain
    render_placed(domain, vm.bindings, vm.policy, ground, Held())
    return domain


def attributes(domain: etree._Element, path: str) -> list[dict[str, str]]:
    return [{str(k): str(v) for k, v in each.attrib.items()} for each in domain.iterfind(path)]


def test_threads_are_pinned() -> None:
    domain = rendered(Vm(1, vcpus=4, iothreads=2))
    pins = attributes(domain, "cputune/vcpupin")
    assert [(p["vcpu"], p["cpuset"]) for p in pins] == [
        ("0", "2"),
        ("1", "12"),
        ("2", "3"),
        ("3", "13"),
    ]
    assert attributes(domain, "cputune/emulatorpin") == [{"cpuset": "6,16"}]
    assert attributes(domain, "cputune/iothreadpin") == [
        {"iothread": "1", "cpuset": "6,16"},
        {"iothread": "2", "cpuset": "6,16"},
    ]
    assert domain.find("vcpu").get("placement") == "static"


def test_memory_is_on_the_node_in_hugepages() -> None:
    domain = rendered(Vm(1, vcpus=4, cells=(2, 2)))
    assert attributes(domain, "numatune/memory") == [{"mode": "strict", "nodeset": "0-1"}]
    assert attributes(domain, "numatune/memnode") == [
        {"cellid": "0", "mode": "strict", "nodeset": "0"},
        {"cellid": "1", "mode": "strict", "nodeset": "1"},
    ]
    [page] = attributes(domain, "memoryBacking/hugepages/page")
    assert page == {"size": "1048576", "unit": "KiB", "nodeset": "0-1"}
    assert {cell["memAccess"] for cell in attributes(domain, "cpu/numa/cell")} == {"shared"}
    assert domain.find("memoryBacking/source") is None, "a file of hugetlbfs is shared as it is"


def test_a_domain_without_cells_gets_one() -> None:
    [cell] = attributes(rendered(Vm(1, vcpus=3, memory_mb=2048)), "cpu/numa/cell")
    assert cell == {
        "id": "0",
        "cpus": "0-2",
        "memory": str(2048 << 10),
        "unit": "KiB",
        "memAccess": "shared",
    }
    [cell] = attributes(rendered(Vm(1, vhost=False)), "cpu/numa/cell")
    assert "memAccess" not in cell, "a tap needs no shared memory"


@pytest.mark.parametrize(
    ("kind", "cpu", "mode", "check"),
    [
        ("kvm", "", "host-passthrough", "none"),
        ("qemu", "", "maximum", None),
        ("kvm", "<cpu mode='host-model'/>", "host-model", None),
        ("kvm", "<cpu match='exact'><model>Haswell</model></cpu>", None, None),
    ],
)
def test_the_operator_s_cpu_stays(kind: str, cpu: str, mode: str | None, check: str | None) -> None:
    found = rendered(Vm(1, kind=kind, extra=cpu)).find("cpu")
    assert (found.get("mode"), found.get("check")) == (mode, check)


@pytest.mark.parametrize(
    ("vm", "sockets", "cores", "threads"),
    [
        (Vm(1, vcpus=4), 1, 2, 2),
        (Vm(1, vcpus=3), 1, 3, 1),
        (Vm(1, vcpus=4, cells=(2, 2)), 2, 1, 2),
        (Vm(1, vcpus=4, cells=(1, 3)), 2, 2, 1),
        (Vm(1, vcpus=4, topology="<topology sockets='4' cores='1' threads='1'/>"), 1, 2, 2),
        (Vm(1, vcpus=4, topology="<topology sockets='2' cores='2' threads='1'/>"), 2, 1, 2),
        (
            Vm(1, vcpus=4, topology="<topology sockets='1' dies='2' cores='2' threads='1'/>"),
            1,
            1,
            2,
        ),
    ],
)
def test_the_guest_knows_its_siblings(vm: Vm, sockets: int, cores: int, threads: int) -> None:
    [topology] = attributes(rendered(vm), "cpu/topology")
    found = tuple(int(topology[name]) for name in ("sockets", "cores", "threads"))
    assert found == (sockets, cores, threads)
    assert vm.vcpus == sockets * int(topology["dies"]) * cores * threads


def test_real_time_has_what_it_takes_and_pinning_alone_has_not() -> None:
    balloon = "<devices><memballoon model='virtio'><stats period='10'/></memballoon></devices>"
    vm = Vm(1, vcpus=4, realtime=True)
    domain = parse_domain(vm.xml.replace("<devices/>", balloon), "t")
    render_placed(domain, vm.bindings, vm.policy, TWO_NODES, Held())
    fifo = {"scheduler": "fifo", "priority": "1"}
    assert attributes(domain, "cputune/vcpusched") == [{"vcpus": "0-3", **fifo}]
    assert attributes(domain, "cputune/emulatorsched") == [fifo]
    assert domain.find("memoryBacking/locked") is not None
    assert attributes(domain, "features/pmu") == [{"state": "off"}]
    assert attributes(domain, "clock/timer") == [
        {"name": "kvmclock", "present": "no"},
        {"name": "tsc", "mode": "native"},
    ]
    assert attributes(domain, "cpu/feature") == [{"name": "invtsc", "policy": "require"}]
    assert (cpu := domain.find("cpu")).get("migratable") == "off"
    assert cpu.get("mode") == "host-passthrough"
    assert attributes(domain, "devices/memballoon") == [{"model": "none"}]
    assert len(domain.find("devices/memballoon")) == 0
    assert is_marked_realtime(domain)
    pinned = rendered(Vm(1))
    assert [path for path in REALTIME_ONLY if pinned.find(path) is not None] == []
    assert is_marked(pinned) and not is_marked_realtime(pinned)


def test_real_time_without_kvm_has_no_timers_of_kvm() -> None:
    domain = rendered(Vm(1, realtime=True, kind="qemu"))
    assert domain.find("clock/timer") is None and domain.find("features/pmu") is None
    assert domain.find("cpu/feature") is None and domain.find("cpu").get("migratable") is None
    assert domain.find("cputune/vcpusched") is not None


def test_emulator_threads_on_housekeeping_are_not_in_real_time() -> None:
    domain = rendered(Vm(1, realtime=True), replace(SMALL, realtime=True))
    assert domain.find("cputune/emulatorsched") is None
    assert domain.find("cputune/vcpusched") is not None


def test_what_was_placed_before_is_placed_again() -> None:
    """Its pins are ours, whatever they say; they would be the operator's without our mark."""
    vm = Vm(1, realtime=True)
    domain = rendered(vm)
    policy = DomainPolicy(pin=True, numa_node=1)
    render_placed(domain, vm.bindings, policy, TWO_NODES, Held())
    assert [pin["cpuset"] for pin in attributes(domain, "cputune/vcpupin")] == ["22", "32"]
    assert attributes(domain, "numatune/memnode")[0]["nodeset"] == "1"
    assert domain.find("cputune/vcpusched") is None
    with pytest.raises(Conflict):
        refuse_stale_mark(domain)
    for part in ("metadata", "numatune"):
        domain.remove(domain.find(part))
    refuse_stale_mark(domain)
    with pytest.raises(Conflict):
        render_placed(domain, vm.bindings, vm.policy, TWO_NODES, Held())


def test_other_people_s_metadata_stays() -> None:
    extra = "<metadata><a:b xmlns:a='urn:somebody' c='d'/></metadata>"
    domain = rendered(Vm(1, extra=extra))
    assert domain.find("metadata/{urn:somebody}b").get("c") == "d"
    again = parse_domain(written(domain), "t")
    assert is_marked(again) and len(again.findall("metadata/*")) == 2

"""PMD threads go to cores of the nodes of NICs and VMs, and never to a core that a VM has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.api.errors import BackendUnavailable, Conflict, InvalidRequest
from netplugin.host.cpus import parse_list
from netplugin.host.ovs_rows import OvsInterface
from netplugin.libvirt.pins import PlacedCell, Placement
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Core, DomainLive, Live
from netplugin.tuning.placing.pmd_cores import PmdHost, choose_cores, host_of, refuse_cores_of_vms
from netplugin.tuning.root import Unknown
from tests.unit.tuning.golden import facts_of, planned
from tests.unit.tuning.machines import load
from tests.unit.tuning.test_checks import facts_from

ALONE = Placement(cells=(), threads=1, emulator=(), emulator_alone=True, page_kb=2048)


def interface(name: str, kind: str, node: int | None) -> OvsInterface:
    return OvsInterface(name, kind, {}, {}, None, 1500, 1, None, "up", numa_node=node)


NIC = interface("dpdk0", "dpdk", 0)
VHOST = interface("vh1", "dpdkvhostuserclient", 1)


def placed(node: int, *cpus: int) -> Placement:
    vcpus = tuple(range(len(cpus)))
    cell = PlacedCell(number=0, node=node, vcpus=vcpus, cpus=cpus, memory_kb=2048)
    return ALONE.model_copy(update={"cells": (cell,)})


def host(
    machine: str = "published",
    *interfaces: OvsInterface,
    live: Live | None = None,
    vms: dict[str, Placement] | None = None,
    **intent: Any,
) -> PmdHost:
    plan = planned(machine, **intent) if intent else None
    scene = Scene(facts_of(machine), live or Live(), plan)
    return host_of(scene, vms or {}, interfaces or (NIC,))


def cpus(count: int, found: PmdHost, siblings: bool = False) -> tuple[int, ...]:
    chosen = choose_cores(count, siblings, found)
    return tuple(cpu for core in chosen for cpu in parse_list(core.cpus))


# -- which ---------------------------------------------------------------------------------------


def test_a_thread_on_each_core_of_the_nic_s_node() -> None:
    """The highest CPUs of this host, 62 and 63, are on the other node."""
    assert cpus(2, host()) == (1, 2)
    assert cpus(4, host(), siblings=True) == (1, 33, 2, 34)
    assert cpus(3, host(), siblings=True) == (1, 33, 2)
    [first, _] = choose_cores(2, False, host())
    assert (first.cpus, first.numa_node) == ("1", 0)
    assert first.reason.startswith("NUMA node 0 has the NIC dpdk0; free")


def test_a_node_with_vms_has_a_thread_for_their_ports() -> None:
    assert cpus(3, host("published", NIC, VHOST)) == (1, 17, 2)
    assert cpus(1, host("published", NIC, VHOST)) == (1,), "the NIC goes first"
    where = choose_cores(2, False, host("published", NIC, VHOST))[1]
    assert where.reason.startswith("NUMA node 1 has VMs (vh1)")
    assert cpus(2, host(vms={"a": placed(1, 20)})) == (1, 17)


def test_the_cores_of_the_plan_are_taken_first() -> None:
    asked = {"pmd_cores": 2, "vm_cores": 8, "housekeeping_cores": 2}
    assert cpus(2, host(**asked)) == (2, 3)
    chosen = choose_cores(4, False, host(**asked))
    assert [core.cpus for core in chosen] == ["2", "3", "13", "14"], "1 is for housekeeping, as 0 is"
    assert chosen[0].reason.endswith("a PMD core of the host's plan")
    # The last are those for VMs, while no VM has them.
    few = {"pmd_cores": 2, "vm_cores": 12}
    assert cpus(3, host(**few)) == (1, 2, 4)
    assert cpus(3, host(vms={"a": placed(0, 4, 36)}, **few)) == (1, 2, 5)


def test_cores_that_the_kernel_isolates_come_before_others() -> None:
    isolated = replace(load("published"), isolated="8-9,40-41")
    found = host_of(Scene(facts_from(isolated)), {}, (NIC,))
    assert cpus(3, found) == (8, 9, 1)


def test_without_a_port_of_a_nic_the_fastest_nics_count() -> None:
    assert cpus(2, host("intel-snc", VHOST)) == (49, 17)
    assert cpus(1, host("small", interface("null", "dpdk", None))) == (1,)


def test_a_machine_of_one_core_keeps_its_first_cpu() -> None:
    core = Core(0, 0, frozenset((0, 1)))
    facts = facts_of("small")
    facts = replace(facts, cpus=replace(facts.cpus, cores=(core,)))
    found = host_of(Scene(facts), {}, (NIC,))
    assert cpus(1, found) == (1,)
    with pytest.raises(InvalidRequest):
        cpus(2, found, siblings=True)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "siblings"), [(16, False), (31, True), (1000, False)])
def test_more_than_the_nodes_have(count: int, siblings: bool) -> None:
    with pytest.raises(InvalidRequest, match="NUMA node 0 has 15 cores") as refused:
        choose_cores(count, siblings, host())
    assert [wrong.field for wrong in refused.value.errors] == ["count"] and refused.value.fix


def test_housekeeping_cores_of_the_plan_are_not_taken() -> None:
    """Node 0 has 16 cores, of which 3 are kept, and one is for emulator threads."""
    found = host(pmd_cores=2, vm_cores=0, housekeeping_cores=3)
    assert cpus(13, found) == tuple(range(3, 16))
    with pytest.raises(InvalidRequest, match="NUMA node 0 has 13 cores"):
        choose_cores(14, False, found)


@pytest.mark.parametrize(("count", "siblings", "least"), [(1, False, 2), (2, True, 4)])
def test_each_node_of_a_nic_has_a_thread_or_the_call_is_refused(
    count: int, siblings: bool, least: int
) -> None:
    """OVS would poll the NIC from the other node, and report it in its log alone."""
    found = host("published", NIC, interface("dpdk1", "dpdk", 1))
    with pytest.raises(InvalidRequest, match="no PMD thread on NUMA node 1") as refused:
        choose_cores(count, siblings, found)
    assert "NIC dpdk1" in refused.value.detail and f"at least {least}" in str(refused.value.fix)
    chosen = choose_cores(least, siblings, found)
    assert {core.numa_node for core in chosen} == {0, 1}
    vms = {"vm-a": placed(1, *range(17, 32))}
    taken = host("published", NIC, interface("dpdk1", "dpdk", 1), vms=vms)
    with pytest.raises(Conflict, match=r"NUMA node 1.* are of the VMs vm-a"):
        choose_cores(least, siblings, taken)
    full = host("published", NIC, interface("dpdk1", "dpdk", 1))
    full = replace(full, ranks=tuple((cpus & {*range(16)}, why) for cpus, why in full.ranks))
    with pytest.raises(InvalidRequest, match=r"NUMA node 1.* for everything else"):
        choose_cores(least, siblings, full)


def test_a_node_of_vms_without_a_thread_is_named() -> None:
    [only] = choose_cores(1, False, host("published", NIC, VHOST))
    assert only.reason.endswith(
        "none is left for the VMs of NUMA node 1 (vh1): OVS polls their ports from here"
    )
    assert "none is left" not in str(choose_cores(2, False, host("published", NIC, VHOST)))


def test_cores_of_placed_vms_are_not_taken() -> None:
    """A VM has its cores whole, also where a sibling has none of its vCPUs."""
    found = host(vms={"vm-a": placed(0, *range(1, 9)), "vm-b": placed(0, 41)})
    assert cpus(6, found) == (10, 11, 12, 13, 14, 15)
    with pytest.raises(Conflict, match="of the VMs vm-a, vm-b"):
        choose_cores(7, False, found)
    with pytest.raises(Conflict, match="on cores of the VMs vm-b"):
        refuse_cores_of_vms((9, 10), (), found)
    refuse_cores_of_vms((9, 10), (9,), found)
    refuse_cores_of_vms((10, 11), (), found)


def test_cores_that_running_domains_are_pinned_to_are_not_taken() -> None:
    pinned = DomainLive("foreign", (frozenset((1, 2)),), frozenset(range(64)), frozenset())
    floating = DomainLive("floating", (frozenset(range(64)),), frozenset(range(64)), frozenset())
    found = host(live=Live(domains=(pinned, floating)))
    assert cpus(2, found) == (3, 4)
    with pytest.raises(Conflict, match="foreign"):
        refuse_cores_of_vms((34,), (), found)


def test_cores_of_emulator_and_io_threads_are_not_taken() -> None:
    """Unless they may run on the lowest core of a node too, which no PMD thread takes."""
    every = frozenset(range(64))
    pinned = DomainLive("foreign", (frozenset((1,)),), frozenset((2, 3)), frozenset(), (frozenset((36,)),))
    shared = DomainLive("shared", (every,), frozenset(range(8)), frozenset(), (frozenset((0, 5)), every))
    assert cpus(2, host(live=Live(domains=(pinned, shared)))) == (5, 6)
    alone = placed(0, 1).model_copy(update={"emulator": (2,)})
    sharing = placed(0, 3).model_copy(update={"emulator": (0, 4), "emulator_alone": False})
    assert cpus(1, host(vms={"a": alone, "b": sharing})) == (4,)


def test_a_libvirt_that_does_not_answer_may_have_vms_on_any_core() -> None:
    silent = Unknown("qemu:///system", "did not answer within 5 s")
    with pytest.raises(BackendUnavailable, match="did not answer within 5 s") as refused:
        host(live=Live(domains=silent))
    assert refused.value.fix
    assert cpus(1, host(live=Live(domains=replace(silent, missing=True)))) == (1,)


@given(
    count=st.integers(1, 40),
    siblings=st.booleans(),
    taken=st.sets(st.integers(0, 63)),
    nodes=st.sets(st.sampled_from([0, 1]), min_size=1),
    machine=st.sampled_from([{}, {"pmd_cores": 3}]),
)
def test_what_is_chosen(
    count: int, siblings: bool, taken: set[int], nodes: set[int], machine: dict[str, int]
) -> None:
    """So many CPUs, of cores that no VM has, on the nodes of NICs; or a refusal that says why."""
    nics = [interface(f"dpdk{node}", "dpdk", node) for node in nodes]
    vms = {"vm": placed(0, *sorted(taken))} if taken else {}
    found = host("published", *nics, vms=vms, **machine)
    try:
        chosen = choose_cores(count, siblings, found)
    except Conflict:
        assert taken
        return
    except InvalidRequest:
        # A plan keeps a core of each node for emulator threads in addition to that for everything else.
        cores = (14 if machine else 15) * len(nodes) - (16 if taken else 0)
        each = 2 if siblings else 1
        assert count > cores * each or count < len(nodes) * each
        return
    every = [cpu for core in chosen for cpu in parse_list(core.cpus)]
    assert len(every) == len(set(every)) == count
    assert not {cpu % 32 for cpu in every} & {cpu % 32 for cpu in taken}
    assert not {cpu % 32 for cpu in every} & {0, 16}, "the lowest core of each node"
    if not siblings:
        assert len({cpu % 32 for cpu in every}) == count
    assert nodes <= {core.numa_node for core in chosen} <= nodes | ({0} if taken else set())

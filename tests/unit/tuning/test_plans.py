"""Plans that are known: the three machines, the arithmetic of buffers, and what cannot be planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netplugin.api.errors import HostError, InvalidRequest
from netplugin.host.cpus import format_list, from_mask
from netplugin.tuning import steps as sources
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Live, OvsLive, OvsPortLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.hugepages import buffer_bytes, pools_mb, port_mbufs
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import known
from netplugin.tuning.steps import BootPages, File, OtherConfig
from tests.unit.tuning.golden import (
    OVS,
    PLANS,
    arguments,
    facts_of,
    ovs,
    plan_of,
    planned,
    step,
    texts,
)
from tests.unit.tuning.guests import PLANS as GUESTS
from tests.unit.tuning.guests import guest_plan_of
from tests.unit.tuning.machines import DATA, MemoryRoot, load
from tests.unit.tuning.test_checks import facts_from
from tests.unit.tuning.trees import tree

# -- golden plans --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", texts())
def test_a_plan_is_as_it_was_read(file: str) -> None:
    """If it should be otherwise: ``python -m tests.unit.tuning.golden``, and read the difference."""
    assert texts()[file] == (DATA / "plans" / file).read_text()


def test_no_plan_is_kept_that_nobody_makes() -> None:
    assert {path.name for path in (DATA / "plans").iterdir()} == set(texts())


@pytest.mark.parametrize(
    ("cores", "pmd", "mask", "isolated"),
    [
        (2, "1-2,17,33-34,49", "0x2000600020006", "1-2,4-15,17,19-31,33-34,36-47,49,51-63"),
        (4, "1-4,17,33-36,49", "0x2001e0002001e", "1-4,6-15,17,19-31,33-36,38-47,49,51-63"),
        (6, "1-6,17,33-38,49", "0x2007e0002007e", "1-6,8-15,17,19-31,33-38,40-47,49,51-63"),
        (8, "1-8,17,33-40,49", "0x201fe000201fe", "1-8,10-15,17,19-31,33-40,42-47,49,51-63"),
    ],
)
def test_the_published_host(cores: int, pmd: str, mask: str, isolated: str) -> None:
    plan = plan_of(f"published-pmd-{cores}")
    assert format_list(plan.partition.pmd) == pmd
    assert format_list(plan.partition.isolated) == isolated
    assert [len(share.pmd) for share in plan.partition.nodes] == [cores, 1], "one for the VMs of node 1"
    assert step(plan, OtherConfig("pmd-cpu-mask")).desired == mask
    assert frozenset(from_mask(mask)) == plan.partition.pmd
    assert step(plan, OtherConfig("dpdk-socket-mem")).desired == "2048,2048"
    assert arguments(plan)["nohz_full"] == isolated
    assert arguments(plan)["isolcpus"] == f"managed_irq,domain,{isolated}"


def test_idle_siblings_have_no_pmd_thread_and_are_isolated() -> None:
    plan = plan_of("published-realtime")
    assert format_list(plan.partition.polling) == "1-2"
    assert plan.partition.isolated >= {33, 34}
    assert format_list(plan.partition.vcpus) == "4-11"
    assert step(plan, OtherConfig("pmd-cpu-mask")).desired == "0x6"


def test_vm_cores_stay_on_the_nic_s_node_while_there_are_some() -> None:
    assert planned("published", pmd_cores=2, vm_cores=12).partition.vm_nodes == (0,)
    assert planned("published", pmd_cores=2, vm_cores=13).partition.vm_nodes == (0, 1)


def test_pmd_cores_are_spread_over_the_nodes_of_the_named_nics() -> None:
    asked = {"pmd_cores": 3, "nics": ("ens2f0", "0000:41:00.0")}
    plan = planned("amd-4-nodes", vm_cores=0, **asked)
    assert [len(share.pmd) for share in plan.partition.nodes] == [0, 2, 1, 0]


def test_whether_there_is_a_plan_does_not_depend_on_cables() -> None:
    """While no link is up all NICs count as the fastest: they are on nodes 1 and 2."""
    down = [nic | {"speed": -1, "driver": "ice"} for nic in load("amd-4-nodes").nics]
    facts = facts_from(replace(load("amd-4-nodes"), nics=down))
    plan = make_plan(facts, HostIntent(pmd_cores=1))
    assert {known(nic.node, None) for nic in plan.nics} == {1, 2}
    assert all(share.pmd for share in plan.partition.nodes if share.vm)
    bare = make_plan(facts, HostIntent(pmd_cores=1, vm_cores=1))
    [away] = [f for f in check(Scene(facts, OVS, bare)) if f.id == "nic-node"]
    assert away.status == "warn" and "0000:a1:00.0 on NUMA node 2" in away.found and away.fix
    bound = [nic | {"driver": "vfio-pci"} for nic in down]
    with pytest.raises(InvalidRequest, match="there are NICs on the NUMA nodes 1, 2"):
        make_plan(facts_from(replace(load("amd-4-nodes"), nics=bound)), HostIntent(pmd_cores=1))


def test_each_node_with_vms_has_a_pmd_core_for_their_ports() -> None:
    """OVS polls a vhost-user port on the node of its VM's memory, where it has a thread there."""
    plan = planned("published", pmd_cores=2, vm_cores=20)
    assert [len(share.pmd) for share in plan.partition.nodes] == [2, 1]
    [away] = [f for f in check(Scene(facts_of("published"), OVS, plan)) if f.id == "vm-node"]
    assert "no PMD thread" not in away.found
    none = planned("published", pmd_cores=2, vm_cores=20, vm_pmd_cores=0)
    assert none.partition.pmd_nodes == (0,)
    [away] = [f for f in check(Scene(facts_of("published"), OVS, none)) if f.id == "vm-node"]
    assert "no PMD thread on node 1" in away.found
    assert planned("published", pmd_cores=2, vm_cores=8).partition.pmd_nodes == (0,)


def test_vm_cores_are_on_the_neighbour_node_before_the_other_socket() -> None:
    """The NIC is on node 3, whose socket is nodes 2 and 3."""
    for cores, nodes in ((10, (3,)), (20, (2, 3)), (30, (0, 2, 3))):
        plan = planned("intel-snc", pmd_cores=4, vm_cores=cores)
        assert plan.partition.vm_nodes == nodes, cores
    # By the package alone, where the firmware has one distance for all other nodes.
    flat = [[10 if a == b else 20 for b in range(4)] for a in range(4)]
    machine = replace(load("intel-snc"), distances=flat)
    plan = make_plan(facts_from(machine), HostIntent(pmd_cores=4, vm_cores=20))
    assert plan.partition.vm_nodes == (2, 3)


def test_cores_of_one_l3_cache_stay_together() -> None:
    """A node of amd-nps4 has two groups of 4 cores, the first without the core for housekeeping."""
    [node] = [s for s in planned("amd-nps4", pmd_cores=4, vm_cores=2).partition.nodes if s.node == 5]
    assert [core.first for core in node.pmd] == [44, 45, 46, 47]
    assert {core.first for core in (*node.emulator, *node.vm)} == {41, 42, 43}
    [node] = [s for s in planned("amd-nps4", pmd_cores=2, vm_cores=4).partition.nodes if s.node == 5]
    assert [core.first for core in node.pmd] == [41, 42]
    assert [core.first for core in node.vm] == [44, 45, 46, 47]


# -- sources -------------------------------------------------------------------------------------

SOURCES = tuple(value for value in vars(sources).values() if isinstance(value, sources.Source))


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_was_read_or_says_that_it_was_not(source: sources.Source) -> None:
    assert bool(source.read) is not source.endswith(f"({sources.NOT_READ})")
    assert source.read is None or " at " in source.read or "in its translations" in source.read


def test_every_line_of_a_plan_has_a_source_that_is_known() -> None:
    """One that only has a name would read as if it had been looked up."""
    steps = {step.source for name in PLANS for step in plan_of(name).steps}
    guest = {step.source for name in GUESTS for step in guest_plan_of(name).steps}
    assert len(SOURCES) > 20 and len(steps) > 20
    for text in {*steps, *guest, *sources.PARTITION.values(), sources.PAGES}:
        for part in text.split("; "):
            named = part.startswith("/sys/") or sources.OWN in part
            assert named or any(source in part for source in SOURCES), (part, text)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mtu", "size"), [(1500, 3008), (1800, 3008), (6000, 7104), (9000, 10176)])
def test_the_size_of_a_buffer_is_that_of_ovs(mtu: int, size: int) -> None:
    assert buffer_bytes(mtu) == size


def test_pools_of_mtus() -> None:
    assert pools_mb((1500,), 262144) == -(-788_529_152 // (1 << 20)) == 752
    assert pools_mb((9000,), 262144) == 2544
    assert pools_mb((1500, 1800), 262144) == 752  # one pool
    assert pools_mb((1500, 9000), 262144) == 752 + 2544
    assert pools_mb((1400,), 262144) == 47  # small frames have the small pool
    assert pools_mb((1400, 1500), 262144) == 752


@pytest.mark.parametrize(("rxqs", "pmds", "mbufs"), [(1, 1, 22560), (1, 2, 24608), (2, 2, 26688)])
def test_buffers_of_a_port_with_memory_of_its_own(rxqs: int, pmds: int, mbufs: int) -> None:
    """The examples of OVS's memory.rst; its third adds the burst of one queue for two."""
    assert port_mbufs(rxqs, pmds + 1) == mbufs


def test_per_port_memory_is_sized_by_the_ports() -> None:
    asked = {"pmd_cores": 1, "vm_cores": 4, "vm_ports": 40, "nics": ("ens1f0np0",)}
    shared = planned("published", **asked).pages[0]
    plan = planned("published", ovs(per_port_memory="true"), **asked)
    # 40 ports of VMs and the NIC, whose transmit queues are one more than the PMD threads.
    mbufs = 40 * port_mbufs(1, 1) + port_mbufs(1, 3)
    [pages] = [p for p in plan.pages if p.pages]
    assert (pages.mbufs, pages.ports) == (mbufs, 41)
    assert pages.ovs_mb == 3072 > mbufs * 3008 / (1 << 20) + 512 > shared.ovs_mb == 2048
    assert step(plan, OtherConfig("per-port-memory")).done
    assert step(plan, OtherConfig("dpdk-socket-mem")).desired == f"{pages.ovs_mb},0"
    # Nobody says how many: those that OVS has now, and at least one for each VM core.
    port = OvsPortLive("vm1", "vm1", "dpdkvhostuserclient", 1500)
    for there, ports in ((3, 5), (9, 10)):
        live = Live(ovs=OvsLive("3.1.0", None, True, {"per-port-memory": "true"}, (port,) * there))
        [pages] = [p for p in planned("published", live, **asked | {"vm_ports": None}).pages if p.pages]
        assert pages.ports == ports


def test_a_node_has_memory_for_whole_vms() -> None:
    """By cores it would be 30 and 34 GB: three VMs of 16 GB, and not four."""
    asked = {"pmd_cores": 2, "vm_memory_mb": 64 * 1024}
    by_cores = [pages.vm_mb // 16384 for pages in planned("published", **asked).pages]
    assert sum(by_cores) == 3
    plan = planned("published", vm_size_mb=16384, **asked)
    assert [pages.vm_mb for pages in plan.pages] == [2 * 16384, 2 * 16384]
    with pytest.raises(InvalidRequest, match="20 VMs of 16384 MB") as refused:
        planned("published", pmd_cores=2, vm_memory_mb=20 * 16384, vm_size_mb=16384)
    assert refused.value.errors[0].field == "vm_memory_mb"


def test_memory_of_whole_vms_is_where_their_cores_are() -> None:
    """Node 0 has one VM core next to 13 and 10 on the others: a VM's room there would be taken from them."""
    plan = plan_of("intel-snc")
    given = {pages.node: pages.vm_mb // 16384 for pages in plan.pages}
    assert [(s.node, len(s.vm)) for s in plan.partition.nodes] == [(0, 1), (1, 0), (2, 13), (3, 10)]
    assert given == {0: 0, 1: 0, 2: 5, 3: 3}
    [found] = [f for f in check(Scene(facts_of("intel-snc"), plan=plan)) if f.id == "vm-memory"]
    assert found.status == "warn" and "on NUMA node 0" in found.found and found.fix
    spread = planned("intel-snc", pmd_cores=4, vm_cores=24, vm_memory_mb=131072)
    assert not [f for f in check(Scene(facts_of("intel-snc"), plan=spread)) if f.id == "vm-memory"]


def test_pages_that_are_there_stay_now_and_at_boot() -> None:
    """Run time, command line and unit agree, or a plan would find wrong what another one had set."""
    for release, node_counts in (("6.8.0", "0:40,1:5"), ("5.14.0", None)):
        there = load("published")
        nodes = [
            node | {"hugepages": {2048: 0, 1048576: pages}}
            for node, pages in zip(there.nodes, (40, 1), strict=True)
        ]
        facts = facts_from(replace(there, release=release, nodes=nodes))
        plan = make_plan(facts, HostIntent(pmd_cores=2, vm_memory_mb=4096), OVS)
        assert [(p.pages, p.beyond) for p in plan.pages] == [(4, 36), (5, 0)]
        live = [s.desired for s in plan.steps if isinstance(s.target, File) and "1048576" in s.target.path]
        assert live == ["40", "5"]
        if node_counts:
            assert arguments(plan)["hugepages"] == node_counts
        else:
            assert step(plan, BootPages(1048576)).desired == "0:40,1:5"


def test_the_page_sizes_of_arm() -> None:
    """A kernel of 64 KB pages has 2 MB, 512 MB and 16 GB."""
    [pages] = planned("arm", pmd_cores=2, vm_memory_mb=4096).pages
    assert pages.size_kb == 524288
    [pages] = planned("arm", pmd_cores=2, vm_memory_mb=4096, hugepage_kb=2048).pages
    assert pages.size_kb == 2048


def test_buffers_are_halved_where_memory_is_short() -> None:
    [pages] = planned("small", pmd_cores=1, mtus=(9000,), vm_memory_mb=1024).pages
    assert (pages.mbufs, pages.ovs_mb) == (131072, 1272 + 512)
    assert pages.pages == (1272 + 512 + 1024) // 2


@pytest.mark.parametrize(
    ("machine", "field", "intent"),
    [
        ("published", "pmd_cores", {"pmd_cores": 16}),
        ("published", "vm_cores", {"pmd_cores": 2, "vm_cores": 27}),
        # A node of a NIC without a PMD thread is polled from another one.
        ("amd-4-nodes", "pmd_cores", {"pmd_cores": 1, "nics": ("ens2f0", "0000:41:00.0")}),
        ("published", "vm_memory_mb", {"pmd_cores": 2, "vm_memory_mb": 300_000}),
        ("published", "nics", {"pmd_cores": 2, "nics": ("eth7",)}),
        ("published", "hugepage_kb", {"pmd_cores": 2, "hugepage_kb": 64}),
        ("small", "hugepage_kb", {"pmd_cores": 1, "hugepage_kb": 1048576}),
        ("small", "vm_memory_mb", {"pmd_cores": 1, "vm_memory_mb": 4000}),
        ("small-1280", "mtus", {"pmd_cores": 1, "mtus": tuple(range(1500, 9600, 1024)) * 3}),
        ("small-1024", "pmd_cores", {"pmd_cores": 1, "mtus": tuple(range(1500, 9600, 1024)) * 3}),
    ],
)
def test_what_cannot_be_planned(machine: str, field: str, intent: dict[str, Any]) -> None:
    machine, _, megabytes = machine.partition("-") if machine.startswith("small") else (machine, "", "")
    facts = facts_of(machine)
    if megabytes:  # even the smallest pools want more than this: those of one MTU, or of all
        assert isinstance(facts.memory.nodes, tuple)
        nodes = tuple(replace(node, total_kb=int(megabytes) << 10) for node in facts.memory.nodes)
        facts = replace(facts, memory=replace(facts.memory, nodes=nodes))
    with pytest.raises(InvalidRequest) as refused:
        make_plan(facts, HostIntent(**intent))
    assert [wrong.field for wrong in refused.value.errors] == [field]
    assert refused.value.fix and refused.value.step == "plan"


@pytest.mark.parametrize("path", ["/sys/devices/system/cpu/online", "/sys/devices/system/node/node0/meminfo"])
def test_no_plan_without_the_facts_it_stands_on(path: str) -> None:
    made = tree(load("small"))
    made.files[path] = "garbage"
    with pytest.raises(HostError, match=path):
        make_plan(read_facts(MemoryRoot(made)), HostIntent(pmd_cores=1))


def test_pages_that_are_there_beyond_the_plan_stay() -> None:
    plan = planned("amd-4-nodes", pmd_cores=1, vm_cores=1)
    path = "/sys/devices/system/node/node2/hugepages/hugepages-1048576kB/nr_hugepages"
    assert (step(plan, File(path)).now, step(plan, File(path)).desired) == ("16", "16")

"""Plans for NUMA nodes without memory, without CPUs or with sparse numbers, and for CPUs of no node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netplugin.api.errors import InvalidRequest
from netplugin.host.cpus import format_list, parse_list
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import NODELESS, Facts, HostNic, NodeMemory, OvsPortLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.placing.capacity import ground_of
from netplugin.tuning.placing.pmd_cores import choose_cores, host_of
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import known
from netplugin.tuning.steps import BootPages, OtherConfig
from tests.unit.tuning.golden import OVS, arguments, ovs, step
from tests.unit.tuning.machines import Machine, MemoryRoot, load
from tests.unit.tuning.placing.test_pmd_cores import interface
from tests.unit.tuning.test_checks import facts_from, found
from tests.unit.tuning.trees import tree

SOCKET_MEM = OtherConfig("dpdk-socket-mem")
EMPTY: dict[str, Any] = {"memory_kb": 0, "hugepages": {}}


def changed(name: str, nodes: dict[int, dict[str, Any]], **fields: Any) -> Machine:
    """The machine with other values of some nodes, by position."""
    machine = load(name)
    return replace(machine, nodes=[n | nodes.get(at, {}) for at, n in enumerate(machine.nodes)], **fields)


def planned(machine: Machine | str, **intent: Any) -> TuningPlan:
    facts = facts_from(load(machine) if isinstance(machine, str) else machine)
    return make_plan(facts, HostIntent(**intent), OVS)


def refused(facts: Facts, **intent: Any) -> tuple[str, str]:
    """The field of the error and its fix."""
    with pytest.raises(InvalidRequest) as error:
        make_plan(facts, HostIntent(**intent), OVS)
    [wrong] = error.value.errors
    assert error.value.fix
    return wrong.field, error.value.fix


# -- without memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "node", "memory"),
    [
        ({}, 0, "2048"),
        ({1: {"hugepages": {2048: 0, 1048576: 0}}}, 0, "2048"),  # as Linux 6.12 has it
        ({0: EMPTY, 1: {"memory_kb": 131823308, "hugepages": {2048: 0, 1048576: 0}}}, 1, "0,2048"),
        ({1: {"memory_kb": 524288, "hugepages": {2048: 0, 1048576: 0}}}, 0, "2048,0"),  # too little for OVS
        ({1: {"memory_kb": 131823308}}, 0, "2048,0"),  # memory and no hugepages: a node added while it runs
    ],
)
def test_memory_in_one_socket(nodes: dict[int, dict[str, Any]], node: int, memory: str) -> None:
    machine = changed("one-socket-memory", nodes)
    plan = planned(machine, pmd_cores=2, vm_memory_mb=8192)
    partition = plan.partition
    assert (plan.nic_nodes, partition.pmd_nodes, partition.vm_nodes) == ((node,), (node,), (node,))
    [other] = [share for share in partition.nodes if share.node != node]
    assert len(other.housekeeping) == 16 and other.cpus < partition.housekeeping
    assert step(plan, SOCKET_MEM).desired == memory
    assert {pages.node: pages.pages for pages in plan.pages if pages.pages} == {node: 2 + 8}
    scene = Scene(facts_from(machine), OVS, plan)
    [moved] = found(scene, "nic-memory")
    assert moved.status == "warn" and f"on NUMA node {1 - node}" in moved.found
    address = "0000:af:00.0" if node == 0 else "0000:3b:00.0"
    assert moved.fix and f"echo {node} > /sys/bus/pci/devices/{address}/numa_node" in moved.fix
    # VMs are placed where the plan has cores for them, and the agent chooses PMD cores there.
    assert [ground.node for ground in ground_of(plan, scene.facts).with_cores] == [node]
    if other.node not in [n.node for n in known(scene.facts.memory.nodes, ()) if n.total_kb]:
        ports = (interface("dpdk1", "dpdk", other.node), interface("vh1", "dpdkvhostuserclient", other.node))
        chosen = choose_cores(2, False, host_of(Scene(scene.facts), {}, ports))
        reason = f"NUMA node {node} has the NIC dpdk1 (nearest to its node {other.node}); "
        assert all(core.numa_node == node and core.reason.startswith(reason) for core in chosen)


def test_a_nic_that_is_bound_there_needs_no_core_of_its_own_node() -> None:
    machine = load("one-socket-memory")
    bound = replace(machine, nics=[nic | {"driver": "vfio-pci"} for nic in machine.nics])
    assert planned(bound, pmd_cores=1).partition.pmd_nodes == (0,)
    named = planned("one-socket-memory", pmd_cores=1, nics=("ens3f0",))
    assert (named.nic_nodes, named.partition.pmd_nodes) == ((0,), (0,))


def test_the_size_of_pages_is_that_of_nodes_that_get_some() -> None:
    assert {pages.size_kb for pages in planned("one-socket-memory", pmd_cores=1).pages} == {1048576}
    small = changed("hbm", {2: {"memory_kb": 4 << 20}})
    assert {pages.size_kb for pages in planned(small, pmd_cores=1).pages} == {1048576}
    both = changed("hbm", {1: {"memory_kb": 4 << 20}})
    assert {pages.size_kb for pages in planned(both, pmd_cores=1).pages} == {2048}


def test_no_node_has_both() -> None:
    """As a partition of a POWER server may have it."""
    facts = facts_from(changed("hbm", {0: EMPTY, 1: EMPTY}))
    for intent in ({"pmd_cores": 2}, {"pmd_cores": 0, "vm_memory_mb": 4096}):
        field, fix = refused(facts, **intent)
        assert field in intent and intent[field] and fix.startswith("ask for none (0), or boot with numa=off")
    assert refused(facts, pmd_cores=0, vm_cores=1) == (
        "vm_cores",
        "ask for at most 0, or for fewer of the others",
    )
    idle = make_plan(facts, HostIntent(pmd_cores=0), OVS)
    assert idle.partition.housekeeping == frozenset(range(16)) and not idle.partition.isolated


@pytest.mark.parametrize(("megabytes", "intent"), [(2048, {}), (2048, {"hugepage_kb": 1048576}), (5120, {})])
def test_memory_that_is_too_little_is_named(megabytes: int, intent: dict[str, Any]) -> None:
    """The number in the fix is the most that there is a plan for."""
    facts = facts_from(load("small"))
    nodes = tuple(NodeMemory(0, megabytes << 10, 0) for _ in range(1))
    pools = tuple(
        replace(pool, size_kb=size) for pool in known(facts.memory.pools, ()) for size in (2048, 1048576)
    )
    memory = replace(facts.memory, nodes=nodes, sizes_kb=(2048, 1048576), pools=pools)
    facts = replace(facts, memory=memory)
    for more in (intent, intent | {"vm_size_mb": 256}):
        field, fix = refused(facts, pmd_cores=1, vm_memory_mb=65536, **more)
        most = int(fix.split()[4].rstrip(","))
        assert field == "vm_memory_mb"
        make_plan(facts, HostIntent(pmd_cores=1, vm_memory_mb=most, **more), OVS)
        assert refused(facts, pmd_cores=1, vm_memory_mb=most + 1, **more)[0] == "vm_memory_mb"


@pytest.mark.parametrize(("rxqs", "count"), [(1, 900), (4, 300)])
def test_ports_that_have_no_room_for_their_buffers(rxqs: int, count: int) -> None:
    facts, live = facts_from(load("edge")), ovs(per_port_memory="true")
    asked = {"pmd_cores": 1, "queues": rxqs}
    with pytest.raises(InvalidRequest) as error:
        make_plan(facts, HostIntent(**asked, vm_ports=count, mtus=(9000,)), live)
    assert error.value.errors[0].field == "vm_ports" and error.value.fix
    most = int(error.value.fix.split()[4].rstrip(","))
    make_plan(facts, HostIntent(**asked, vm_ports=most, mtus=(9000,)), live)
    with pytest.raises(InvalidRequest, match="vm_ports"):
        make_plan(facts, HostIntent(**asked, vm_ports=most + 1, mtus=(9000,)), live)
    ports = (OvsPortLive("vm1", "vm1", "dpdkvhostuserclient", 1500),) * count
    assert live.ovs and make_plan(facts, HostIntent(**asked, vm_ports=0), live)
    crowded = replace(live, ovs=replace(live.ovs, ports=ports))  # type: ignore[type-var]
    with pytest.raises(InvalidRequest, match="vm_ports"):
        make_plan(facts, HostIntent(**asked, mtus=(9000,)), crowded)


# -- without CPUs --------------------------------------------------------------------------------


def test_memory_without_cpus_is_left_alone() -> None:
    plan = planned("hbm", pmd_cores=2, vm_memory_mb=8192)
    assert [share.node for share in plan.partition.nodes] == [0, 1]
    assert {pages.node for pages in plan.pages if pages.pages} == {0, 1}
    assert arguments(plan)["hugepages"] == "0:7,1:6", "a plain number would be spread over all nodes"
    one = planned(changed("hbm", {1: {"cpus": ""}}), pmd_cores=2)
    assert arguments(one)["hugepages"] == "0:2"


@pytest.mark.parametrize(
    ("machine", "offline", "nic", "node"),
    [
        ("hbm", "", 4, 1),
        ("hbm", "", 2, 0),
        ("hbm", "8-15", 1, 0),
        ("amd-nps4", "40-47,104-111", 5, 4),  # its neighbours are nodes 4, 6 and 7
        ("amd-nps4", "32-47,96-111", 5, 6),
        ("intel-snc", "48-63,112-127", 3, 2),
    ],
)
def test_a_nic_on_a_node_without_cpus(machine: str, offline: str, nic: int, node: int) -> None:
    there = load(machine)
    nics = [there.nics[0] | {"node": nic, "driver": "vfio-pci"}]
    plan = planned(replace(there, offline=offline, nics=nics), pmd_cores=2, vm_cores=2)
    assert (plan.nic_nodes, plan.partition.pmd_nodes, plan.partition.vm_nodes) == ((node,), (node,), (node,))
    facts = facts_from(replace(there, offline=offline, nics=nics))
    [moved] = found(Scene(facts, OVS, plan), "nic-memory")
    assert f"on NUMA node {nic}" in moved.found
    chosen = choose_cores(2, False, host_of(Scene(facts), {}, (interface("dpdk0", "dpdk", nic),)))
    assert {core.numa_node for core in chosen} == {node}


# -- numbers -------------------------------------------------------------------------------------


def test_sparse_numbers() -> None:
    plan = planned("power9", pmd_cores=2, vm_memory_mb=8192)
    assert [share.node for share in plan.partition.nodes] == [0, 8]
    assert (plan.nic_nodes, plan.partition.pmd_nodes) == ((8,), (0, 8))
    assert step(plan, SOCKET_MEM).desired == "2048,0,0,0,0,0,0,0,2048", "by number"
    assert {pages.node for pages in plan.pages} == {0, 8}, (
        "252 commas are refused, and GPUs keep their memory"
    )
    made = tree(load("power9"))
    made.files["/proc/cpuinfo"] = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n"
    again = make_plan(read_facts(MemoryRoot(made)), HostIntent(pmd_cores=2, vm_memory_mb=8192), OVS)
    assert (again.partition, again.pages) == (plan.partition, plan.pages)


@pytest.mark.parametrize("release", ["5.15.0", "5.16.0", "5.18.19", "5.19.0", "6.12.0"])
def test_pages_of_sparse_nodes_are_on_the_command_line_if_the_kernel_takes_their_numbers(
    release: str,
) -> None:
    plan = planned(changed("power9", {}, release=release), pmd_cores=2, vm_memory_mb=8192)
    by_unit = any(isinstance(step.target, BootPages) for step in plan.steps)
    assert by_unit == (release[:4] in ("5.15", "5.16", "5.18")) != ("0:10,8:2" in str(arguments(plan)))


@pytest.mark.parametrize(
    ("number", "vendor", "usable"), [(31, "", True), (32, "", False), (4, "0x41", False)]
)
def test_numbers_that_dpdk_does_not_have(number: int, vendor: str, usable: bool) -> None:
    machine = changed("published", {1: {"number": number}})
    machine = replace(machine, vendor=vendor or machine.vendor, nics=[machine.nics[0] | {"node": number}])
    plan = planned(machine, pmd_cores=2)
    expected = (number,) if usable else (0,)
    assert plan.nic_nodes == expected
    assert len((step(plan, SOCKET_MEM).desired or "").split(",")) == (number + 1 if usable else 1)
    assert bool(found(Scene(facts_from(machine), OVS, plan), "nic-memory")) is not usable
    without = planned(machine, pmd_cores=0, vm_memory_mb=8192)
    assert without.partition.vm_nodes == (0, number), "VMs need no DPDK"


@pytest.mark.parametrize("count", [70, 130])
def test_many_nodes(count: int) -> None:
    one = load("small").nodes[0] | {"memory_kb": 16 << 20, "hugepages": {2048: 0}}
    nodes = [one | {"cpus": format_list((2 * at, 2 * at + 1)), "package": at} for at in range(count)]
    plan = planned(replace(load("small"), nodes=nodes), pmd_cores=1, vm_pmd_cores=0, emulator_cores=0)
    assert (plan.partition.pmd_nodes, plan.partition.vm_nodes) == ((0,), tuple(range(1, 32)))
    assert len(plan.partition.nodes) == count and 2 * count - 1 in plan.partition.housekeeping


def test_a_node_that_is_off_line_is_none() -> None:
    made = tree(load("hbm"))
    made.files["/sys/devices/system/node/online"] = "0-3\n"
    for node in range(4):
        at = f"/sys/devices/system/node/node{node}/distance"
        made.files[at] = " ".join(made.files[at].split()[:4]) + "\n"
    facts = read_facts(MemoryRoot(made))
    assert [node.node for node in known(facts.memory.nodes, ())] == [0, 1, 2, 3]
    assert make_plan(facts, HostIntent(pmd_cores=1)).nic_nodes == (0,), "nobody knows where node 4 is"
    del made.files["/sys/devices/system/node/online"]  # a kernel that lists none
    assert len(known(read_facts(MemoryRoot(made)).memory.nodes, ())) == 5


@pytest.mark.parametrize("hugepages", [True, False])
def test_a_kernel_without_numa(hugepages: bool) -> None:
    made = tree(load("one-socket-memory"))
    gone = ("/system/node/", *(() if hugepages else ("/mm/hugepages/",)))
    made.files = {path: text for path, text in made.files.items() if not any(g in path for g in gone)}
    made.files["/proc/meminfo"] = "MemTotal: 131823308 kB\nMemFree: 131823308 kB\n"
    if not hugepages:
        facts = read_facts(MemoryRoot(made))
        assert refused(facts, pmd_cores=2) == ("pmd_cores", "ask for none (0), or use another kernel")
        assert refused(facts, pmd_cores=0, vm_memory_mb=9)[0] == "vm_memory_mb"
        assert make_plan(facts, HostIntent(pmd_cores=0, vm_cores=2)).pages == ()
        return
    for size in (2048, 1048576):
        at = f"/sys/kernel/mm/hugepages/hugepages-{size}kB"
        made.files |= {f"{at}/nr_hugepages": "0\n", f"{at}/free_hugepages": "0\n"}
    plan = make_plan(read_facts(MemoryRoot(made)), HostIntent(pmd_cores=2, vm_memory_mb=4096), OVS)
    assert (plan.nic_nodes, plan.partition.pmd_nodes, plan.partition.vm_nodes) == ((0,), (0,), (0,))
    assert step(plan, SOCKET_MEM).desired == "2048" and arguments(plan)["hugepages"] == "6"


# -- cores ---------------------------------------------------------------------------------------


def test_cpus_of_no_node_are_for_housekeeping() -> None:
    made = tree(load("published"))
    made.files["/sys/devices/system/node/node0/cpulist"] = "0-14,32-46\n"
    facts = read_facts(MemoryRoot(made))
    assert [core.cpus for core in known(facts.cpus.cores, ()) if core.kind == NODELESS] == [{15, 47}]
    for intent in (HostIntent(pmd_cores=14), HostIntent(pmd_cores=2, housekeeping_cores=2)):
        assert make_plan(facts, intent).partition.housekeeping >= {0, 15, 32, 47}
    assert refused(facts, pmd_cores=15) == ("pmd_cores", "ask for at most 14")
    chosen = choose_cores(14, False, host_of(Scene(facts), {}, (interface("dpdk0", "dpdk", 0),)))
    assert "15" not in {core.cpus for core in chosen}


def test_siblings_on_two_nodes_are_cores_of_their_own() -> None:
    """As a guest may have them, and a firmware with a mistake."""
    made = tree(load("published"))
    made.files["/sys/devices/system/node/node0/cpulist"] = "0-15\n"
    made.files["/sys/devices/system/node/node1/cpulist"] = "16-63\n"
    cores = known(read_facts(MemoryRoot(made)).cpus.cores, ())
    assert [format_list(core.cpus) for core in cores if core.node == 0] == [str(cpu) for cpu in range(16)]
    assert {format_list(core.cpus) for core in cores if core.node == 1} == {
        *(str(cpu) for cpu in range(32, 48)),
        *(f"{cpu},{cpu + 32}" for cpu in range(16, 32)),
    }
    plan = make_plan(read_facts(MemoryRoot(made)), HostIntent(pmd_cores=2, vm_memory_mb=4096), OVS)
    assert format_list(plan.partition.pmd) == "1-2,17,49"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_single_core(threads: int) -> None:
    cpus = format_list(range(threads))
    facts = facts_from(
        replace(load("small"), nodes=[load("small").nodes[0] | {"cpus": cpus}], threads=threads)
    )
    assert refused(facts, pmd_cores=1) == ("pmd_cores", "ask for at most 0")
    assert refused(facts, pmd_cores=1, housekeeping_cores=3)[1].startswith("ask for at most 0, or for fewer")
    plan = make_plan(facts, HostIntent(pmd_cores=0))
    assert plan.partition.housekeeping == set(parse_list(cpus)) and not plan.partition.isolated


def test_a_nic_on_a_node_of_one_core() -> None:
    """``housekeeping_cores`` cannot be fewer than 1: the error names an option that can."""
    nodes = [{"cpus": "0-3", "memory_kb": 16 << 20, "hugepages": {2048: 0}}]
    nodes.append(nodes[0] | {"cpus": "4"})
    nics = [
        load("small").nics[0] | {"node": at, "driver": "vfio-pci", "address": f"0000:0{at}:03.0"}
        for at in (0, 1)
    ]
    for nic in nics:
        del nic["interface"]
    machine = replace(load("small"), nodes=nodes, nics=nics)
    for pmd_cores in (1, 2):
        field, fix = refused(facts_from(machine), pmd_cores=pmd_cores)
        assert (field, fix.endswith("no PMD cores: 0")) == ("pmd_cores", True)
    assert planned(machine, pmd_cores=1, nics=("0000:00:03.0",)).partition.pmd_nodes == (0,)
    wide = replace(machine, nodes=[nodes[0], nodes[0] | {"cpus": "4-5"}])
    field, fix = refused(facts_from(wide), pmd_cores=2, housekeeping_cores=2)
    assert (field, fix.endswith("ask for fewer: 1")) == ("housekeeping_cores", True)
    assert planned(wide, pmd_cores=2).partition.pmd_nodes == (0, 1)


# -- NICs ----------------------------------------------------------------------------------------


def unplugged(name: str, address: str) -> Facts:
    """Facts of a machine whose NIC went while its files were read: the bus lists it, and it has none."""
    made = tree(load(name))
    gone = f"/{address}/"
    made.files = {path: text for path, text in made.files.items() if gone not in path}
    return read_facts(MemoryRoot(made))


@pytest.mark.parametrize("address", ["0000:3b:00.0", "0000:af:00.0"])
def test_a_nic_that_was_unplugged(address: str) -> None:
    facts = unplugged("one-socket-memory", address)
    plan = make_plan(facts, HostIntent(pmd_cores=2), OVS)
    assert plan.partition.pmd_nodes == (0,)
    left: tuple[HostNic, ...] = known(facts.network.nics, ())
    assert [nic.address for nic in left if not isinstance(nic.node, int)] in ([], [address])
    assert refused(facts, pmd_cores=2, nics=("ens9",))[0] == "nics"

"""Each finding is made where something is wrong, and not where nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdCore, RxQueue
from netplugin.host.cpus import to_mask
from netplugin.pmd.settings import masked
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts, Live, OvsLive, OvsPortLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Unknown, known
from tests.unit.core.pmd_states import core, queue
from tests.unit.tuning.golden import OVS, facts_of
from tests.unit.tuning.machines import Machine, MemoryRoot, load
from tests.unit.tuning.trees import tree


def scene(machine: str | Machine, live: Live = OVS, **intent: Any) -> Scene:
    facts = facts_of(machine) if isinstance(machine, str) else facts_from(machine)
    plan = make_plan(facts, HostIntent(**intent), live) if intent else None
    return Scene(facts, live, plan)


def facts_from(machine: Machine) -> Facts:
    return read_facts(MemoryRoot(tree(machine)))


def found(scene: Scene, name: str) -> list[Finding]:
    return [finding for finding in check(scene) if finding.id == name]


def statuses(scene: Scene, name: str) -> list[str]:
    return [finding.status for finding in found(scene, name)]


def test_a_machine_as_it_came_lacks_hugepages_and_no_more() -> None:
    assert {(f.id, f.status) for f in check(scene("published", Live()))} == {
        ("hugepages", "warn"),
        ("iommu", "ok"),
    }


def test_the_machine_that_was_set_up_in_a_hurry() -> None:
    findings = check(scene("amd-4-nodes", Live()))
    assert sorted((f.id, f.status) for f in findings) == [
        ("bond-hash", "warn"),
        ("cgroup-cpus", "warn"),
        ("cpu-offline", "warn"),
        ("iommu", "fail"),
        ("isolation-irqs", "warn"),
        ("isolation-siblings", "warn"),
        ("isolation-ticks", "warn"),
        ("mtu", "fail"),
        ("vf-drivers", "ok"),
    ]
    words = {f.id: f"{f.found}; {f.fix}" for f in findings}
    assert "ens2f0 below it 1500" in words["mtu"]
    assert "CPUs 12,16 are not isolated" in words["isolation-siblings"]
    assert "AMD-Vi" in words["iommu"] and "amd_iommu=on" not in words["iommu"] and "4 VFs" in words["iommu"]
    assert "interrupts 120 go" in words["isolation-irqs"]


def test_groups_that_keep_a_plan_from_its_cpus_and_pages_fail() -> None:
    asked = scene("amd-4-nodes", pmd_cores=2, vm_memory_mb=65536)
    [cpus] = found(asked, "cgroup-cpus")
    assert cpus.status == "fail" and "not on 37-38,43 of the plan" in cpus.found
    [pages] = found(asked, "cgroup-hugepages")
    assert (pages.status, pages.expected) == ("fail", "65538 MB")
    # 8 GB of pages are enough for VMs of 4 GB: OVS is in another group.
    assert found(scene("amd-4-nodes", pmd_cores=2, vm_memory_mb=4096), "cgroup-hugepages") == []


def test_a_limit_on_memory() -> None:
    small = replace(load("small"), limits={"/machine.slice": {"memory.max": str(1 << 30)}})
    [limit] = found(scene(small), "cgroup-memory")
    assert "/machine.slice may use 1024 MB" in limit.found


def test_hugepages_of_a_plan_fail_until_they_are_there() -> None:
    asked = {"pmd_cores": 1, "vm_memory_mb": 1024}
    assert statuses(scene("small", **asked), "hugepages") == ["fail"]
    nodes = [load("small").nodes[0] | {"hugepages": {2048: 632 + 512}}]
    assert statuses(scene(replace(load("small"), nodes=nodes), **asked), "hugepages") == ["ok"]


@pytest.mark.parametrize(("vfs", "status"), [(0, "warn"), (2, "fail")])
def test_vfs_without_an_iommu(vfs: int, status: str) -> None:
    nics = [nic | {"vfs": vfs} for nic in load("published").nics[:1]]
    machine = replace(load("published"), nics=nics, iommu_groups=0)
    assert statuses(scene(machine), "iommu") == [status]
    assert statuses(scene(replace(machine, iommu_groups=9)), "iommu") == ["ok"]


# -- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intent", "pmd", "vm"),
    [
        ({"pmd_cores": 2, "vm_cores": 2}, "ok", "ok"),
        ({"pmd_cores": 1, "vm_cores": 1}, "warn", "warn"),
        ({"pmd_cores": 3, "vm_cores": 4, "links": 2}, "warn", "ok"),
        ({"pmd_cores": 6, "vm_cores": 5, "link_gbps": 25}, "ok", "warn"),
    ],
)
def test_two_whole_cores_for_each_10_gbit(intent: dict[str, Any], pmd: str, vm: str) -> None:
    made = scene("published", **intent)
    assert statuses(made, "budget-pmd") == [pmd] and statuses(made, "budget-vm") == [vm]


def test_vms_away_from_their_nic() -> None:
    assert found(scene("published", pmd_cores=2, vm_cores=8), "vm-node") == []
    [away] = found(scene("published", pmd_cores=2, vm_cores=20), "vm-node")
    assert "VM cores on NUMA node 1, NIC on node 0" in away.found


def test_a_nic_of_no_node_among_several() -> None:
    nics = [nic | {"node": -1} for nic in load("published").nics]
    machine = replace(load("published"), nics=nics)
    assert statuses(scene(machine, pmd_cores=2), "nic-node") == ["warn"]
    assert found(scene("small", pmd_cores=1), "nic-node") == []


@pytest.mark.parametrize(("queues", "count"), [(4, 0), (5, 1)])
def test_more_queues_requested_than_pmd_threads(queues: int, count: int) -> None:
    assert len(found(scene("published", pmd_cores=2, queues=queues), "queues")) == count


def test_the_nic_s_mtu_is_too_small_for_the_largest_in_use() -> None:
    names = [f.found for f in found(scene("published", pmd_cores=2, mtus=(1500, 9000)), "mtu")]
    assert names == ["ens1f0np0 has MTU 1500", "ens1f1np1 has MTU 1500"]
    assert found(scene("published", pmd_cores=2), "mtu") == []


# -- real time -----------------------------------------------------------------------------------


def test_what_moves_where_latency_counts() -> None:
    latency = {"smt", "turbo", "realtime-kernel"}
    asked = scene("published", pmd_cores=2, realtime=True)
    assert {f.id for f in check(asked)} & latency == latency
    assert {f.id for f in check(scene("published", pmd_cores=2))} & latency == set()
    calm = replace(load("published"), no_turbo=1, version="Linux version 6.1.0 #1 SMP PREEMPT_RT Debian")
    assert {f.id for f in check(scene(calm, pmd_cores=2, realtime=True))} & latency == {"smt"}
    asked = scene(calm, pmd_cores=2, realtime=True, idle_siblings=True)
    assert {f.id for f in check(asked)} & latency == set()
    asked = scene(replace(calm, threads=1), pmd_cores=2, realtime=True)
    assert {f.id for f in check(asked)} & latency == set()


# -- OVS as it runs ------------------------------------------------------------------------------


def ovs(mask: str, *, queues: int = 0, ports: tuple[OvsPortLive, ...] = ()) -> Live:
    """With a PMD thread on each CPU of the mask, or on CPU 1."""
    rows = tuple(RxQueue(port="vm1", queue=n, enabled=True, usage_percent=None) for n in range(queues))
    pmds = tuple(
        PmdCore(cpu=cpu, numa_node=0, isolated=False, busy_percent=None, queues=rows if not number else ())
        for number, cpu in enumerate(masked(mask) or (1,))
    )
    return Live(ovs=OvsLive("3.1.0", "DPDK 22.11", True, {"pmd-cpu-mask": mask}, ports, pmds))


def test_pmd_threads_on_cpus_that_are_not_isolated() -> None:
    isolated = replace(load("published"), isolated="1-2,33-34")
    assert statuses(scene(isolated, ovs("0x600000006")), "pmd-isolated") == ["ok"]
    assert statuses(scene(isolated, ovs("0x60000000e")), "pmd-isolated") == ["warn"]
    assert statuses(scene("published", ovs("0x6")), "pmd-isolated") == ["warn"]


@pytest.mark.parametrize(("mask", "status"), [("", "warn"), ("all", "fail"), ("0x8", "fail")])
def test_a_mask_that_is_none_or_of_cpus_that_are_not_there(mask: str, status: str) -> None:
    assert statuses(scene("small", ovs(mask)), "pmd-mask") == [status]
    assert statuses(scene("small", ovs("0x2")), "pmd-mask") == []


def test_a_mask_that_pins_ovs_s_own_threads_to_one_cpu() -> None:
    live = OvsLive("3.1.0", "DPDK 22.11", True, {"dpdk-lcore-mask": "0x3"})
    [lcores] = found(scene("small", Live(ovs=live)), "lcore-mask")
    assert lcores.status == "warn" and "remove" in str(lcores.fix)
    assert found(scene("small", ovs("0x2")), "lcore-mask") == []


def test_a_plan_has_no_findings_of_its_own_about_where_pmd_threads_are() -> None:
    """Carried out, it leaves no vhost-user port of its VMs to threads of another node."""
    made = scene("published", pmd_cores=2, vm_cores=20)
    assert made.plan is not None
    nodes = {share.node for share in made.plan.partition.nodes if share.vm}
    assert nodes == {0, 1} == set(made.plan.partition.pmd_nodes)
    polling = sorted(made.plan.partition.polling)
    rows = [RxQueue(port=f"vm{n}", queue=0, enabled=True, usage_percent=5, port_numa_node=n) for n in nodes]
    threads = tuple(
        PmdCore(
            cpu=cpu,
            numa_node=cpu // 16 % 2,
            isolated=False,
            busy_percent=5,
            queues=tuple(row for row in rows if row.port_numa_node == cpu // 16 % 2 and cpu in (1, 17)),
        )
        for cpu in polling
    )
    mask = to_mask(polling)
    live = Live(ovs=OvsLive("3.1.0", "DPDK 22.11", True, {"pmd-cpu-mask": mask}, (), threads))
    assert {f.id for f in check(replace(made, live=live))} & {
        "pmd-numa",
        "pmd-cores",
        "pmd-mask",
    } == set()


def test_pmd_threads_away_from_the_plan() -> None:
    assert statuses(scene("published", ovs("0x10000"), pmd_cores=2), "pmd-cores") == ["warn"]
    assert found(scene("published", ovs("0x6"), pmd_cores=2), "pmd-cores") == []


@pytest.mark.parametrize(("queues", "count"), [(2, 0), (3, 1)])
def test_a_port_with_more_queues_than_pmd_threads(queues: int, count: int) -> None:
    assert len(found(scene("published", ovs("0x6", queues=queues)), "queues")) == count


@pytest.mark.parametrize(("mtu", "count"), [(1500, 0), (9000, 1), (1400, 0)])
def test_a_vm_s_port_with_a_larger_mtu_than_the_uplink(mtu: int, count: int) -> None:
    ports = (
        OvsPortLive("p0", "p0", "dpdk", 1500),
        OvsPortLive("vm1", "vm1", "dpdkvhostuserclient", mtu),
        OvsPortLive("down", "down", "dpdkvhostuserclient", None),
    )
    assert len(found(scene("small", ovs("0x2", ports=ports)), "mtu")) == count


@pytest.mark.parametrize(("mode", "count"), [("balance-slb", 1), ("balance-tcp", 0), ("active-backup", 0)])
def test_a_bond_of_ovs_that_cannot_spread(mode: str, count: int) -> None:
    ports = tuple(OvsPortLive(f"p{n}", "bond", "dpdk", 1500, mode) for n in range(2))
    assert len(found(scene("small", ovs("0x2", ports=ports)), "bond-hash")) == count


@pytest.mark.parametrize(
    ("mode", "policy", "count"),
    [
        ("802.3ad 4", "layer3+4 1", 0),
        ("802.3ad 4", "layer2 0", 1),
        ("active-backup 1", "layer2 0", 0),
    ],
)
def test_a_bond_of_the_kernel_that_cannot_spread(mode: str, policy: str, count: int) -> None:
    bonds = {"bond0": {"mode": mode, "policy": policy, "mtu": 1500}}
    assert len(found(scene(replace(load("amd-4-nodes"), bonds=bonds)), "bond-hash")) == count


# -- what is configured and not in use -------------------------------------------------------------


def test_a_cpu_of_the_mask_without_a_thread() -> None:
    live = ovs("0x6")
    assert not isinstance(live.ovs, Unknown)
    less = replace(live, ovs=replace(live.ovs, pmds=live.ovs.pmds[:1]))
    [mask] = found(scene("published", less), "pmd-mask")
    assert mask.found == "CPUs 2 of pmd-cpu-mask have no PMD thread, CPUs 1 have"
    silent = replace(live, ovs=replace(live.ovs, pmds=()))
    assert found(scene("published", silent), "pmd-mask") == [], "no port needs polling"


@pytest.mark.parametrize(
    ("cmdline", "isolated", "count"),
    [
        ("isolcpus=nohz,2-5", "", 1),
        ("isolcpus=managed_irq,domain,2-5", "2-5", 0),
        ("isolcpus=2-5", "2-4", 1),
        ("isolcpus=2-99", "2-63", 0),
        ("isolcpus=2-N", "", 1),
    ],
)
def test_isolcpus_that_isolates_nothing(cmdline: str, isolated: str, count: int) -> None:
    machine = replace(load("published"), cmdline=cmdline, isolated=isolated)
    assert len(found(scene(machine), "isolation-argument")) == count


def test_pages_of_a_plan_that_something_else_holds() -> None:
    nodes = [load("small").nodes[0] | {"hugepages": {2048: 632 + 512}}]
    made = scene(replace(load("small"), nodes=nodes), Live(), pmd_cores=1, vm_memory_mb=1024)
    [pool] = known(made.facts.memory.pools, ())
    memory = replace(made.facts.memory, pools=(replace(pool, free=3),))
    held = replace(made, facts=replace(made.facts, memory=memory))
    [pages] = found(held, "hugepages")
    assert pages.status == "fail" and "of which 3 are free" in pages.found
    assert statuses(replace(held, live=ovs("0x2")), "hugepages") == ["ok"], "OVS has them"


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("1024,1024", []),
        ("1024", ["has nothing for NUMA node 1, which has port p1"]),
        ("0,1024", ["has nothing for NUMA node 0, which has port p0"]),
        ("1024,9999", ["has 9999 MB for NUMA node 1, whose hugepages are 4096 MB"]),
    ],
)
def test_memory_of_ovs_on_the_wrong_node(listed: str, words: list[str]) -> None:
    nodes = [node | {"hugepages": {1048576: 4}} for node in load("published").nodes]
    pmds = tuple(
        core(cpu, queue(f"p{node}", port_numa_node=node), node=node) for node, cpu in enumerate((1, 17))
    )
    config = {"dpdk-socket-mem": listed, "dpdk-extra": "--legacy-mem"}
    live = Live(ovs=OvsLive("3.1.0", "22.11", True, config, (), pmds))
    findings = found(scene(replace(load("published"), nodes=nodes), live), "socket-memory")
    later = ", and DPDK can take 0 MB there later"
    assert [f.found.removeprefix("dpdk-socket-mem ").removesuffix(later) for f in findings] == words
    assert {f.status for f in findings} <= {"warn"}, "it runs"
    assert isinstance(live.ovs, OvsLive)
    dynamic = replace(live, ovs=replace(live.ovs, other_config={"dpdk-socket-mem": listed}))
    taken = found(scene(replace(load("published"), nodes=nodes), dynamic), "socket-memory")
    assert [f.found for f in taken] == [f.found for f in findings if "9999" in f.found], "free pages do too"
    down = replace(live, ovs=replace(live.ovs, silent=Unknown("ovs-vswitchd", "does not answer")))
    findings = found(scene(replace(load("published"), nodes=nodes), down), "socket-memory")
    assert [f.status for f in findings] == ["fail" if "9999" in listed else "warn" for _ in words]
    bare = [nodes[0], nodes[1] | {"hugepages": {1048576: 0}}]
    [none] = found(scene(replace(load("published"), nodes=bare), live), "hugepages")
    assert "on NUMA node 1, which has port p1" in none.found
    # As long as no port is polled, it is known only where the threads are to be.
    silent = Live(ovs=OvsLive("3.1.0", "22.11", True, {"dpdk-socket-mem": "0,1024", "pmd-cpu-mask": "0x6"}))
    other = replace(load("published"), nodes=[nodes[0] | {"hugepages": {1048576: 0}}, nodes[1]])
    ids = [
        finding.id for finding in check(scene(other, silent)) if "PMD threads on CPUs 1-2" in finding.found
    ]
    assert ids[:2] == ["hugepages", "socket-memory"]


@pytest.mark.parametrize(("queues", "count"), [(2, 0), (4, 1)])
def test_queues_of_the_plan_for_the_node_of_each_nic(queues: int, count: int) -> None:
    """Four PMD CPUs on node 1 and two on node 2: those of node 1 poll no NIC of node 2."""
    made = scene("amd-4-nodes", pmd_cores=3, nics=("ens2f0", "eno8303"), vm_cores=0, queues=queues)
    assert len(found(made, "queues")) == count


# -- against a plan ------------------------------------------------------------------------------


def test_what_differs_from_the_plan_is_reported_by_group() -> None:
    made = scene("small", pmd_cores=1)
    [arguments] = found(made, "plan-kernel-arguments")
    assert arguments.status == "warn" and arguments.fix == "set them and boot again"
    assert arguments.found.startswith("kernel argument default_hugepagesz is not set; ")
    assert arguments.found.endswith("and 4 more")
    assert statuses(made, "plan-watchdog") == ["ok"]


def test_an_ovs_that_was_not_read_is_reported_once() -> None:
    [asked] = found(scene("small", Live(), pmd_cores=1), "plan-ovs")
    assert asked.found == "unknown (ovs-vswitchd: was not asked)"


# -- field reports -------------------------------------------------------------------------------


def test_more_cpus_without_ticks_than_isolated_ones() -> None:
    """housekeeping_setup in kernel/sched/isolation.c takes a nohz_full that differs from isolcpus=domain."""
    made = tree(replace(load("published"), isolated="2-9"))
    made.files["/sys/devices/system/cpu/nohz_full"] = "2-15\n"
    assert found(Scene(read_facts(MemoryRoot(made))), "isolation-ticks") == []
    made.files["/sys/devices/system/cpu/nohz_full"] = "3-15\n"
    [lacking] = found(Scene(read_facts(MemoryRoot(made))), "isolation-ticks")
    assert lacking.fix == "boot with nohz_full=2-15 rcu_nocbs=2-15"


def test_cpus_that_could_be_plugged_in_are_not_off_line() -> None:
    """Firmware announces more than there are: online 0-63, possible 0-127."""
    made = tree(load("published"))
    made.files["/sys/devices/system/cpu/offline"] = "64-127\n"
    assert found(Scene(read_facts(MemoryRoot(made))), "cpu-offline") == []
    made.files["/sys/devices/system/cpu/present"] = "0-65\n"
    [away] = found(Scene(read_facts(MemoryRoot(made))), "cpu-offline")
    assert away.found == "CPUs 64-65 are off line"


def test_the_iommu_of_a_hygon_cpu_is_amd_s() -> None:
    [off] = found(scene(replace(load("published"), vendor="HygonGenuine", iommu_groups=0)), "iommu")
    assert "AMD-Vi" in str(off.fix) and "intel_iommu" not in str(off.fix)


def test_a_limit_on_pages_of_a_size_that_arm_has() -> None:
    limits = {"/machine.slice": {"hugetlb.512MB.max": "0"}}
    [limit] = found(
        scene(replace(load("arm"), limits=limits), pmd_cores=2, vm_memory_mb=4096), "cgroup-hugepages"
    )
    assert (limit.status, limit.found) == ("fail", "control group /machine.slice may use 0 MB of 512MB pages")


def test_the_cpu_that_boots_is_never_isolated() -> None:
    every = replace(load("published"), cmdline="isolcpus=0-63", isolated="1-63")
    assert found(scene(every), "isolation-argument") == []
    [lost] = found(scene(replace(every, isolated="2-63")), "isolation-argument")
    assert "names CPUs 1, which" in lost.found


@pytest.mark.parametrize(
    ("memory", "lacks"), [(",1024", 0), ("1024,", 1), (" 1024, 1024", None), (",", None)]
)
def test_an_empty_entry_of_dpdk_socket_mem_has_a_place(memory: str, lacks: int | None) -> None:
    nodes = [node | {"hugepages": {1048576: 8}} for node in load("published").nodes]
    config = {"dpdk-socket-mem": memory, "dpdk-extra": "-a 0000:00:00.0 --legacy-mem"}
    threads = (core(2, queue("a", port_numa_node=0)), core(18, queue("b", port_numa_node=1), node=1))
    live = Live(OvsLive("3.1.0", "22.11", True, config, pmds=threads))
    findings = found(scene(replace(load("published"), nodes=nodes), live), "socket-memory")
    assert [f"for NUMA node {lacks}," in finding.found for finding in findings] == [True][: lacks is not None]


@pytest.mark.parametrize(
    ("mask", "status"),
    [
        ({}, "warn"),
        ({"pmd-cpu-mask": ""}, "warn"),
        *[({"pmd-cpu-mask": text}, "fail") for text in ("0", "0x0", "0x")],
    ],
)
def test_a_mask_without_a_cpu_is_none_at_all_only_if_it_is_empty(mask: dict[str, str], status: str) -> None:
    """reconfigure_pmd_threads in OVS's lib/dpif-netdev.c."""
    assert statuses(scene("published", Live(OvsLive("3.1.0", "22.11", True, mask))), "pmd-mask") == [status]

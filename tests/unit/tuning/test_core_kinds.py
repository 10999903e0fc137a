"""Performance and efficiency cores: what is read, planned, placed and found; isolation by control groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netplugin.api.pmd_models import PmdCore
from netplugin.host.cpus import format_list, parse_list, to_mask
from netplugin.tuning.checks.running import slow_core
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.checks.scopes import PmdThread
from netplugin.tuning.facts import EFFICIENCY, PERFORMANCE, Live
from netplugin.tuning.placing.capacity import HostCapacity, NodeGround, ground_of
from netplugin.tuning.placing.pmd_cores import choose_cores, host_of
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Unknown, known
from tests.unit.tuning.golden import facts_of, ovs, planned
from tests.unit.tuning.machines import MemoryRoot, load
from tests.unit.tuning.placing.grounds import SMALL
from tests.unit.tuning.placing.strategies import Vm, with_memory
from tests.unit.tuning.placing.test_place import place
from tests.unit.tuning.placing.test_pmd_cores import interface
from tests.unit.tuning.test_checks import facts_from, found
from tests.unit.tuning.trees import tree


def efficient(machine: str, **changes: Any) -> str:
    cores = known(facts_from(replace(load(machine), **changes)).cpus.cores, ())
    return format_list(cpu for core in cores if core.kind == EFFICIENCY for cpu in core.cpus)


def test_kinds_are_read() -> None:
    assert efficient("hybrid") == "16-31"
    assert efficient("hybrid", pmus={}) == "", "all cores are alike"
    assert (
        efficient("hybrid", pmus={"cpu_core": "0-15", "cpu_atom": "16-29", "cpu_lowpower": "30-31"})
        == "16-31"
    )
    assert efficient("big-little") == "0-3", "CPUs 6 and 7 are a little slower, and of the same kind"
    assert efficient("big-little", capacities=dict.fromkeys(range(8), 1024)) == ""
    assert efficient("arm") == efficient("published") == ""
    made = tree(load("hybrid"))
    made.files["/sys/devices/cpu_core/cpus"] = "odd\n"
    assert isinstance(read_facts(MemoryRoot(made)).cpus.cores, Unknown)


@pytest.mark.parametrize(
    ("machine", "intent", "pmd", "emulator", "vm", "housekeeping"),
    [
        ("hybrid", {}, "2-5", "16", "6-15,17-31", "0-1"),
        ("hybrid", {"housekeeping_cores": 3, "emulator_cores": 2}, "2-5", "18-19", "6-15,20-31", "0-1,16-17"),
        ("hybrid", {"vm_cores": 5}, "2-5", "16", "6-15", "0-1,17-31"),
        ("hybrid", {"pmd_cores": 8, "vm_cores": 0}, "2-16", "", "", "0-1,17-31"),
        ("big-little", {}, "4-5", "1", "2-3,6-7", "0"),
        ("big-little", {"vm_cores": 2, "housekeeping_cores": 2}, "4-5", "2", "6-7", "0-1,3"),
    ],
)
def test_performance_cores_first(
    machine: str, intent: dict[str, Any], pmd: str, emulator: str, vm: str, housekeeping: str
) -> None:
    """Linux boots on CPU 0, of which nothing is isolated."""
    partition = planned(machine, **{"pmd_cores": 2} | intent).partition
    roles = (partition.pmd, partition.emulator, partition.vm, partition.housekeeping)
    assert tuple(map(format_list, roles)) == (pmd, emulator, vm, housekeeping)


def test_a_vm_has_cores_of_one_kind() -> None:
    ground = with_memory(ground_of(planned("hybrid", pmd_cores=2), facts_of("hybrid")), 1 << 20)
    fast, slow = set(range(6, 16)), set(range(17, 32))
    for vcpus, kinds in ((1, fast), (8, fast), (10, fast), (11, slow), (15, slow), (16, fast | slow)):
        assert set(place(Vm(1, vcpus=vcpus, memory_mb=1024), ground).pins.values()) <= kinds
    # Cores of the same width: nothing else tells them apart.
    for cores, expected in (((1, 2, 3), {2, 3}), ((1, 2, 3, 4, 5), {2, 3})):
        node = NodeGround(0, tuple((cpu,) for cpu in cores), frozenset((0,)), {}, slow=frozenset((1, 4, 5)))
        two = with_memory(replace(SMALL, nodes=(node,)), 1 << 14)
        assert set(place(Vm(1, vcpus=2, memory_mb=1024), two).pins.values()) == expected
    three: HostCapacity = with_memory(replace(SMALL, nodes=(node,)), 1 << 14)
    assert set(place(Vm(1, vcpus=3, memory_mb=1024), three).pins.values()) == {1, 4, 5}


def test_the_agent_chooses_performance_cores_first() -> None:
    for machine, plan, expected in (
        ("hybrid", None, ["2", "4", "6", "8", "10", "12", "14", "30"]),  # 30 and 31 are isolated
        ("hybrid", planned("hybrid", pmd_cores=1, vm_cores=3), ["2", "10", "12", "14", "4", "6", "8", "17"]),
        ("big-little", None, ["4", "5", "6", "7", "1", "2", "3"]),
    ):
        scene = Scene(facts_of(machine), plan=plan)
        chosen = choose_cores(len(expected), False, host_of(scene, {}, (interface("dpdk0", "dpdk", None),)))
        assert [core.cpus for core in chosen] == expected
        slow = {core.cpus for core in chosen if core.reason.endswith("; an efficiency core")}
        assert slow == {cpu for cpu in expected if int(cpu) in set(parse_list(efficient(machine)))}


def test_a_pmd_thread_on_an_efficiency_core_is_found() -> None:
    mask = ovs(pmd_cpu_mask=to_mask((2, 20)))
    [warned] = found(Scene(facts_of("hybrid"), mask), "pmd-efficiency")
    assert warned.status == "warn" and warned.found.startswith("pmd-cpu-mask has a PMD thread on CPU 20")
    assert warned.fix and "CPUs 0-15:" in warned.fix
    running = PmdCore(cpu=21, numa_node=0, isolated=False, busy_percent=None, queues=())
    assert not isinstance(mask.ovs, Unknown)
    both = Live(ovs=replace(mask.ovs, pmds=(running,)))
    cpus = [
        each.found.split("CPU ")[1].split(",")[0]
        for each in found(Scene(facts_of("hybrid"), both), "pmd-efficiency")
    ]
    assert cpus == ["20", "21"]
    for machine in ("published", "big-little"):
        [] = found(Scene(facts_of(machine), ovs(pmd_cpu_mask="0x30")), "pmd-efficiency")
    assert found(Scene(facts_of("big-little"), ovs(pmd_cpu_mask="0x3")), "pmd-efficiency")
    # As planned, where there are not enough others: still a finding.
    plan = planned("hybrid", pmd_cores=8, vm_cores=0)
    scene = Scene(facts_of("hybrid"), ovs(pmd_cpu_mask=to_mask(plan.partition.polling)), plan)
    assert [each.status for each in found(scene, "pmd-efficiency")] == ["warn"]


def test_the_rule_of_one_thread() -> None:
    assert not list(slow_core(PmdThread(3, True, PERFORMANCE, frozenset())))
    [alone] = slow_core(PmdThread(3, True, EFFICIENCY, frozenset()))
    assert (
        alone.found.startswith("a PMD thread runs on CPU 3")
        and alone.fix
        and "no performance core" in alone.fix
    )


# -- isolation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "booted", "isolated", "partitioned"),
    [
        ({}, "", "", ""),
        ({}, "2-3", "2-3", ""),
        ({"cpuset.cpus.isolated": "4-5"}, "2-3", "2-5", "4-5"),
        ({"cpuset.cpus.isolated": "3-4"}, "2-3", "2-4", "4"),
        ({"cpuset.cpus.isolated": ""}, "", "", ""),
        # Before Linux 6.8 each partition is read.
        (
            {"rt.slice/cpuset.cpus.partition": "isolated", "rt.slice/cpuset.cpus.effective": "6-7"},
            "",
            "6-7",
            "6-7",
        ),
        ({"rt.slice/cpuset.cpus.partition": "root", "rt.slice/cpuset.cpus.effective": "6-7"}, "", "", ""),
        (
            {
                "a.slice/cpuset.cpus.partition": "root",
                "a.slice/b/cpuset.cpus.partition": "isolated",
                "a.slice/b/cpuset.cpus.effective": "8",
                "c.slice/cpuset.cpus.partition": "isolated invalid (Parent is not a partition root)",
                "c.slice/cpuset.cpus.effective": "9",
                "d.slice/cpuset.cpus.partition": "member",
                "d.slice/e/cpuset.cpus.partition": "isolated",
            },
            "",
            "8",
            "8",
        ),
    ],
)
def test_partitions_of_control_groups_isolate(
    groups: dict[str, str], booted: str, isolated: str, partitioned: str
) -> None:
    facts = facts_from(replace(load("published"), isolated=booted, cgroups=groups)).cpus
    assert format_list(known(facts.isolated, None) or ()) == isolated
    assert format_list(known(facts.partitioned, frozenset())) == partitioned


def test_isolation_that_cannot_be_read() -> None:
    for path in ("cpuset.cpus.isolated", "rt.slice/cpuset.cpus.effective"):
        groups = {path: "odd", "rt.slice/cpuset.cpus.partition": "isolated"}
        facts = facts_from(replace(load("published"), isolated="2", cgroups=groups)).cpus
        assert isinstance(facts.partitioned, Unknown) and facts.isolated == {2}
    made = tree(replace(load("published"), cgroups={"cpuset.cpus.isolated": "4"}))
    del made.files["/sys/devices/system/cpu/isolated"]
    facts = read_facts(MemoryRoot(made)).cpus
    assert (facts.isolated, facts.partitioned) == ({4}, {4})


def test_pmd_threads_on_a_partition_are_isolated() -> None:
    groups = {"cpuset.cpus.isolated": "1-2,33-34"}
    facts = facts_from(replace(load("published"), cgroups=groups))
    mask = ovs(pmd_cpu_mask=to_mask((1, 2)))
    assert [f.status for f in found(Scene(facts, mask), "pmd-isolated")] == ["ok"]
    assert [f.status for f in found(Scene(facts_of("published"), mask), "pmd-isolated")] == ["warn"]

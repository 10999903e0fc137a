"""The steps of a plan: what each should be, whether it is done, and when it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netplugin.tuning.intent import Intent
from netplugin.tuning.live import Live, OvsLive
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import (
    Effect,
    File,
    KernelArgument,
    OtherConfig,
    Swap,
    Sysctl,
    ThreadPriority,
    TunedProfile,
)
from tests.unit.tuning.golden import arguments, plan_of, planned, step
from tests.unit.tuning.machines import MemoryRoot, load
from tests.unit.tuning.trees import tree


def test_settings_of_ovs_as_found_count_as_done() -> None:
    found = {
        "dpdk-init": "true", "pmd-cpu-mask": "2", "dpdk-lcore-mask": "0x01", "dpdk-socket-mem": "1264",
        "pmd-rxq-assign": "cycles", "userspace-tso-enable": "true",
    }  # fmt: skip
    plan = planned("small", Live(ovs=OvsLive("2.15.3", None, True, found)), pmd_cores=1)
    ovs = [s for s in plan.steps if isinstance(s.target, OtherConfig)]
    assert len(ovs) == 6 and all(s.done for s in ovs)
    newer = planned("small", Live(ovs=OvsLive("3.1.0", None, True, found)), pmd_cores=1)
    [left] = [s for s in newer.steps if isinstance(s.target, OtherConfig) and not s.done]
    assert (left.target, left.now, left.wanted) == (
        OtherConfig("pmd-rxq-assign"),
        "cycles",
        "group",
    )


def test_what_takes_a_restart_of_ovs() -> None:
    plan = plan_of("small")
    effects = {s.target.key: s.effect for s in plan.steps if isinstance(s.target, OtherConfig)}
    assert effects == {
        "dpdk-init": Effect.OVS_RESTART, "pmd-cpu-mask": Effect.LIVE, "pmd-rxq-assign": Effect.LIVE,
        "dpdk-lcore-mask": Effect.OVS_RESTART, "dpdk-socket-mem": Effect.OVS_RESTART,
    }  # fmt: skip


def test_a_mask_of_ovs_that_is_none_is_unknown_and_not_done() -> None:
    live = Live(ovs=OvsLive("3.1.0", None, True, {"pmd-cpu-mask": "all"}))
    mask = step(planned("small", live, pmd_cores=1), OtherConfig("pmd-cpu-mask"))
    assert isinstance(mask.now, Unknown) and not mask.done


def test_a_host_without_ovs_dpdk() -> None:
    plan = planned("published", pmd_cores=0, vm_cores=4)
    assert not [s for s in plan.steps if isinstance(s.target, OtherConfig)]
    assert plan.partition.isolated == plan.partition.vm and not any(p.pages for p in plan.pages)


def test_real_time_asks_for_more() -> None:
    usual, realtime = (
        planned("published", pmd_cores=2),
        planned("published", pmd_cores=2, realtime=True),
    )
    extra = set(arguments(realtime)) - set(arguments(usual))
    assert extra == {
        "mce", "tsc", "idle", "processor.max_cstate", "intel_pstate", "pcie_aspm"
    }  # fmt: skip
    targets = {s.target for s in realtime.steps} - {s.target for s in usual.steps}
    assert {Swap(), Sysctl("kernel.sched_rt_runtime_us"), ThreadPriority("ksoftirqd")} <= targets
    assert ThreadPriority("rcuc") not in targets  # this kernel has no such threads
    assert step(realtime, TunedProfile()).wanted == "realtime-virtual-host"
    assert step(realtime, Swap()).now == "/dev/dm-1"


def test_amd_has_its_own_arguments() -> None:
    found = arguments(planned("amd-4-nodes", pmd_cores=1, realtime=True))
    assert found["amd_iommu"] == "on"
    assert "intel_iommu" not in found and "intel_pstate" not in found


@pytest.mark.parametrize(
    ("release", "isolcpus", "hugepages"),
    [
        ("3.10.0-957.el7.x86_64", "1-31,33-63", "4"),
        ("5.14.0", "managed_irq,domain,1-31,33-63", "4"),
        ("5.15.0", "managed_irq,domain,1-31,33-63", "0:2,1:2"),
    ],
)
def test_arguments_that_a_kernel_must_know(release: str, isolcpus: str, hugepages: str) -> None:
    facts = read_facts(MemoryRoot(tree(replace(load("published"), release=release))))
    plan = make_plan(facts, Intent(pmd_cores=15, emulator_cores=0, vm_cores=15))
    assert arguments(plan)["hugepages"] == hugepages
    assert arguments(plan)["isolcpus"] == isolcpus.replace("1-31,33-63", "1-15,17-31,33-47,49-63")


def test_a_list_of_cpus_on_the_command_line_counts_however_it_is_written() -> None:
    made = tree(
        replace(load("small"), cmdline="isolcpus=managed_irq,domain,1,1 nohz_full=1-1 rcu_nocbs=1")
    )
    plan = make_plan(read_facts(MemoryRoot(made)), Intent(pmd_cores=1))
    for name in ("isolcpus", "nohz_full", "rcu_nocbs"):
        assert step(plan, KernelArgument(name)).done, name


def test_interrupts_leave_isolated_cpus_and_stay_near() -> None:
    plan = planned("published", pmd_cores=2)
    files = {s.target.path: s for s in plan.steps if isinstance(s.target, File)}
    assert files["/proc/irq/40/smp_affinity_list"].wanted == "0,32"
    # One that has isolated CPUs alone goes to the housekeeping of their node.
    assert plan.partition.near(frozenset((20, 21))) == {16, 48}
    assert plan.partition.near(frozenset((99,))) == {0, 16, 32, 48}
    assert not files["/proc/irq/40/smp_affinity_list"].target.lasting  # type: ignore[union-attr]
    assert files["/proc/irq/default_smp_affinity"].wanted == "10001,00010001"

"""Where the kernel's own work may go, and how fast CPUs run (pure): steps that need no restart."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list
from netplugin.tuning.facts import Cpus, Facts
from netplugin.tuning.masks import to_kernel
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.read.cpus import CPU
from netplugin.tuning.read.interrupts import DEFAULT_AFFINITY, WORKQUEUES, WRITEBACK, irq_path
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import Effect, File, Group, Step, Sysctl


def kernel_work(facts: Facts, partition: Partition) -> Iterator[Step]:
    """Nothing where no CPU is to be kept free."""
    if not partition.isolated:
        return
    yield from _interrupts(facts, partition)
    for path, cpus, what in (
        (WORKQUEUES, facts.interrupts.workqueues, "unbound work of the kernel"),
        (WRITEBACK, facts.interrupts.writeback, "writing dirty pages to disks"),
    ):
        yield from _mask(Group.WORKQUEUES, path, cpus, partition, f"{what} stays on housekeeping")
    yield from _sysctl(
        facts, Group.WATCHDOG, "kernel.nmi_watchdog", "0",
        "the NMI watchdog interrupts each CPU and takes a counter of its PMU",
    )  # fmt: skip
    yield from _sysctl(
        facts, Group.MEMORY, "kernel.numa_balancing", "0",
        "balancing takes pages away to see who faults; planned memory is where it belongs",
    )  # fmt: skip
    yield from _sysctl(
        facts, Group.SCHEDULING, "vm.stat_interval", "10",
        "each CPU folds its memory statistics once an interval (as tuned's cpu-partitioning)",
    )  # fmt: skip
    yield from _governors(facts, partition)


def _interrupts(facts: Facts, partition: Partition) -> Iterator[Step]:
    yield from _mask(
        Group.INTERRUPTS, DEFAULT_AFFINITY, facts.interrupts.default_affinity, partition,
        "interrupts that come later go to housekeeping",
    )  # fmt: skip
    for irq in known(facts.interrupts.irqs, ()):
        affinity = irq.affinity
        if isinstance(affinity, Unknown) or not affinity & partition.isolated:
            continue
        wanted = (affinity & partition.housekeeping) or partition.near(affinity)
        yield Step(
            Group.INTERRUPTS, File(irq_path(irq.number), lasting=False), format_list(affinity),
            format_list(wanted), Effect.LIVE, "an interrupt stops what the CPU does",
        )  # fmt: skip


def _mask(
    group: Group, path: str, cpus: Fact[Cpus | None], partition: Partition, why: str
) -> Iterator[Step]:
    if cpus is not None:
        now = cpus if isinstance(cpus, Unknown) else to_kernel(cpus)
        yield Step(group, File(path), now, to_kernel(partition.housekeeping), Effect.LIVE, why)


def _sysctl(facts: Facts, group: Group, name: str, wanted: str, why: str) -> Iterator[Step]:
    now = facts.kernel.sysctl(name)
    if now is not None:
        yield Step(group, Sysctl(name), now, wanted, Effect.LIVE, why)


def _governors(facts: Facts, partition: Partition) -> Iterator[Step]:
    for policy in known(facts.power.policies, ()):
        if known(policy.cpus, frozenset()) & partition.isolated:
            yield Step(
                Group.POWER, File(f"{CPU}/cpufreq/{policy.name}/scaling_governor"), policy.governor,
                "performance", Effect.LIVE, "a core that has to speed up first loses packets meanwhile",
            )  # fmt: skip

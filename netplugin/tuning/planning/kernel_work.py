"""Plan the CPUs of kernel work and services, the frequency governor, and tuned (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list, to_kernel
from netplugin.tuning.facts import Cpus, Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning import sources
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.read.cpus import CPU
from netplugin.tuning.read.interrupts import DEFAULT_AFFINITY, WORKQUEUES, WRITEBACK, irq_path
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import (
    BannedCpus,
    Effect,
    File,
    Group,
    ServiceCpus,
    Step,
    Sysctl,
    TunedProfile,
    TunedVariable,
)

# -- Plan the CPUs of kernel work and services, and the frequency governor (pure). ----------------


def kernel_work(facts: Facts, partition: Partition) -> Iterator[Step]:
    """Steps that keep kernel work off isolated CPUs; none if no CPU is to be isolated."""
    if not partition.isolated:
        return
    yield from _interrupts(facts, partition)
    yield from _irqbalance(facts, partition)
    for path, cpus, what in (
        (WORKQUEUES, facts.interrupts.workqueues, "unbound work of the kernel"),
        (WRITEBACK, facts.interrupts.writeback, "writing dirty pages to disks"),
    ):
        yield from _mask(
            Group.WORKQUEUES,
            path,
            cpus,
            partition,
            f"{what} stays on housekeeping",
            f"{sources.KERNEL_THREADS}; {sources.TUNED_PARTITIONING}",
        )
    yield from _sysctl(
        facts,
        Group.WATCHDOG,
        "kernel.nmi_watchdog",
        "0",
        "the NMI watchdog interrupts each CPU and takes a counter of its PMU",
        f"{sources.SYSCTL_KERNEL}; {sources.TUNED_LATENCY}",
    )
    yield from _sysctl(
        facts,
        Group.MEMORY,
        "kernel.numa_balancing",
        "0",
        "balancing takes pages away to see who faults; planned memory is where it belongs",
        f"{sources.SYSCTL_KERNEL}; {sources.TUNED_LATENCY}",
    )
    yield from _sysctl(
        facts,
        Group.SCHEDULING,
        "vm.stat_interval",
        "10",
        "each CPU folds its memory statistics once an interval",
        f"{sources.KERNEL_THREADS}; {sources.TUNED_LATENCY}",
    )
    yield from _services(facts, partition)
    yield from _governors(facts, partition)


def _interrupts(facts: Facts, partition: Partition) -> Iterator[Step]:
    yield from _mask(
        Group.INTERRUPTS,
        DEFAULT_AFFINITY,
        facts.interrupts.default_affinity,
        partition,
        "interrupts that come later go to housekeeping",
        sources.IRQ_AFFINITY,
    )
    for irq in known(facts.interrupts.irqs, ()):
        affinity = irq.affinity
        if isinstance(affinity, Unknown) or not affinity & partition.isolated:
            continue
        wanted = (affinity & partition.housekeeping) or partition.near(affinity)
        yield Step(
            Group.INTERRUPTS,
            File(irq_path(irq.number), lasting=False),
            format_list(affinity),
            format_list(wanted),
            Effect.LIVE,
            "an interrupt stops what the CPU does",
            sources.IRQ_AFFINITY,
        )


def _irqbalance(facts: Facts, partition: Partition) -> Iterator[Step]:
    """Ban the isolated CPUs explicitly; irqbalance skips only those isolated since boot."""
    found = facts.interrupts.irqbalance
    if found is None or isinstance(found, Unknown):
        return
    now = None if found.banned is None else format_list(found.banned)
    yield Step(
        Group.INTERRUPTS,
        BannedCpus(found.path),
        now,
        format_list(partition.isolated),
        Effect.LIVE,
        "irqbalance would bring interrupts back within seconds",
        f"{sources.IRQBALANCE}; {sources.TUNED_PARTITIONING}",
    )


def _services(facts: Facts, partition: Partition) -> Iterator[Step]:
    found = facts.kernel.service_cpus
    now: Fact[str | None] = None
    if found is not None:
        now = found if isinstance(found, Unknown) else format_list(found)
    yield Step(
        Group.SCHEDULING,
        ServiceCpus(),
        now,
        format_list(partition.housekeeping),
        Effect.REBOOT,
        "services, with them OVS's main, handler and revalidator threads, start on housekeeping; libvirt "
        "gives VMs CPUs of their own",
        f"{sources.SYSTEMD}; {sources.TUNED_PARTITIONING}",
    )


def _mask(
    group: Group, path: str, cpus: Fact[Cpus | None], partition: Partition, why: str, source: str
) -> Iterator[Step]:
    if cpus is not None:
        now = cpus if isinstance(cpus, Unknown) else to_kernel(cpus)
        wanted = to_kernel(partition.housekeeping)
        yield Step(group, File(path), now, wanted, Effect.LIVE, why, source)


def _sysctl(facts: Facts, group: Group, name: str, wanted: str, why: str, source: str) -> Iterator[Step]:
    now = facts.kernel.sysctl(name)
    if now is not None:
        yield Step(group, Sysctl(name), now, wanted, Effect.LIVE, why, source)


def _governors(facts: Facts, partition: Partition) -> Iterator[Step]:
    for policy in known(facts.power.policies, ()):
        if known(policy.cpus, frozenset()) & partition.isolated:
            yield Step(
                Group.POWER,
                File(f"{CPU}/cpufreq/{policy.name}/scaling_governor"),
                policy.governor,
                "performance",
                Effect.LIVE,
                "a CPU that has to speed up first loses packets meanwhile",
                f"{sources.GOVERNOR}; {sources.TUNED_POWER}",
            )


# -- Plan tuned's variables and profile, if tuned is installed (pure). ----------------------------


def tuned_steps(facts: Facts, partition: Partition, intent: HostIntent) -> Iterator[Step]:
    """Set the same CPUs as in ``isolcpus``; otherwise tuned would revert these settings."""
    tuned = facts.kernel.tuned
    if tuned is None or isinstance(tuned, Unknown) or not partition.isolated:
        return
    profile = "realtime-virtual-host" if intent.realtime else "cpu-partitioning"
    source = sources.TUNED_HOST if intent.realtime else sources.TUNED_PARTITIONING
    yield Step(
        Group.TUNED,
        TunedVariable(profile, "isolated_cores"),
        tuned.isolated_cores.get(profile),
        format_list(partition.isolated),
        Effect.LIVE,
        "tuned sets masks and priorities by this list",
        source,
    )
    yield Step(
        Group.TUNED,
        TunedProfile(),
        tuned.profile,
        profile,
        Effect.LIVE,
        "another profile would undo this one's settings at the next boot",
        source,
    )

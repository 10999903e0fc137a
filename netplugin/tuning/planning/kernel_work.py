"""Plan the CPUs of kernel work and services, frequency, tuned and real-time settings (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list, to_kernel
from netplugin.tuning import steps
from netplugin.tuning.facts import Cpus, Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.read.cpus import CPU, DEFAULT_AFFINITY, WORKQUEUES, WRITEBACK, irq_path
from netplugin.tuning.read.kernel import HALT_POLL
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import (
    BannedCpus,
    Effect,
    File,
    Group,
    ServiceCpus,
    Step,
    Swap,
    Sysctl,
    Target,
    ThreadPriority,
    TunedProfile,
    TunedVariable,
)

# -- Plan the CPUs of kernel work and services, and the frequency governor (pure). ----------------

#: Group, name, value, reason and source.
_QUIET = (
    (
        Group.WATCHDOG,
        "kernel.nmi_watchdog",
        "0",
        "the NMI watchdog interrupts each CPU and takes a counter of its PMU",
        f"{steps.SYSCTL_KERNEL}; {steps.TUNED_LATENCY}",
    ),
    (
        Group.MEMORY,
        "kernel.numa_balancing",
        "0",
        "balancing takes pages away to see who faults; planned memory is where it belongs",
        f"{steps.SYSCTL_KERNEL}; {steps.TUNED_LATENCY}",
    ),
    (
        Group.SCHEDULING,
        "vm.stat_interval",
        "10",
        "each CPU folds its memory statistics once an interval",
        f"{steps.KERNEL_THREADS}; {steps.TUNED_LATENCY}",
    ),
)


def kernel_work(facts: Facts, partition: Partition) -> Iterator[Step]:
    """Steps that keep kernel work off isolated CPUs; none if no CPU is to be isolated."""
    if not partition.isolated:
        return
    yield from _interrupts(facts, partition)
    yield from _irqbalance(facts, partition)
    unbound = f"{steps.KERNEL_THREADS}; {steps.TUNED_PARTITIONING}"
    for path, cpus, what in (
        (WORKQUEUES, facts.interrupts.workqueues, "unbound work of the kernel"),
        (WRITEBACK, facts.interrupts.writeback, "writing dirty pages to disks"),
    ):
        why = f"{what} stays on housekeeping"
        yield from _mask(Group.WORKQUEUES, path, cpus, partition, why, unbound)
    for group, name, desired, why, source in _QUIET:
        yield from _step(group, Sysctl(name), facts.kernel.sysctl(name), desired, why, source)
    yield from _services(facts, partition)
    yield from _governors(facts, partition)


def _interrupts(facts: Facts, partition: Partition) -> Iterator[Step]:
    default = facts.interrupts.default_affinity
    why = "interrupts that come later go to housekeeping"
    yield from _mask(Group.INTERRUPTS, DEFAULT_AFFINITY, default, partition, why, steps.IRQ_AFFINITY)
    for irq in known(facts.interrupts.irqs, ()):
        affinity = irq.affinity
        if isinstance(affinity, Unknown) or not affinity & partition.isolated:
            continue
        desired = (affinity & partition.housekeeping) or partition.near(affinity)
        target = File(irq_path(irq.number), lasting=False)
        why = "an interrupt stops what the CPU does"
        now, planned = format_list(affinity), format_list(desired)
        yield Step(Group.INTERRUPTS, target, now, planned, Effect.LIVE, why, steps.IRQ_AFFINITY)


def _irqbalance(facts: Facts, partition: Partition) -> Iterator[Step]:
    """Ban the isolated CPUs explicitly; irqbalance skips only those isolated since boot."""
    found = facts.interrupts.irqbalance
    if found is None or isinstance(found, Unknown):
        return
    yield Step(
        Group.INTERRUPTS,
        BannedCpus(found.path),
        None if found.banned is None else format_list(found.banned),
        format_list(partition.isolated),
        Effect.LIVE,
        "irqbalance would bring interrupts back within seconds",
        f"{steps.IRQBALANCE}; {steps.TUNED_PARTITIONING}",
    )


def _services(facts: Facts, partition: Partition) -> Iterator[Step]:
    found = facts.kernel.service_cpus
    yield Step(
        Group.SCHEDULING,
        ServiceCpus(),
        found if found is None or isinstance(found, Unknown) else format_list(found),
        format_list(partition.housekeeping),
        Effect.REBOOT,
        "services, with them OVS's main, handler and revalidator threads, start on housekeeping; libvirt "
        "gives VMs CPUs of their own",
        f"{steps.SYSTEMD}; {steps.TUNED_PARTITIONING}",
    )


def _mask(
    group: Group, path: str, cpus: Fact[Cpus | None], partition: Partition, why: str, source: str
) -> Iterator[Step]:
    now = cpus if cpus is None or isinstance(cpus, Unknown) else to_kernel(cpus)
    yield from _step(group, File(path), now, to_kernel(partition.housekeeping), why, source)


def _governors(facts: Facts, partition: Partition) -> Iterator[Step]:
    why = "a CPU that has to speed up first loses packets meanwhile"
    source = f"{steps.GOVERNOR}; {steps.TUNED_POWER}"
    for policy in known(facts.power.policies, ()):
        if known(policy.cpus, frozenset()) & partition.isolated:
            target = File(f"{CPU}/cpufreq/{policy.name}/scaling_governor")
            yield Step(Group.POWER, target, policy.governor, "performance", Effect.LIVE, why, source)


# -- Plan tuned's variables and profile, if tuned is installed (pure). ----------------------------


def tuned_steps(facts: Facts, partition: Partition, intent: HostIntent) -> Iterator[Step]:
    """Set the same CPUs as in ``isolcpus``; otherwise tuned would revert these settings."""
    tuned = facts.kernel.tuned
    if tuned is None or isinstance(tuned, Unknown) or not partition.isolated:
        return
    profile = "realtime-virtual-host" if intent.realtime else "cpu-partitioning"
    source = steps.TUNED_HOST if intent.realtime else steps.TUNED_PARTITIONING
    variable, now = TunedVariable(profile, "isolated_cores"), tuned.isolated_cores.get(profile)
    cpus, why = format_list(partition.isolated), "tuned sets masks and priorities by this list"
    yield Step(Group.TUNED, variable, now, cpus, Effect.LIVE, why, source)
    why = "another profile would undo this one's settings at the next boot"
    yield Step(Group.TUNED, TunedProfile(), tuned.profile, profile, Effect.LIVE, why, source)


# -- Plan real-time settings that can be changed live (pure). -------------------------------------


KSM = "/sys/kernel/mm/ksm/run"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_RCU = "RCU must not wait for a busy vCPU, or memory runs full of what nobody frees"
#: SCHED_FIFO priorities from tuned's realtime-virtual-host, above that of a real-time vCPU (1), which these
#: threads must preempt. Not every kernel has all of them.
PRIORITIES = (
    ("ksoftirqd", "2", "timers and packets of a CPU must not wait for its vCPU"),
    ("ktimers", "2", "timers of a CPU must not wait for its vCPU"),
    ("ktimersoftd", "3", "timers of a CPU must not wait for its vCPU"),
    ("rcuc", "4", _RCU),
    ("rcub", "4", _RCU),
)
#: KVM's default on x86 (KVM_HALT_POLL_NS_DEFAULT in arch/x86/include/asm/kvm_host.h).
_HALT_POLL_NS = "200000"


#: Group, name, value, reason and source.
_REALTIME = (
    (
        Group.WATCHDOG,
        "kernel.soft_watchdog",
        "0",
        "it wakes a thread on each CPU",
        f"{steps.SYSCTL_KERNEL}; {steps.TUNED_REALTIME} (nosoftlockup)",
    ),
    (
        Group.SCHEDULING,
        "kernel.sched_rt_runtime_us",
        "-1",
        "a vCPU in real time is stopped for 5 % of each second otherwise",
        steps.TUNED_REALTIME,
    ),
    (
        Group.SCHEDULING,
        "kernel.timer_migration",
        "0",
        "timers of other CPUs must not move to one of these",
        steps.TUNED_LATENCY,
    ),
)


def latency(facts: Facts, partition: Partition, intent: HostIntent) -> Iterator[Step]:
    """Real-time steps; none unless the intent is real time."""
    if not (intent.realtime and partition.isolated):
        return
    memory = facts.memory
    # Not 0, which would keep merged pages; tuned's profile also sets 2.
    why = "a merged page stops a VM at its next write to it: 2 parts those that are merged already"
    source = f"{steps.KSM}; {steps.TUNED_HOST}"
    yield from _step(Group.MEMORY, File(KSM), _text(memory.ksm), "2", why, source)
    # Reading the file gives all choices; the one in brackets is compared.
    why = "making large pages of small ones stops who uses them; VMs have hugepages of their own"
    source = f"{steps.THP}; {steps.TUNED_LATENCY}"
    yield from _step(Group.MEMORY, File(THP), memory.transparent, "never", why, source)
    swaps = memory.swaps if isinstance(memory.swaps, Unknown) else ",".join(memory.swaps) or None
    why = "memory that comes back from a disk comes milliseconds late"
    yield Step(Group.MEMORY, Swap(), swaps, None, Effect.LIVE, why, steps.OWN)
    for group, name, desired, why, source in _REALTIME:
        yield from _step(group, Sysctl(name), facts.kernel.sysctl(name), desired, why, source)
    yield from _halt_polling(facts, partition)
    yield from _threads(facts)


def _halt_polling(facts: Facts, partition: Partition) -> Iterator[Step]:
    """KVM halt polling: a halted vCPU polls before it sleeps, and so wakes faster."""
    now = facts.kernel.halt_poll_ns
    cores = (core for share in partition.nodes for core in share.vm)
    if any(len(core.cpus & partition.vcpus) > 1 for core in cores):
        desired = "0"
        why = "a halted vCPU that polls takes from the vCPU on the sibling"
    else:
        desired = str(known(now, None) or _HALT_POLL_NS)
        why = "a halted vCPU that polls wakes sooner, and has its core to itself"
    source = f"{steps.HALT_POLLING}; by siblings: {steps.OWN}"
    yield from _step(Group.SCHEDULING, File(HALT_POLL), _text(now), desired, why, source)


def _threads(facts: Facts) -> Iterator[Step]:
    threads = facts.kernel.threads
    for name, desired, why in PRIORITIES:
        now: Fact[str | None]
        if isinstance(threads, Unknown):
            now = threads
        else:
            found = {t.priority for t in threads if t.name.partition("/")[0] == name}
            # rcuc needs rcu_nocbs or PREEMPT_RT, ktimers PREEMPT_RT
            now = ",".join(map(str, sorted(found))) or None
        yield from _step(Group.SCHEDULING, ThreadPriority(name), now, desired, why, steps.TUNED_HOST)


def _text(value: Fact[int | None]) -> Fact[str | None]:
    return value if isinstance(value, Unknown) or value is None else str(value)


def _step(
    group: Group, target: Target, now: Fact[str | None], desired: str, why: str, source: str
) -> Iterator[Step]:
    """The step, unless the kernel lacks the setting."""
    if now is not None:
        yield Step(group, target, now, desired, Effect.LIVE, why, source)

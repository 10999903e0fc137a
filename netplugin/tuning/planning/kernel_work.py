"""Plan the CPUs of kernel work and services, frequency, tuned and real-time settings (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from netplugin.host.cpus import format_list, to_kernel
from netplugin.tuning import steps
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.read.cpus import CPU, DEFAULT_AFFINITY, WORKQUEUES, WRITEBACK, irq_path
from netplugin.tuning.read.kernel import HALT_POLL
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import Effect, File, Group, Step, Sysctl, Target

T = TypeVar("T")

KSM = "/sys/kernel/mm/ksm/run"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
#: Sysctls where CPUs are isolated, and for real time: group, name, value and source.
QUIET = (
    (Group.WATCHDOG, "kernel.nmi_watchdog", "0", f"{steps.SYSCTL_KERNEL}; {steps.TUNED_LATENCY}"),
    (Group.MEMORY, "kernel.numa_balancing", "0", f"{steps.SYSCTL_KERNEL}; {steps.TUNED_LATENCY}"),
    (Group.SCHEDULING, "vm.stat_interval", "10", f"{steps.KERNEL_THREADS}; {steps.TUNED_LATENCY}"),
)
_NO_SOFT_LOCKUP = f"{steps.SYSCTL_KERNEL}; {steps.TUNED_REALTIME} (nosoftlockup)"
REALTIME = (
    (Group.WATCHDOG, "kernel.soft_watchdog", "0", _NO_SOFT_LOCKUP),
    (Group.SCHEDULING, "kernel.sched_rt_runtime_us", "-1", steps.TUNED_REALTIME),
    (Group.SCHEDULING, "kernel.timer_migration", "0", steps.TUNED_LATENCY),
)
#: SCHED_FIFO priorities from tuned's realtime-virtual-host, above that of a real-time vCPU (1), which these
#: threads must preempt. Not every kernel has all of them.
PRIORITIES = (("ksoftirqd", "2"), ("ktimers", "2"), ("ktimersoftd", "3"), ("rcuc", "4"), ("rcub", "4"))
_KERNEL = "what the kernel has to do on a vCPU must not wait for a busy thread there"
_RCU = "RCU must not wait for a busy vCPU, or memory runs full of what nobody frees"
_FAULTS = "balancing takes pages away to see who faults"
_MERGED = "making large pages of small ones stops who uses them"
#: Why each is set on a host, and in a guest.
WHY = {
    DEFAULT_AFFINITY: "interrupts that come later go to housekeeping",
    WORKQUEUES: "unbound work of the kernel stays on housekeeping",
    WRITEBACK: "writing dirty pages to disks stays on housekeeping",
    # 2 and not 0, which would keep merged pages; tuned's profile also sets 2.
    KSM: "a merged page stops a VM at its next write to it: 2 parts those that are merged already",
    THP: f"{_MERGED}; VMs have hugepages of their own",
    "swap": "memory that comes back from a disk comes milliseconds late",
    "kernel.nmi_watchdog": "the NMI watchdog interrupts each CPU and takes a counter of its PMU",
    "kernel.numa_balancing": f"{_FAULTS}; planned memory is where it belongs",
    "vm.stat_interval": "each CPU folds its memory statistics once an interval",
    "kernel.soft_watchdog": "it wakes a thread on each CPU",
    "kernel.sched_rt_runtime_us": "a vCPU in real time is stopped for 5 % of each second otherwise",
    "kernel.timer_migration": "timers of other CPUs must not move to one of these",
    "ksoftirqd": "timers and packets of a CPU must not wait for its vCPU",
    **dict.fromkeys(("ktimers", "ktimersoftd"), "timers of a CPU must not wait for its vCPU"),
    **dict.fromkeys(("rcuc", "rcub"), _RCU),
}
WHY_IN_GUEST = {
    **WHY,
    WRITEBACK: "writing dirty pages stays on housekeeping",
    THP: _MERGED,
    "kernel.nmi_watchdog": "the NMI watchdog needs a counter that KVM emulates, and each of its interrupts "
    "leaves the guest",
    "kernel.numa_balancing": _FAULTS,
    "kernel.sched_rt_runtime_us": "a thread in real time is stopped for 5 % of each second otherwise",
    **dict.fromkeys(dict(PRIORITIES), _KERNEL),
}
#: KVM's default on x86 (KVM_HALT_POLL_NS_DEFAULT in arch/x86/include/asm/kvm_host.h).
_HALT_POLL_NS = "200000"


def kernel_work(facts: Facts, partition: Partition) -> Iterator[Step]:
    """Steps that keep kernel work off isolated CPUs; none if no CPU is to be isolated."""
    if not partition.isolated:
        return
    yield from _interrupts(facts, partition)
    yield from _irqbalance(facts, partition)
    mask, source = to_kernel(partition.housekeeping), f"{steps.KERNEL_THREADS}; {steps.TUNED_PARTITIONING}"
    for path, cpus in ((WORKQUEUES, facts.interrupts.workqueues), (WRITEBACK, facts.interrupts.writeback)):
        yield from _step(Group.WORKQUEUES, File(path), _text(cpus, to_kernel), mask, WHY[path], source)
    yield from _sysctls(facts, QUIET)
    yield _services(facts, partition)
    yield from _governors(facts, partition)


def _sysctls(facts: Facts, rows: Iterable[tuple[Group, str, str, str]]) -> Iterator[Step]:
    for group, name, desired, source in rows:
        yield from _step(group, Sysctl(name), facts.kernel.sysctls.get(name), desired, WHY[name], source)


def _interrupts(facts: Facts, partition: Partition) -> Iterator[Step]:
    target, now = File(DEFAULT_AFFINITY), _text(facts.interrupts.default_affinity, to_kernel)
    desired, why = to_kernel(partition.housekeeping), WHY[DEFAULT_AFFINITY]
    yield from _step(Group.INTERRUPTS, target, now, desired, why, steps.IRQ_AFFINITY)
    for irq in known(facts.interrupts.irqs, ()):
        affinity = irq.affinity
        if isinstance(affinity, Unknown) or not affinity & partition.isolated:
            continue
        desired = format_list((affinity & partition.housekeeping) or partition.near(affinity))
        target, why = File(irq_path(irq.number), lasting=False), "an interrupt stops what the CPU does"
        yield from _step(Group.INTERRUPTS, target, format_list(affinity), desired, why, steps.IRQ_AFFINITY)


def _irqbalance(facts: Facts, partition: Partition) -> Iterator[Step]:
    """Ban the isolated CPUs explicitly; irqbalance skips only those isolated since boot."""
    found = facts.interrupts.irqbalance
    if found is None or isinstance(found, Unknown):
        return
    target, desired = steps.BannedCpus(found.path), format_list(partition.isolated)
    now, why = _text(found.banned, format_list), "irqbalance would bring interrupts back within seconds"
    source = f"{steps.IRQBALANCE}; {steps.TUNED_PARTITIONING}"
    yield Step(Group.INTERRUPTS, target, now, desired, Effect.LIVE, why, source)


def _services(facts: Facts, partition: Partition) -> Step:
    now, desired = _text(facts.kernel.service_cpus, format_list), format_list(partition.housekeeping)
    why = (
        "services, with them OVS's main, handler and revalidator threads, start on housekeeping; libvirt "
        "gives VMs CPUs of their own"
    )
    source = f"{steps.SYSTEMD}; {steps.TUNED_PARTITIONING}"
    return Step(Group.SCHEDULING, steps.ServiceCpus(), now, desired, Effect.REBOOT, why, source)


def _governors(facts: Facts, partition: Partition) -> Iterator[Step]:
    why = "a CPU that has to speed up first loses packets meanwhile"
    source = f"{steps.GOVERNOR}; {steps.TUNED_POWER}"
    for policy in known(facts.power.policies, ()):
        if known(policy.cpus, frozenset()) & partition.isolated:
            target = File(f"{CPU}/cpufreq/{policy.name}/scaling_governor")
            yield Step(Group.POWER, target, policy.governor, "performance", Effect.LIVE, why, source)


def tuned_steps(facts: Facts, partition: Partition, intent: HostIntent) -> Iterator[Step]:
    """Set the same CPUs as in ``isolcpus``; otherwise tuned would revert these settings."""
    tuned = facts.kernel.tuned
    if tuned is None or isinstance(tuned, Unknown) or not partition.isolated:
        return
    profile = "realtime-virtual-host" if intent.realtime else "cpu-partitioning"
    source = steps.TUNED_HOST if intent.realtime else steps.TUNED_PARTITIONING
    variable, now = steps.TunedVariable(profile, "isolated_cores"), tuned.isolated_cores.get(profile)
    cpus, why = format_list(partition.isolated), "tuned sets masks and priorities by this list"
    yield Step(Group.TUNED, variable, now, cpus, Effect.LIVE, why, source)
    why = "another profile would undo this one's settings at the next boot"
    yield Step(Group.TUNED, steps.TunedProfile(), tuned.profile, profile, Effect.LIVE, why, source)


def latency(facts: Facts, partition: Partition, intent: HostIntent) -> Iterator[Step]:
    """Real-time steps; none unless the intent is real time."""
    if not (intent.realtime and partition.isolated):
        return
    memory = facts.memory
    ksm, thp = f"{steps.KSM}; {steps.TUNED_HOST}", f"{steps.THP}; {steps.TUNED_LATENCY}"
    yield from _step(Group.MEMORY, File(KSM), _text(memory.ksm), "2", WHY[KSM], ksm)
    yield from _step(Group.MEMORY, File(THP), memory.transparent, "never", WHY[THP], thp)
    swaps = _text(memory.swaps, ",".join) or None
    yield Step(Group.MEMORY, steps.Swap(), swaps, None, Effect.LIVE, WHY["swap"], steps.OWN)
    yield from _sysctls(facts, REALTIME)
    yield from _halt_polling(facts, partition)
    yield from _threads(facts)


def _halt_polling(facts: Facts, partition: Partition) -> Iterator[Step]:
    """KVM halt polling: a halted vCPU polls before it sleeps, and so wakes faster."""
    now = facts.kernel.halt_poll_ns
    cores = (core for share in partition.nodes for core in share.vm)
    if any(len(core.cpus & partition.vcpus) > 1 for core in cores):
        desired, why = "0", "a halted vCPU that polls takes from the vCPU on the sibling"
    else:
        desired = str(known(now, None) or _HALT_POLL_NS)
        why = "a halted vCPU that polls wakes sooner, and has its core to itself"
    source = f"{steps.HALT_POLLING}; by siblings: {steps.OWN}"
    yield from _step(Group.SCHEDULING, File(HALT_POLL), _text(now), desired, why, source)


def _threads(facts: Facts) -> Iterator[Step]:
    threads = facts.kernel.threads
    for name, desired in PRIORITIES:
        found = {t.priority for t in known(threads, ()) if t.name.partition("/")[0] == name}
        # rcuc needs rcu_nocbs or PREEMPT_RT, ktimers PREEMPT_RT
        now = threads if isinstance(threads, Unknown) else ",".join(map(str, sorted(found))) or None
        target = steps.ThreadPriority(name)
        yield from _step(Group.SCHEDULING, target, now, desired, WHY[name], steps.TUNED_HOST)


def _text(value: Fact[T | None], form: Callable[[T], str] = str) -> Fact[str | None]:
    return value if isinstance(value, Unknown) or value is None else form(value)


def _step(
    group: Group, target: Target, now: Fact[str | None], desired: str, why: str, source: str
) -> Iterator[Step]:
    """The step, unless the kernel lacks the setting."""
    if now is not None:
        yield Step(group, target, now, desired, Effect.LIVE, why, source)

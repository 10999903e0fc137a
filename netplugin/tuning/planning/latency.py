"""Plan real-time settings that can be changed live (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning import sources
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.read.kernel import HALT_POLL
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import Effect, File, Group, Step, Swap, Sysctl, Target, ThreadPriority

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


def latency(facts: Facts, partition: Partition, intent: HostIntent) -> Iterator[Step]:
    """Real-time steps; none unless the intent is real time."""
    if not (intent.realtime and partition.isolated):
        return
    memory = facts.memory
    yield from _step(
        # Not 0, which would keep merged pages; tuned's profile also sets 2.
        Group.MEMORY,
        File(KSM),
        _text(memory.ksm),
        "2",
        "a merged page stops a VM at its next write to it: 2 parts those that are merged already",
        f"{sources.KSM}; {sources.TUNED_HOST}",
    )
    # Reading the file gives all choices; the one in brackets is compared.
    yield from _step(
        Group.MEMORY,
        File(THP),
        memory.transparent,
        "never",
        "making large pages of small ones stops who uses them; VMs have hugepages of their own",
        f"{sources.THP}; {sources.TUNED_LATENCY}",
    )
    swaps = memory.swaps if isinstance(memory.swaps, Unknown) else ",".join(memory.swaps) or None
    yield Step(
        Group.MEMORY,
        Swap(),
        swaps,
        None,
        Effect.LIVE,
        "memory that comes back from a disk comes milliseconds late",
        sources.OWN,
    )
    for group, name, wanted, why, source in (
        (
            Group.WATCHDOG,
            "kernel.soft_watchdog",
            "0",
            "it wakes a thread on each CPU",
            f"{sources.SYSCTL_KERNEL}; {sources.TUNED_REALTIME} (nosoftlockup)",
        ),
        (
            Group.SCHEDULING,
            "kernel.sched_rt_runtime_us",
            "-1",
            "a vCPU in real time is stopped for 5 % of each second otherwise",
            sources.TUNED_REALTIME,
        ),
        (
            Group.SCHEDULING,
            "kernel.timer_migration",
            "0",
            "timers of other CPUs must not move to one of these",
            sources.TUNED_LATENCY,
        ),
    ):
        yield from _step(group, Sysctl(name), facts.kernel.sysctl(name), wanted, why, source)
    yield from _halt_polling(facts, partition)
    yield from _threads(facts)


def _halt_polling(facts: Facts, partition: Partition) -> Iterator[Step]:
    """KVM halt polling: a halted vCPU polls before it sleeps, and so wakes faster."""
    now = facts.kernel.halt_poll_ns
    cores = (core for share in partition.nodes for core in share.vm)
    if any(len(core.cpus & partition.vcpus) > 1 for core in cores):
        wanted = "0"
        why = "a halted vCPU that polls takes from the vCPU on the sibling"
    else:
        wanted = str(known(now, None) or _HALT_POLL_NS)
        why = "a halted vCPU that polls wakes sooner, and has its core to itself"
    yield from _step(
        Group.SCHEDULING,
        File(HALT_POLL),
        _text(now),
        wanted,
        why,
        f"{sources.HALT_POLLING}; by siblings: {sources.OWN}",
    )


def _threads(facts: Facts) -> Iterator[Step]:
    threads = facts.kernel.threads
    for name, wanted, why in PRIORITIES:
        now: Fact[str | None]
        if isinstance(threads, Unknown):
            now = threads
        else:
            found = {t.priority for t in threads if t.name.partition("/")[0] == name}
            if not found:  # rcuc needs rcu_nocbs or PREEMPT_RT, ktimers PREEMPT_RT
                continue
            now = ",".join(map(str, sorted(found)))
        yield Step(
            Group.SCHEDULING,
            ThreadPriority(name),
            now,
            wanted,
            Effect.LIVE,
            why,
            sources.TUNED_HOST,
        )


def _text(value: Fact[int | None]) -> Fact[str | None]:
    return value if isinstance(value, Unknown) or value is None else str(value)


def _step(
    group: Group, target: Target, now: Fact[str | None], wanted: str, why: str, source: str
) -> Iterator[Step]:
    """The step, unless the kernel lacks the setting."""
    if now is not None:
        yield Step(group, target, now, wanted, Effect.LIVE, why, source)

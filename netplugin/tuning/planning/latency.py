"""What real time asks for beside isolation, and what can be set live (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import Intent
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.root import Fact, Unknown
from netplugin.tuning.steps import Effect, File, Group, Step, Swap, Sysctl, Target, ThreadPriority

KSM = "/sys/kernel/mm/ksm/run"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
#: SCHED_FIFO priorities: above a vCPU in real time, which has 1, as these must not wait for it.
PRIORITIES = (
    ("ksoftirqd", "2", "timers and packets of a CPU must not wait for its vCPU"),
    ("rcuc", "4", "RCU must not wait for a busy vCPU, or memory runs full of what nobody frees"),
)


def latency(facts: Facts, partition: Partition, intent: Intent) -> Iterator[Step]:
    """Nothing where throughput counts."""
    if not (intent.realtime and partition.isolated):
        return
    memory = facts.memory
    yield from _step(
        Group.MEMORY, File(KSM), _text(memory.ksm), "0",
        "merging equal pages stops VMs at their next write to one",
    )  # fmt: skip
    # A list under /sys keeps its brackets; the value that is chosen is what counts.
    yield from _step(
        Group.MEMORY, File(THP), memory.transparent, "never",
        "making large pages of small ones stops who uses them; VMs have hugepages of their own",
    )  # fmt: skip
    swaps = memory.swaps if isinstance(memory.swaps, Unknown) else ",".join(memory.swaps) or None
    yield Step(
        Group.MEMORY, Swap(), swaps, None, Effect.LIVE,
        "memory that comes back from a disk comes milliseconds late",
    )  # fmt: skip
    for group, name, wanted, why in (
        (Group.WATCHDOG, "kernel.soft_watchdog", "0", "it wakes a thread on each CPU"),
        (
            Group.SCHEDULING, "kernel.sched_rt_runtime_us", "-1",
            "a vCPU in real time is stopped for 5 % of each second otherwise",
        ),
        (
            Group.SCHEDULING, "kernel.timer_migration", "0",
            "timers of other CPUs must not move to one of these",
        ),
    ):  # fmt: skip
        yield from _step(group, Sysctl(name), facts.kernel.sysctl(name), wanted, why)
    yield from _threads(facts)


def _threads(facts: Facts) -> Iterator[Step]:
    threads = facts.kernel.threads
    for name, wanted, why in PRIORITIES:
        now: Fact[str | None]
        if isinstance(threads, Unknown):
            now = threads
        else:
            found = {t.priority for t in threads if t.name.partition("/")[0] == name}
            if not found:  # rcuc threads come with rcu_nocbs or PREEMPT_RT
                continue
            now = ",".join(map(str, sorted(found)))
        yield Step(Group.SCHEDULING, ThreadPriority(name), now, wanted, Effect.LIVE, why)


def _text(value: Fact[int | None]) -> Fact[str | None]:
    return value if isinstance(value, Unknown) or value is None else str(value)


def _step(
    group: Group, target: Target, now: Fact[str | None], wanted: str, why: str
) -> Iterator[Step]:
    """None where the kernel has no such thing."""
    if now is not None:
        yield Step(group, target, now, wanted, Effect.LIVE, why)

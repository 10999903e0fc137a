"""Advice on PMD threads beyond another rxq assignment: more queues, more CPUs, auto load balance (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from netplugin.models import AutoLoadBalanceView, PmdAdvice, PmdLoads, PmdState

#: Percent of a CPU above which a queue or thread counts as full.
FULL = 90


def advice(
    state: PmdState, now: PmdLoads, view: AutoLoadBalanceView, measured: bool
) -> tuple[PmdAdvice, ...]:
    """All advice for this state; ``now`` and ``view`` are parts of the proposal for it."""
    found = [*_queues(state), *_cores(state)]
    if not measured:
        found.append(PmdAdvice(
            id="not-measured",
            text="OVS has not measured all queues yet: it takes it 5 s, and a minute for a mean of one",
        ))  # fmt: skip
    if view.preferred:
        found.append(_balance(state, now, view))
    return tuple(found)


def _balance(state: PmdState, now: PmdLoads, view: AutoLoadBalanceView) -> PmdAdvice:
    asks = state.settings.auto_load_balance
    command = "netplugin pmd set --auto-lb on"
    if now.largest_percent < asks.load_threshold:
        command += f" --auto-lb-load {max(1, now.largest_percent - 1)}"
    if view.improvement_percent < asks.improvement_threshold:
        command += f" --auto-lb-improvement {view.improvement_percent}"
    does = "is on and comes" if view.enabled and view.acts else "would come"
    return PmdAdvice(
        id="auto-load-balance",
        text=f"OVS's automatic load balance {does} to {view.expected.largest_percent} % on the "
        f"fullest thread without pinning anything, and follows the traffic: {command}",
    )


def _queues(state: PmdState) -> Iterator[PmdAdvice]:
    nodes = Counter(core.numa_node for core in state.cores)
    enabled: Counter[tuple[str, int | None]] = Counter()
    for core in state.cores:
        for queue in core.queues:
            enabled[queue.port, queue.port_numa_node] += queue.enabled
            if (queue.usage_percent or 0) >= FULL:
                yield PmdAdvice(
                    id="more-queues",
                    text=f"{queue.port} queue {queue.queue} alone takes {queue.usage_percent} % of a "
                    "CPU, and no thread gives it more: give the port more queues (options:n_rxq of a "
                    "NIC, queues of a VM), so that its flows spread",
                )
    for (port, node), count in sorted(enabled.items(), key=lambda found: found[0][0]):
        threads = nodes.get(node if node is not None else -1, len(state.cores))
        if count > threads:
            yield PmdAdvice(
                id="fewer-queues",
                text=f"{port} has {count} queues for {threads} PMD threads that are near it: two on "
                "one thread cost a poll more and bring nothing",
            )


def _cores(state: PmdState) -> Iterator[PmdAdvice]:
    loads = [
        sum(queue.usage_percent or 0 for queue in core.queues) + (core.overhead_percent or 0)
        for core in state.cores
    ]
    if loads and min(loads) > FULL:
        yield PmdAdvice(
            id="more-cores",
            text=f"all {len(loads)} PMD threads are above {FULL} %: only more cores help "
            f"(netplugin pmd set --count {len(loads) + 1})",
        )

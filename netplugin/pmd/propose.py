"""Propose an rxq assignment for PMD threads, and compare it with OVS's auto load balance (pure).

A queue is assigned to a thread on its port's NUMA node, and to another node only if that node has
no thread. All queues with load are pinned; otherwise OVS would move the rest when the first is
pinned. Idle queues are left to OVS. No thread is isolated: with ``pmd-rxq-assign=group`` and
``pmd-rxq-isolate=false``, OVS assigns an unpinned queue, such as one of a new port, to the thread
with the least load. With isolation, possibly no thread would poll it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from netplugin.api.pmd_models import (
    AutoLoadBalanceView,
    PmdAdvice,
    PmdLoads,
    PmdProposal,
    PmdState,
    ProposedQueue,
    RxQueue,
)
from netplugin.pmd import parts, schedule
from netplugin.pmd.balance import Key, LoadProblem, Placement, balanced
from netplugin.pmd.parts import NodeThreads, PortQueues
from netplugin.pmd.settings import ASSIGN, GROUP, ISOLATE

#: The least improvement, in percent of a CPU, that justifies moves. OVS rounds usage to whole
#: percent.
WORTH = 5


def propose(state: PmdState) -> PmdProposal:
    """Propose an assignment that is better by a margin, or none. A proposal on its own result is empty."""
    measured = is_measured(state)
    problem, now = _problem(state)
    then = balanced(problem, now) if measured else now
    gain = problem.largest(now) - problem.largest(then)
    is_worth = problem.away(then) < problem.away(now) or gain >= WORTH
    needed = measured and (is_worth or bool(state.unpolled))
    if not is_worth:
        then = now
    before, after = _loads(state, problem, now), _loads(state, problem, then)
    view = _auto_load_balance(state, problem, now, after, needed)
    return PmdProposal(
        moves=sum(then[key] != cpu for key, cpu in now.items()),
        now=before,
        proposed=after,
        improvement_percent=schedule.improvement(
            schedule.variances(problem.sums(now), state.cores),
            schedule.variances(problem.sums(then), state.cores),
        ),
        queues=tuple(_queues(state, then, needed)),
        affinity=_affinity(state, then) if needed else {},
        settings={ASSIGN: GROUP, ISOLATE: "false"} if needed and state.settings.rxq_isolate else {},
        auto_load_balance=view,
        advice=advice(state, before, view, measured),
    )


def is_measured(state: PmdState) -> bool:
    """Whether all queues have a usage. OVS reports it 5 s after the start of a thread."""
    queues = (queue for core in state.cores for queue in core.queues)
    return all(queue.usage_percent is not None for queue in queues if queue.enabled)


def _problem(state: PmdState) -> tuple[LoadProblem, dict[Key, int]]:
    """The queues with load, and their CPUs."""
    cpus = tuple(core.cpu for core in state.cores)
    everywhere = frozenset(cpus)
    nodes: dict[int, frozenset[int]] = {}
    for core in state.cores:
        nodes[core.numa_node] = nodes.get(core.numa_node, frozenset()) | {core.cpu}
    loads: dict[Key, int] = {}
    homes: dict[Key, frozenset[int]] = {}
    now: dict[Key, int] = {}
    for core in state.cores:
        for queue in core.queues:
            if queue.usage_percent:
                key = (queue.port, queue.queue)
                loads[key], now[key] = queue.usage_percent, core.cpu
                node = queue.port_numa_node
                homes[key] = everywhere if node is None else nodes.get(node, everywhere)
    return LoadProblem(cpus, loads, homes), now


def _loads(state: PmdState, problem: LoadProblem, placement: Placement) -> PmdLoads:
    """The loads of all threads, isolated or not."""
    node = {core.cpu: core.numa_node for core in state.cores}
    home = {(queue.port, queue.queue): queue.port_numa_node for core in state.cores for queue in core.queues}
    sums = problem.sums(placement)
    return PmdLoads(
        largest_percent=problem.largest(placement),
        variance=max(schedule.variances(sums, state.cores).values(), default=0),
        numa_mismatches=sum(
            home[key] is not None and home[key] != node[cpu] for key, cpu in placement.items()
        ),
    )


def _queues(state: PmdState, then: Placement, needed: bool) -> Iterable[ProposedQueue]:
    for core in state.cores:
        for queue in core.queues:
            there = None if needed and not _keeps_pin(queue, core.cpu) else core.cpu
            yield ProposedQueue(
                port=queue.port,
                queue=queue.queue,
                load_percent=queue.usage_percent or 0,
                port_numa_node=queue.port_numa_node,
                cpu=core.cpu,
                proposed_cpu=then.get((queue.port, queue.queue), there),
                port_id=queue.port_id,
                vm_id=queue.vm_id,
            )


def _keeps_pin(queue: RxQueue, cpu: int) -> bool:
    """Whether the pinning of an idle queue stays: it is in effect and on the right NUMA node."""
    return queue.pinned_to == cpu and not queue.numa_mismatch


def _affinity(state: PmdState, then: Placement) -> dict[str, dict[str, int | None]]:
    """The pinnings that have to be written."""
    found: dict[str, dict[str, int | None]] = {}
    for core in state.cores:
        for queue in core.queues:
            kept = queue.pinned_to if _keeps_pin(queue, core.cpu) else None
            desired = then.get((queue.port, queue.queue), kept)
            if desired != queue.pinned_to:
                found.setdefault(queue.port, {})[str(queue.queue)] = desired
    return found


def _auto_load_balance(
    state: PmdState, problem: LoadProblem, now: Mapping[Key, int], proposed: PmdLoads, needed: bool
) -> AutoLoadBalanceView:
    settings = state.settings.auto_load_balance
    own = schedule.scheduled(state)
    placement = {key: own.get(key, cpu) for key, cpu in now.items()}
    expected = _loads(state, problem, placement)
    shared = [core for core in state.cores if not core.isolated]
    improvement = schedule.improvement(
        schedule.variances(problem.sums(now), shared),
        schedule.variances(problem.sums(placement), shared),
    )
    obstacle = schedule.balance_obstacle(state)
    reason = obstacle
    if obstacle is None and problem.largest(now) < settings.load_threshold:
        reason = f"no PMD thread has a load of {settings.load_threshold} %"
    elif obstacle is None and improvement < settings.improvement_threshold:
        reason = (
            f"the variance would improve by {improvement} %, and {settings.improvement_threshold} % "
            "are required"
        )
    as_good = (
        expected.largest_percent < proposed.largest_percent + WORTH
        and expected.numa_mismatches <= proposed.numa_mismatches
    )
    return AutoLoadBalanceView(
        enabled=settings.enabled,
        possible=obstacle is None,
        reason=reason,
        expected=expected,
        improvement_percent=improvement,
        acts=reason is None,
        preferred=needed and obstacle is None and as_good and not state.unpolled,
    )


# -- Advice on PMD threads beyond another rxq assignment: more queues, more CPUs, auto load balance (pure).


#: Percent of a CPU above which a queue or thread counts as full.
FULL = 90


def advice(
    state: PmdState, now: PmdLoads, view: AutoLoadBalanceView, measured: bool
) -> tuple[PmdAdvice, ...]:
    """All advice for this state; ``now`` and ``view`` are parts of the proposal for it."""
    own, near = tuple(parts.ports(state)), tuple(parts.nodes(state))
    found = [advice for rule in (_more_queues, _fewer_queues) for port in own for advice in rule(port)]
    found += [advice for node in near for advice in _more_cores(node)]
    if not measured:
        found.append(
            PmdAdvice(
                id="not-measured",
                text="OVS has not measured all queues yet: it takes it 5 s, and a minute for a mean of one",
            )
        )
    if view.preferred:
        found.append(_balance(state, now, view))
    return tuple(found)


def _balance(state: PmdState, now: PmdLoads, view: AutoLoadBalanceView) -> PmdAdvice:
    asks = state.settings.auto_load_balance
    fields = ['"enabled": true']
    if now.largest_percent < asks.load_threshold:
        fields.append(f'"load_threshold": {max(1, now.largest_percent - 1)}')
    if view.improvement_percent < asks.improvement_threshold:
        fields.append(f'"improvement_threshold": {view.improvement_percent}')
    call = f'PUT /v1/pmd {{"auto_load_balance": {{{", ".join(fields)}}}}}'
    does = "is on and comes" if view.enabled and view.acts else "would come"
    return PmdAdvice(
        id="auto-load-balance",
        text=f"OVS's automatic load balance {does} to {view.expected.largest_percent} % on the "
        f"fullest thread without pinning anything, and follows the traffic: {call}",
    )


def _more_queues(port: PortQueues) -> Iterator[PmdAdvice]:
    for queue in port.queues:
        if (queue.usage_percent or 0) >= FULL:
            yield PmdAdvice(
                id="more-queues",
                text=f"{port.port} queue {queue.queue} alone takes {queue.usage_percent} % of a "
                "CPU, and no thread gives it more: give the port more queues (options:n_rxq of a "
                "NIC, queues of a VM), so that its flows spread",
            )


def _fewer_queues(port: PortQueues) -> Iterator[PmdAdvice]:
    if port.enabled > port.threads:
        yield PmdAdvice(
            id="fewer-queues",
            text=f"{port.port} has {port.enabled} queues for {port.threads} PMD threads that are near it: "
            "two on one thread cost a poll more and bring nothing",
        )


def _more_cores(node: NodeThreads) -> Iterator[PmdAdvice]:
    loads = [
        sum(queue.usage_percent or 0 for queue in core.queues) + (core.overhead_percent or 0)
        for core in node.cores
    ]
    if loads and min(loads) > FULL:
        count = len(loads) + node.others
        yield PmdAdvice(
            id="more-cores",
            text=f"all {len(loads)} PMD threads of NUMA node {node.node} are above {FULL} %: only more cores "
            f'of that node help (PUT /v1/pmd {{"count": {count + 1}}}, or "cpus" to choose them)',
        )

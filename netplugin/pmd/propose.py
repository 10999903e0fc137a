"""Propose an rxq assignment for PMD threads, and compare it with OVS's auto load balance (pure).

A queue is assigned to a thread on its port's NUMA node, and to another node only if that node has
no thread. All queues with load are pinned; otherwise OVS would move the rest when the first is
pinned. Idle queues are left to OVS. No thread is isolated: with ``pmd-rxq-assign=group`` and
``pmd-rxq-isolate=false``, OVS assigns an unpinned queue, such as one of a new port, to the thread
with the least load. With isolation, possibly no thread would poll it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from netplugin.api.pmd_models import (
    AutoLoadBalanceView,
    PmdAdvice,
    PmdLoads,
    PmdProposal,
    PmdState,
    ProposedQueue,
    RxQueue,
)
from netplugin.host.cpus import format_list
from netplugin.pmd import parts, schedule
from netplugin.pmd.balance import Key, LoadProblem, Placement, balanced
from netplugin.pmd.parts import NodeThreads, PortQueues
from netplugin.pmd.settings import ASSIGN, GROUP, ISOLATE

#: The least improvement, in percent of a CPU, that justifies moves. OVS rounds usage to whole percent.
WORTH = 5


def propose(state: PmdState) -> PmdProposal:
    """Propose an assignment that is better by a margin, or none. A proposal on its own result is empty."""
    measured = is_measured(state)
    problem, now = _problem(state)
    nodes = tuple(frozenset(core.cpu for core in node.cores) for node in parts.nodes(state))
    then = _better(problem, now, nodes) if measured else now
    needed = measured and (then != now or bool(state.unpolled))
    before, after = _loads(state, problem, now), _loads(state, problem, then)
    variances, sums = schedule.variances, (problem.sums(now), problem.sums(then))
    view = _auto_load_balance(state, problem, now, then, needed)
    return PmdProposal(
        moves=sum(then[key] != cpu for key, cpu in now.items()),
        now=before,
        proposed=after,
        improvement_percent=schedule.improvement(*(variances(loads, state.cores) for loads in sums)),
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


def _better(problem: LoadProblem, now: Placement, nodes: Collection[frozenset[int]]) -> dict[Key, int]:
    """Balance all threads, then those of each node: one node that no assignment can help hides no other.

    What is not worth its moves is left out. Proposing on the result proposes nothing.
    """
    then: dict[Key, int] = {}
    while then != now:
        then, now = dict(now), balanced(problem, now)
        if problem.away(now) == problem.away(then) and problem.largest(then) - problem.largest(now) < WORTH:
            now = then
        for cpus in nodes:
            own, there = problem.within(cpus, now)
            better = balanced(own, there)
            if own.largest(there) - own.largest(better) >= WORTH:
                now = {**now, **better}
    return then


def _problem(state: PmdState) -> tuple[LoadProblem, dict[Key, int]]:
    """The queues with load, and their CPUs."""
    every = frozenset(core.cpu for core in state.cores)
    near: dict[int | None, frozenset[int]] = {None: every}
    for node in parts.nodes(state):
        near[node.node] = frozenset(core.cpu for core in node.cores) or every
    busy = {(q.port, q.queue): (q, core.cpu) for core in state.cores for q in core.queues if q.usage_percent}
    loads = {key: queue.usage_percent or 0 for key, (queue, _) in busy.items()}
    homes = {key: near[queue.port_numa_node] for key, (queue, _) in busy.items()}
    cpus = tuple(core.cpu for core in state.cores)
    return LoadProblem(cpus, loads, homes), {key: cpu for key, (_, cpu) in busy.items()}


def _loads(state: PmdState, problem: LoadProblem, placement: Placement) -> PmdLoads:
    """The loads of all threads, isolated or not."""
    node = {core.cpu: core.numa_node for core in state.cores}
    home = {(queue.port, queue.queue): queue.port_numa_node for core in state.cores for queue in core.queues}
    variances = schedule.variances(problem.sums(placement), state.cores)
    return PmdLoads(
        largest_percent=problem.largest(placement),
        variance=max(variances.values(), default=0),
        numa_mismatches=sum(home[key] not in (None, node[cpu]) for key, cpu in placement.items()),
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
    state: PmdState, problem: LoadProblem, now: Mapping[Key, int], then: Placement, needed: bool
) -> AutoLoadBalanceView:
    settings = state.settings.auto_load_balance
    own = schedule.scheduled(state)
    placement = {key: own.get(key, cpu) for key, cpu in now.items()}
    expected = _loads(state, problem, placement)
    shared = [core for core in state.cores if not core.isolated]
    improvement = schedule.improvement(
        schedule.variances(problem.sums(now), shared), schedule.variances(problem.sums(placement), shared)
    )
    obstacle = schedule.balance_obstacle(state)
    reason = obstacle
    if obstacle is None and problem.largest(now) < settings.load_threshold:
        reason = f"no PMD thread has a load of {settings.load_threshold} %"
    elif obstacle is None and improvement < settings.improvement_threshold:
        least = settings.improvement_threshold
        reason = f"the variance would improve by {improvement} %, and {least} % are required"
    as_good = expected.numa_mismatches <= _loads(state, problem, then).numa_mismatches
    for node in parts.nodes(state):
        cpus = frozenset(core.cpu for core in node.cores)
        (there, at), (own_there, own_at) = problem.within(cpus, placement), problem.within(cpus, then)
        as_good = as_good and there.largest(at) < own_there.largest(own_at) + WORTH
    return AutoLoadBalanceView(
        enabled=settings.enabled,
        possible=obstacle is None,
        reason=reason,
        expected=expected,
        improvement_percent=improvement,
        acts=reason is None,
        preferred=needed and obstacle is None and as_good and not state.unpolled,
    )


#: Percent of a CPU above which a queue or thread counts as full.
FULL = 90


def advice(
    state: PmdState, now: PmdLoads, view: AutoLoadBalanceView, measured: bool
) -> tuple[PmdAdvice, ...]:
    """All advice for this state; ``now`` and ``view`` are parts of the proposal for it."""
    ports = tuple(parts.ports(state))
    found = [advice for rule in (_more_queues, _fewer_queues) for port in ports for advice in rule(port)]
    found += [advice for node in parts.nodes(state) for advice in _more_cores(node)]
    if not measured:
        text = "OVS has not measured all queues yet: it takes it 5 s, and a minute for a mean of one"
        found.append(PmdAdvice(id="not-measured", text=text))
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
    text = f"OVS's automatic load balance {does} to {view.expected.largest_percent} % on the "
    text += f"fullest thread without pinning anything, and follows the traffic: {call}"
    return PmdAdvice(id="auto-load-balance", text=text)


def _more_queues(port: PortQueues) -> Iterator[PmdAdvice]:
    """Queues that the port has and nothing comes in on are no reason for more of them."""
    usage = {queue.queue: queue.usage_percent for queue in port.queues if queue.enabled}
    idle = [number for number, percent in usage.items() if percent is not None and percent < WORTH]
    for queue in port.queues:
        if (queue.usage_percent or 0) < FULL:
            continue
        way = "give the port more queues (options:n_rxq of a NIC, queues of a VM), so that its flows spread"
        if idle:
            way = (
                f"its queues {format_list(idle)} idle, and more would too: it needs more flows, or a hash "
                "over their ports (ethtool -N NIC rx-flow-hash; in a VM, that of the sender's queues)"
            )
        elif port.enabled < len(port.queues):
            count = len(port.queues)
            way = f"the VM uses {port.enabled} of {count} queues: in it, ethtool -L NIC combined {count}"
        takes = f"{port.port} queue {queue.queue} alone takes {queue.usage_percent} % of a CPU"
        text = f"{takes}, and no thread gives it more: {way}"
        yield PmdAdvice(id="spread-flows" if idle else "more-queues", text=text)


def _fewer_queues(port: PortQueues) -> Iterator[PmdAdvice]:
    if port.enabled > port.threads:
        text = f"{port.port} has {port.enabled} queues for {port.threads} PMD threads that are near it: "
        text += "two on one thread cost a poll more and bring nothing"
        yield PmdAdvice(id="fewer-queues", text=text)


def _more_cores(node: NodeThreads) -> Iterator[PmdAdvice]:
    usage = [[core.overhead_percent, *(queue.usage_percent for queue in core.queues)] for core in node.cores]
    loads = [sum(percent or 0 for percent in each) for each in usage]
    if loads and min(loads) > FULL:
        count = len(loads) + node.others
        text = f"all {len(loads)} PMD threads of NUMA node {node.node} are above {FULL} %: only more cores "
        text += f'of that node help (PUT /v1/pmd {{"count": {count + 1}}}, or "cpus" to choose them)'
        yield PmdAdvice(id="more-cores", text=text)

"""Rules of receive queues on PMD threads: of a node, of its balance, of a port, and of all threads (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdState
from netplugin.host.cpus import format_list
from netplugin.pmd.parts import NodeThreads
from netplugin.pmd.propose import propose

#: Percent of a CPU below which an uneven assignment is not reported.
_LOW = 50
_PROPOSED = 'PUT /v1/pmd {"proposed": true}'


def numa(node: NodeThreads) -> Iterator[Finding]:
    """Queues of a node's ports that other nodes poll, now or as soon as a port is added."""
    if away := [f"{q.port} queue {q.queue}" for q in node.queues if q.enabled and q.numa_mismatch]:
        add = f"add CPUs of NUMA node {node.node} to those of PMD threads (PUT /v1/pmd)"
        yield Finding(
            id="pmd-numa",
            status="warn",
            found=f"{len(away)} receive queues are polled from another NUMA node than their port's, "
            f"{node.node}: {some(away)}",
            expected="queues polled by PMD threads of their port's node",
            fix=_PROPOSED if node.cores else add,
        )
    if node.shared_others and node.cores and all(core.isolated for core in node.cores):
        yield Finding(
            id="pmd-numa",
            status="warn",
            found=f"all PMD threads of NUMA node {node.node} are isolated by pinned queues: those of the "
            "next port there would be polled from another node",
            expected="a PMD thread on each node that is not isolated",
            fix=_UNISOLATE,
        )


_UNISOLATE = (
    'PUT /v1/pmd {"clear_affinity": ["PORT"]}, so that a thread is left for queues that are not '
    "pinned; or pmd-rxq-assign=group and pmd-rxq-isolate=false"
)


def pins(state: PmdState) -> Iterator[Finding]:
    running = {core.cpu for core in state.cores}
    lost = [
        f"{queue.port} queue {queue.queue} to CPU {queue.pinned_to}"
        for core in state.cores
        for queue in core.queues
        if queue.pinned_to is not None and queue.pinned_to not in running
    ]
    if lost:
        yield Finding(
            id="pmd-pinned",
            status="warn",
            found=f"pinned where no PMD thread runs, and polled elsewhere: {some(lost)}",
            expected=f"pinnings to the CPUs of PMD threads, {format_list(running)}",
            fix='pin them to others, or not at all: PUT /v1/pmd {"clear_affinity": ["PORT"]}',
        )


def unpolled(state: PmdState) -> Iterator[Finding]:
    """Queues go to the threads of any node before they are left without one (sched_numa_list_schedule)."""
    if state.unpolled:
        names = [f"{queue.port} queue {queue.queue}" for queue in state.unpolled]
        yield Finding(
            id="pmd-unpolled",
            status="fail",
            found=f"no PMD thread polls {some(names)}: all threads are isolated by pinned queues",
            expected="every receive queue is polled",
            fix=_UNISOLATE,
        )
    elif state.cores and all(core.isolated for core in state.cores):
        yield Finding(
            id="pmd-unpolled",
            status="warn",
            found="all PMD threads are isolated by pinned queues: those of the next port would not be polled",
            expected="a PMD thread that is not isolated",
            fix=_UNISOLATE,
        )


@dataclass(frozen=True)
class NodeBalance:
    """The fullest PMD thread of a node in percent, now and as proposed, with the queues that leave their
    thread; ``of`` names the node if others have threads too."""

    of: str
    now: int
    proposed: int
    moves: int
    fix: str


def balances(state: PmdState) -> Iterator[NodeBalance]:
    proposal = propose(state)
    view, fix = proposal.auto_load_balance, _PROPOSED
    if view.preferred:
        fix = next((a.text for a in proposal.advice if a.id == "auto-load-balance"), fix)
    loads = {core.cpu: [0, 0, 0] for core in state.cores}
    for queue in proposal.queues:
        there = queue.cpu if queue.proposed_cpu is None else queue.proposed_cpu
        loads[queue.cpu][0] += queue.load_percent
        loads[there][1] += queue.load_percent
        loads[queue.cpu][2] += there != queue.cpu
    several = len({core.numa_node for core in state.cores}) > 1
    for node in sorted({core.numa_node for core in state.cores}):
        now, then, moves = zip(
            *(loads[core.cpu] for core in state.cores if core.numa_node == node), strict=True
        )
        yield NodeBalance(f" of NUMA node {node}" if several else "", max(now), max(then), sum(moves), fix)


def uneven(node: NodeBalance) -> Iterator[Finding]:
    if node.moves and node.now >= _LOW:
        yield Finding(
            id="pmd-balance",
            status="warn",
            found=f"the fullest PMD thread{node.of} has a load of {node.now} %",
            expected=f"{node.proposed} %, with {node.moves} queues elsewhere (GET /v1/pmd/proposal)",
            fix=node.fix,
        )

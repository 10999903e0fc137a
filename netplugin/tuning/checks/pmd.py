"""Rules of receive queues on PMD threads: of a node and its balance, of a port, and of all threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdState
from netplugin.host.cpus import format_list
from netplugin.pmd.parts import NodeThreads, PortQueues
from netplugin.pmd.propose import propose
from netplugin.tuning.checks.frame import fail, warn

#: Percent of a CPU below which an uneven assignment is not reported.
_LOW = 50
_PROPOSED = 'PUT /v1/pmd {"proposed": true}'
_UNISOLATE = (
    'PUT /v1/pmd {"clear_affinity": ["PORT"]}, so that a thread is left for queues that are not '
    "pinned; or pmd-rxq-assign=group and pmd-rxq-isolate=false"
)


def numa(node: NodeThreads) -> Iterator[Finding]:
    """Queues of a node's ports that other nodes poll, now or as soon as a port is added."""
    if away := [f"{q.port} queue {q.queue}" for q in node.queues if q.enabled and q.numa_mismatch]:
        found = f"{len(away)} receive queues are polled from another NUMA node than their port's, {node.node}"
        fix = f"add CPUs of NUMA node {node.node} to those of PMD threads (PUT /v1/pmd)"
        expected = "queues polled by PMD threads of their port's node"
        yield warn("pmd-numa", f"{found}: {some(away)}", expected, _PROPOSED if node.cores else fix)
    if node.shared_others and node.cores and all(core.isolated for core in node.cores):
        found = f"all PMD threads of NUMA node {node.node} are isolated by pinned queues"
        later = "those of the next port there would be polled from another node"
        yield warn(
            "pmd-numa", f"{found}: {later}", "a PMD thread on each node that is not isolated", _UNISOLATE
        )


def pins(state: PmdState) -> Iterator[Finding]:
    running = {core.cpu for core in state.cores}
    queues = [q for core in state.cores for q in core.queues if q.pinned_to is not None]
    lost = [f"{q.port} queue {q.queue} to CPU {q.pinned_to}" for q in queues if q.pinned_to not in running]
    if lost:
        found = f"pinned where no PMD thread runs, and polled elsewhere: {some(lost)}"
        fix = 'pin them to others, or not at all: PUT /v1/pmd {"clear_affinity": ["PORT"]}'
        yield warn("pmd-pinned", found, f"pinnings to the CPUs of PMD threads, {format_list(running)}", fix)


def unpolled(state: PmdState) -> Iterator[Finding]:
    """Queues go to the threads of any node before they are left without one (sched_numa_list_schedule)."""
    isolated = "all threads are isolated by pinned queues"
    if state.unpolled:
        names = some([f"{queue.port} queue {queue.queue}" for queue in state.unpolled])
        found = f"no PMD thread polls {names}: {isolated}"
        yield fail("pmd-unpolled", found, "every receive queue is polled", _UNISOLATE)
    elif state.cores and all(core.isolated for core in state.cores):
        found = f"{isolated}: those of the next port would not be polled"
        yield warn("pmd-unpolled", found, "a PMD thread that is not isolated", _UNISOLATE)


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
    fix = next((a.text for a in proposal.advice if a.id == "auto-load-balance"), _PROPOSED)
    loads = {core.cpu: [0, 0, 0] for core in state.cores}
    for queue in proposal.queues:
        there = queue.cpu if queue.proposed_cpu is None else queue.proposed_cpu
        loads[queue.cpu][0] += queue.load_percent
        loads[there][1] += queue.load_percent
        loads[queue.cpu][2] += there != queue.cpu
    numbers = sorted({core.numa_node for core in state.cores})
    for node in numbers:
        own = [loads[core.cpu] for core in state.cores if core.numa_node == node]
        now, then, moves = zip(*own, strict=True)
        of = f" of NUMA node {node}" if len(numbers) > 1 else ""
        yield NodeBalance(of, max(now), max(then), sum(moves), fix)


def uneven(node: NodeBalance) -> Iterator[Finding]:
    if node.moves and node.now >= _LOW:
        found = f"the fullest PMD thread{node.of} has a load of {node.now} %"
        expected = f"{node.proposed} %, with {node.moves} queues elsewhere (GET /v1/pmd/proposal)"
        yield warn("pmd-balance", found, expected, node.fix)


def queues(port: PortQueues) -> Iterator[Finding]:
    """Two queues of one port on the same PMD thread add a poll and no throughput."""
    if port.enabled > port.threads:
        found = f"{port.port} has {port.enabled} receive queues for {port.threads} PMD threads"
        fix = f"ovs-vsctl set Interface {port.port} options:n_rxq={port.threads}, or fewer queues in the VM"
        yield warn("queues", found, "no more queues than PMD threads", fix)

"""Findings on the assignment of receive queues to PMD threads (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdProposal, PmdState
from netplugin.host.cpus import format_list
from netplugin.pmd.propose import propose

#: Percent of a CPU below which an uneven assignment is not reported.
_LOW = 50


def findings(state: PmdState) -> Iterator[Finding]:
    """Yield the findings on this state; none without PMD threads."""
    if not state.cores:
        return
    yield from _nodes(state)
    yield from _pins(state)
    yield from _unpolled(state)
    proposal = propose(state)
    if proposal.moves and proposal.now.largest_percent >= _LOW:
        yield _uneven(proposal)


def _nodes(state: PmdState) -> Iterator[Finding]:
    away = [
        (f"{queue.port} queue {queue.queue}", queue.port_numa_node)
        for core in state.cores
        for queue in core.queues
        if queue.enabled and queue.numa_mismatch
    ]
    if not away:
        return
    nodes = {core.numa_node for core in state.cores}
    bare = sorted({node for _, node in away if node is not None} - nodes)
    fix = 'PUT /v1/pmd {"proposed": true}'
    if bare:
        fix = f"add CPUs of NUMA node {format_list(bare)} to those of PMD threads (PUT /v1/pmd)"
    yield Finding(
        id="pmd-numa",
        status="warn",
        found=f"{len(away)} receive queues are polled from another NUMA node than their port's: "
        f"{some([name for name, _ in away])}",
        expected="queues polled by PMD threads of their port's node",
        fix=fix,
    )


def _pins(state: PmdState) -> Iterator[Finding]:
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


def _unpolled(state: PmdState) -> Iterator[Finding]:
    fix = (
        'PUT /v1/pmd {"clear_affinity": ["PORT"]}, so that a thread is left for queues that are not '
        "pinned; or pmd-rxq-assign=group and pmd-rxq-isolate=false"
    )
    if state.unpolled:
        names = [f"{queue.port} queue {queue.queue}" for queue in state.unpolled]
        yield Finding(
            id="pmd-unpolled",
            status="fail",
            found=f"no PMD thread polls {some(names)}: all threads are isolated by pinned queues",
            expected="every receive queue is polled",
            fix=fix,
        )
    elif all(core.isolated for core in state.cores):
        yield Finding(
            id="pmd-unpolled",
            status="warn",
            found="all PMD threads are isolated by pinned queues: those of the next port would not be polled",
            expected="a PMD thread that is not isolated",
            fix=fix,
        )


def _uneven(proposal: PmdProposal) -> Finding:
    view = proposal.auto_load_balance
    fix = 'PUT /v1/pmd {"proposed": true}'
    advice = next((a.text for a in proposal.advice if a.id == "auto-load-balance"), None)
    return Finding(
        id="pmd-balance",
        status="warn",
        found=f"the fullest PMD thread has a load of {proposal.now.largest_percent} %",
        expected=f"{proposal.proposed.largest_percent} %, with {proposal.moves} queues elsewhere "
        "(GET /v1/pmd/proposal)",
        fix=advice if advice and view.preferred else fix,
    )

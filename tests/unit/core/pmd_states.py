"""PMD threads and queues for tests, in few words."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from netplugin.api.pmd_models import PmdCore, PmdProposal, PmdSettings, PmdState, RxQueue

SHARED = PmdSettings(rxq_assign="group", rxq_isolate=False)


def queue(port: str, number: int = 0, load: int | None = 0, **more: Any) -> RxQueue:
    return RxQueue(port=port, queue=number, enabled=True, usage_percent=load, **more)


def core(cpu: int, *queues: RxQueue, node: int = 0, **more: Any) -> PmdCore:
    placed = tuple(
        q.model_copy(update={"numa_mismatch": q.port_numa_node not in (None, node)}) for q in queues
    )
    fields = {"isolated": False, "busy_percent": None, **more}
    return PmdCore(cpu=cpu, numa_node=node, queues=placed, **fields)


def state(*cores: PmdCore, settings: PmdSettings | None = None, **more: Any) -> PmdState:
    return PmdState(cpus="", cores=cores, settings=settings or PmdSettings(), **more)


@st.composite
def states(draw: st.DrawFn) -> PmdState:
    """Up to three nodes with PMD threads, and queues of ports of up to four nodes anywhere on them."""
    nodes = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    settings = draw(st.sampled_from([PmdSettings(), SHARED, PmdSettings(rxq_assign="roundrobin")]))
    placed: list[list[RxQueue]] = [[] for _ in nodes]
    for port in range(draw(st.integers(0, 5))):
        home = draw(st.none() | st.integers(0, 3))
        for number in range(draw(st.integers(1, 4))):
            load = draw(st.integers(0, 100))
            cpu = draw(st.integers(0, len(nodes) - 1))
            pin = cpu if draw(st.booleans()) else draw(st.none() | st.integers(0, 9))
            placed[cpu].append(queue(f"p{port}", number, load, port_numa_node=home, pinned_to=pin))
    cores = []
    for cpu, (node, queues) in enumerate(zip(nodes, placed, strict=True)):
        pinned = any(q.pinned_to == cpu for q in queues)
        cores.append(core(cpu, *queues, node=node, isolated=pinned and settings.rxq_isolate))
    return state(*cores, settings=settings)


def after(before: PmdState, proposal: PmdProposal) -> PmdState:
    """As it is when the proposal is set, and queues that idle stay where they were."""
    pins = {(p, int(q)): cpu for p, queues in proposal.affinity.items() for q, cpu in queues.items()}
    target = {(q.port, q.queue): q.cpu if q.proposed_cpu is None else q.proposed_cpu for q in proposal.queues}
    moved = {
        c.cpu: [
            q.model_copy(update={"pinned_to": pins.get((q.port, q.queue), q.pinned_to)})
            for other in before.cores
            for q in other.queues
            if target[q.port, q.queue] == c.cpu
        ]
        for c in before.cores
    }
    settings = SHARED if proposal.settings else before.settings
    cores = []
    for c in before.cores:
        pinned = any(q.pinned_to == c.cpu for q in moved[c.cpu])
        cores.append(core(c.cpu, *moved[c.cpu], node=c.numa_node, isolated=pinned and settings.rxq_isolate))
    return state(*cores, settings=settings)

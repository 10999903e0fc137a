"""The parts of a PMD state that are judged each by itself: NUMA nodes and ports (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from netplugin.api.pmd_models import PmdCore, PmdState, RxQueue


@dataclass(frozen=True)
class NodeThreads:
    """The PMD threads of a node, perhaps none, and the queues of its ports, wherever they are polled.

    ``others``: threads of other nodes, ``shared_others`` those that take queues that are not pinned.
    """

    node: int
    cores: tuple[PmdCore, ...]
    queues: tuple[RxQueue, ...]
    others: int
    shared_others: int


def nodes(state: PmdState) -> Iterator[NodeThreads]:
    queues = [queue for core in state.cores for queue in core.queues]
    numbers = {core.numa_node for core in state.cores} | {queue.port_numa_node for queue in queues}
    for number in sorted(number for number in numbers if number is not None):
        others = [core for core in state.cores if core.numa_node != number]
        yield NodeThreads(
            node=number,
            cores=tuple(core for core in state.cores if core.numa_node == number),
            queues=tuple(queue for queue in queues if queue.port_numa_node == number),
            others=len(others),
            shared_others=sum(not core.isolated for core in others),
        )


@dataclass(frozen=True)
class PortQueues:
    """The queues of a port, and the number of PMD threads near it: of its node, or all if that has none."""

    port: str
    queues: tuple[RxQueue, ...]
    threads: int

    @property
    def enabled(self) -> int:
        return sum(queue.enabled for queue in self.queues)


def ports(state: PmdState) -> Iterator[PortQueues]:
    threads = Counter(core.numa_node for core in state.cores)
    found: dict[str, list[RxQueue]] = {}
    for core in state.cores:
        for queue in core.queues:
            found.setdefault(queue.port, []).append(queue)
    for port, queues in sorted(found.items()):
        home = queues[0].port_numa_node
        near = threads[home] if home is not None else 0
        yield PortQueues(port, tuple(sorted(queues, key=lambda q: q.queue)), near or len(state.cores))

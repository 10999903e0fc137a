"""A model of OVS's own rxq assignment and auto load balance (pure).

It follows rxq_scheduling and pmd_rebalance_dry_run in lib/dpif-netdev.c, which are the same from OVS 3.1 to
4.0 but for details of the round robin over NUMA nodes, and Documentation/topics/dpdk/pmd.rst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle

from netplugin.api.pmd_models import PmdCore, PmdState, RxQueue
from netplugin.pmd.balance import Key
from netplugin.pmd.settings import GROUP


@dataclass
class _Slot:
    """A PMD thread that accepts unpinned queues."""

    core: PmdCore
    load: int = 0
    queues: int = 0

    def take(self, queue: RxQueue) -> None:
        self.load += queue.usage_percent or 0
        self.queues += 1


def is_pinned(queue: RxQueue, cpus: frozenset[int]) -> bool:
    """Whether the queue is pinned to a CPU that has a PMD thread; other pinnings have no effect."""
    return queue.pinned_to in cpus


def scheduled(state: PmdState) -> dict[Key, int]:
    """The CPU of each queue after ``dpif-netdev/pmd-rxq-rebalance``, without unpolled queues."""
    cpus = frozenset(core.cpu for core in state.cores)
    found: dict[Key, int] = {}
    shared = {core.cpu: _Slot(core) for core in state.cores if not core.isolated}
    free: list[RxQueue] = []
    for core in state.cores:
        for queue in core.queues:
            if not is_pinned(queue, cpus):
                free.append(queue)
                continue
            found[queue.port, queue.queue] = core.cpu
            if core.cpu in shared:
                shared[core.cpu].take(queue)
    nodes: dict[int, list[_Slot]] = {}
    for slot in shared.values():
        nodes.setdefault(slot.core.numa_node, []).append(slot)
    roundrobin = state.settings.rxq_assign == "roundrobin"
    rounds = {n: cycle(slots) if roundrobin else _updown(slots) for n, slots in nodes.items()}
    if not roundrobin:
        free.sort(key=lambda q: (-(q.usage_percent or 0), q.port, q.queue))
    last = -1
    for queue in free:
        # A port without a NUMA node counts as on node 0 (SOCKET0 in netdev-dpdk).
        node = queue.port_numa_node or 0
        if node not in nodes:
            if not nodes:
                break
            node = last = _after(last, sorted(nodes))
        if state.settings.rxq_assign == GROUP:
            slot = _lowest(nodes[node], bool(queue.usage_percent))
        else:
            slot = next(rounds[node])
        slot.take(queue)
        found[queue.port, queue.queue] = slot.core.cpu
    return found


def balance_obstacle(state: PmdState) -> str | None:
    """Why OVS would skip the auto load balance (pmd_rebalance_dry_run_needed); None if it would not."""
    shared = [core for core in state.cores if not core.isolated]
    if state.settings.rxq_assign == "roundrobin":
        return "pmd-rxq-assign is roundrobin"
    if len(shared) < 2:
        return f"there are {len(shared)} PMD threads that are not isolated, and it needs two"
    if not any(len(core.queues) > 1 for core in shared):
        return "no PMD thread polls more than one queue"
    if len({core.numa_node for core in state.cores}) > 1 and _crosses(state, scheduled(state)):
        return "queues would be polled from another NUMA node, whose cost OVS cannot foresee"
    return None


def variances(loads: Mapping[int, int], cores: Iterable[PmdCore]) -> dict[int, int]:
    """The variance of the threads' loads on each NUMA node, in integer arithmetic like OVS."""
    nodes: dict[int, list[int]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node, []).append(loads[core.cpu])
    return {node: _variance(values) for node, values in nodes.items()}


def improvement(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """The largest reduction of the variance on any node, in percent."""
    gains = ((old - after[node]) * 100 // old for node, old in before.items() if old)
    return max(0, *gains, 0)


def _variance(values: list[int]) -> int:
    mean = sum(values) // len(values)
    return sum((value - mean) ** 2 for value in values) // len(values)


def _crosses(state: PmdState, placement: Mapping[Key, int]) -> bool:
    node = {core.cpu: core.numa_node for core in state.cores}
    cpus = frozenset(node)
    return any(
        not is_pinned(queue, cpus)
        and (cpu := placement.get((queue.port, queue.queue))) is not None
        and (queue.port_numa_node or 0) != node[cpu]
        for core in state.cores
        for queue in core.queues
    )


def _updown(slots: list[_Slot]) -> Iterator[_Slot]:
    """Yield the slots up and down: 1, 2, 3, 3, 2, 1, 1, ..."""
    while True:
        yield from slots
        yield from reversed(slots)


def _lowest(slots: list[_Slot], by_load: bool) -> _Slot:
    return min(slots, key=lambda slot: (slot.load if by_load else slot.queues, slot.core.cpu))


def _after(last: int, nodes: list[int]) -> int:
    return next((node for node in nodes if node > last), nodes[0])

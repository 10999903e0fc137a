"""Search for a NUMA node for each guest NUMA cell, and for a CPU for each of its vCPUs (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from netplugin.placing.ground import Ground, Held, NodeGround
from netplugin.placing.needs import Cell
from netplugin.placing.placement import PlacedCell
from netplugin.tuning.facts import Cpus
from netplugin.tuning.planning.l3 import grouped, together

_Core: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Wish:
    """What to place. ``nodes`` are NUMA nodes that the VM must use, ``near`` nodes that it should prefer;
    ``homes`` maps a cell number to the node where that cell must stay."""

    cells: tuple[Cell, ...]
    page_kb: int
    nodes: frozenset[int] = frozenset()
    near: frozenset[int] = frozenset()
    homes: Mapping[int, int] = field(default_factory=dict)


def arrange(wish: Wish, ground: Ground, others: Held) -> tuple[PlacedCell, ...] | None:
    """Return the first arrangement that fits, trying the best nodes first, or None if there is no room."""
    if len(wish.cells) > len(ground.with_cores):
        return None
    return _arrange(wish, wish.cells, frozenset(), ground, others)


def free_cores(node: NodeGround, others: Held) -> tuple[_Core, ...]:
    """Cores of the node on which no CPU is in use."""
    return tuple(core for core in node.cores if not others.cpus & set(core))


def free_kb(node: NodeGround, others: Held, page_kb: int) -> int:
    """Free memory for VMs in pages of this size, KB."""
    return max(0, node.memory_kb.get(page_kb, 0) - others.memory_kb.get((node.node, page_kb), 0))


def whole_pages(kb: int, page_kb: int) -> int:
    """``kb`` rounded up to whole pages, KB."""
    return -(-kb // page_kb) * page_kb


def _arrange(
    wish: Wish, left: Sequence[Cell], used: frozenset[int], ground: Ground, others: Held
) -> tuple[PlacedCell, ...] | None:
    """Backtracking search: each cell gets its own node, and the cells together must cover ``wish.nodes``."""
    if not left:
        return () if used >= wish.nodes else None
    cell = left[0]
    for node, cpus in _fitting(wish, cell, ground, others):
        if node in used:
            continue
        rest = _arrange(wish, left[1:], used | {node}, ground, others)
        if rest is not None:
            mine = PlacedCell(
                number=cell.number, node=node, vcpus=cell.vcpus, cpus=cpus, memory_kb=cell.memory_kb
            )
            return (mine, *rest)
    return None


def _fitting(
    wish: Wish, cell: Cell, ground: Ground, others: Held
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Nodes with room for a cell, and the CPUs there. Order: nodes in ``wish.nodes``, then in ``near``, then
    by distance from the NICs, then by the fewest CPUs left."""
    found = []
    for node in ground.with_cores:
        free = free_cores(node, others)
        cpus = _cpus(len(cell.vcpus), free, node.l3)
        if (
            cpus is not None
            and wish.homes.get(cell.number, node.node) == node.node
            and free_kb(node, others, wish.page_kb) >= whole_pages(cell.memory_kb, wish.page_kb)
        ):
            unwanted = (node.node not in wish.nodes, node.node not in wish.near, node.away)
            left = sum(map(len, free)) - len(cpus)
            found.append((unwanted, left, node.node, cpus))
    for _, _, number, cpus in sorted(found):
        yield number, cpus


def _cpus(count: int, cores: Sequence[_Core], l3: Sequence[Cpus]) -> tuple[int, ...] | None:
    """Choose a CPU for each vCPU. Uses cores of equal width if there are enough, the width that leaves the
    fewest siblings idle, and as few L3 caches as possible.

    Returns None if there are too few cores.
    """
    alike = {
        width: same
        for width in {len(core) for core in cores}
        if len(same := [core for core in cores if len(core) == width]) * width >= count
    }
    if alike:
        width = min(alike, key=lambda width: (-count % width, -width))
        groups = grouped(alike[width], [frozenset(core) for core in alike[width]], l3)
        chosen = together(groups, -(-count // width))
    else:
        chosen = sorted(cores, key=lambda core: (-len(core), core))
    cpus = tuple(cpu for core in chosen for cpu in core)[:count]
    return cpus if len(cpus) == count else None

"""Which node each guest NUMA cell is on, and which CPUs its vCPUs have (pure): the search for a place."""

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
    """``nodes`` the VM must be on, ``near`` those it is best on; ``homes`` are the nodes of its cells, by
    their numbers, where they are to stay."""

    cells: tuple[Cell, ...]
    page_kb: int
    nodes: frozenset[int] = frozenset()
    near: frozenset[int] = frozenset()
    homes: Mapping[int, int] = field(default_factory=dict)


def arrange(wish: Wish, ground: Ground, others: Held) -> tuple[PlacedCell, ...] | None:
    """The first arrangement that fits, best nodes first; None if there is no room."""
    if len(wish.cells) > len(ground.with_cores):
        return None
    return _arrange(wish, wish.cells, frozenset(), ground, others)


def free_cores(node: NodeGround, others: Held) -> tuple[_Core, ...]:
    """Those of which nobody has any sibling."""
    return tuple(core for core in node.cores if not others.cpus & set(core))


def free_kb(node: NodeGround, others: Held, page_kb: int) -> int:
    """Memory for VMs in pages of this size."""
    return max(0, node.memory_kb.get(page_kb, 0) - others.memory_kb.get((node.node, page_kb), 0))


def whole_pages(kb: int, page_kb: int) -> int:
    """KB, rounded up to pages."""
    return -(-kb // page_kb) * page_kb


def _arrange(
    wish: Wish, left: Sequence[Cell], used: frozenset[int], ground: Ground, others: Held
) -> tuple[PlacedCell, ...] | None:
    """Each cell on a node of its own, and every node that is asked for among them."""
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
    """The nodes with room for a cell, and the CPUs there: the asked for, the near, those nearest to the
    NICs, the fullest."""
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
    """A CPU for each vCPU, of cores alike if there are enough, those that leave fewest siblings idle, and of
    as few L3 caches as will do.

    None if the cores are not enough.
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

"""Choose a VM's placement (pure): whole cores, siblings together, each guest NUMA cell on one node.

A core with all its siblings belongs to one VM, because siblings share execution units. A VM that has a
placement stays on its nodes and cores if it still fits there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from netplugin.placing.arrange import Wish, arrange
from netplugin.placing.ground import Ground, Held
from netplugin.placing.needs import Needs
from netplugin.placing.no_room import exhausted, require_possible
from netplugin.placing.placement import PlacedCell, Placement


def place(
    needs: Needs,
    ground: Ground,
    others: Held,
    nodes: Collection[int] = (),
    near: Collection[int] = (),
    before: Placement | None = None,
) -> Placement:
    """Place a VM. It must use ``nodes`` and should prefer ``near``; ``before`` is its current placement.

    Raises: Conflict if it can never fit on this host, CapacityExhausted if other VMs use the room.
    """
    page_kb = needs.page_kb or ground.page_kb
    wish = Wish(needs.cells, page_kb, frozenset(nodes), frozenset(near))
    if before is not None:
        homes = {cell.number: cell.node for cell in before.cells}
        kept = arrange(replace(wish, homes=homes), _only(ground, before), others)
        if kept is not None:
            return _placement(kept, ground, page_kb)
    require_possible(needs, ground, wish.nodes, page_kb)
    chosen = arrange(wish, ground, others)
    if chosen is None:
        raise exhausted(needs, ground, others, wish.nodes, page_kb)
    return _placement(chosen, ground, page_kb)


def _only(ground: Ground, before: Placement) -> Ground:
    """The part of the host capacity that the VM's current placement uses."""
    cpus = before.cpus
    nodes = (
        replace(node, cores=tuple(core for core in node.cores if cpus & set(core)))
        for node in ground.nodes
    )
    return replace(ground, nodes=tuple(node for node in nodes if node.cores))


def _placement(cells: tuple[PlacedCell, ...], ground: Ground, page_kb: int) -> Placement:
    emulator = frozenset(
        cpu
        for node in ground.nodes
        if node.node in {c.node for c in cells}
        for cpu in node.emulator
    )
    return Placement(
        cells=cells,
        threads=_threads(cells, ground),
        emulator=tuple(sorted(emulator)),
        emulator_alone=not emulator & ground.housekeeping,
        page_kb=page_kb,
    )


def _threads(cells: Sequence[PlacedCell], ground: Ground) -> int:
    """Threads per core to show to the guest; 1 unless it holds for all cores, as libvirt has one value."""
    homes = {cpu: core for node in ground.nodes for core in node.cores for cpu in core}
    widths = {len(homes[cpu]) for cell in cells for cpu in cell.cpus}
    width = min(widths)
    even = all(len(cell.cpus) % width == 0 for cell in cells)
    return width if len(widths) == 1 and even else 1

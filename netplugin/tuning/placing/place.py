"""Choose the placement of a VM (pure): nodes and CPUs, or the error that it does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from netplugin.api.errors import CapacityExhausted, NetpluginError
from netplugin.libvirt.domain import RENDER, conflict
from netplugin.libvirt.needs import GuestCell, Needs, whole
from netplugin.libvirt.pins import PlacedCell, Placement
from netplugin.tuning.facts import Cpus
from netplugin.tuning.placing.capacity import Held, HostCapacity, NodeGround
from netplugin.tuning.planning.partition import grouped, together


def require_possible(needs: Needs, ground: HostCapacity, nodes: Collection[int], page_kb: int) -> None:
    """Raises: Conflict if the VM would not fit on an empty host either: the domain or plan must change."""
    have = {node.node: node for node in ground.with_cores}
    if not have:
        raise conflict("the host's plan has no cores for VMs", "set [host] vm_cores in netplugin.conf")
    missing = sorted(set(nodes) - set(have))
    if missing:
        found = f"the request names NUMA node {missing[0]}, on which the host's plan has no VM cores"
        raise conflict(found, f"ask for node {_list(have)}, or for none")
    if len(needs.cells) > len(have) or len(set(nodes)) > len(needs.cells):
        raise _wrong_number(needs, have, nodes)
    where = set(nodes) if nodes and len(needs.cells) == 1 else set(have)
    sizes = {number: len(have[number].cpus) for number in sorted(where)}
    widest = max(sizes, key=lambda number: (sizes[number], -number))
    for cell in needs.cells:
        if len(cell.vcpus) > sizes[widest]:
            has = f"NUMA node {widest} has {sizes[widest]} CPUs for VMs"
            fix = "give it fewer vCPUs, the plan more [host] vm_cores, or the domain NUMA cells "
            fix += "(<cpu><numa>), each for a node of its own"
            raise conflict(f"{_of(cell, needs)} {len(cell.vcpus)} vCPUs, and {has}", fix)
        memory = {number: have[number].memory_kb.get(page_kb, 0) for number in sizes}
        if whole(cell.memory_kb, page_kb) > max(memory.values()):
            have_mb = "; ".join(f"NUMA node {n} has {kb >> 10} MB" for n, kb in memory.items())
            found = f"{_of(cell, needs)} {cell.memory_kb >> 10} MB of memory, and {have_mb} for VMs "
            found += f"in pages of {page_kb} KB"
            fix = "set [host] vm_memory_mb, and reserve what netplugin host plan says, "
            raise conflict(found, fix + "or give the VM less memory")


def _wrong_number(needs: Needs, have: Collection[int], nodes: Collection[int]) -> NetpluginError:
    count = len(needs.cells)
    if count > len(have):
        cores = f"and the host's plan has cores for VMs on NUMA node {_list(have)} alone"
        fix = "give the domain fewer cells, or the plan more [host] vm_cores"
        return conflict(f"the domain has {count} NUMA cells (<cpu><numa>), {cores}", fix)
    asked = f"NUMA nodes {_list(nodes)} are required by the NICs and the policy"
    fix = "ask for one node, or give the domain a NUMA cell (<cpu><numa>) for each"
    return conflict(f"{asked}, and the domain has {count} NUMA cell", fix)


def exhausted(
    needs: Needs, ground: HostCapacity, others: Held, nodes: Collection[int], page_kb: int
) -> CapacityExhausted:
    free = "; ".join(
        f"node {node.node} has {sum(map(len, free_cores(node, others)))} of {len(node.cpus)} CPUs and "
        f"{free_kb(node, others, page_kb) >> 10} of {node.memory_kb.get(page_kb, 0) >> 10} MB"
        for node in ground.with_cores
    )
    wants = " and ".join(f"{len(cell.vcpus)} vCPUs with {cell.memory_kb >> 10} MB" for cell in needs.cells)
    where = f"node {_list(nodes)}" if nodes else "one node" if len(needs.cells) == 1 else "a node each"
    found = f"no room for {wants} on {where}; in whole cores and in pages of {page_kb} KB are free: {free}"
    fix = "delete the ports of a placed VM that is gone, stop what libvirt runs on these CPUs, "
    return CapacityExhausted(found, step=RENDER, fix=fix + "or plan more [host] vm_cores")


def _of(cell: GuestCell, needs: Needs) -> str:
    return "the VM has" if len(needs.cells) == 1 else f"its NUMA cell {cell.number} has"


def _list(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


_Core: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class PlacementRequest:
    """What to place. ``nodes`` are NUMA nodes that the VM must use, ``near`` nodes that it should prefer;
    ``homes`` maps a cell number to the node where that cell must stay."""

    cells: tuple[GuestCell, ...]
    page_kb: int
    nodes: frozenset[int] = frozenset()
    near: frozenset[int] = frozenset()
    homes: Mapping[int, int] = field(default_factory=dict)


def arrange(request: PlacementRequest, ground: HostCapacity, others: Held) -> tuple[PlacedCell, ...] | None:
    """Return the first arrangement that fits, trying the best nodes first, or None if there is no room."""
    if len(request.cells) > len(ground.with_cores):
        return None
    return _arrange(request, request.cells, frozenset(), ground, others)


def free_cores(node: NodeGround, others: Held) -> tuple[_Core, ...]:
    """Cores of the node on which no CPU is in use."""
    return tuple(core for core in node.cores if not others.cpus & set(core))


def free_kb(node: NodeGround, others: Held, page_kb: int) -> int:
    """Free memory for VMs in pages of this size, KB."""
    return max(0, node.memory_kb.get(page_kb, 0) - others.memory_kb.get((node.node, page_kb), 0))


def _arrange(
    request: PlacementRequest,
    left: Sequence[GuestCell],
    used: frozenset[int],
    ground: HostCapacity,
    others: Held,
) -> tuple[PlacedCell, ...] | None:
    """Backtracking search: each cell gets its own node, and all of them must cover ``request.nodes``."""
    if not left:
        return () if used >= request.nodes else None
    cell = left[0]
    for node, cpus in _fitting(request, cell, ground, others):
        if node in used:
            continue
        rest = _arrange(request, left[1:], used | {node}, ground, others)
        if rest is not None:
            kb = cell.memory_kb
            mine = PlacedCell(number=cell.number, node=node, vcpus=cell.vcpus, cpus=cpus, memory_kb=kb)
            return (mine, *rest)
    return None


def _fitting(
    request: PlacementRequest, cell: GuestCell, ground: HostCapacity, others: Held
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Nodes with room for a cell, and the CPUs there. Order: nodes in ``request.nodes``, then in ``near``,
    then by distance from the NICs, then by the fewest CPUs left."""
    found = []
    for node in ground.with_cores:
        free = free_cores(node, others)
        fast = tuple(core for core in free if not node.slow & set(core))
        slow = tuple(core for core in free if core not in fast)
        # Cores of both kinds only if there are too few of each: a VM's vCPUs wait for the slowest of them.
        tries = (_cpus(len(cell.vcpus), cores, node.l3) for cores in (fast, slow, free))
        cpus = next((cpus for cpus in tries if cpus is not None), None)
        if (
            cpus is not None
            and request.homes.get(cell.number, node.node) == node.node
            and free_kb(node, others, request.page_kb) >= whole(cell.memory_kb, request.page_kb)
        ):
            unwanted = (node.node not in request.nodes, node.node not in request.near, node.away)
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


# A core with all its siblings belongs to one VM, because siblings share execution units. A VM that has a
# placement stays on its nodes and cores if it still fits there.


def place(
    needs: Needs,
    ground: HostCapacity,
    others: Held,
    nodes: Collection[int] = (),
    near: Collection[int] = (),
    before: Placement | None = None,
    homes: Mapping[int, int] | None = None,
) -> Placement:
    """Place a VM. It must use ``nodes`` and should prefer ``near``; ``before`` is its current placement,
    ``homes`` the node of each cell that must be on one.

    Raises: Conflict if it can never fit on this host, CapacityExhausted if other VMs use the room.
    """
    page_kb = needs.page_kb or ground.page_kb
    offered = {size for node in ground.nodes for size in node.memory_kb}
    if page_kb not in offered:
        found = f"<page size> is {page_kb} KB, and the host has hugepages of {_list(offered) or 'no'} KB"
        raise conflict(found, "name a size that the host has, or none")
    request = PlacementRequest(needs.cells, page_kb, frozenset(nodes), frozenset(near), homes or {})
    if before is not None:
        stay = {cell.number: cell.node for cell in before.cells}
        kept = arrange(replace(request, homes={**stay, **request.homes}), _only(ground, before), others)
        if kept is not None:
            return _placement(kept, ground, page_kb)
    require_possible(needs, ground, request.nodes, page_kb)
    chosen = arrange(request, ground, others)
    if chosen is None:
        raise exhausted(needs, ground, others, request.nodes, page_kb)
    return _placement(chosen, ground, page_kb)


def _only(ground: HostCapacity, before: Placement) -> HostCapacity:
    """The part of the host capacity that the VM's current placement uses."""
    cpus = before.cpus
    nodes = (
        replace(node, cores=tuple(core for core in node.cores if cpus & set(core))) for node in ground.nodes
    )
    return replace(ground, nodes=tuple(node for node in nodes if node.cores))


def _placement(cells: tuple[PlacedCell, ...], ground: HostCapacity, page_kb: int) -> Placement:
    emulator = frozenset(
        cpu for node in ground.nodes if node.node in {c.node for c in cells} for cpu in node.emulator
    )
    threads, cpus, alone = (
        _threads(cells, ground),
        tuple(sorted(emulator)),
        not emulator & ground.housekeeping,
    )
    return Placement(cells=cells, threads=threads, emulator=cpus, emulator_alone=alone, page_kb=page_kb)


def _threads(cells: Sequence[PlacedCell], ground: HostCapacity) -> int:
    """Threads per core to show to the guest; 1 unless it holds for all cores, as libvirt has one value."""
    homes = {cpu: core for node in ground.nodes for core in node.cores for cpu in core}
    widths = {len(homes[cpu]) for cell in cells for cpu in cell.cpus}
    width = min(widths)
    even = all(len(cell.cpus) % width == 0 for cell in cells)
    return width if len(widths) == 1 and even else 1

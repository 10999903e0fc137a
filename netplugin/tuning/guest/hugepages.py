"""Hugepages inside a guest (pure): the same number in each NUMA cell, which any kernel can reserve."""

from __future__ import annotations

from dataclasses import dataclass

from netplugin.tuning.guest.domain import GuestDomain
from netplugin.tuning.guest.options import STEP, GuestOptions
from netplugin.tuning.intent import PAGE_1G, PAGE_2M
from netplugin.tuning.planning.refused import impossible

#: Reserved for Linux in each cell: a share of its memory, and the minimum in KB.
_SYSTEM_SHARE, _SYSTEM_KB = 0.1, 512 * 1024


@dataclass(frozen=True)
class GuestPages:
    """``pages`` is the total number, spread evenly over the cells."""

    size_kb: int
    pages: int

    @property
    def mb(self) -> int:
        return self.pages * self.size_kb // 1024


def plan_pages(domain: GuestDomain, options: GuestOptions) -> GuestPages:
    """Plan the pages; by default half of the memory, or 0 pages without room. Raises: InvalidRequest."""
    cells = len(domain.cells_kb)
    for size in _sizes(domain, options):
        room = min(_room_kb(cell) for cell in domain.cells_kb) // size * cells
        if options.hugepage_mb is None:
            half = min(domain.cells_kb) // 2 // size * cells
            pages = min(half, room)
            if pages:
                return GuestPages(size, pages)
        else:
            pages = -(-options.hugepage_mb * 1024 // (size * cells)) * cells
            if pages <= room:
                return GuestPages(size, pages)
    if options.hugepage_mb is None:
        return GuestPages(size, 0)
    raise impossible(
        "hugepage_mb", f"{options.hugepage_mb} MB in pages of {size} KB, but {domain.name} has room for "
        f"{room * size // 1024} beside Linux ({domain.memory_kb // 1024} MB in {_cells(cells)})",
        "ask for less, or give the VM more memory", step=STEP,
    )  # fmt: skip


def _sizes(domain: GuestDomain, options: GuestOptions) -> tuple[int, ...]:
    """Page sizes in KB, best first. 1 GB helps only if the host backs the VM with 1 GB pages."""
    if options.hugepage_kb is not None:
        return (options.hugepage_kb,)
    large = domain.backing_kb == PAGE_1G and domain.whole_cpu
    return (PAGE_1G, PAGE_2M) if large else (PAGE_2M,)


def _room_kb(cell_kb: int) -> int:
    return max(0, cell_kb - max(_SYSTEM_KB, int(cell_kb * _SYSTEM_SHARE)))


def _cells(count: int) -> str:
    return "one cell" if count == 1 else f"{count} cells"

"""Placement of a VM: the CPU of each vCPU, the CPUs of QEMU's other threads, and its memory nodes."""

from __future__ import annotations

from netplugin.models import Value


class PlacedCell(Value):
    """A guest NUMA cell on a host node: ``vcpus[i]`` runs on ``cpus[i]``."""

    number: int
    node: int
    vcpus: tuple[int, ...]
    cpus: tuple[int, ...]
    memory_kb: int


class Placement(Value):
    """``threads`` is the guest's threads per core: 2 if vCPUs 2k and 2k+1 run on siblings of one core.

    ``emulator`` are the CPUs of QEMU's emulator and IO threads; ``emulator_alone`` is true if none of
    these is a housekeeping CPU. ``page_kb`` is the hugepage size.
    """

    cells: tuple[PlacedCell, ...]
    threads: int
    emulator: tuple[int, ...]
    emulator_alone: bool
    page_kb: int

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for cell in self.cells for cpu in cell.cpus)

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cell.node for cell in self.cells}))

    @property
    def pins(self) -> dict[int, int]:
        """vCPU number to CPU."""
        pairs = (pair for cell in self.cells for pair in zip(cell.vcpus, cell.cpus, strict=True))
        return dict(sorted(pairs))

    def paged_kb(self, cell: PlacedCell) -> int:
        """Memory of a cell, rounded up to whole hugepages, KB."""
        return -(-cell.memory_kb // self.page_kb) * self.page_kb

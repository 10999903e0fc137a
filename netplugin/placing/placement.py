"""Where a VM is: the CPU of each vCPU, those of QEMU's other threads, and the nodes of its memory."""

from __future__ import annotations

from netplugin.models import Value


class PlacedCell(Value):
    """A guest NUMA cell on a node of the host: ``cpus`` are those of ``vcpus``, one for one."""

    number: int
    node: int
    vcpus: tuple[int, ...]
    cpus: tuple[int, ...]
    memory_kb: int


class Placement(Value):
    """``threads`` are the guest's CPUs a core: 2 where vCPUs 2k and 2k+1 are on siblings of one.

    ``emulator`` is for QEMU's own threads and its IO threads; ``emulator_alone``: they share these
    with nothing else. ``page_kb`` is the size of the hugepages.
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
        """The CPU of each vCPU."""
        pairs = (pair for cell in self.cells for pair in zip(cell.vcpus, cell.cpus, strict=True))
        return dict(sorted(pairs))

    def paged_kb(self, cell: PlacedCell) -> int:
        """The memory of a cell in whole pages, KB."""
        return -(-cell.memory_kb // self.page_kb) * self.page_kb

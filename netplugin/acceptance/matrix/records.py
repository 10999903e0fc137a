"""What the journal of a run holds, as values: the cells, what was found in each, and by what controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One combination that is measured. ``pmd_cores`` is None for a backend without PMD threads."""

    backend: str
    pmd_cores: int | None = None
    #: ``64`` bytes with FCS, or the name of a mix: ``imix``.
    frame: str = "64"
    flows: int = 1024
    queues: int = 1

    @property
    def key(self) -> str:
        """Unique within a run, stable over runs: ``dpdkvhostuser,pmd=2,frame=64,flows=1024,queues=1``."""
        pmd = "-" if self.pmd_cores is None else str(self.pmd_cores)
        return (
            f"{self.backend},pmd={pmd},frame={self.frame},flows={self.flows},queues={self.queues}"
        )


#: The "backend" of the cell of a control.
NO_BACKEND = "none"


class Part(StrEnum):
    """What of a cell was measured: the backend, or a control that says how far it can be believed.

    A control is measured once for all backends: see ``control_cell``.
    """

    SEARCH = "search"
    #: The generator looped back to itself, without device and VNF.
    LOOPBACK = "loopback"
    #: The VNF with the generator, without the backend.
    VNF = "vnf"


def control_cell(cell: Cell, part: Part) -> Cell:
    """The cell under which the control of this cell is in the journal: without backend and PMD cores.

    Queues are the VNF's, and so do not matter to the generator alone.
    """
    queues = cell.queues if part is Part.VNF else 1
    return Cell(NO_BACKEND, None, cell.frame, cell.flows, queues)


@dataclass(frozen=True, slots=True)
class CellRecord:
    """The end of one part of one cell. ``result`` is what ``search --json`` writes; else ``error``."""

    cell: Cell
    part: Part
    started: str
    ended: str
    result: Mapping[str, Any] | None = None
    error: str | None = None
    #: What was set up: bindings, PMD cores with their CPUs, VNF with its version and configuration.
    setup: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return str(self.result["verdict"]) if self.result else "failed"

    @property
    def zero_loss_pps(self) -> float | None:
        """The rate that may be quoted."""
        rate = self.result["zero_loss_pps"] if self.result else None
        return None if rate is None else float(rate)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A whole run as its folder has it: complete, or as far as it came."""

    name: str
    #: The run description as it was given (YAML text), and the machine and versions it ran with.
    description: str
    environment: Mapping[str, Any]
    #: Every cell that is to be measured, in order; and what has ended, in the order that it did.
    cells: tuple[Cell, ...]
    records: tuple[CellRecord, ...]

    def record(self, cell: Cell, part: Part = Part.SEARCH) -> CellRecord | None:
        """The last one of this cell: a later run of a failed cell takes its place."""
        found = [r for r in self.records if r.cell == cell and r.part is part]
        return found[-1] if found else None

    def control(self, cell: Cell, part: Part) -> CellRecord | None:
        """What bounds this cell: the last ``LOOPBACK`` or ``VNF`` with its frames, flows and queues."""
        return self.record(control_cell(cell, part), part)

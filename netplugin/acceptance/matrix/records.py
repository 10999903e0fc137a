"""Values of a run: cells, and the results of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One combination of the axes. ``pmd_cores`` is None for a backend without PMD threads."""

    backend: str
    pmd_cores: int | None = None
    #: Frame size in bytes with FCS (``64``), or the name of a mix (``imix``).
    frame: str = "64"
    flows: int = 1024
    queues: int = 1

    @property
    def key(self) -> str:
        """Unique and stable key: ``dpdkvhostuser,pmd=2,frame=64,flows=1024,queues=1``."""
        pmd = "-" if self.pmd_cores is None else str(self.pmd_cores)
        return (
            f"{self.backend},pmd={pmd},frame={self.frame},flows={self.flows},queues={self.queues}"
        )


#: Backend name in the cell of a control.
NO_BACKEND = "none"


class Part(StrEnum):
    """The measured part of a cell: the backend, or a control that measures a limit of the setup.

    A control is measured once for all backends: see ``control_cell``.
    """

    SEARCH = "search"
    #: The generator looped back to itself, without device and VNF.
    LOOPBACK = "loopback"
    #: The VNF directly connected to the generator, without the backend.
    VNF = "vnf"


def control_cell(cell: Cell, part: Part) -> Cell:
    """Return the cell of the control in the journal: without backend and PMD cores.

    Queues are a property of the VNF, so the loopback control has one.
    """
    queues = cell.queues if part is Part.VNF else 1
    return Cell(NO_BACKEND, None, cell.frame, cell.flows, queues)


@dataclass(frozen=True, slots=True)
class CellRecord:
    """Result of one part of a cell. ``result`` is the output of ``search --json``; otherwise ``error``."""

    cell: Cell
    part: Part
    started: str
    ended: str
    result: Mapping[str, Any] | None = None
    error: str | None = None
    #: The setup: bindings, PMD cores with their CPUs, VNF with version and configuration.
    setup: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return str(self.result["verdict"]) if self.result else "failed"

    @property
    def zero_loss_pps(self) -> float | None:
        """The NDR in pps, if there is one."""
        rate = self.result["zero_loss_pps"] if self.result else None
        return None if rate is None else float(rate)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as recorded in its folder, complete or not."""

    name: str
    #: YAML text of the run description; machine and versions of the run.
    description: str
    environment: Mapping[str, Any]
    #: All cells in order; finished parts in order of completion.
    cells: tuple[Cell, ...]
    records: tuple[CellRecord, ...]

    def record(self, cell: Cell, part: Part = Part.SEARCH) -> CellRecord | None:
        """Return the last record of a cell: a repeated cell replaces the failed one."""
        found = [r for r in self.records if r.cell == cell and r.part is part]
        return found[-1] if found else None

    def control(self, cell: Cell, part: Part) -> CellRecord | None:
        """Return the last ``LOOPBACK`` or ``VNF`` control for the frames, flows and queues of this cell."""
        return self.record(control_cell(cell, part), part)

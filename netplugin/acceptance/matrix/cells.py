"""Derives the work from a run description (pure): cells, their controls, and search plans."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from netplugin.acceptance.generators.contract import GeneratorInfo
from netplugin.acceptance.goals import OTHER_GOALS, headline, warm_up_s
from netplugin.acceptance.matrix.axes import frame_bytes, pmd_count
from netplugin.acceptance.matrix.description import Description
from netplugin.acceptance.matrix.records import Cell, CellRecord, Part, control_cell
from netplugin.acceptance.outcome import SearchVerdict
from netplugin.acceptance.trials import SearchPlan
from netplugin.acceptance.values import MIXES, line_rate_pps
from netplugin.models import PmdRequest


@dataclass(frozen=True, slots=True)
class Task:
    """One part of one cell: a search with its own setup."""

    cell: Cell
    part: Part

    def __str__(self) -> str:
        cell = self.cell
        if self.part is not Part.SEARCH:
            what = "control: the generator" if self.part is Part.LOOPBACK else "control: the VNF"
        else:
            cores = f", {cell.pmd_cores} PMD" if cell.pmd_cores is not None else ""
            what = cell.backend + cores
        size = cell.frame if cell.frame in MIXES else f"{cell.frame} bytes"
        queues = f", {cell.queues} queues" if cell.queues > 1 else ""
        return f"{what}, {size}, {cell.flows} flows{queues}"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates reached by the controls of a cell in pps; None: not measured, or no limit found."""

    generator_pps: float | None = None
    vnf_pps: float | None = None


def cells(description: Description) -> tuple[Cell, ...]:
    """Return the cells in table order; one per backend without PMD threads for all ``pmd_cores``."""
    axes = description.matrix
    found = []
    for backend in axes.backends:
        cores = (None,) if backend in axes.without_pmd else tuple(map(pmd_count, axes.pmd_cores))
        for pmd, frame, flows, queues in product(cores, axes.frames, axes.flows, axes.queues):
            cell = Cell(backend, pmd, str(frame), flows, queues)
            if not any(match.fits(cell) for match in description.exclude):
                found.append(cell)
    return tuple(found)


def tasks(description: Description) -> tuple[Task, ...]:
    """Return all tasks; each control comes before the first cell it applies to."""
    controls = {
        Part.LOOPBACK: description.controls.loopback,
        Part.VNF: description.controls.vnf,
    }
    parts = [part for part, control in controls.items() if control is not None]
    found: dict[Task, None] = {}
    for cell in cells(description):
        for part in parts:
            found.setdefault(Task(control_cell(cell, part), part))
        found.setdefault(Task(cell, Part.SEARCH))
    return tuple(found)


def pmd_request(description: Description, cell: Cell) -> PmdRequest | None:
    """Return the PMD cores to request for a cell: named CPUs, or a count."""
    for entry in description.matrix.pmd_cores:
        if cell.pmd_cores is not None and pmd_count(entry) == cell.pmd_cores:
            return PmdRequest(cpus=entry) if isinstance(entry, str) else PmdRequest(count=entry)
    return None


def plan(
    description: Description, task: Task, info: GeneratorInfo, ceilings: Ceilings
) -> SearchPlan:
    """Return the search plan of a task. A control has the headline goal only."""
    search = description.search
    final = search.final_duration
    others = search.goals
    if task.part is not Part.SEARCH:
        final, others = min(final, description.controls.final_duration), ()
    frame: int | str = task.cell.frame if task.cell.frame in MIXES else int(task.cell.frame)
    size = frame_bytes(frame)
    return SearchPlan(
        goals=(
            headline(final, search.initial_duration, search.precision, search.max_loss_ratio),
            *(OTHER_GOALS[name](search.precision) for name in others),
        ),
        line_rate_pps=search.line_rate_pps or line_rate_pps(search.line_bits_per_second, size),
        generator_max_pps=info.limit_pps(size),
        can_abort=info.can_abort,
        min_trial_s=info.min_trial_s,
        frame_size=round(size),
        flows=task.cell.flows,
        mix=frame if isinstance(frame, str) else "",
        warm_up_s=warm_up_s(search.warm_up, final),
        buffer_packets=search.buffer_packets,
        max_trials=search.max_trials,
        vnf_ceiling_pps=ceilings.vnf_pps,
        generator_ceiling_pps=ceilings.generator_pps,
    )


def repeats(description: Description, task: Task) -> int:
    """Return the number of searches of a task."""
    return description.search.repeats if task.part is Part.SEARCH else 1


def ceilings(loopback: CellRecord | None, vnf: CellRecord | None) -> Ceilings:
    """Return the rates of the controls that are below the line rate.

    The loopback control may end at the generator's limit, which it measures; for the VNF control that
    limit would hide the VNF's.
    """
    by_generator = SearchVerdict.GENERATOR_LIMITED
    return Ceilings(
        _reached(loopback, {SearchVerdict.NDR, by_generator}), _reached(vnf, {SearchVerdict.NDR})
    )


def _reached(control: CellRecord | None, verdicts: set[SearchVerdict]) -> float | None:
    if control is None or control.result is None or control.verdict not in verdicts:
        return None
    lower = float(control.result["bounds_pps"][0])
    of_line = lower * (1 + float(control.result["goal"]["relative_width"]))
    return lower if 0 < lower and of_line < control.result["plan"]["line_rate_pps"] else None

"""Derives the work from a run description (pure): cells, their controls, and search plans."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import product

from netplugin.data_path import NoDataPath, data_paths
from netplugin_zeroloss.generators.contract import GeneratorInfo
from netplugin_zeroloss.journal import Cell, CellRecord, Part, control_cell
from netplugin_zeroloss.matrix.description import Axes, RunDescription, pmd_count
from netplugin_zeroloss.report import words
from netplugin_zeroloss.search.follow_up import LATENCY_LOADS
from netplugin_zeroloss.search.trials import SearchPlan, SearchVerdict
from netplugin_zeroloss.values import MIXES


@dataclass(frozen=True, slots=True)
class CellTask:
    """One part of one cell: a search with its own setup."""

    cell: Cell
    part: Part

    def __str__(self) -> str:
        if self.part is not Part.SEARCH:
            control = {Part.LOOPBACK: "the generator", Part.VNF: "the VNF"}[self.part]
            return f"control: {control}, {words.axes(self.cell)}"
        pmd = "" if self.cell.pmd_cores is None else f", {self.cell.pmd_cores} PMD"
        return f"{self.cell.backend}{pmd}, {words.axes(self.cell)}"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates reached by the controls of a cell in pps; None: not measured, or no limit found."""

    generator_pps: float | None = None
    vnf_pps: float | None = None


def cells(description: RunDescription) -> tuple[Cell, ...]:
    """Return the cells in table order; one per backend without PMD threads for all ``pmd_cores``."""
    axes = description.matrix
    modes, placements = axes.vnf_modes or ("",), axes.numa or ("",)
    frames = tuple(map(str, axes.frames))
    found: list[Cell] = []
    for backend in axes.backends:
        cores = tuple(map(pmd_count, axes.pmd_cores)) if _has_pmd_threads(axes, backend) else (None,)
        others = product(cores, frames, axes.flows, axes.queues, modes, axes.bursts, placements)
        found += (Cell(backend, *values) for values in others)
    return tuple(cell for cell in found if not any(match.fits(cell) for match in description.exclude))


def _has_pmd_threads(axes: Axes, backend: str) -> bool:
    if axes.without_pmd is not None:
        return backend not in axes.without_pmd
    try:
        return any(path.pmd_threads for path in data_paths(backend))
    except NoDataPath:
        return True  # simulations may name any; with an agent, ``AgentBench.check`` refuses it


def tasks(description: RunDescription) -> tuple[CellTask, ...]:
    """Return all tasks; each control comes before the first cell it applies to."""
    controls = {Part.LOOPBACK: description.controls.loopback, Part.VNF: description.controls.vnf}
    parts = [part for part, control in controls.items() if control is not None]
    found: dict[CellTask, None] = {}
    for cell in cells(description):
        for part in parts:
            found.setdefault(CellTask(control_cell(cell, part), part))
        found.setdefault(CellTask(cell, Part.SEARCH))
    return tuple(found)


def plan(description: RunDescription, task: CellTask, info: GeneratorInfo, ceilings: Ceilings) -> SearchPlan:
    """Return the search plan of a task. A control has the headline goal only, and nothing follows it."""
    search, cell = description.search, task.cell
    if task.part is not Part.SEARCH:
        final = min(search.final_duration, description.controls.final_duration)
        alone = {"preset": None, "goals": (), "latency_duration": 0.0, "soak_duration": 0.0}
        search = search.model_copy(update={"final_duration": final, **alone})
    frame: int | str = cell.frame if cell.frame in MIXES else int(cell.frame)
    limits = {"vnf_ceiling_pps": ceilings.vnf_pps, "generator_ceiling_pps": ceilings.generator_pps}
    return search.plan(info, frame, cell.flows, cell.burst, search.line_bits_per_second, **limits)


def ceilings(loopback: CellRecord | None, vnf: CellRecord | None) -> Ceilings:
    """Return the rates of the controls that are below the line rate.

    The loopback control may end at the generator's limit, which it measures; for the VNF control that
    limit would hide the VNF's.
    """
    by_generator = SearchVerdict.GENERATOR_LIMITED
    return Ceilings(_reached(loopback, {SearchVerdict.NDR, by_generator}), _reached(vnf, {SearchVerdict.NDR}))


def _reached(control: CellRecord | None, verdicts: set[SearchVerdict]) -> float | None:
    if control is None or control.result is None or control.verdict not in verdicts:
        return None
    lower = float(control.result["bounds_pps"][0])
    of_line = lower * (1 + float(control.result["goal"]["relative_width"]))
    return lower if 0 < lower and of_line < control.result["plan"]["line_rate_pps"] else None


# -- Estimates the remaining time of a run (pure), from finished tasks or from typical search costs.


#: Cost of a search in full trials. A sharp limit takes little more than one; most devices take more.
_FINAL_TRIALS = 1.5
#: Seconds of 1 s trials per additional goal.
_OTHER_GOAL_S = 25.0
#: Seconds to plug the ports, start the VNF, and tear down.
_SET_UP_S = 10.0


@dataclass(slots=True)
class TimeEstimate:
    """Remaining time in seconds. A task that exceeds its estimate is expected to need one more trial."""

    description: RunDescription
    tasks: tuple[CellTask, ...]
    #: Seconds of the finished tasks.
    took_s: dict[CellTask, float] = field(default_factory=dict)
    #: Tasks whose generator runs in virtual time.
    virtual: frozenset[CellTask] = frozenset()

    def expected_s(self, task: CellTask) -> float:
        """Return the expected seconds of a task: the mean of similar tasks, the same backend first.

        Tasks in virtual time and in real time say nothing about each other.
        """
        kind = task.part, task in self.virtual
        alike = [each for each in self.took_s if (each.part, each in self.virtual) == kind]
        nearest = [each for each in alike if each.cell.backend == task.cell.backend] or alike
        if nearest:
            return statistics.fmean(self.took_s[each] for each in nearest)
        if task in self.virtual:
            return 0.0
        once = _FINAL_TRIALS * self._final_s(task)
        if task.part is not Part.SEARCH:
            return _SET_UP_S + once
        asked = self.description.search
        follow_up = len(LATENCY_LOADS) * asked.latency_duration + asked.soak_duration
        return _SET_UP_S + asked.repeats * (once + len(asked.goals) * _OTHER_GOAL_S) + follow_up

    def left_s(self, current: CellTask | None = None, in_current_s: float = 0.0) -> float:
        """Return the remaining seconds; ``in_current_s``: seconds spent on the current task."""
        waiting = [task for task in self.tasks if task not in self.took_s and task != current]
        left = sum(map(self.expected_s, waiting))
        if current is not None and current not in self.took_s:
            one_more = 0.0 if current in self.virtual else self._final_s(current)
            left += max(self.expected_s(current) - in_current_s, one_more)
        return left

    def done_share(self, current: CellTask | None = None, in_current_s: float = 0.0) -> float:
        """Return the completed share of the time, 0 to 1."""
        spent = sum(self.took_s.values()) + in_current_s
        if whole := spent + self.left_s(current, in_current_s):
            return spent / whole
        return len(self.took_s) / len(self.tasks) if self.tasks else 1.0

    def _final_s(self, task: CellTask) -> float:
        search = self.description.search
        if task.part is Part.SEARCH:
            return search.headline.sum_s
        return min(search.final_duration, self.description.controls.final_duration)

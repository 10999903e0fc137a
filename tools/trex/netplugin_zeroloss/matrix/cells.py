"""Derives the work from a run description (pure): cells, their controls, and search plans."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import product

from netplugin.api.pmd_models import PmdRequest
from netplugin.data_path import NoDataPath, data_paths
from netplugin_zeroloss.generators.contract import GeneratorInfo
from netplugin_zeroloss.journal import Cell, CellRecord, Part, control_cell
from netplugin_zeroloss.matrix.axes import Axes, frame_bytes, pmd_count
from netplugin_zeroloss.matrix.description import RunDescription
from netplugin_zeroloss.search.follow_up import LATENCY_LOADS
from netplugin_zeroloss.search.trials import SearchPlan, SearchVerdict
from netplugin_zeroloss.values import MIXES, OTHER_GOALS, headline, line_rate_pps, warm_up_s


@dataclass(frozen=True, slots=True)
class CellTask:
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
        mode = f", VNF {cell.vnf_mode}" if cell.vnf_mode else ""
        burst = f", bursts of {cell.burst}" if cell.burst > 1 else ""
        numa = f", VNF {cell.numa} to the NICs" if cell.numa else ""
        return f"{what}, {size}, {cell.flows} flows{queues}{mode}{burst}{numa}"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates reached by the controls of a cell in pps; None: not measured, or no limit found."""

    generator_pps: float | None = None
    vnf_pps: float | None = None


def cells(description: RunDescription) -> tuple[Cell, ...]:
    """Return the cells in table order; one per backend without PMD threads for all ``pmd_cores``."""
    axes = description.matrix
    found = []
    for backend in axes.backends:
        cores = tuple(map(pmd_count, axes.pmd_cores)) if _has_pmd_threads(axes, backend) else (None,)
        others = (axes.vnf_modes or ("",), axes.bursts, axes.numa or ("",))
        for pmd, frame, flows, queues, mode, burst, numa in product(
            cores, axes.frames, axes.flows, axes.queues, *others
        ):
            cell = Cell(backend, pmd, str(frame), flows, queues, str(mode), burst, str(numa))
            if not any(match.fits(cell) for match in description.exclude):
                found.append(cell)
    return tuple(found)


def _has_pmd_threads(axes: Axes, backend: str) -> bool:
    if axes.without_pmd is not None:
        return backend not in axes.without_pmd
    try:
        return any(path.pmd_threads for path in data_paths(backend))
    except NoDataPath:
        return True  # simulations may name any; with an agent, ``AgentBench.check`` refuses it


def tasks(description: RunDescription) -> tuple[CellTask, ...]:
    """Return all tasks; each control comes before the first cell it applies to."""
    controls = {
        Part.LOOPBACK: description.controls.loopback,
        Part.VNF: description.controls.vnf,
    }
    parts = [part for part, control in controls.items() if control is not None]
    found: dict[CellTask, None] = {}
    for cell in cells(description):
        for part in parts:
            found.setdefault(CellTask(control_cell(cell, part), part))
        found.setdefault(CellTask(cell, Part.SEARCH))
    return tuple(found)


def pmd_request(description: RunDescription, cell: Cell) -> PmdRequest | None:
    """Return the PMD cores to request for a cell: named CPUs, or a count."""
    for entry in description.matrix.pmd_cores:
        if cell.pmd_cores is not None and pmd_count(entry) == cell.pmd_cores:
            return PmdRequest(cpus=entry) if isinstance(entry, str) else PmdRequest(count=entry)
    return None


def plan(description: RunDescription, task: CellTask, info: GeneratorInfo, ceilings: Ceilings) -> SearchPlan:
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
        burst=task.cell.burst,
        warm_up_s=warm_up_s(search.warm_up, final),
        buffer_packets=search.buffer_packets,
        max_trials=search.max_trials,
        latency_s=search.latency_duration if task.part is Part.SEARCH else 0.0,
        soak_s=search.soak_duration if task.part is Part.SEARCH else 0.0,
        measures_latency=info.latency,
        vnf_ceiling_pps=ceilings.vnf_pps,
        generator_ceiling_pps=ceilings.generator_pps,
    )


def repeats(description: RunDescription, task: CellTask) -> int:
    """Return the number of searches of a task."""
    return description.search.repeats if task.part is Part.SEARCH else 1


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


#: Cost of a search in full trials. A sharp limit takes little more than one; most devices take
#: more.
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
        alike = [
            t for t in self.took_s if t.part is task.part and (t in self.virtual) == (task in self.virtual)
        ]
        nearest = [t for t in alike if t.cell.backend == task.cell.backend] or alike
        if nearest:
            return statistics.fmean(self.took_s[t] for t in nearest)
        if task in self.virtual:
            return 0.0
        final = self._final_s(task)
        goals = len(self.description.search.goals) if task.part is Part.SEARCH else 0
        once = _FINAL_TRIALS * final + goals * _OTHER_GOAL_S
        return _SET_UP_S + repeats(self.description, task) * once + self._follow_up_s(task)

    def _follow_up_s(self, task: CellTask) -> float:
        search = self.description.search
        if task.part is not Part.SEARCH:
            return 0.0
        return len(LATENCY_LOADS) * search.latency_duration + search.soak_duration

    def left_s(self, current: CellTask | None = None, in_current_s: float = 0.0) -> float:
        """Return the remaining seconds; ``in_current_s``: seconds spent on the current task."""
        waiting = [t for t in self.tasks if t not in self.took_s and t != current]
        left = sum(map(self.expected_s, waiting))
        if current is not None and current not in self.took_s:
            one_more = 0.0 if current in self.virtual else self._final_s(current)
            left += max(self.expected_s(current) - in_current_s, one_more)
        return left

    def done_share(self, current: CellTask | None = None, in_current_s: float = 0.0) -> float:
        """Return the completed share of the time, 0 to 1."""
        spent = sum(self.took_s.values()) + in_current_s
        whole = spent + self.left_s(current, in_current_s)
        if whole > 0:
            return spent / whole
        return len(self.took_s) / len(self.tasks) if self.tasks else 1.0

    def _final_s(self, task: CellTask) -> float:
        final = self.description.search.final_duration
        if task.part is Part.SEARCH:
            return final
        return min(final, self.description.controls.final_duration)


def in_words(seconds: float) -> str:
    """Format a duration: ``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"

"""Figures of a report, per cell: rate, bounds, controls and CPU cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from netplugin.acceptance.evidence.witness import UNEXPLAINED
from netplugin.acceptance.matrix.records import Cell, CellRecord, Part, RunRecord
from netplugin.acceptance.outcome import SearchVerdict
from netplugin.acceptance.report.cpu import CpuUse, cpu_use
from netplugin.acceptance.report.published import Beside, PublishedTable

#: Verdict of a cell that was not measured.
MISSING: Final = "missing"
#: Name prefix of the simulated generator.
_SIMULATION: Final = "sim:"


@dataclass(frozen=True, slots=True)
class GoalFigure:
    """Result of one goal. ``rate_pps`` is None if there is no rate."""

    name: str
    words: str
    relative_width: float
    verdict: str
    rate_pps: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Interval:
    """Confidence interval of the median over repeats."""

    low_pps: float
    high_pps: float
    median_pps: float
    confidence: float
    answers: int


@dataclass(frozen=True, slots=True)
class Control:
    """Rate of a control, an upper limit for the cell; None if the control failed."""

    verdict: str
    rate_pps: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Figures of one cell. ``rate_pps`` is set for an NDR, ``at_least_pps`` for a lower limit (``>=``)."""

    cell: Cell
    verdict: str
    reason: str
    goal: GoalFigure | None = None
    others: tuple[GoalFigure, ...] = ()
    rate_pps: float | None = None
    #: Lower limit of the rate: the generator reached its limit first.
    at_least_pps: float | None = None
    bounds_pps: tuple[float, float] | None = None
    repeats: int = 0
    #: Number of repeats by verdict.
    verdicts: Mapping[str, int] = field(default_factory=dict)
    interval: Interval | None = None
    #: Load-independent loss: loss ratio, and the component that lost most frames.
    floor_ratio: float | None = None
    floor_place: str | None = None
    cpu: CpuUse | None = None
    #: Rate per PMD core relative to the cell with the fewest cores; None for that cell or if
    #: unknown.
    efficiency: float | None = None
    #: Controls: generator loopback, and the VNF without the backend.
    loopback: Control | None = None
    vnf: Control | None = None
    published_pps: float | None = None
    trials: int = 0
    invalid_trials: int = 0
    traffic_s: float = 0.0
    started: str = ""
    generator: str = ""

    @property
    def rate_per_core_pps(self) -> float | None:
        cores = self.cell.pmd_cores
        return self.rate_pps / cores if self.rate_pps is not None and cores else None


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of all cells of a run, in the order of its description."""

    run: str
    figures: tuple[Figure, ...]
    published: PublishedTable | None = None
    beside: Beside = Beside.NOT_SHOWN

    @property
    def missing(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.verdict == MISSING)

    @property
    def simulated(self) -> bool:
        """Whether the devices were simulated and no frame was sent."""
        return any(figure.generator.startswith(_SIMULATION) for figure in self.figures)

    @property
    def goals(self) -> tuple[str, ...]:
        """The headline goals as text; several if cells were measured with different goals."""
        return tuple(dict.fromkeys(f.goal.words for f in self.figures if f.goal is not None))


def report_of(
    run: RunRecord,
    published: PublishedTable | None = None,
    beside: Beside = Beside.NOT_SHOWN,
) -> Report:
    """Return the figures of a run, with published figures as ``beside`` says."""
    figures = [_figure(run, cell) for cell in run.cells]
    if published is not None and beside is not Beside.NOT_SHOWN:
        figures = [replace(f, published_pps=published.rate_pps(f.cell)) for f in figures]
    return Report(
        run.name,
        tuple(_with_efficiency(f, figures) for f in figures),
        published,
        beside,
    )


def _figure(run: RunRecord, cell: Cell) -> Figure:
    record = run.record(cell)
    if record is None:
        return Figure(cell, MISSING, "the run has not come to it")
    if record.result is None:
        reason = record.error or "it ended without a result"
        return Figure(cell, SearchVerdict.FAILED, reason, started=record.started)
    return replace(
        _measured(cell, record, record.result),
        loopback=_control(run, cell, Part.LOOPBACK),
        vnf=_control(run, cell, Part.VNF),
    )


def _measured(cell: Cell, record: CellRecord, result: Mapping[str, Any]) -> Figure:
    goals = [_goal(entry) for entry in result["goals"]]
    lower, upper = result["bounds_pps"]
    limited = record.verdict == SearchVerdict.GENERATOR_LIMITED
    floor = result["evidence"]["floor"]
    return Figure(
        cell,
        record.verdict,
        result["reason"],
        goal=goals[0],
        others=tuple(goals[1:]),
        rate_pps=record.zero_loss_pps,
        at_least_pps=lower if limited and lower else None,
        bounds_pps=(lower, upper),
        repeats=result["repeats"]["count"],
        verdicts=result["repeats"]["verdicts"],
        interval=_interval(result["repeats"]["spread"]),
        floor_ratio=floor["loss_ratio"] if floor else None,
        floor_place=floor["place"] if floor and floor["place"] != UNEXPLAINED else None,
        cpu=cpu_use(cell, trials_at(result, result["evidence"]["lower_trials"])),
        trials=result["trials"],
        invalid_trials=result["invalid_trials"],
        traffic_s=result["traffic_s"],
        started=record.started,
        generator=str(result["environment"].get("generator", "")),
    )


def trials_at(result: Mapping[str, Any], numbers: Sequence[int]) -> list[Mapping[str, Any]]:
    """Return the trial log entries with these numbers, of the reported repeat."""
    shown = result["repeats"]["shown"]
    return [t for t in result["trial_log"] if t["repeat"] == shown and t["number"] in numbers]


def _goal(entry: Mapping[str, Any]) -> GoalFigure:
    goal = entry["goal"]
    return GoalFigure(
        goal["name"], goal["in_words"], goal["relative_width"], entry["verdict"],
        entry["rate_pps"], entry["reason"],
    )  # fmt: skip


def _interval(spread: Mapping[str, Any] | None) -> Interval | None:
    if spread is None or spread["answers"] < 2:
        return None
    low, high = spread["interval_pps"]
    return Interval(low, high, spread["median_pps"], spread["confidence"], spread["answers"])


def _control(run: RunRecord, cell: Cell, part: Part) -> Control | None:
    record = run.control(cell, part)
    if record is None:
        return None
    if record.result is None:
        return Control(SearchVerdict.FAILED, None, record.error or "it ended without a result")
    lower = record.result["bounds_pps"][0]
    return Control(record.verdict, lower or None, record.result["reason"])


def _with_efficiency(figure: Figure, figures: Sequence[Figure]) -> Figure:
    """Set the scaling efficiency relative to the cell with the fewest PMD cores: 1 is linear."""
    mine = figure.rate_per_core_pps
    if mine is None:
        return figure
    same = [
        f
        for f in figures
        if replace(f.cell, pmd_cores=None) == replace(figure.cell, pmd_cores=None)
        and f.rate_per_core_pps
    ]
    first = min(same, key=lambda f: f.cell.pmd_cores or 0)
    if first is figure or not first.rate_per_core_pps:
        return figure
    return replace(figure, efficiency=mine / first.rate_per_core_pps)

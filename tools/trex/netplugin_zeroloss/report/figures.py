"""Figures of a report, per cell: rate, bounds, controls, loss accounting and CPU cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from netplugin_zeroloss.journal import Cell, CellRecord, Part, RunRecord
from netplugin_zeroloss.loss.contract import UNEXPLAINED
from netplugin_zeroloss.paths import names
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.published import PublishedRelation, PublishedTable
from netplugin_zeroloss.search.recorded import (
    GoalResult,
    LoadEntry,
    ResultEntry,
    SoakEntry,
    SpreadEntry,
    TrialEntry,
)
from netplugin_zeroloss.search.trials import SearchVerdict

# -- What a run says about the rate of a cell: bounds, answers of repeats, and whether the limit is sharp.


#: Rank of a verdict: a lower rank than before is a regression.
_WORTH: Final[Mapping[str, int]] = {
    SearchVerdict.NDR: 2,
    SearchVerdict.VNF_LIMITED: 2,
    SearchVerdict.GENERATOR_LIMITED: 2,
    SearchVerdict.FLOOR: 1,
    SearchVerdict.FAILED: 0,
}
#: Range above the lowest lossy load, as a factor.
_JUST_ABOVE: Final = 1.05


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one cell in one run, in pps of all directions together."""

    verdict: str
    reason: str
    #: Rate per repeat, or 0 for load-independent loss. Repeats without a verdict are left out.
    rates: tuple[float, ...] = ()
    #: Bounds of the rate over all repeats.
    lower: float = 0.0
    upper: float = math.inf
    rate: float | None = None
    #: Relative width of the goal.
    width: float = 0.0
    #: Loss starts immediately above the limit, so another search would give the same answer.
    sharp: bool = False

    @property
    def worth(self) -> int:
        return _WORTH[self.verdict]

    @property
    def has_bounds(self) -> bool:
        return self.worth == _WORTH[SearchVerdict.NDR]


def answers_of(record: CellRecord) -> Answers:
    """Return the answers of a record with any verdict."""
    if record.result is None:
        return Answers(record.verdict, record.error or "it ended without a result")
    result = record.result
    repeats = result["repeats"]
    quoted = [float(rate) for rate in repeats["answers_pps"] if rate is not None]
    floors = [0.0] * int(repeats["verdicts"].get(SearchVerdict.FLOOR, 0))
    lower, upper = result["bounds_pps"]
    if record.verdict == SearchVerdict.GENERATOR_LIMITED:
        upper = math.inf
    elif quoted:
        # The bounds belong to one repeat; for the others the answer is the lower bound.
        width = max(upper / lower, 1.0) if lower else 1.0
        lower, upper = (
            min([lower, *quoted]),
            max([upper, *(width * rate for rate in quoted)]),
        )
    return Answers(
        record.verdict,
        result["reason"],
        (*quoted, *floors),
        lower,
        upper,
        record.zero_loss_pps,
        float(result["goal"]["relative_width"]),
        _sharp(result),
    )


def _sharp(result: ResultEntry) -> bool:
    """Whether no trial just above the limit lost later than a device with a sharp limit would.

    Half a width above its limit such a device fills its rings and then loses, in any case within the
    time of short trials. Later loss is random, and so is the answer. Without early abort the time of
    loss in a full trial is unknown; the limit then does not count as sharp.
    """
    goal, plan = result["goal"], result["plan"]
    lossy = [trial for trial in result["trial_log"] if trial["verdict"] == "lossy"]
    lowest: dict[int, float] = {}
    for trial in lossy:
        number, rate = trial["repeat"], trial["rate_pps"]
        lowest[number] = min(rate, lowest.get(number, math.inf))
    return all(
        trial["measured"]["elapsed_s"]
        <= max(
            2 * goal["initial_trial_s"],
            2 * plan["buffer_packets"] / (goal["relative_width"] * trial["rate_pps"]),
        )
        for trial in lossy
        if trial["rate_pps"] <= lowest[trial["repeat"]] * _JUST_ABOVE
    )


# -- CPU cost of forwarding on the host at the NDR. A PMD thread occupies its core, busy or not. --


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU use: 1 is one CPU all the time. None: not measured."""

    #: Cores of PMD threads, which poll at any load.
    pmd: float | None = None
    #: Share of busy PMD cycles, 0 to 1.
    pmd_busy: float | None = None
    #: PMD cycles per frame that crosses OVS; in and out of the VNF count separately.
    cycles_per_packet: float | None = None
    softirq: float | None = None
    #: Share of softirq on the busiest CPU, 0 to 1; at 1 it is the bottleneck.
    softirq_busiest: float | None = None
    #: Kernel time outside softirq.
    system: float | None = None

    @property
    def host(self) -> float | None:
        """Total CPUs of the host used for forwarding."""
        known = [part for part in (self.pmd, self.softirq, self.system) if part is not None]
        return sum(known) if known else None


#: Reading of a trial by field.
READINGS: Mapping[str, str] = {
    "pmd_busy": "ovs.pmd_busy_share",
    "cycles_per_packet": "ovs.pmd_cycles_per_packet",
    "softirq": "host.softirq_cpus",
    "softirq_busiest": "host.softirq_busiest_share",
    "system": "host.system_cpus",
}


def cpu_use(cell: Cell, trials: Sequence[TrialEntry]) -> CpuUse | None:
    """Return the mean CPU use over these trial log entries (those at the NDR); None if unknown."""
    found: dict[str, float] = {}
    for name, reading in READINGS.items():
        found_here = [trial["measured"].get("readings", {}).get(reading) for trial in trials]
        values = [value for value in found_here if value is not None]
        if values:
            found[name] = statistics.fmean(values)
    # OVS may also have PMD threads that a backend without PMD threads does not use.
    if cell.pmd_cores is not None:
        found["pmd"] = float(cell.pmd_cores)
    return CpuUse(**found) if found else None


# -- Loss accounting of a trial: sent = received + lost at known components + unexplained. --------


#: Prefix of losses of the generator itself, which other counters of the trial include.
_GENERATOR: Final = "generator."


def located(trial: TrialEntry) -> dict[str, float]:
    """Return the lost frames of a trial log entry, by component."""
    evidence = trial["measured"]["evidence"]
    return {place: count for place, count in evidence.items() if count and place != UNEXPLAINED}


def not_located(trial: TrialEntry) -> float:
    """Return lost frames that no component counted; negative if frames were counted twice."""
    measured = trial["measured"]
    if UNEXPLAINED in measured["evidence"]:
        return float(measured["evidence"][UNEXPLAINED])
    missing = measured["tx_packets"] - measured["rx_packets"] - measured["rx_errors"]
    found = [n for place, n in located(trial).items() if not place.startswith(_GENERATOR)]
    return float(missing - sum(found))


def unexplained(run: RunRecord, cell: Cell) -> tuple[float, float]:
    """Return unexplained and excess frames over all valid trials of a cell."""
    record = run.record(cell)
    if record is None or record.result is None:
        return 0.0, 0.0
    log = record.result["trial_log"]
    left = [not_located(trial) for trial in log if trial["verdict"] != "invalid"]
    return sum(n for n in left if n > 0), -sum(n for n in left if n < 0)


# -- Figures of a report, per cell: rate, bounds, controls and CPU cost. --------------------------


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
class LatencyFigure:
    """Latency at a load, in microseconds: the largest percentiles of all directions."""

    part: float
    rate_pps: float
    verdict: str
    samples: int
    p50_us: float | None
    p90_us: float | None
    p99_us: float | None
    max_us: float | None


@dataclass(frozen=True, slots=True)
class SoakFigure:
    """The found rate held for some time. ``verdict`` is None if there was no rate to hold."""

    verdict: str | None
    text: str
    elapsed_s: float = 0.0
    lost_packets: int = 0
    loss_ratio: float = 0.0
    #: Seconds, and frames that were missing then.
    missing: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ReportFigure:
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
    #: Latency by part of the rate, or why there is none; empty if it was not requested.
    latencies: tuple[LatencyFigure, ...] = ()
    no_latency: str = ""
    soak: SoakFigure | None = None
    #: Queues of the ports; None: not recorded. Fewer than those of the cell where the NIC has no more.
    port_queues: int | None = None
    #: Name of each path and its lost frames in the trials at the upper bound; empty: not known.
    paths: tuple[tuple[str, int], ...] = ()

    @property
    def worst_path(self) -> tuple[str, int] | None:
        """The path with the most lost frames, if there are several pairs of ends."""
        return max(self.paths, key=lambda path: path[1]) if len(self.paths) > 2 else None

    def latency(self, part: float, name: str) -> float | None:
        """Return a percentile at a part of the rate in microseconds, such as ``p99_us``."""
        found: dict[float, float | None] = {one.part: asdict(one)[name] for one in self.latencies}
        return found.get(part)

    @property
    def rate_per_core_pps(self) -> float | None:
        cores = self.cell.pmd_cores
        return self.rate_pps / cores if self.rate_pps is not None and cores else None


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of all cells of a run, in the order of its description."""

    run: str
    figures: tuple[ReportFigure, ...]
    published: PublishedTable | None = None
    relation: PublishedRelation = PublishedRelation.NOT_SHOWN

    @property
    def missing(self) -> tuple[ReportFigure, ...]:
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
    relation: PublishedRelation = PublishedRelation.NOT_SHOWN,
) -> Report:
    """Return the figures of a run, with published figures as ``relation`` says."""
    figures = [_figure(run, cell) for cell in run.cells]
    if published is not None and relation is not PublishedRelation.NOT_SHOWN:
        figures = [replace(f, published_pps=published.rate_pps(f.cell)) for f in figures]
    return Report(
        run.name,
        tuple(_with_efficiency(f, figures) for f in figures),
        published,
        relation,
    )


def _figure(run: RunRecord, cell: Cell) -> ReportFigure:
    record = run.record(cell)
    if record is None:
        return ReportFigure(cell, MISSING, "not measured yet")
    if record.result is None:
        reason = record.error or "it ended without a result"
        return ReportFigure(cell, SearchVerdict.FAILED, reason, started=record.started)
    return replace(
        _measured(cell, record, record.result),
        loopback=_control(run, cell, Part.LOOPBACK),
        vnf=_control(run, cell, Part.VNF),
    )


def _measured(cell: Cell, record: CellRecord, result: ResultEntry) -> ReportFigure:
    goals = [_goal(entry) for entry in result["goals"]]
    lower, upper = result["bounds_pps"]
    limited = record.verdict == SearchVerdict.GENERATOR_LIMITED
    floor = result["evidence"]["floor"]
    return ReportFigure(
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
        **_followed(result),
        port_queues=min((p["spec"]["queues"] for p in record.setup.get("ports", ())), default=None),
        paths=_paths(result["evidence"].get("lost_by_direction", ()), record.setup.get("ends", ())),
    )


def _paths(lost: Sequence[int], ports: Sequence[str]) -> tuple[tuple[str, int], ...]:
    return tuple(zip(names(len(lost), ports), lost, strict=False))


def _followed(result: ResultEntry) -> dict[str, Any]:
    """Return the figures of what followed the search; results of earlier versions have none."""
    latency, soak = result.get("latency"), result.get("soak")
    found: dict[str, Any] = {}
    if latency:
        found["latencies"] = tuple(_latency_figure(load) for load in latency["loads"])
        found["no_latency"] = latency["reason"]
    if soak:
        found["soak"] = _soak_figure(soak)
    return found


def _latency_figure(load: LoadEntry) -> LatencyFigure:
    times = load["p50_us"], load["p90_us"], load["p99_us"], load["max_us"]
    return LatencyFigure(load["part"], load["rate_pps"], load["verdict"], load["samples"], *times)


def _soak_figure(soak: SoakEntry) -> SoakFigure:
    text = words.soak(soak)
    if soak["verdict"] is None:
        return SoakFigure(None, text)
    return SoakFigure(
        soak["verdict"],
        text,
        soak["elapsed_s"],
        soak["lost_packets"],
        soak["loss_ratio"],
        tuple((one["elapsed_s"], one["missing_packets"]) for one in soak["readings"]),
    )


def trials_at(result: ResultEntry, numbers: Sequence[int]) -> list[TrialEntry]:
    """Return the trial log entries with these numbers, of the reported repeat."""
    shown = result["repeats"]["shown"]
    return [t for t in result["trial_log"] if t["repeat"] == shown and t["number"] in numbers]


def _goal(entry: GoalResult) -> GoalFigure:
    goal = entry["goal"]
    return GoalFigure(
        goal["name"],
        goal["in_words"],
        goal["relative_width"],
        entry["verdict"],
        entry["rate_pps"],
        entry["reason"],
    )


def _interval(spread: SpreadEntry | None) -> Interval | None:
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


def _with_efficiency(figure: ReportFigure, figures: Sequence[ReportFigure]) -> ReportFigure:
    """Set the scaling efficiency relative to the cell with the fewest PMD cores: 1 is linear."""
    mine = figure.rate_per_core_pps
    if mine is None:
        return figure
    same = [
        f
        for f in figures
        if replace(f.cell, pmd_cores=None) == replace(figure.cell, pmd_cores=None) and f.rate_per_core_pps
    ]
    first = min(same, key=lambda f: f.cell.pmd_cores or 0)
    if first is figure or not first.rate_per_core_pps:
        return figure
    return replace(figure, efficiency=mine / first.rate_per_core_pps)

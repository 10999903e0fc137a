"""Figures of a report, per cell: rate, bounds, controls, loss accounting and CPU cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from netplugin_zeroloss.journal import Cell, CellRecord, Part, RunRecord
from netplugin_zeroloss.loss.contract import UNEXPLAINED
from netplugin_zeroloss.paths import described, names
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.published import PublishedTable
from netplugin_zeroloss.search.recorded import (
    AttributionEntry,
    FloorEntry,
    GoalEntry,
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
    SearchVerdict.DEAD_DIRECTION: 0,
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

    @property
    def whole(self) -> bool:
        """Whether all that counts was measured; otherwise ``host`` is a lower limit."""
        return self.softirq is not None and self.system is not None


#: Reading of a trial by field.
_READINGS: Final[Mapping[str, str]] = {
    "pmd_busy": "ovs.pmd_busy_share",
    "cycles_per_packet": "ovs.pmd_cycles_per_packet",
    "softirq": "host.softirq_cpus",
    "softirq_busiest": "host.softirq_busiest_share",
    "system": "host.system_cpus",
}


def _cpu_use(cell: Cell, trials: Sequence[TrialEntry]) -> CpuUse:
    """Return the mean CPU use over these trial log entries."""
    found: dict[str, float] = {}
    for name, reading in _READINGS.items():
        read = [trial["measured"].get("readings", {}).get(reading) for trial in trials]
        if values := [value for value in read if value is not None]:
            found[name] = statistics.fmean(values)
    # OVS may also have PMD threads that a backend without PMD threads does not use.
    if cell.pmd_cores is not None:
        found["pmd"] = float(cell.pmd_cores)
    return CpuUse(**found)


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
    return missing - sum(n for place, n in located(trial).items() if not place.startswith(_GENERATOR))


#: Verdict of a cell that was not measured.
MISSING: Final = "missing"


@dataclass(frozen=True)
class ReportFigure:
    """What is reported of one cell, or of a control, from its record; None: it was not measured."""

    cell: Cell
    record: CellRecord | None = None
    #: Controls: generator loopback, and the VNF without the backend. None: there was none.
    loopback: ReportFigure | None = None
    vnf: ReportFigure | None = None
    #: Rate per PMD core relative to the cell with the fewest cores; None for that cell or if unknown.
    efficiency: float | None = None
    published_pps: float | None = None

    @property
    def result(self) -> ResultEntry | None:
        return self.record.result if self.record else None

    @property
    def verdict(self) -> str:
        return self.record.verdict if self.record else MISSING

    @property
    def reason(self) -> str:
        if self.record is None:
            return "not measured yet"
        if self.result is None:
            return self.record.error or "it ended without a result"
        return self.result["reason"] + _named(self.result["evidence"], self.record.setup.get("ends", ()))

    @property
    def goal(self) -> GoalEntry | None:
        """The headline goal."""
        return self.result["goals"][0]["goal"] if self.result else None

    @property
    def others(self) -> Sequence[GoalResult]:
        return self.result["goals"][1:] if self.result else ()

    @property
    def rate_pps(self) -> float | None:
        """The NDR in pps, if there is one."""
        return self.record.zero_loss_pps if self.record else None

    @property
    def at_least_pps(self) -> float | None:
        """Lower limit of the rate: the generator reached its limit first."""
        limited = self.verdict == SearchVerdict.GENERATOR_LIMITED
        return (self.bounds_pps[0] or None) if limited and self.bounds_pps else None

    @property
    def known_pps(self) -> float | None:
        """The NDR, or the rate that the device forwards at least."""
        return self.at_least_pps if self.rate_pps is None else self.rate_pps

    @property
    def number(self) -> str | None:
        """The text of ``known_pps`` in Mpps, with the digits that the goal supports: the same everywhere."""
        if self.known_pps is None or self.goal is None:
            return None
        return words.found(self.known_pps, self.goal["relative_width"])

    @property
    def bounds_pps(self) -> Sequence[float] | None:
        return self.result["bounds_pps"] if self.result else None

    @property
    def spread(self) -> SpreadEntry | None:
        """The confidence interval of the median over repeats."""
        spread = self.result["repeats"]["spread"] if self.result else None
        return spread if spread and spread["answers"] > 1 else None

    @property
    def range_pps(self) -> Sequence[float]:
        """What the rate is known to be within: the interval over repeats, or else the bounds."""
        return self.spread["interval_pps"] if self.spread else self.bounds_pps or (0.0, math.inf)

    @property
    def floor(self) -> FloorEntry | None:
        """Loss ratio of load-independent loss, and the component that lost most frames."""
        floor = self.result["evidence"]["floor"] if self.result else None
        return {**floor, "place": None} if floor and floor["place"] == UNEXPLAINED else floor

    @cached_property
    def cpu(self) -> CpuUse:
        if self.result is None:
            return CpuUse()
        shown, numbers = self.result["repeats"]["shown"], self.result["evidence"]["lower_trials"]
        log = self.result["trial_log"]
        return _cpu_use(self.cell, [t for t in log if t["repeat"] == shown and t["number"] in numbers])

    @property
    def cpus_per_mpps(self) -> float | None:
        """Price of the rate: CPUs of the host for each Mpps; a lower limit if not all was measured."""
        if self.known_pps is None or self.cpu.host is None:
            return None
        return self.cpu.host / (self.known_pps / 1e6)

    @property
    def rate_per_core_pps(self) -> float | None:
        cores = self.cell.pmd_cores
        return self.rate_pps / cores if self.rate_pps is not None and cores else None

    @property
    def latencies(self) -> Mapping[str, LoadEntry]:
        """Latency by percent of the rate (``10``); the largest percentiles of all directions."""
        latency = self.result.get("latency") if self.result else None
        return {str(round(100 * load["part"])): load for load in latency["loads"]} if latency else {}

    @property
    def soak(self) -> SoakEntry | None:
        """The rate held for some time; without a verdict there was no rate to hold."""
        return self.result.get("soak") if self.result else None

    @property
    def port_queues(self) -> int | None:
        """Queues of the ports; fewer than those of the cell where the NIC has no more. None: unknown."""
        ports = self.record.setup.get("ports", ()) if self.result and self.record else ()
        return min((port["spec"]["queues"] for port in ports), default=None)

    @property
    def paths(self) -> Sequence[tuple[str, int]]:
        """Name of each path and its lost frames in the trials at the upper bound; empty: not known."""
        if self.result is None or self.record is None:
            return ()
        lost = self.result["evidence"].get("lost_by_direction", ())
        return tuple(zip(names(len(lost), self.record.setup.get("ends", ())), lost, strict=False))

    @property
    def ends(self) -> int | None:
        return len(self.paths) or None

    @property
    def worst_path(self) -> tuple[str, int] | None:
        """The path with the most lost frames, if there are several pairs of ends."""
        return max(self.paths, key=lambda path: path[1]) if len(self.paths) > 2 else None

    @cached_property
    def unexplained(self) -> tuple[float, float]:
        """Unexplained and excess frames over all valid trials."""
        log = self.result["trial_log"] if self.result else ()
        left = [not_located(trial) for trial in log if trial["verdict"] != "invalid"]
        return sum(n for n in left if n > 0), -sum(n for n in left if n < 0)


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of all cells of a run, in the order of its description."""

    run: RunRecord
    figures: tuple[ReportFigure, ...]
    published: PublishedTable | None = None

    @property
    def missing(self) -> Sequence[ReportFigure]:
        return [figure for figure in self.figures if figure.verdict == MISSING]

    @property
    def measured(self) -> Sequence[ReportFigure]:
        """The figures with a result, whatever its verdict."""
        return [figure for figure in self.figures if figure.result is not None]

    @property
    def hosts(self) -> Sequence[str]:
        """Where the run was started, and where it was resumed."""
        environments = (self.run.environment, *self.run.environment.get("sessions", ()))
        return tuple(dict.fromkeys(str(each.get("host", "an unknown host")) for each in environments))

    @property
    def generators(self) -> Sequence[str]:
        results = [figure.result for figure in self.figures if figure.result]
        return tuple(dict.fromkeys(str(r["environment"].get("generator", "unknown")) for r in results))

    @property
    def goals(self) -> Sequence[str]:
        """The headline goals as text; several if cells were measured with different goals."""
        return tuple(dict.fromkeys(f.goal["in_words"] for f in self.figures if f.goal))


def _named(evidence: AttributionEntry, ports: Sequence[str]) -> str:
    """Name the paths whose directions a reason has by number: `` (path 1 (a to b))``."""
    numbers = [*evidence.get("dead_directions", ()), *evidence.get("limiting_directions", ())]
    known = names(len(evidence.get("lost_by_direction", ())), ports)
    return f" ({described(numbers, known)})" if numbers and known else ""


def report_of(run: RunRecord, published: PublishedTable | None = None) -> Report:
    """Return the figures of a run, with published ones next to them."""
    figures = []
    for cell in run.cells:
        controls = [run.control(cell, part) for part in (Part.LOOPBACK, Part.VNF)]
        loopback, vnf = (ReportFigure(each.cell, each) if each else None for each in controls)
        there = published.rate_pps(cell) if published else None
        figures.append(ReportFigure(cell, run.record(cell), loopback, vnf, published_pps=there))
    # Of each backend, the cell with the fewest PMD cores that has a rate.
    first: dict[Cell, ReportFigure] = {}
    for figure in sorted(figures, key=lambda f: f.cell.pmd_cores or 0):
        if figure.rate_per_core_pps:
            first.setdefault(replace(figure.cell, pmd_cores=None), figure)
    return Report(run, tuple(_with_efficiency(f, first) for f in figures), published)


def _with_efficiency(figure: ReportFigure, first: Mapping[Cell, ReportFigure]) -> ReportFigure:
    least = first.get(replace(figure.cell, pmd_cores=None))
    if least is None or least is figure or not figure.rate_per_core_pps or not least.rate_per_core_pps:
        return figure
    return replace(figure, efficiency=figure.rate_per_core_pps / least.rate_per_core_pps)

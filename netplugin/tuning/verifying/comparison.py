"""Compare two runs figure by figure with a statistical test (pure).

The rounds of each run are the samples. A two-sided exact rank test compares them. Holm's adjustment keeps
the probability of any false claim among the figures at or below ``LEVEL``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from netplugin.host.cpus import parse_list
from netplugin.statistics import Change, can_reach, change, holm, p_lower
from netplugin.tuning.verifying.result import PERCENTILES, Histogram, Run

LEVEL = 0.05


class Finding(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference found"
    UNTOLD = "cannot be told"


@dataclass(frozen=True)
class Figure:
    """A measured figure. ``samples`` returns one value per round, or none if it was not measured.

    ``settings`` are those that must be equal for two runs to be comparable.
    """

    name: str
    unit: str
    more_is_better: bool
    settings: Callable[[Run], Mapping[str, int]]
    samples: Callable[[Run], Sequence[float]]
    whole: Callable[[Run], float | None]


@dataclass(frozen=True)
class Row:
    """``before`` and ``after`` are values of the whole runs; ``p`` is adjusted, None if not tested."""

    figure: Figure
    before: float | None
    after: float | None
    samples: tuple[Sequence[float], Sequence[float]]
    finding: Finding = Finding.SAME
    why: str = ""
    change: Change | None = None
    p: float | None = None


@dataclass(frozen=True)
class Difference:
    """A condition of the host that differs; None if a run does not have it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Comparison:
    before: Run
    after: Run
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]

    def of(self, finding: Finding) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.finding is finding)


def compare(before: Run, after: Run) -> Comparison:
    rows = [row for figure in FIGURES if (row := _row(figure, before, after))]
    testable = [row for row in rows if not row.why]
    sizes = [(len(old), len(new)) for old, new in (row.samples for row in testable)]
    able = dict(zip((r.figure.name for r in testable), can_reach(sizes, LEVEL / 2), strict=True))
    tested = [row for row in testable if able[row.figure.name]]
    adjusted = holm([min(1.0, 2 * min(_tails(row))) for row in tested])
    judged = {row.figure.name: _judged(row, p) for row, p in zip(tested, adjusted, strict=True)}
    return Comparison(
        before, after,
        tuple(judged.get(r.figure.name) or _untold(r, r.why or "too few rounds") for r in rows),
        tuple(_differences(before.conditions, after.conditions)),
    )  # fmt: skip


def _row(figure: Figure, before: Run, after: Run) -> Row | None:
    """Make a row; None if neither run has the figure. ``why`` is set if it cannot be tested."""
    values = figure.whole(before), figure.whole(after)
    row = Row(figure, *values, (figure.samples(before), figure.samples(after)))
    if values == (None, None):
        return None
    if None in values:
        return _untold(row, "not measured in both")
    if apart := _apart(figure, before, after):
        return _untold(row, apart)
    return row if all(row.samples) else _untold(row, "too few samples in a round")


def _untold(row: Row, why: str) -> Row:
    return replace(row, finding=Finding.UNTOLD, why=why)


def _apart(figure: Figure, before: Run, after: Run) -> str:
    """The setting that makes the runs incomparable, as text; empty if there is none."""
    one, other = (figure.settings(run) for run in (before, after))
    for name in one:
        if name in other and one[name] != other[name]:
            return f"{name} is {one[name]} in one and {other[name]} in the other"
    return ""


def _tails(row: Row) -> tuple[float, float]:
    """One-sided p-values for ``after`` being as low, and as high, by chance."""
    old, new = row.samples
    return p_lower(old, new), p_lower(new, old)


def _judged(row: Row, p: float) -> Row:
    finding = Finding.SAME
    if p <= LEVEL:
        low, high = _tails(row)
        better = (high < low) is row.figure.more_is_better
        finding = Finding.BETTER if better else Finding.WORSE
    return replace(row, finding=finding, change=change(*row.samples), p=p)


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[Difference]:
    return [
        Difference(name, before.get(name), after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


# -- the figures ---------------------------------------------------------------------------------

_Of = Callable[[Histogram], float | None]


def _of_latency(run: Run) -> Mapping[str, int]:
    if run.latency is None:
        return {}
    s = run.latency.settings
    return {
        "number of CPUs": len(parse_list(s.cpus)), "length of a round (s)": s.round_s,
        "interval (us)": s.interval_us, "priority": s.priority, "width (us)": s.width_us,
    }  # fmt: skip


def _of_throughput(run: Run) -> Mapping[str, int]:
    return {"frame size": run.throughput.settings.frame_size} if run.throughput else {}


def _latency(name: str, of: _Of) -> Figure:
    def samples(run: Run) -> Sequence[float]:
        found = [of(each.overall) for each in run.latency.rounds] if run.latency else []
        values = [value for value in found if value is not None]
        # If one round lacks the value, drop all: that round may be the worst.
        return values if len(values) == len(found) else []

    def whole(run: Run) -> float | None:
        return of(run.latency.overall) if run.latency else None

    return Figure(f"latency {name}", "us", False, _of_latency, samples, whole)


def _percentile(share: float) -> _Of:
    return lambda histogram: histogram.percentile(share)


FIGURES: tuple[Figure, ...] = (
    _latency("average", lambda histogram: histogram.average_us),
    *(_latency(name, _percentile(share)) for name, share in PERCENTILES.items()),
    _latency("maximum", lambda histogram: histogram.max_us),
    Figure(
        "throughput", "pps", True, _of_throughput,
        lambda run: run.throughput.samples if run.throughput else (),
        lambda run: median(run.throughput.samples) if run.throughput else None,
    ),
)  # fmt: skip

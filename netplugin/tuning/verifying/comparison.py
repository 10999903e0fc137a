"""Compare two runs figure by figure with a statistical test (pure).

The rounds of each run are the samples. A two-sided exact rank test compares them. Holm's adjustment keeps
the probability of any false claim among the figures at or below ``LEVEL``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from netplugin.statistics import adjusted, change, p_lower
from netplugin.tuning.verifying.figures import Figure, figures
from netplugin.tuning.verifying.result import MeasuredRun

LEVEL = 0.05


class FigureVerdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference found"
    UNDECIDED = "cannot be decided"


@dataclass(frozen=True)
class FigureRow:
    """A figure of both runs. ``p`` is adjusted, None if it was not tested: ``why`` has the reason.

    ``ratios``: after divided by before, and the confidence interval of the test.
    """

    before: Figure
    after: Figure
    finding: FigureVerdict
    why: str = ""
    p: float | None = None
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True)
class Difference:
    """A condition of the host that differs; None if a run does not have it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class MeasurementComparison:
    before: MeasuredRun
    after: MeasuredRun
    rows: tuple[FigureRow, ...]
    differences: tuple[Difference, ...]

    def of(self, finding: FigureVerdict) -> tuple[FigureRow, ...]:
        return tuple(row for row in self.rows if row.finding is finding)


def compare(before: MeasuredRun, after: MeasuredRun) -> MeasurementComparison:
    both = zip(figures(before), figures(after), strict=True)
    pairs = [(old, new) for old, new in both if (old.whole, new.whole) != (None, None)]
    reasons = [_apart(*pair) for pair in pairs]
    samples = [None if why else (o.samples, n.samples) for (o, n), why in zip(pairs, reasons, strict=True)]
    tested = zip(pairs, reasons, adjusted(samples, LEVEL, sides=2), strict=True)
    had, has = before.conditions, after.conditions
    differences = (Difference(name, had.get(name), has.get(name)) for name in dict.fromkeys([*had, *has]))
    rows = tuple(_row(*pair, why, p) for pair, why, p in tested)
    return MeasurementComparison(before, after, rows, tuple(d for d in differences if d.before != d.after))


def _apart(old: Figure, new: Figure) -> str:
    """Why the two cannot be compared; empty if they can."""
    if None in (old.whole, new.whole):
        return "not measured in both"
    for name, one in old.settings.items():
        if (other := new.settings.get(name, one)) != one:
            return f"{name} is {one} in one and {other} in the other"
    return "" if old.samples and new.samples else "too few samples in a round"


def _row(old: Figure, new: Figure, why: str, p: float | None) -> FigureRow:
    if p is None:
        return FigureRow(old, new, FigureVerdict.UNDECIDED, why or "too few rounds")
    finding = FigureVerdict.SAME
    if p <= LEVEL:
        more = p_lower(new.samples, old.samples) < p_lower(old.samples, new.samples)
        finding = FigureVerdict.BETTER if more is old.unit.more_is_better else FigureVerdict.WORSE
    found = change(old.samples, new.samples)
    return FigureRow(old, new, finding, "", p, (found.ratio + 1, found.low + 1, found.high + 1))

"""Compares two runs cell by cell to find regressions, if they are comparable (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from netplugin import statistics
from netplugin.statistics import RelativeChange
from netplugin_zeroloss.journal import Cell, CellRecord, RunRecord
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.figures import Answers, answers_of
from netplugin_zeroloss.search.recorded import ResultEntry
from netplugin_zeroloss.search.trials import SearchVerdict

# -- Checks whether two runs are comparable, and lists their differences (pure). ------------------


_LIMITED: Final = SearchVerdict.GENERATOR_LIMITED
#: Differences here can change the rates without a change of the backend.
_MACHINE: Final = ("host", "machine", "kernel", "cpus")
#: Environment fields that differ between any two runs.
_OF_THE_RUN: Final = (*_MACHINE, "started", "command", "sessions", "run_id", "seed", "generator", "virtual")


def _both(before: RunRecord, after: RunRecord) -> Iterator[tuple[Cell, CellRecord, CellRecord]]:
    """Yield the records of cells that both runs have."""
    for cell in before.cells:
        old, new = before.record(cell), after.record(cell)
        if old is not None and new is not None:
            yield cell, old, new


def refusals(before: RunRecord, after: RunRecord) -> Iterator[str]:
    """Yield the reasons that make the runs incomparable: no common cell, or different goals."""
    if not set(before.cells) & set(after.cells):
        yield "the runs have no cell in common"
    goals: dict[tuple[str, str], list[str]] = {}
    for cell, old, new in _both(before, after):
        if old.result is not None and new.result is not None:
            if _goal(old.result) != _goal(new.result):
                words = old.result["goal"]["in_words"], new.result["goal"]["in_words"]
                goals.setdefault(words, []).append(cell.key)
    for (one, other), keys in goals.items():
        yield f"the goals differ ({_cells(keys)}): {one}; then {other}"


def _goal(result: ResultEntry) -> dict[str, Any]:
    """Return the parameters of the goal without its name."""
    return {k: v for k, v in result["goal"].items() if k not in ("name", "in_words")}


def doubts(before: RunRecord, after: RunRecord) -> Iterator[str]:
    """Yield differences that can change the rates without a change of the backend."""
    # Earlier versions did not record whether the host is virtual.
    recorded = {"virtual"} & before.environment.keys() & after.environment.keys()
    yield from _differing((*_MACHINE, *recorded), before.environment, after.environment)
    seen: dict[str, list[str]] = {}
    for cell, old, new in _both(before, after):
        one, other = _facts(old), _facts(new)
        for text in _differing(sorted(one.keys() & other.keys()), one, other):
            seen.setdefault(text, []).append(cell.key)
    for text, keys in seen.items():
        yield f"{text} ({_cells(keys)})"
    for name, run in (("old", before), ("new", after)):
        missing = [cell.key for cell in run.cells if run.record(cell) is None]
        if missing:
            yield f"the {name} run is incomplete: not measured {_cells(missing)}"


def _facts(record: CellRecord) -> dict[str, Any]:
    """Return VNF, generator and line rate of a cell."""
    vnf: Any = record.setup.get("vnf")
    vnf = vnf if isinstance(vnf, Mapping) else {}
    found = {f"VNF's {name}": vnf[name] for name in ("name", "version", "rx_queues") if name in vnf}
    if record.result is not None:
        found["generator"] = record.result["environment"].get("generator")
        found["line rate"] = record.result["plan"]["line_rate_pps"]
    return found


def _differing(names: Iterable[str], one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in names:
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name)}, then {other.get(name)}"


def changes(before: RunRecord, after: RunRecord) -> Iterator[str]:
    """Yield the other differences, most likely those under test."""
    names = sorted({*before.environment, *after.environment} - set(_OF_THE_RUN))
    yield from _differing(names, before.environment, after.environment)


def _cells(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{len(keys)} cells"


# -- Compares two runs cell by cell to find regressions, with error probabilities (pure). ---------
# Cells with enough repeats are tested: do the answers of the new run rank below those of the old one,
# less the tolerance? Holm's adjustment limits the probability of any false alarm to the level. For the
# other cells the bounds are compared, without such a guarantee. They must differ by a tolerance, which is
# wide where loss is random; smaller differences are undecided.


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """Thresholds of a regression. Ratios: 0.01 is 1 %."""

    #: Smallest decrease that is a regression.
    tolerance: float = 0.01
    #: The same for cells with random loss and no test; a decrease from half of it on is undecided.
    noisy_tolerance: float = 0.5
    #: Probability of at least one false alarm among the tested cells.
    level: float = 0.05


class CellVerdict(StrEnum):
    """Result of the comparison of one cell."""

    SAME = "no regression"
    REGRESSION = "regression"
    FASTER = "faster"
    #: The new run has no measurement that could show a regression.
    UNDECIDED = "cannot be decided"
    #: The old run has no such cell or no verdict.
    NO_BASELINE = "no baseline"


@dataclass(frozen=True, slots=True)
class CellComparison:
    """One cell in both runs. ``p``: adjusted for the number of tested cells; None without a test."""

    cell: Cell
    finding: CellVerdict
    why: str
    before: Answers | None = None
    after: Answers | None = None
    change: RelativeChange | None = None
    p: float | None = None
    #: Number of answers of both runs; None without a test.
    tested: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs. With ``refusals`` the runs are incomparable."""

    before: str
    after: str
    limits: ComparisonLimits
    cells: tuple[CellComparison, ...]
    refusals: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 0: no regression, 1: a regression, 2: undecided."""
        findings = {cell.finding for cell in self.cells}
        if self.refusals:
            return 2
        if CellVerdict.REGRESSION in findings:
            return 1
        compared = findings - {CellVerdict.NO_BASELINE}
        return 2 if CellVerdict.UNDECIDED in compared or not compared else 0


def compare(before: RunRecord, after: RunRecord, limits: ComparisonLimits | None = None) -> Comparison:
    """Compare the new run ``after`` with the old run ``before``."""
    limits = limits or ComparisonLimits()
    cells = tuple(dict.fromkeys([*before.cells, *after.cells]))
    rows = [_row(before, after, cell) for cell in cells]
    tested = _tested(rows, limits)
    return Comparison(
        before.name,
        after.name,
        limits,
        tuple(_judged(row, p, limits) for row, p in zip(rows, tested, strict=True)),
        tuple(refusals(before, after)),
        tuple(doubts(before, after)),
        tuple(changes(before, after)),
    )


def _row(before: RunRecord, after: RunRecord, cell: Cell) -> CellComparison:
    """Return both sides of a cell, decided where verdicts alone suffice."""
    records = before.record(cell), after.record(cell)
    old, new = (answers_of(record) if record else None for record in records)
    finding, why = CellVerdict.SAME, ""
    if old is None:
        finding, why = CellVerdict.NO_BASELINE, "the old run has not measured it"
    elif new is None:
        finding, why = CellVerdict.UNDECIDED, "the new run has not measured it"
    elif new.worth < old.worth:
        finding, why = CellVerdict.REGRESSION, f"{old.verdict} became {new.verdict}: {new.reason}"
    elif not old.worth:
        finding, why = CellVerdict.NO_BASELINE, "the old run had no verdict"
    elif not old.has_bounds:
        finding = CellVerdict.FASTER if new.has_bounds else CellVerdict.SAME
        why = f"{old.verdict}, now {new.verdict}"
    return CellComparison(cell, finding, why, old, new)


def _tested(rows: Sequence[CellComparison], limits: ComparisonLimits) -> list[float | None]:
    """Return the adjusted p of each row; None if it cannot be tested."""
    pairs: list[tuple[statistics.Samples, statistics.Samples] | None] = []
    for row in rows:
        old, new = row.before, row.after
        if old is None or new is None or row.why or _LIMITED in (old.verdict, new.verdict):
            pairs.append(None)
            continue
        allowed = 1 - _tolerance(row, limits)
        pairs.append(([rate * allowed for rate in old.rates], new.rates))
    return statistics.adjusted(pairs, limits.level)


def _tolerance(row: CellComparison, limits: ComparisonLimits) -> float:
    """Return the tolerance, at least the width of the goal: closer answers are equal."""
    widths = [side.width for side in (row.before, row.after) if side is not None]
    return max([limits.tolerance, *widths])


def _judged(row: CellComparison, p: float | None, limits: ComparisonLimits) -> CellComparison:
    if row.why or row.before is None or row.after is None:
        return row
    if p is None:
        return _by_bounds(row, row.before, row.after, limits)
    old, new = row.before.rates, row.after.rates
    found = statistics.change(old, new)
    row = replace(row, change=found, p=p, tested=(len(old), len(new)))
    tolerance = _tolerance(row, limits)
    more = f"p = {p:.2g}{_more_floors(old, new)}"
    if p <= limits.level:
        why = f"lower by more than {words.percent(tolerance, 1)}: {more}"
        return replace(row, finding=CellVerdict.REGRESSION, why=why)
    if found.low > tolerance:
        return replace(row, finding=CellVerdict.FASTER, why=f"the whole interval is above; {more}")
    return replace(row, why=f"not shown to be lower: {more}")


def _more_floors(old: Sequence[float], new: Sequence[float]) -> str:
    """Mention an increase of repeats with load-independent loss, which the median hardly shows."""
    counts = old.count(0.0), new.count(0.0)
    if counts[1] <= counts[0]:
        return ""
    return f"; {counts[1]} of {len(new)} repeats found a floor, before {counts[0]} of {len(old)}"


def _by_bounds(row: CellComparison, old: Answers, new: Answers, limits: ComparisonLimits) -> CellComparison:
    """Decide without a test: the bounds over all repeats must be disjoint by a tolerance."""
    least = _tolerance(row, limits)
    sharp = old.sharp and new.sharp
    most = least if sharp else max(least, limits.noisy_tolerance)
    apart = most if sharp else max(least, most / 2)
    how = "bounds only" if sharp else "bounds only, and loss is a matter of chance"
    if new.upper < old.lower * (1 - most):
        finding, why = CellVerdict.REGRESSION, f"{how}: apart by more than {words.percent(most, 1)}"
    elif new.verdict == _LIMITED and new.lower < old.lower * (1 - least):
        finding, why = CellVerdict.UNDECIDED, "the generator ended below what the old run found"
    elif not sharp and new.upper < old.lower * (1 - apart):
        finding, why = CellVerdict.UNDECIDED, f"{how}: too few repeats to tell"
    elif old.verdict == _LIMITED:
        finding, why = CellVerdict.SAME, "it does what the old run's generator could show"
    elif new.lower > old.upper * (1 + most):
        finding, why = CellVerdict.FASTER, how
    else:
        finding, why = CellVerdict.SAME, f"{how}: not apart by more than {words.percent(apart, 1)}"
    return replace(row, finding=finding, why=why, change=_between(old, new))


def _between(old: Answers, new: Answers) -> RelativeChange | None:
    """Return the change derived from the bounds, without a confidence."""
    if not old.rate or new.rate is None or not old.lower:
        return None
    low, high = new.lower / old.upper - 1, new.upper / old.lower - 1
    return RelativeChange(new.rate / old.rate - 1, low, high, 0.0)

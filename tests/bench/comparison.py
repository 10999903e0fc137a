"""What differs between two runs by more than their rounds do among themselves (pure).

Samples that were taken one after the other resemble each other, and a machine is slower for a while: so
not single samples are compared but medians of blocks of them, by the rank test of `netplugin.statistics`.
A way that was measured in turn with another one is judged by its quotient to that one, which a slower
machine does not change.
"""

from __future__ import annotations

import statistics as medians
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from netplugin import statistics
from tests.bench.names import LINUXBRIDGE, ONE_PORT
from tests.bench.values import Run, Series

#: Blocks of a series, if it has enough samples.
BLOCKS = 10
#: Probability of calling one figure different that is not: of a hundred figures one, by chance.
LEVEL = 0.01
#: By workload, the way whose time of the same turn each other one is divided by.
YARDSTICKS = {ONE_PORT: "os-vif", LINUXBRIDGE: "ip -batch"}
#: Smallest change that is called one, as a ratio.
TOLERANCE = 0.03


class Verdict(StrEnum):
    SAME = "within the noise"
    LESS = "less"
    MORE = "MORE"
    FEW = "too few rounds"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both runs: medians, and the interval of new over old."""

    label: str
    unit: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    yardstick: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class _Pair:
    old: Series
    new: Series
    before: tuple[float, ...]
    after: tuple[float, ...]
    yardstick: str


def compare(old: Run, new: Run) -> list[Row]:
    """Return a row for each figure that both runs have."""
    return [_row(pair) for pair in _pairs(old, new)]


def doubts(old: Run, new: Run) -> list[str]:
    """Return what else differs between the runs, by which the figures may differ too."""
    found = []
    if old.form != new.form:
        found.append(f"form: {old.form}, then {new.form}")
    before, after = old.machine.model_dump(), new.machine.model_dump()
    found += [
        f"{name}: {value}, then {after[name]}"
        for name, value in before.items()
        if name != "load" and value != after[name]
    ]
    found += [
        f"the machine was not idle ({which} run): load {run.machine.load:g}"
        for which, run in (("old", old), ("new", new))
        if run.machine.load > 0.5
    ]
    return found


def blocks(samples: Sequence[float]) -> tuple[float, ...]:
    """Return the medians of up to ten blocks of samples that follow each other."""
    count = min(BLOCKS, len(samples))
    ends = [round(n * len(samples) / count) for n in range(count + 1)]
    return tuple(medians.median(samples[a:b]) for a, b in pairwise(ends))


def _pairs(old: Run, new: Run) -> Iterator[_Pair]:
    for series in new.series:
        there = old.find(*series.key)
        if there is None or there.unit != series.unit or not (there.samples and series.samples):
            continue
        yardsticks = _yardstick(old, there), _yardstick(new, series)
        if yardsticks[0] and yardsticks[1]:
            name = yardsticks[1].way
            yield _Pair(
                there, series, _quotients(there, yardsticks[0]), _quotients(series, yardsticks[1]), name
            )
        else:
            yield _Pair(there, series, blocks(there.samples), blocks(series.samples), "")


def _yardstick(run: Run, series: Series) -> Series | None:
    way = YARDSTICKS.get(series.workload)
    if way is None or way == series.way or series.unit != "ms" or series.figure != "plug":
        return None
    found = run.find(series.workload, series.figure, way, series.ports)
    return found if found and len(found.samples) == len(series.samples) else None


def _quotients(series: Series, yardstick: Series) -> tuple[float, ...]:
    pairs = zip(blocks(series.samples), blocks(yardstick.samples), strict=True)
    return tuple(one / other for one, other in pairs)


def _p(before: Sequence[float], after: Sequence[float]) -> float:
    """The probability of so low an ``after`` if it is not lower, less the tolerance."""
    return statistics.p_lower([value * (1 - TOLERANCE) for value in before], after)


def _verdict(pair: _Pair) -> Verdict:
    if statistics.least_p(len(pair.before), len(pair.after)) > LEVEL / 2:
        return Verdict.FEW
    if _p(pair.before, pair.after) <= LEVEL / 2:
        return Verdict.LESS
    return Verdict.MORE if _p(pair.after, pair.before) <= LEVEL / 2 else Verdict.SAME


def _row(pair: _Pair) -> Row:
    change = statistics.change(pair.before, pair.after)
    return Row(
        pair.new.label,
        pair.new.unit,
        medians.median(pair.old.samples),
        medians.median(pair.new.samples),
        change.ratio + 1,
        change.low + 1,
        change.high + 1,
        pair.yardstick,
        _verdict(pair),
    )

"""Median of repeated answers with a distribution-free confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResultSpread:
    """Spread of the answers of repeated searches, in pps."""

    answers: int
    median_pps: float
    #: Interval between two answers that contains the true median with probability ``confidence``.
    interval_pps: tuple[float, float]
    confidence: float
    #: Relative standard deviation; None for one answer.
    relative_std: float | None


def spread(answers: Sequence[float], wanted: float = 0.95) -> ResultSpread | None:
    """Return the narrowest order-statistic interval for the median; None without answers.

    Each answer is above the true median with probability 1/2 for any distribution, so the number above
    is binomial. Five or fewer answers cannot reach 95 %: the interval is then the full range, with its
    actual confidence.
    """
    ordered = sorted(answers)
    count = len(ordered)
    if not count:
        return None
    out, confidence = 0, _covers(count, 0)
    while 2 * (out + 1) < count and _covers(count, out + 1) >= wanted:
        out += 1
        confidence = _covers(count, out)
    mean = statistics.fmean(ordered)
    return ResultSpread(
        count,
        statistics.median(ordered),
        (ordered[out], ordered[-1 - out]),
        confidence,
        relative_std(ordered) if mean else None,
    )


def relative_std(answers: Sequence[float]) -> float | None:
    """Return the relative standard deviation; None for one answer."""
    return statistics.stdev(answers) / statistics.fmean(answers) if len(answers) > 1 else None


def _covers(count: int, out: int) -> float:
    """Return the probability that the median lies between the answers ``out`` from both ends."""
    below = math.fsum(math.comb(count, k) * 0.5**count for k in range(out + 1))
    return max(0.0, 1 - 2 * below)

"""What several answers say together: their median and an interval that assumes no distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the answers of repeated searches, in packets a second."""

    answers: int
    median_pps: float
    #: From one answer to another, so that the true median lies between with ``confidence``.
    interval_pps: tuple[float, float]
    confidence: float
    #: Standard deviation over mean; None for one answer.
    relative_std: float | None


def spread(answers: Sequence[float], wanted: float = 0.95) -> Spread | None:
    """The narrowest pair of order statistics that covers the median with ``wanted``; None without answers.

    Each answer is above the true median with probability 1/2, whatever the distribution, so the count
    of those above is binomial. Five answers or fewer cannot reach 95 %: then it is the whole range, with
    the confidence that it has.
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
    return Spread(
        count, statistics.median(ordered), (ordered[out], ordered[-1 - out]), confidence,
        relative_std(ordered) if mean else None,
    )  # fmt: skip


def relative_std(answers: Sequence[float]) -> float | None:
    """Standard deviation over mean."""
    return statistics.stdev(answers) / statistics.fmean(answers) if len(answers) > 1 else None


def _covers(count: int, out: int) -> float:
    """That the median is between the answers number ``out`` from both ends."""
    below = math.fsum(math.comb(count, k) * 0.5**count for k in range(out + 1))
    return max(0.0, 1 - 2 * below)

"""Which quantile of a series may be said, and how well it is known (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile with its interval of 95 % confidence by order statistics, whatever the distribution.

    ``high`` is None if there are too few samples for an upper end.
    """

    value: float
    low: float
    high: float | None


def three_digits(value: float) -> str:
    """Return a number with three significant digits, and no exponent: 0.0123, 12.3, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def fewest(share: float) -> int:
    """Return how many samples it takes until one is expected beyond the quantile: 1,000 for p99.9."""
    return math.ceil(round(1 / min(share, 1 - share), 6))


def quantile(samples: Sequence[float], share: float) -> Quantile | None:
    """Return the quantile, None if there are fewer than ``fewest`` samples.

    The value is a sample (the smallest with at least this share at or below it), not interpolated.
    """
    from scipy.stats import binom  # it takes seconds, and each process that collects tests imports us

    count = len(samples)
    if count < fewest(share):
        return None
    ordered = sorted(samples)
    value = ordered[max(0, math.ceil(round(share * count, 6)) - 1)]
    # The number of samples below the quantile is binomial.
    tail = (1 - CONFIDENCE) / 2
    low = max(0, int(binom.ppf(tail, count, share)) - 1)
    high = int(binom.ppf(1 - tail, count, share))
    return Quantile(value, ordered[low], ordered[high] if high < count else None)

"""Whether a figure grows over time, or only goes up and down (pure).

Samples of one process follow each other closely, so that a line through all of them would seem far better
known than it is. Blocks of them hardly do: the slope is that of the blocks' means, by Theil and Sen, whose
interval needs no distribution and is not led astray by single blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: So many figures are judged in a soak that 95 % would be a false alarm in every fifth.
CONFIDENCE = 0.99
#: The part of the time that is left out: imports, pools and caches fill.
WARM_UP = 1 / 3
BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Trend:
    """Growth over the time that is judged, with its interval. ``bound``: growth that is none."""

    growth: float
    low: float
    high: float
    bound: float

    @property
    def steady(self) -> bool:
        """The interval includes 0 (or is below), or is below the bound."""
        return self.low <= 0 or self.high <= self.bound

    def __str__(self) -> str:
        return f"{self.growth:+.3g} ({self.low:+.3g} to {self.high:+.3g}), bound {self.bound:.3g}"


def after_warm_up(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the (time, value) pairs that are judged."""
    first, last = times[0], times[-1]
    since = first + (last - first) * WARM_UP
    return [(at, value) for at, value in zip(times, values, strict=True) if at >= since]


def trend(times: Sequence[float], values: Sequence[float], bound: float) -> Trend:
    """``times`` are in seconds.

    Raises: ValueError if there are not three samples for each block.
    """
    points = after_warm_up(times, values)
    if len(points) < 3 * BLOCKS:
        raise ValueError(f"{len(points)} samples after the warm-up, and {3 * BLOCKS} are needed")
    from scipy.stats import theilslopes  # it takes seconds, and each process that collects tests imports us

    ends = [round(n * len(points) / BLOCKS) for n in range(BLOCKS + 1)]
    blocks = [points[ends[n] : ends[n + 1]] for n in range(BLOCKS)]
    judged_s = points[-1][0] - points[0][0]
    parts = [statistics.fmean(at for at, _ in block) / judged_s for block in blocks]
    means = [statistics.fmean(value for _, value in block) for block in blocks]
    found = theilslopes(means, parts, alpha=CONFIDENCE)
    return Trend(float(found.slope), float(found.low_slope), float(found.high_slope), bound)

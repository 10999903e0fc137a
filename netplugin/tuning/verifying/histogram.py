"""Histogram of wake-up latencies in microseconds, and its percentiles (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

#: Percentiles by name, as fractions.
PERCENTILES: Final[Mapping[str, float]] = {
    "P99": 0.99, "P99.9": 0.999, "P99.99": 0.9999, "P99.999": 0.99999,
}  # fmt: skip


class Histogram(BaseModel):
    """``counts`` maps latency, in whole microseconds, to samples; ``overflows`` are beyond the width."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    counts: Mapping[int, int]
    overflows: int = Field(0, ge=0)
    min_us: int
    average_us: float
    max_us: int

    @property
    def samples(self) -> int:
        return sum(self.counts.values()) + self.overflows

    def percentile(self, share: float) -> int | None:
        """The latency, in microseconds, that ``share`` of the samples do not exceed.

        None if there are too few samples for one to be above it. If it lies beyond the histogram's width, the
        result is the maximum, which is an upper bound.
        """
        samples = self.samples
        below = _ceil(samples * share)
        if below >= samples:
            return None
        seen = 0
        for latency in sorted(self.counts):
            seen += self.counts[latency]
            if seen >= below:
                return latency
        return self.max_us


def merged(parts: Iterable[Histogram]) -> Histogram:
    """Merge histograms. Raises: ValueError without samples."""
    known = list(parts)
    counts: Counter[int] = Counter()
    for part in known:
        counts.update(part.counts)
    samples = sum(part.samples for part in known)
    if not samples:
        raise ValueError("there are no samples")
    return Histogram(
        counts=dict(sorted(counts.items())),
        overflows=sum(part.overflows for part in known),
        min_us=min(part.min_us for part in known if part.samples),
        average_us=sum(part.average_us * part.samples for part in known) / samples,
        max_us=max(part.max_us for part in known if part.samples),
    )


def _ceil(number: float) -> int:
    """Round up, tolerating floating-point error: 0.999 of 1000 is 999."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-6 else int(number) + 1

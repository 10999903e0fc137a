"""Latency of TRex's latency streams: the streams to send, and percentiles from their histograms.

Observed in the sources of TRex 3.08 (``src/time_histogram.cpp``, ``trex_stl_streams_compiler.h``): a latency
stream keeps its own rate, which counts towards the requested total; the key of a bucket is its lower
edge in microseconds, from 10 on with one significant digit; key 0 is less than 10.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from netplugin.programs import bounded
from netplugin_zeroloss.generators.frames import sizes
from netplugin_zeroloss.values import GeneratorError, LatencySummary, TrialRequest

#: Frames with a time stamp per second and direction, and the most that they may be of all frames.
_SAMPLES_PPS: Final = 1000.0
_MOST_PART: Final = 0.1
#: Width of the first bucket in microseconds.
_FIRST_US: Final = 10


def latency_pps(request: TrialRequest, directions: int) -> float:
    """Return the rate of the latency stream of each direction."""
    return min(_SAMPLES_PPS, _MOST_PART * request.rate_pps / directions)


def latency_streams(
    streams: Sequence[Mapping[str, Any]], request: TrialRequest, first_id: int
) -> Iterator[dict[str, Any]]:
    """Yield a latency stream for each sending port, like its first stream, with ids from ``first_id`` on.

    It has one flow and the smallest frame, because TRex writes the time stamp into the payload.
    """
    ports = {stream["port"]: stream for stream in reversed(streams)}
    for number, (_, stream) in enumerate(sorted(ports.items())):
        yield {
            **stream,
            "size": min(sizes(request)),
            "flows": 1,
            "pps": latency_pps(request, len(ports)),
            "latency_id": first_id + number,
        }


def summary(histogram: Mapping[str, int], max_us: float) -> LatencySummary | None:
    """Return the percentiles of a histogram; None without samples.

    A percentile is the upper edge of its bucket, and at most the maximum: it never understates.
    Raises: GeneratorError.
    """
    try:
        buckets = sorted((int(low), int(count)) for low, count in histogram.items() if count)
        bounded.check(buckets)
    except (TypeError, ValueError) as error:
        raise GeneratorError(f"TRex's histogram of latencies cannot be read: {error!r}") from error
    total = sum(count for _, count in buckets)
    if not total:
        return None
    p50, p90, p99 = (_percentile(buckets, part * total, max_us) for part in (0.5, 0.9, 0.99))
    return LatencySummary(total, p50, p90, p99, max_us)


def _percentile(buckets: Sequence[tuple[int, int]], rank: float, max_us: float) -> float:
    seen = 0
    for low, count in buckets:
        seen += count
        if seen >= rank:
            width = _FIRST_US if low < _FIRST_US else 10 ** math.floor(math.log10(low))
            return min(float(low + width), max_us)
    return max_us

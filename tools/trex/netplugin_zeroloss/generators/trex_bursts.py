"""Streams of TRex that send in bursts at a mean rate (pure).

Observed in the sources of TRex 3.08 (``trex_stl_stream_node.h``, ``trex_stl_streams_compiler.cpp``): within
a burst frames are ``1 / pps`` apart; the gap ``ibg`` is from the last frame of a burst to the first of the
next, also if several cores share the stream. The multiplier of ``start`` changes ``pps`` and not the gap, so
it must be 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from netplugin_zeroloss.generators.trex_latency import latency_pps
from netplugin_zeroloss.values import TrialRequest, line_rate_pps

#: Of a port that reports no speed.
_SPEED_GBPS = 10.0


def in_bursts(
    streams: Iterator[dict[str, Any]],
    request: TrialRequest,
    directions: int,
    speeds_gbps: Mapping[int, float],
) -> Iterator[dict[str, Any]]:
    """Yield for each stream one in bursts at the line rate of its port, and one for the frames that are left.

    All frames of the trial are sent, no more. Latency streams are not among them, but their rate is.
    """
    measuring = latency_pps(request, directions) if request.latency else 0.0
    rate = request.rate_pps / directions - measuring
    frames = round(rate * request.duration_s)
    for stream in streams:
        speed = speeds_gbps[stream["port"]] or _SPEED_GBPS
        line = max(line_rate_pps(1e9 * speed, stream["size"]), rate)
        gap_us = 1e6 * (request.burst / rate - (request.burst - 1) / line)
        whole, rest = divmod(frames, request.burst)
        trains = ((request.burst, whole, 0.0), (rest, min(rest, 1), 1e6 * whole * request.burst / rate))
        for burst, count, after_us in trains:
            if count:
                yield {
                    **stream,
                    "pps": line,
                    "after_us": after_us,
                    "burst": {"frames": burst, "gap_us": gap_us, "count": count},
                }


def burst_s(request: TrialRequest, directions: int) -> float:
    """Return the seconds from a burst to the next: by so much a count may be ahead of the mean rate."""
    return request.burst * directions / request.rate_pps if request.burst > 1 else 0.0

"""Streams for the stateless client of TRex: of frames, in bursts, and with time stamps (pure).

Observed in the sources of TRex 3.08 (``trex_stl_stream_node.h``, ``trex_stl_streams_compiler``,
``src/time_histogram.cpp``):

- Within a burst frames are ``1 / pps`` apart; the gap ``ibg`` is from the last frame of a burst to the first
  of the next, also if several cores share the stream. The multiplier of ``start`` changes ``pps`` and not the
  gap, so it must be 1.
- A latency stream keeps its own rate, which counts towards the requested total; the key of a bucket is its
  lower edge in microseconds, from 10 on with one significant digit; key 0 is less than 10.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from netplugin.programs import bounded
from netplugin_zeroloss.generators.frames import Frames, Vary, sizes
from netplugin_zeroloss.values import GeneratorError, LatencySummary, TrialRequest, line_rate_pps

#: The field that a field engine writes, and its bytes.
_VARIED: Final = {
    Vary.SOURCE_IP: ("IP.src", 4),
    Vary.DESTINATION_IP: ("IP.dst", 4),
    Vary.SOURCE_PORT: ("UDP.sport", 2),
    Vary.DESTINATION_PORT: ("UDP.dport", 2),
}
#: Of a port that reports no speed.
_SPEED_GBPS: Final = 10.0
#: Frames with a time stamp per second and direction, and the most that they may be of all frames.
_SAMPLES_PPS: Final = 1000.0
_MOST_PART: Final = 0.1
#: Width of the first bucket in microseconds.
_FIRST_US: Final = 10

#: Arguments of ``trex_stl_trials.Trials._stream``.
Stream = dict[str, Any]


def plain(paths: Sequence[tuple[int, Frames]], request: TrialRequest) -> Iterator[Stream]:
    """Yield one stream per size and path; ``pps`` is its relative share of the started load.

    ``paths``: the transmitting port of each, and its frames. Raises: GeneratorError.
    """
    for port, frames in paths:
        frames.check(request.flows)
        offset, width = _VARIED[frames.vary]
        last = frames.first + request.flows - 1
        counting = {"name": "flow", "min_value": frames.first, "max_value": last, "size": width, "op": "inc"}
        engine = [
            ("STLVmFlowVar", counting),
            ("STLVmWrFlowVar", {"fv_name": "flow", "pkt_offset": offset}),
            ("STLVmFixIpv4", {"offset": "IP"}),
        ]
        # TRex fills in the port's MAC addresses where none is given.
        macs = {"src": frames.source_mac, "dst": frames.destination_mac}
        packet = {
            "Ether": {name: mac for name, mac in macs.items() if mac},
            "IP": {"src": str(frames.source_ip), "dst": str(frames.destination_ip)},
            "UDP": {"sport": frames.source_port, "dport": frames.destination_port, "chksum": 0},
        }
        for size, share in Counter(sizes(request)).items():
            yield {
                "port": port,
                "size": size,
                "packet": packet,
                "engine": engine if request.flows > 1 else [],
                "mode": ("STLTXCont", {"pps": share}),
            }


def in_bursts(
    streams: Sequence[Stream], request: TrialRequest, directions: int, speeds_gbps: Mapping[int, float]
) -> Iterator[Stream]:
    """Yield for each stream one in bursts at the line rate of its port, and one for the frames that are left.

    All frames of the trial are sent, no more. Latency streams are not among them, but their rate is.
    """
    measuring = latency_pps(request, directions) if request.latency else 0.0
    rate = request.rate_pps / directions - measuring
    whole, rest = divmod(round(rate * request.duration_s), request.burst)
    for stream in streams:
        speed = speeds_gbps[stream["port"]] or _SPEED_GBPS
        line = max(line_rate_pps(1e9 * speed, stream["size"]), rate)
        gap_us = 1e6 * (request.burst / rate - (request.burst - 1) / line)
        trains = ((request.burst, whole, 0.0), (rest, min(rest, 1), 1e6 * whole * request.burst / rate))
        for frames, count, after_us in trains:
            if count:
                train = {"pps": line, "pkts_per_burst": frames, "ibg": gap_us, "count": count}
                yield {**stream, "isg": after_us, "mode": ("STLTXMultiBurst", train)}


def burst_s(request: TrialRequest, directions: int) -> float:
    """Return the seconds from a burst to the next: by so much a count may be ahead of the mean rate."""
    return request.burst * directions / request.rate_pps if request.burst > 1 else 0.0


def latency_pps(request: TrialRequest, directions: int) -> float:
    """Return the rate of the latency stream of each direction."""
    return min(_SAMPLES_PPS, _MOST_PART * request.rate_pps / directions)


def with_latency(streams: Sequence[Stream], request: TrialRequest, first_id: int) -> Iterator[Stream]:
    """Yield a latency stream for each sending port, like its first stream, with ids from ``first_id`` on.

    It has one flow and the smallest frame, because TRex writes the time stamp into the payload.
    """
    ports = {stream["port"]: stream for stream in reversed(streams)}
    mode = ("STLTXCont", {"pps": latency_pps(request, len(ports))})
    for number, (_, stream) in enumerate(sorted(ports.items())):
        smallest = {"size": min(sizes(request)), "engine": [], "mode": mode}
        yield {**stream, **smallest, "latency_id": first_id + number}


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
    max_us = float(max_us)
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

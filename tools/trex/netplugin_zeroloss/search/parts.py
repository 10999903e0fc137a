"""What each part of a path does (pure): dead directions, the path that limits, full queues and threads.

A total hides them: half of the frames lost is one dead direction of two, or a device at twice its capacity.
So a direction is judged by itself, and far below the load: there no lack of capacity explains its loss.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from netplugin_zeroloss.values import Direction, Measurement

#: Seconds of traffic within which a direction must begin to forward (addresses are learned, a port comes
#: up), and of one control trial.
GRACE_S: Final = 5.0
CONTROL_S: Final = 1.0
#: Load of a control per direction if nothing came back, and otherwise the part of what came back.
_CONTROL_PPS, _CONTROL_PART = 1000.0, 0.1
#: Frames per second that other programs and switches send (LLDP, spanning tree, ARP).
_STRAY_PPS = 5.0
#: A direction of which at most this share comes back is dead: the share is of others, or of a latency stream.
_DEAD: Final = 0.1
#: Loss of this share is doubted up to this many times the rate that came back at a higher load.
_SHARE, _ABOVE = 0.1, 1.1
#: So few frames tell no share.
_FEW = 20
#: Lost frames of a path that limits, at least, and its share of all.
_HALF, _MOST = 0.5, 0.9


def ways(measured: Measurement) -> tuple[Direction, ...]:
    """Return the directions, or the total of a generator that does not count by direction."""
    return measured.directions or (Direction(measured.tx_packets, measured.rx_packets),)


def _lost(way: Direction) -> float:
    """Return the lost share; 0 if the counters cannot tell it."""
    known = way.tx_packets >= _FEW and 0 <= way.rx_packets <= way.tx_packets
    return 1 - way.rx_packets / way.tx_packets if known else 0.0


def losing(measured: Measurement, least: float = _SHARE) -> tuple[int, ...]:
    """Return the directions that lost at least this share, beyond what the generator lost itself."""
    if measured.rx_errors or measured.queue_drops or not measured.settled:
        return ()
    return tuple(number for number, way in enumerate(ways(measured)) if _lost(way) >= max(least, _SHARE))


def dead(measured: Measurement) -> tuple[int, ...]:
    """Return the directions in which next to nothing came back."""
    return losing(measured, 1 - _DEAD)


def silent(measured: Measurement) -> bool:
    """Whether in some direction no more came back than what other programs may have sent."""
    few = 1 + _STRAY_PPS * measured.elapsed_s
    return any(_lost(way) >= 1 - _DEAD and way.rx_packets <= few for way in ways(measured))


def control_pps(
    measured: Measurement, rate_pps: float, came_back_pps: float, *, lossy: bool, first: bool
) -> float | None:
    """Return the load of a control that shows whether each direction forwards; None: there is no doubt.

    ``came_back_pps``: of a lossy trial at a higher load; 0: there was none. ``first``: no control was run.
    """
    back = [1 - _lost(way) for way in ways(measured)]
    if silent(measured):
        return round(min(rate_pps, _CONTROL_PPS * len(back)), 2)
    if lossy and first and min(back) <= _DEAD * max(back):
        came_back_pps = rate_pps * min(back)
    elif not (lossy and rate_pps <= came_back_pps * _ABOVE and min(back) <= 1 - _SHARE):
        return None
    low = round(came_back_pps * _CONTROL_PART, 2)
    return low if low * CONTROL_S >= _FEW * len(back) else None


def described(measured: Measurement) -> str:
    """Say what came back of each direction: ``1000 of 1000 in direction 0, 0 of 1000 in direction 1``."""
    names = [f" in direction {number}" for number in range(len(measured.directions))] or [""]
    counts = (f"{way.rx_packets} of {way.tx_packets}" for way in ways(measured))
    return ", ".join(count + name for count, name in zip(counts, names, strict=True))


def limiting(lost: Sequence[int]) -> tuple[int, ...]:
    """Return the directions that lost nearly all of the lost frames; empty if all lose alike."""
    worst = max(lost, default=0)
    found = tuple(number for number, count in enumerate(lost) if count and count >= _HALF * worst)
    is_part = 0 < len(found) < len(lost)
    return found if is_part and sum(lost[number] for number in found) >= _MOST * sum(lost) else ()


def located(evidences: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the lost frames by component, of several trials."""
    places: Counter[str] = Counter()
    for evidence in evidences:
        places.update(evidence)
    return {place: count for place, count in places.items() if count}


def place(evidences: Iterable[Mapping[str, float]]) -> str | None:
    """Return the component that lost most frames."""
    places = located(evidences)
    return max(places, key=places.__getitem__) if max(places.values(), default=0) > 0 else None


# -- Queues and threads, from the readings of a trial -------------------------------------------------

#: Readings of parts that share the work, with the value of a full one; None: those of a queue are frames.
_LOADS: Final = (
    (re.compile(r"(ovs)\.(pmd\d+)\.busy_share"), 1.0),
    (re.compile(r"(vnf)\.(vpp_wk_\d+)\.vectors_per_call"), 256.0),
    (re.compile(r"(host)\.(cpu\d+)\.softirq_share"), 1.0),
    (re.compile(r"(\w+\..+)\.(rxq\d+)\.packets"), None),
)
#: A part with this load is full, and one with this load idles.
_FULL, _IDLE = 0.9, 0.5


def full(readings: Mapping[str, float]) -> dict[str, float]:
    """Return the load (0 to 1) of each part that is full while another of its kind idles."""
    found: dict[str, float] = {}
    for pattern, whole in _LOADS:
        kinds: dict[str, dict[str, float]] = defaultdict(dict)
        for name, value in readings.items():
            if match := pattern.fullmatch(name):
                kinds[match[1]][f"{match[1]}.{match[2]}"] = value
        for parts in kinds.values():
            loads = {name: value / (whole or sum(parts.values()) or 1.0) for name, value in parts.items()}
            if min(loads.values()) <= _IDLE:
                found |= {name: load for name, load in loads.items() if load >= _FULL}
    return found

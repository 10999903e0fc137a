"""Judges a trial: whether it is valid, and if so, whether the device lost frames.

Validity is checked first. A generator that sends late, drops in its own transmit queue or does not read
received frames causes the same difference of counters as a device that loses.

RFC 2544 (section 26.1) and RFC 9004 do not define what happens with a trial that did not offer its
load; here it is invalid. Reasons are sentences for people, ``Cause`` is for programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from netplugin_zeroloss.values import ROUNDING, Direction, Measurement, TrialRequest

#: Tolerance of the offered load, as a fraction of the relative width of the goal.
_TENTH: Final = 0.1


class Verdict(StrEnum):
    """Verdict of a trial; ``invalid``: it says nothing about the device."""

    PASSED = "passed"
    LOSSY = "lossy"
    INVALID = "invalid"


class Cause(StrEnum):
    """Cause of an invalid trial."""

    COUNTERS = "counters"
    UNSETTLED = "unsettled"
    RECEIVER = "receiver"
    QUEUE = "queue"
    SHORT = "short"
    LATE = "late"
    FAST = "fast"
    NOTHING_SENT = "nothing_sent"
    CONTRADICTION = "contradiction"
    #: Run far below the load to see whether each direction forwards, or before one did.
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its reason. ``loss_ratio`` is the ratio of the worst direction."""

    verdict: Verdict
    reason: str
    cause: Cause | None = None
    lost_packets: int = 0
    loss_ratio: float = 0.0

    @property
    def valid(self) -> bool:
        return self.verdict is not Verdict.INVALID

    @property
    def lossy(self) -> bool:
        return self.verdict is Verdict.LOSSY


def judge(
    asked: TrialRequest, measured: Measurement, precision: float, max_loss_ratio: float = 0.0
) -> Judgement:
    """Judge one trial (pure). ``precision`` is the relative width of the goal."""
    for cause, reason in _objections(asked, measured, precision):
        return Judgement(Verdict.INVALID, reason, cause)
    return _loss(measured, max_loss_ratio)


def judge_by_rfc9971(asked: TrialRequest, measured: Measurement, max_loss_ratio: float) -> Judgement:
    """Judge one trial by RFC 9971 alone: frames that were not sent are lost (section 4.9.1).

    The loss ratio is that of all directions together (4.5.5), and within 0 and 1 whatever was counted.
    """
    # Rate times duration may be off by one frame.
    unsent = asked.packets - measured.tx_packets
    expected = measured.tx_packets + (round(unsent) if unsent > 1 else 0)
    lost = expected - min(max(measured.rx_packets, 0), expected)
    ratio = lost / expected if expected > 0 else 1.0
    verdict = Verdict.LOSSY if ratio > max_loss_ratio else Verdict.PASSED
    what = f"{lost} of {expected} frames were lost or not sent, a ratio of {ratio:.3g}"
    return Judgement(verdict, what, None, lost, ratio)


def _objections(asked: TrialRequest, measured: Measurement, precision: float) -> Iterator[tuple[Cause, str]]:
    """Yield the reasons that make a trial invalid, most specific first."""
    yield from _about_counters(measured)
    if measured.rx_errors:
        yield Cause.RECEIVER, f"the generator's own receiver dropped {measured.rx_errors} frames"
    if measured.queue_drops:
        yield Cause.QUEUE, f"the generator dropped {measured.queue_drops} frames in its own transmit queue"
    if measured.queue_full:
        delayed = f"was held up {measured.queue_full} times (its queue was full, or it had no CPU)"
        yield Cause.QUEUE, f"the generator {delayed}: frames went out late, in bursts"
    if not measured.aborted:
        yield from _about_the_load(asked, measured, precision)
    if measured.tx_packets == 0:
        yield Cause.NOTHING_SENT, "the generator sent nothing"
    missing = measured.tx_packets - measured.rx_packets
    if 0 < missing <= measured.in_flight_packets:
        moving = f"{measured.in_flight_packets} may still be in flight"
        yield Cause.UNSETTLED, f"{missing} frames are missing and {moving}: loss is not certain"
    if measured.aborted and missing == 0:
        yield Cause.CONTRADICTION, "the trial was stopped for loss, and no frame is missing"


def _about_counters(measured: Measurement) -> Iterator[tuple[Cause, str]]:
    times = (measured.elapsed_s, measured.elapsed_uncertainty_s)
    if not all(math.isfinite(t) and t >= 0 for t in times):
        yield Cause.COUNTERS, f"the elapsed time is {measured.elapsed_s} s"
    total = Direction(measured.tx_packets, measured.rx_packets)
    counts = [count for way in (total, *measured.directions) for count in (way.tx_packets, way.rx_packets)]
    counts += [measured.tx_shortfall, measured.rx_errors, measured.queue_drops, measured.queue_full]
    counts += [measured.in_flight_packets]
    if negative := [count for count in counts if count < 0]:
        yield Cause.COUNTERS, f"a counter is negative ({negative[0]}): it wrapped or was reset"
    for number, way in enumerate([total, *measured.directions], -1):
        if way.rx_packets > way.tx_packets:
            name = f"direction {number}: " if number >= 0 else ""
            counted = f"{way.rx_packets} frames received and {way.tx_packets} sent"
            yield Cause.COUNTERS, f"{name}{counted}: more than was sent"
    if measured.directions and Direction.total(measured.directions) != total:
        yield Cause.COUNTERS, "the directions do not add up to the totals"
    if not measured.settled:
        yield Cause.UNSETTLED, "the counters still moved when they were read last"


def _about_the_load(
    asked: TrialRequest, measured: Measurement, precision: float
) -> Iterator[tuple[Cause, str]]:
    """Check the offered load: all frames sent, and in the requested time."""
    tolerance, sent, seconds = precision * _TENTH, measured.tx_packets, asked.duration_s
    counted = f"the generator sent {sent} of {asked.packets:.0f} frames"
    took = f"the trial took {measured.elapsed_s:.6g} s instead of {seconds:g} s"
    # Rate times duration may be off by one frame.
    short = max(asked.packets - sent, measured.tx_shortfall)
    if short > max(1.0, asked.packets * tolerance):
        idle = [f"; direction {n} sent none" for n, d in enumerate(measured.directions) if not d.tx_packets]
        yield Cause.SHORT, f"{counted}, {short / asked.packets:.3%} less than asked{''.join(idle)}"
    doubt = measured.elapsed_uncertainty_s + ROUNDING * seconds
    over = measured.elapsed_s - seconds
    if over > seconds * tolerance + doubt:
        load = f"{measured.achieved_pps:.6g} pps, not {asked.rate_pps:.6g}"
        yield Cause.LATE, f"{took}: the load was {load}"
    # A load above the request is also wrong. A full width is allowed: some generators finish their
    # flows, and a device that passes at a higher load passes at this one.
    if -over > seconds * precision + doubt:
        yield Cause.FAST, f"{took}: the load was higher than asked"
    if sent - asked.packets > max(1.0, asked.packets * precision):
        yield Cause.FAST, f"{counted}: more than asked"


def _loss(measured: Measurement, max_loss_ratio: float) -> Judgement:
    """Judge the loss of a valid trial. Every direction must meet the loss ratio by itself."""
    ways = measured.directions or (Direction(measured.tx_packets, measured.rx_packets),)
    lost = sum(way.tx_packets - way.rx_packets for way in ways)
    ratios = [(way.tx_packets - way.rx_packets) / way.tx_packets if way.tx_packets else 0.0 for way in ways]
    worst = max(ratios)
    if lost == 0:
        return Judgement(Verdict.PASSED, f"all {measured.tx_packets} frames came back")
    where = f" in direction {ratios.index(worst)}" if len(ways) > 1 else ""
    what = f"{lost} of {measured.tx_packets} frames were lost, a ratio of {worst:.3g}{where}"
    if worst <= max_loss_ratio:
        return Judgement(Verdict.PASSED, f"{what}; {max_loss_ratio:g} may be", None, lost, worst)
    after = f", {measured.elapsed_s:.3g} s after the start" if measured.aborted else ""
    return Judgement(Verdict.LOSSY, what + after, None, lost, worst)

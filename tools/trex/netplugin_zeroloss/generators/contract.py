"""The contract of a generator, and what generators share: descriptions, and the watch over a trial."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from netplugin_zeroloss.values import (
    Direction,
    Measurement,
    Progress,
    TrialRequest,
    UnusableInput,
    line_rate_pps,
)

#: Default for the frames that rings and queues on the path can hold.
IN_FLIGHT: Final = 2048

Positive = Annotated[float, Field(ge=1e-6, le=1e15, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class GeneratorDescription(BaseModel):
    """What options or a run description say of a generator."""

    model_config = ConfigDict(extra="forbid", frozen=True)


_Path = TypeVar("_Path", bound=GeneratorDescription)


def each_once(paths: tuple[_Path, ...]) -> tuple[_Path, ...]:
    """Reject a port that sends, or receives, for two paths: its counters could not be split."""
    for name in ("send", "receive"):
        ends = [getattr(path, name) for path in paths]
        if len(set(ends)) < len(ends):
            raise ValueError(f"no two paths may {name} at the same port")
    return paths


@dataclass(frozen=True, slots=True)
class GeneratorInfo:
    """Capabilities of a generator."""

    name: str
    max_pps: Annotated[float, Field(gt=0)] = math.inf
    #: Simulated time: a trial takes no real time, and ``elapsed_s`` is virtual.
    virtual_time: bool = False
    can_abort: bool = True
    #: Shorter trials are inaccurate.
    min_trial_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    #: Line rate of its ports in bit/s on the wire, all directions together.
    line_bps: Annotated[float, Field(gt=0)] = math.inf
    #: Whether it measures the latency of frames.
    latency: bool = False
    #: Whether it sends frames in bursts, and also those of a mix.
    bursts: bool = False
    bursts_of_mixes: bool = False

    def check_burst(self, burst: int, mix: str) -> None:
        """Check that it can send such bursts. Raises: UnusableInput."""
        if burst > 1 and not self.bursts:
            raise UnusableInput(f"burst {burst}", f"the generator {self.name} cannot send frames in bursts")
        if burst > 1 and mix and not self.bursts_of_mixes:
            why = f"a burst of the generator {self.name} has frames of one size, not {mix}"
            raise UnusableInput(f"burst {burst}", why)

    def limit_pps(self, frame_size: float) -> float:
        """Return the maximum frame rate in pps; ``frame_size`` includes the FCS and is the mean of a mix."""
        return min(self.max_pps, line_rate_pps(self.line_bps, frame_size))


class Generator(AbstractContextManager["Generator"], ABC):
    """Sends frames through the device under test and counts received frames.

    ``run`` must stop sending, let the device drain, and then read the counters until two reads are
    equal, so that frames in flight do not count as lost.
    """

    _info: GeneratorInfo
    #: What ``close`` releases.
    _opened = ExitStack()

    @property
    def info(self) -> GeneratorInfo:
        """Capabilities, known before the first trial."""
        return self._info

    @abstractmethod
    def run(self, request: TrialRequest) -> Measurement:
        """Run one trial. Raises: GeneratorError."""

    def recall(self, request: TrialRequest) -> None:
        """Account for a trial that was run before a restart; called in order, without running it again."""

    def close(self) -> None:
        """Stop sending and release all resources. Idempotent."""
        self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()


# -- The watch over a running trial: certain loss, bursts, lateness, and when the counters have settled. --
# Times are of the monotonic clock, in seconds; counts are frames since the trial began.


T = TypeVar("T")

#: Factor by which a false alarm raises the in-flight limit: an invalid trial is tried three times.
_FALSE_ALARM: Final = 8
#: Loss must persist this long, so that a delayed poll does not look like loss.
_CERTAIN_S: Final = 0.05
#: Seconds without a frame after which no more frames are expected.
QUIET_S: Final = 0.25
#: Seconds after which counters that still change are reported as unsettled.
_DRAIN_S: Final = 10.0
#: Seconds between two reads of complete counters.
_MOMENT_S: Final = 0.02
#: Seconds that may be between two looks.
_BETWEEN_S: Final = 0.02
#: A trial that is late by this part of its duration, and by the seconds of its generator, cannot catch up.
LATE_PART: Final = 0.02


class PaceWatch:
    """Measures the largest burst sent to catch up after a pause; a lower bound, from polled counters."""

    def __init__(self, rate_pps: float) -> None:
        self._rate = rate_pps
        self._start: float | None = None
        self._most_behind = 0.0
        self.burst_packets = 0

    def look(self, now: float, sent: int) -> None:
        """Account for ``sent`` frames at time ``now``."""
        if not sent:
            return
        if self._start is None:
            self._start = now - sent / self._rate
        behind = (now - self._start) * self._rate - sent
        self._most_behind = max(self._most_behind, behind)
        # The frames caught up since the largest lag; a constant lag is no burst.
        self.burst_packets = max(self.burst_packets, round(self._most_behind - max(0.0, behind)))


class TrialWatch:
    """Watches the directions of one trial: decides when to stop it, and keeps the readings requested.

    A difference between two counters is not yet loss: frames are in flight, and a slightly overloaded
    device fills its rings for seconds before it loses the first frame.
    """

    def __init__(self, request: TrialRequest, directions: int, in_flight: int, late_s: float) -> None:
        """``in_flight``: frames that the device may hold; ``late_s``: how late the generator may be."""
        self._request = request
        #: Frames that may be in flight: more after a false alarm, a trial that was stopped with none missing.
        self.in_flight = in_flight
        #: Since when more than that are missing in each direction.
        self._losing_since = [math.inf] * directions
        #: Evenly spaced from the first frame on.
        self._readings: tuple[Progress, ...] = ()
        self._period_s = request.duration_s / request.readings if request.readings else math.inf
        self._first: float | None = None
        self._takes_s = request.duration_s * (1 + LATE_PART) + late_s
        self.begin()

    def begin(self) -> None:
        """Let the time of the trial begin now."""
        self._late = time.monotonic() + self._takes_s
        self._aborted = False

    def stops(self, now: float, counted: Sequence[Direction], between: float = 0.0) -> bool:
        """Account for the counters at ``now``; returns whether loss is certain or the trial too late.

        ``between``: frames that may have been sent between the counters of a direction.
        """
        total = Direction.total(counted)
        if self._first is None and total.tx_packets:
            self._first = now
        if self._first is not None and now - self._first >= (len(self._readings) + 1) * self._period_s:
            self._readings += (Progress(now - self._first, total.tx_packets, total.rx_packets),)
        self._losing_since = [
            min(since, now) if d.tx_packets - d.rx_packets > self.in_flight + between else math.inf
            for since, d in zip(self._losing_since, counted, strict=True)
        ]
        is_lost = now - min(self._losing_since) >= _CERTAIN_S
        late = time.monotonic() > self._late
        self._aborted = self._request.abort_on_loss and is_lost and not late
        return late or self._aborted

    def finish(self, measured: Measurement) -> Measurement:
        """Return the measurement with what was watched."""
        if self._aborted and measured.tx_packets == measured.rx_packets:
            self.in_flight *= _FALSE_ALARM
        return replace(measured, aborted=self._aborted, progress=self._readings)


@dataclass(frozen=True, slots=True)
class Look:
    """Frames sent at ``at_s``, accurate to ``doubt_s`` seconds."""

    at_s: float
    doubt_s: float
    sent: int


def elapsed(looks: Sequence[Look], total: int) -> tuple[float, float]:
    """Return the seconds from the first frame to the last, and their uncertainty (pure).

    Extrapolates the rate between the first and the last sample with traffic to all frames.
    """
    moving = [look for look in looks if 0 < look.sent < total]
    if len(moving) < 2 or moving[0].sent == moving[-1].sent or moving[0].at_s >= moving[-1].at_s:
        # Too short for two samples: somewhere within the polled time.
        span = looks[-1].at_s - looks[0].at_s if looks else 0.0
        return span / 2, span / 2 + _BETWEEN_S
    first, last = moving[0], moving[-1]
    seconds = total * (last.at_s - first.at_s) / (last.sent - first.sent)
    stretch = seconds / (last.at_s - first.at_s)
    return seconds, (first.doubt_s + last.doubt_s) * stretch


def counted(
    directions: Sequence[Direction], elapsed_s: float, rx_errors: int, queue_drops: int, **more: Any
) -> Measurement:
    """Return the measurement of all directions together."""
    total = Direction.total(directions)
    more |= {"rx_errors": rx_errors, "queue_drops": queue_drops, "directions": tuple(directions)}
    evidence = {"generator.rx": rx_errors, "generator.queue": queue_drops}
    return Measurement(total.tx_packets, total.rx_packets, elapsed_s, evidence=evidence, **more)


def all_came(directions: Sequence[Direction]) -> bool:
    """Whether no frame is missing in any direction."""
    return all(d.rx_packets >= d.tx_packets for d in directions)


def at_rest(read: Callable[[], T], complete: Callable[[T], bool], quiet_s: float = QUIET_S) -> tuple[T, bool]:
    """Read until the counters settle; returns the last value and whether they settled."""
    deadline = time.monotonic() + _DRAIN_S
    last = read()
    while True:
        # Read complete counters twice too: more frames may arrive than were sent.
        time.sleep(_MOMENT_S if complete(last) else quiet_s)
        before, last = last, read()
        if before == last or time.monotonic() > deadline:
            return last, before == last

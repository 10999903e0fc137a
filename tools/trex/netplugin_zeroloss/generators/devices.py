"""Simulated devices under test with known answers, in virtual time.

The simulation models the queue, not single packets: between two events (a stall, a link glitch, a
change of capacity) the queue fills or drains at a constant rate. A minute at 14 Mpps takes about a
thousand steps and one millisecond. All randomness comes from the seed.

The queue is empty at the start of each trial. The clock, and with it warm-up, drift and periodic
glitches, continues from trial to trial and counts traffic only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

#: Interval at which the simulated generator checks for loss, in seconds.
_POLL_S = 0.01
#: Step of the capacity of a drifting device, in seconds.
_DRIFT_STEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Stalls:
    """Pauses of the device: ``per_second`` on average, each of random length."""

    per_second: float
    #: Draws the length of a stall in seconds.
    draw_s: Callable[[random.Random], float]
    #: Probability that a stall is longer than this many seconds.
    longer: Callable[[float], float]

    @staticmethod
    def exponential(per_second: float, mean_s: float) -> Stalls:
        return Stalls(per_second, lambda r: r.expovariate(1 / mean_s), lambda s: math.exp(-s / mean_s))

    @staticmethod
    def heavy(per_second: float, least_s: float, exponent: float) -> Stalls:
        """Pareto distribution: a stall ten times as long is 10**exponent times as rare."""
        return Stalls(
            per_second,
            lambda r: least_s * (1 - r.random()) ** (-1 / exponent),
            lambda s: min(1.0, (least_s / s) ** exponent),
        )


@dataclass(frozen=True, slots=True)
class Glitches:
    """Total loss for a short time at any load: a timer that fires once a minute, a link flap."""

    length_s: float = 100e-6
    every_s: float = 60.0
    #: "timer": exactly every ``every_s``; "window": once in each ``every_s`` at a random time;
    #: "random": at random intervals with this mean.
    when: Literal["timer", "window", "random"] = "timer"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Parameters of a simulated device."""

    capacity_pps: float = 4.2e6
    ring_packets: float = 1024
    stalls: Stalls | None = None
    glitches: Glitches | None = None
    #: The cold device is faster by this fraction; the excess decays with time constant ``drift_s``.
    drift: float = 0.0
    drift_s: float = 30.0
    #: Every other ``step_s`` seconds of traffic (``step_once``: from then on) it is slower by this fraction.
    step: float = 0.0
    step_s: float = 10.0
    step_once: bool = False
    #: Seconds of traffic during which it loses ``warm_up_losses`` frames per second at any load.
    warm_up_s: float = 0.0
    warm_up_losses: float = 50.0
    #: Loss probability of each frame.
    frame_error_ratio: float = 0.0

    @property
    def lasting_pps(self) -> float:
        """Return the capacity that each long trial of a warm device meets."""
        return self.capacity_pps * (1 - (self.step if self.step_once else max(self.step, 0.0)))

    def holds(self, burst: int) -> bool:
        """Whether the queue can hold a whole burst; single frames are a steady load."""
        return burst == 1 or burst <= self.ring_packets

    def loss_probability(self, rate_pps: float, duration_s: float) -> float:
        """Return the probability that a warm device loses a frame at this load within this time.

        Ignores stalls that begin while the queue of an earlier stall still drains: they are rare near
        the answer.
        """
        if rate_pps > self.lasting_pps + self.ring_packets / duration_s:
            return 1.0
        hazard = rate_pps * self.frame_error_ratio
        if self.stalls is not None:
            hazard += self.stalls.per_second * self.stalls.longer(self.ring_packets / rate_pps)
        if self.glitches is not None:
            if self.glitches.when != "random" and duration_s >= self.glitches.every_s:
                return 1.0
            hazard += 1 / self.glitches.every_s
        return -math.expm1(-hazard * duration_s)

    def limit_pps(self, duration_s: float) -> float | None:
        """Return the load that a trial loses at with probability 1/2, at most the capacity; None if none."""
        low, high = 1.0, self.lasting_pps
        if self.loss_probability(high, duration_s) < 0.5:
            return high
        if self.loss_probability(low, duration_s) >= 0.5 or self.frame_error_ratio:
            return None
        for _ in range(60):
            middle = math.sqrt(low * high)
            if self.loss_probability(middle, duration_s) < 0.5:
                low = middle
            else:
                high = middle
        return None if low < 0.01 * self.capacity_pps else low


@dataclass(slots=True)
class Passage:
    """Frames sent and lost in one trial."""

    sent: int
    lost: int
    elapsed_s: float
    aborted: bool
    places: dict[str, int] = field(default_factory=dict)

    @property
    def received(self) -> int:
        return self.sent - self.lost


def _arrivals(rng: random.Random, per_second: float, until: float) -> Iterator[float]:
    """Yield the times of a Poisson process."""
    at = rng.expovariate(per_second) if per_second > 0 else math.inf
    while at < until:
        yield at
        at += rng.expovariate(per_second)


class SimulatedDevice:
    """A simulated device: its clock and its random generator."""

    def __init__(self, spec: DeviceSpec, rng: random.Random) -> None:
        self.spec = spec
        self._rng = rng
        self._clock = 0.0
        #: Times of drawn glitches that are still to come.
        self._glitches: list[float] = []
        self._last_glitch, self._drawn = 0.0, 0
        self._phase = rng.random() if spec.glitches else 0.0

    def run(self, rate_pps: float, duration_s: float, abort: bool, burst: int = 1) -> Passage:
        """Run one trial; with ``abort`` it ends at the first poll after a loss.

        A burst comes all at once. One that the queue can hold leaves as much less room for other frames;
        larger ones are simulated one by one.
        """
        trial = _Trial(self.spec, rate_pps, duration_s, abort, burst, self._clock)
        for event in self._events(rate_pps, duration_s, burst):
            if event[0] >= trial.end:
                break
            trial.happens(*event)
        passage = trial.finish()
        self._clock += passage.elapsed_s
        self._glitches = [at for at in self._glitches if at >= self._clock]
        return passage

    def _events(self, rate: float, duration: float, burst: int) -> list[tuple[float, str, float]]:
        """Return (time, place, frames) in order of time; frames of no place are only offered."""
        spec, rng = self.spec, self._rng
        found: list[tuple[float, str, float]] = []
        if spec.stalls is not None:
            stalls = _arrivals(rng, spec.stalls.per_second, duration)
            found += [(at, "rx_ring_full", spec.stalls.draw_s(rng) * rate) for at in stalls]
        losses = spec.warm_up_losses if spec.warm_up_s else 0.0
        cold_s = min(max(0.0, spec.warm_up_s - self._clock), duration)
        found += [(at, "warm_up", 1.0) for at in _arrivals(rng, losses, cold_s)]
        errors = _arrivals(rng, spec.frame_error_ratio * rate, duration)
        found += [(at, "frame_errors", 1.0) for at in errors]
        if spec.glitches is not None:
            self._draw_glitches(spec.glitches, self._clock + duration)
            frames = max(1.0, spec.glitches.length_s * rate)
            found += [(at - self._clock, "link", frames) for at in self._glitches]
        if not spec.holds(burst):
            total = round(rate * duration)
            found += [
                (n * burst / rate, "", min(burst, total - n * burst)) for n in range(-(-total // burst))
            ]
        if spec.drift or spec.step:
            found += [(n * _DRIFT_STEP_S, "", 0.0) for n in range(1, int(duration / _DRIFT_STEP_S) + 1)]
        return sorted(found)

    def _draw_glitches(self, glitches: Glitches, until: float) -> None:
        """Draw the glitches up to ``until``; they persist even if the trial stops earlier."""
        every, rng = glitches.every_s, self._rng
        while self._last_glitch < until:
            if glitches.when == "timer":
                self._last_glitch = (self._drawn + self._phase) * every
            elif glitches.when == "window":
                self._last_glitch = (self._drawn + rng.random()) * every
            else:
                self._last_glitch += rng.expovariate(1 / every)
            self._drawn += 1
            self._glitches.append(self._last_glitch)


class _Trial:
    """Simulates the queue of one trial from event to event."""

    def __init__(
        self, spec: DeviceSpec, rate: float, duration: float, abort: bool, burst: int, clock: float
    ) -> None:
        self._spec, self._rate, self._abort, self._clock = spec, rate, abort, clock
        #: Whether frames come at a steady rate, and not by events.
        self._steady = spec.holds(burst)
        self._ring = spec.ring_packets - (burst - 1 if self._steady else 0)
        self._offered = 0
        self._asked = self.end = duration
        self._now = self._queue = self._total = 0.0
        self._lost: dict[str, float] = {}

    def happens(self, at: float, place: str, frames: float) -> None:
        self._serve_until(at)
        if at >= self.end:
            return
        if place and place != "rx_ring_full":
            self._lose(frames, place, at)
        elif frames:
            self._offered += 0 if place else round(frames)
            self._fill(frames, at)

    def finish(self) -> Passage:
        self._serve_until(self.end)
        places = {place: round(count) for place, count in self._lost.items() if count >= 0.5}
        sent = round(self._rate * self.end) if self._steady else self._offered
        lost = min(sent, sum(places.values()))
        return Passage(sent, lost, self.end, self.end < self._asked and lost > 0, places)

    def _serve_until(self, at: float) -> None:
        """Advance to ``at``: the queue fills or drains at a constant rate."""
        capacity = self._capacity_at(self._clock + at)
        at = min(at, self.end)
        if at <= self._now:
            return
        net = (self._rate if self._steady else 0.0) - capacity
        if net > 0:
            full_at = self._now + (self._ring - self._queue + 1) / net
            if full_at < at:
                # The first loss occurs at ``full_at``; with abort the rest may not be sent.
                self._stop_after(full_at)
                at = min(at, self.end)
            self._fill(net * (at - self._now), full_at)
        else:
            self._queue = max(0.0, self._queue + net * (at - self._now))
        self._now = at

    def _capacity_at(self, clock: float) -> float:
        spec, phase = self._spec, int(clock / self._spec.step_s)
        slower = spec.step * (min(phase, 1) if spec.step_once else phase % 2)
        return spec.capacity_pps * (1 - slower) * (1 + spec.drift * math.exp(-clock / spec.drift_s))

    def _fill(self, packets: float, at: float) -> None:
        self._queue += packets
        over = self._queue - self._ring
        if over > 0:
            self._queue = self._ring
            self._lose(over, "rx_ring_full", at)

    def _lose(self, packets: float, place: str, at: float) -> None:
        self._lost[place] = self._lost.get(place, 0.0) + packets
        self._total += packets
        if self._total >= 1:
            self._stop_after(at)

    def _stop_after(self, at: float) -> None:
        if self._abort:
            seen = (math.floor(at / _POLL_S) + 1) * _POLL_S
            self.end = max(self._now, min(self.end, seen))


DEVICES: dict[str, DeviceSpec] = {
    "clean": DeviceSpec(),
    "noisy": DeviceSpec(stalls=Stalls.exponential(20, 60e-6)),
    "rare-stalls": DeviceSpec(stalls=Stalls.exponential(0.1, 200e-6)),
    "heavy-stalls": DeviceSpec(stalls=Stalls.heavy(2, 50e-6, 2.5)),
    "glitch": DeviceSpec(glitches=Glitches()),
    "glitch-window": DeviceSpec(glitches=Glitches(when="window")),
    "glitch-random": DeviceSpec(glitches=Glitches(when="random")),
    "frame-errors": DeviceSpec(frame_error_ratio=1e-6),
    "drift": DeviceSpec(drift=0.1),
    "warm-up": DeviceSpec(warm_up_s=8.0),
    "slow-warm-up": DeviceSpec(warm_up_s=25.0, warm_up_losses=0.5),
    "wire-speed": DeviceSpec(capacity_pps=20e6),
}

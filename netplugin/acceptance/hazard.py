"""Bayesian model of the loss rate of a device as a function of the load (pure).

A device with random loss (its CPUs are preempted for tens of microseconds at a time) has no sharp
limit: the probability of loss within a minute rises with the load, and one trial says little. The model
combines all trials with Bayes' rule on a grid, without libraries.

Loss events at load r occur at a rate h(r). A trial stopped at its first loss event gives the time of
that event. Two families of h are considered:

- *falling*: h falls with the load; ``limit`` is the load with ``TARGET`` events within the goal's
  duration, and b is the slope there. Two shapes are tried, because a stall of length s loses where
  r * s exceeds the ring: a power of the load (stalls with a heavy tail), or exponential in 1/r (a light
  tail).
- *floor*: h does not depend on the load, or only as the number of frames does (a link with bit errors).
  Then no load is low enough, and no rate can be reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

#: Loss events within the goal's duration at the searched load: P(loss) is 1 - exp(-TARGET).
TARGET = 1.0
#: Slopes (b = d ln h / d ln r) with their prior weights. Production hosts have 4 to 12; the steep
#: ones represent a sharp limit.
_SLOPES = {2: .6, 3: .8, 4.5: 1.0, 6.5: 1.0, 9: 1.0, 13: .8, 20: .5, 40: .3, 100: .3, 300: .3}  # fmt: skip
#: Grid of the limit: from 1 % of the first lossy load to slightly above it.
_LIMITS = [math.exp(-4.6 + 4.65 * i / 119) for i in range(120)]
#: Loss events within the goal's duration at the first lossy load, for load-independent loss.
_FLOORS = [math.exp(-2 + 0.2 * i) for i in range(41)]
_FLOOR_PRIOR = 0.2
#: Upper limit of the exponent: the device then loses immediately.
_LARGEST = 40.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of the limit: geometric mean, spread, and the probability that there is no limit."""

    limit_pps: float
    #: Standard deviation of ln(limit).
    spread: float
    slope: float
    #: Probability of load-independent loss.
    floor: float


class HazardModel:
    """Posterior for one device; ``time_s``: duration for which the goal allows no loss."""

    def __init__(self, reference_pps: float, time_s: float) -> None:
        self._reference = reference_pps
        self._base = math.log(TARGET / time_s)
        self._cells = [
            (x * reference_pps, b, power)
            for x, b, power in product(_LIMITS, _SLOPES, (True, False))
        ]
        self._log = [math.log(_SLOPES[b]) for _, b, _ in self._cells]
        whole = _log_sum(self._log)
        self._log = [a - whole for a in self._log]
        self._floors = [(math.log(x / time_s), b) for x, b in product(_FLOORS, (0, 1))]
        self._floor_log = [-math.log(len(self._floors))] * len(self._floors)

    def saw(self, rate_pps: float, time_s: float, lost: bool, stopped: bool = True) -> None:
        """Update with a trial of ``time_s`` seconds; ``stopped``: it ended at its first loss."""
        relative = math.log(rate_pps / self._reference)
        for i, (limit, slope, power) in enumerate(self._cells):
            rise = slope * (math.log(rate_pps / limit) if power else 1 - limit / rate_pps)
            self._log[i] += _likelihood(self._base + min(rise, _LARGEST), time_s, lost, stopped)
        for i, (level, b) in enumerate(self._floors):
            self._floor_log[i] += _likelihood(level + b * relative, time_s, lost, stopped)

    def estimate(self) -> Estimate:
        falling, floor = _log_sum(self._log), _log_sum(self._floor_log)
        odds = falling - floor + math.log(1 / _FLOOR_PRIOR - 1)
        weights = [math.exp(a - falling) for a in self._log]
        mean = sum(w * math.log(c[0]) for w, c in zip(weights, self._cells, strict=True))
        variance = sum(
            w * (math.log(c[0]) - mean) ** 2 for w, c in zip(weights, self._cells, strict=True)
        )
        slope = sum(w * math.log(c[1]) for w, c in zip(weights, self._cells, strict=True))
        return Estimate(
            math.exp(mean), math.sqrt(max(0.0, variance)), math.exp(slope),
            1 / (1 + math.exp(max(-700.0, min(700.0, odds)))),
        )  # fmt: skip


def _likelihood(log_hazard: float, time_s: float, lost: bool, stopped: bool) -> float:
    """Return the log-likelihood of no event, of the first event at ``time_s``, or of at least one."""
    events = math.exp(log_hazard) * time_s
    if not lost:
        return -events
    if stopped:
        return log_hazard - events
    return math.log(-math.expm1(-max(events, 1e-300)))


def _log_sum(logs: list[float]) -> float:
    top = max(logs)
    return top + math.log(sum(math.exp(a - top) for a in logs))

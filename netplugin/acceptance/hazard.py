"""How often a device loses at a load, learnt from the times at which its trials lost (pure).

A device that loses by chance (its cores are taken from it for some tens of microseconds now and
then) has no sharp limit: the chance to lose in a minute rises with the load. What one trial says
there is little. This model puts all trials together. It is Bayes' rule on a grid, without libraries.

At the load r the loss events of a device come at a rate h(r), and a trial that is stopped at the
first of them tells when it came. Two families of h are considered:

- *falling*: h falls with the load; ``limit`` is the load at which it is ``TARGET`` in a goal's time,
  and the slope there is b. The shape is one of two, for a stall of length s loses where r * s exceeds
  the ring: a power of the load (stalls with a heavy tail) or exponential in 1/r (a light tail).
- *floor*: h does not depend on the load, or only as much as the number of frames does (a link with
  bit errors). No load is low enough then, and a number would be made up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

#: Loss events in the time of a goal at the load that is looked for: P(loss) is 1 - exp(-TARGET).
TARGET = 1.0
#: Slopes (b = d ln h / d ln r) and how likely each is before anything is known. Operators' hosts have
#: 4 to 12; the steep ones stand for a limit that is sharp after all.
_SLOPES = {2: .6, 3: .8, 4.5: 1.0, 6.5: 1.0, 9: 1.0, 13: .8, 20: .5, 40: .3, 100: .3, 300: .3}  # fmt: skip
#: The limit is looked for between 1 % of the first load that lost and a little above it.
_LIMITS = [math.exp(-4.6 + 4.65 * i / 119) for i in range(120)]
#: Events in the time of a goal at the first load that lost, if there is a floor.
_FLOORS = [math.exp(-2 + 0.2 * i) for i in range(41)]
_FLOOR_PRIOR = 0.2
#: Beyond this a device loses at once, whatever the exponent says.
_LARGEST = 40.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Where the limit is: its logarithmic mean, the spread of that, and whether there is one at all."""

    limit_pps: float
    #: Standard deviation of ln(limit).
    spread: float
    slope: float
    #: Probability that the loss does not fall with the load.
    floor: float


class HazardModel:
    """What is believed of one device; ``time_s`` is the time in which the goal allows no loss."""

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
        """A trial of this length; ``stopped`` says that it ended at its first loss."""
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
    """Of no event in this time, of the first one at its end, or of one at least (logarithm)."""
    events = math.exp(log_hazard) * time_s
    if not lost:
        return -events
    if stopped:
        return log_hazard - events
    return math.log(-math.expm1(-max(events, 1e-300)))


def _log_sum(logs: list[float]) -> float:
    top = max(logs)
    return top + math.log(sum(math.exp(a - top) for a in logs))

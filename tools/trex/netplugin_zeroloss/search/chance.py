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

from netplugin_zeroloss.search.context import SearchContext
from netplugin_zeroloss.search.parts import place
from netplugin_zeroloss.search.trials import Asking, Floor, Outcome, SearchVerdict, Trial
from netplugin_zeroloss.values import ROUNDING

#: Loss events within the goal's duration at the searched load: P(loss) is 1 - exp(-TARGET).
TARGET = 1.0
#: Slopes (b = d ln h / d ln r) with their prior weights. Production hosts have 4 to 12; the steep
#: ones represent a sharp limit.
_SLOPES = {2: 0.6, 3: 0.8, 4.5: 1.0, 6.5: 1.0, 9: 1.0, 13: 0.8, 20: 0.5, 40: 0.3, 100: 0.3, 300: 0.3}
#: Grid of the limit: from 1 % of the first lossy load to slightly above it.
_LIMITS = [math.exp(-4.6 + 4.65 * i / 119) for i in range(120)]
#: Loss events within the goal's duration at the first lossy load, for load-independent loss.
_FLOORS = [math.exp(-2 + 0.2 * i) for i in range(41)]
_FLOOR_PRIOR = 0.2
#: Upper limit of the exponent: the device then loses immediately.
_LARGEST = 40.0


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """Estimate of the limit: geometric mean, spread, and the probability that there is no limit."""

    limit_pps: float
    #: Standard deviation of ln(limit).
    spread: float
    slope: float
    #: Probability of load-independent loss.
    floor: float

    def makes_likely(self, lower: float) -> bool:
        """Whether a pass at ``lower`` is plausible."""
        return lower <= self.limit_pps * _LIKELY[self.slope >= _SHARP]


class HazardModel:
    """Posterior for one device; ``time_s``: duration for which the goal allows no loss."""

    def __init__(self, reference_pps: float, time_s: float) -> None:
        self._reference = reference_pps
        self._base = math.log(TARGET / time_s)
        self._cells = [
            (x * reference_pps, b, power) for x, b, power in product(_LIMITS, _SLOPES, (True, False))
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

    def estimate(self) -> LossEstimate:
        falling, floor = _log_sum(self._log), _log_sum(self._floor_log)
        odds = falling - floor + math.log(1 / _FLOOR_PRIOR - 1)
        weights = [math.exp(a - falling) for a in self._log]
        mean = sum(w * math.log(c[0]) for w, c in zip(weights, self._cells, strict=True))
        variance = sum(w * (math.log(c[0]) - mean) ** 2 for w, c in zip(weights, self._cells, strict=True))
        slope = sum(w * math.log(c[1]) for w, c in zip(weights, self._cells, strict=True))
        return LossEstimate(
            math.exp(mean),
            math.sqrt(max(0.0, variance)),
            math.exp(slope),
            1 / (1 + math.exp(max(-700.0, min(700.0, odds)))),
        )


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


# -- Search for devices with random loss: model the loss rate against the load, then converge from above.
# Such a device loses at every load sooner or later, so a single trial says little. The model above
# combines all trials and proposes the next load. Trials above the answer end at their first loss and cost
# little, so the search approaches from above. A load is the answer when it passed for the goal's
# duration, the load one width above lost, and the model rates the pass as plausible.

#: Probability of load-independent loss above which control trials run at once, and above which they
#: run before an answer is accepted.
_FLOOR_LIKELY = 0.5
_FLOOR_POSSIBLE = 0.2
#: A trial lowers the load at most to this fraction, and by at least the minimum step: trials that
#: lose early are short and informative. The second value applies after many lossy trials.
_LARGEST_STEP = (0.85, 0.75)
_STEPS_BEFORE_LARGER = 7
_SMALLEST_STEP = 0.06
#: The next load is this many standard deviations above the estimated limit.
_FROM_ABOVE = 0.6
#: A pass is accepted up to this factor of the estimated limit; the second value applies to a sharp
#: limit, because the grid of the model is coarse.
_LIKELY = (1.02, 1.05)
#: From this slope the limit is sharp, and the search bisects.
_SHARP = 30.0
#: Loss that does not recur within this multiple of the traffic up to it is attributed to warm-up.
_QUIET = 5.0
#: Load of a control trial as a fraction of the forwarding rate.
_CONTROL = 0.1
#: Lossy control trials that prove load-independent loss, and passed ones that exclude it.
CONTROLS_LOST = 2
CONTROLS_PASSED = 3


class ChanceSearch(SearchContext):
    """Continues a search whose full-length trials lost frames late."""

    _control_pps = 0.0

    def by_chance(self) -> Asking[Outcome | None]:
        """Search for the goal's load.

        Returns: None if all loss occurred at the beginning, so the device was still warming up.
        """
        model = self._learn()
        while True:
            lower = self.lower
            upper = min(self.upper, self.log.ceiling)
            seen = model.estimate()
            closed = lower is not None and self.is_close(lower, upper)
            if seen.floor > (_FLOOR_POSSIBLE if closed else _FLOOR_LIKELY):
                passed, lost = self._controls()
                if lost >= CONTROLS_LOST:
                    return None if self._is_early() else self._floor()
                if passed < CONTROLS_PASSED:
                    trial = yield from self._control(self.upper)
                    if not trial.valid:
                        return self.generator_limited(lower or 0.0)
                    self._teach(model, trial)
                    continue
            if closed and lower is not None and seen.makes_likely(lower):
                if self._lost_only_at_first():
                    return None
                if not self.is_close(lower, self.upper):
                    return self.generator_limited(lower)
                return self.ndr(lower, upper, "bracketed; loss below capacity is a matter of chance")
            rate = self._next(seen, lower, upper)
            if rate < self.least():
                return (yield from self.search_floor(rate))
            trial = yield from self.ask(rate, self.goal.final_trial_s, "how often does it lose?")
            self._teach(model, trial)

    def _is_early(self) -> bool:
        """Whether apparent load-independent loss may be warm-up instead. True at most once per search."""
        early = self.log.traffic_s < 2 * self.goal.final_trial_s
        return early and not self.log.cold_before

    def _lost_only_at_first(self) -> bool:
        """Whether the traffic since the last loss is much longer than all before. True at most once."""
        last = [t for t in self.log.counted() if t.lossy][-1]
        until = last.traffic_before_s + last.traffic_s
        return self.log.traffic_s - until > _QUIET * until and not self.log.cold_before

    def _next(self, seen: LossEstimate, lower: float | None, upper: float) -> float:
        if lower is None:
            lossy = sum(1 for t in self.log.counted() if t.lossy)
            largest = _LARGEST_STEP[lossy > _STEPS_BEFORE_LARGER]
            rate = seen.limit_pps * math.exp(_FROM_ABOVE * seen.spread)
            return min(max(rate, largest * upper), upper / (1 + _SMALLEST_STEP))
        if not seen.makes_likely(lower) or self.is_close(lower, upper):
            return lower  # The model rates the pass as luck: repeat it.
        if upper <= lower * (1 + self.width) ** 2 or seen.slope >= _SHARP:
            return math.sqrt(lower * upper)
        # Far below the estimate, go to the estimate. Near it, raise the load by one width:
        # bisecting would favour loads that passed by luck.
        near = lower * (1 + self.width)
        return max(near, min(seen.limit_pps, upper / (1 + self.width)))

    def _learn(self) -> HazardModel:
        """Build the model from the full-length trials, without those above capacity."""
        full = self.log.full(self.goal)
        late = [t for t in full if t.passed or t.traffic_s > self.resolution(t.rate, self.width)]
        trials = late or full
        model = HazardModel(max(t.rate for t in trials), self.goal.sum_s)
        for trial in trials:
            self._teach(model, trial)
        return model

    def _teach(self, model: HazardModel, trial: Trial) -> None:
        if trial.valid:
            model.saw(trial.rate, trial.traffic_s, trial.lossy, trial.measured.aborted)

    # -- Control trials: of full length, far below capacity, which tell whether there is a floor. --------

    def _controls(self) -> tuple[int, int]:
        """Return the numbers of passed and lossy full-length control trials."""
        limit = self._control_rate() * (1 + ROUNDING)
        lossy = [trial.lossy for trial in self.log.full(self.goal) if trial.rate <= limit]
        return len(lossy) - sum(lossy), sum(lossy)

    def _control(self, rate: float) -> Asking[Trial]:
        """Run one control trial, at most at this load."""
        rate = min(self._control_rate(), rate)
        return (yield from self.ask(rate, self.goal.final_trial_s, "is there a floor?"))

    def search_floor(self, rate: float) -> Asking[Outcome]:
        """Run control trials after short trials lost at the lowest loads. Raises: BudgetExhausted."""
        for _ in range(CONTROLS_LOST + CONTROLS_PASSED):
            if self._controls()[1] >= CONTROLS_LOST:
                return self._floor()
            trial = yield from self._control(rate)
            if not trial.valid:
                return self.generator_limited(0.0)
            if trial.passed and self.lower is not None:
                break
        return self.failed("it loses at nearly every rate, and not always at the lowest")

    def _floor(self) -> Outcome:
        """Return the outcome ``FLOOR``, measured over all trials at or below the control load."""
        limit = self._control_rate() * (1 + ROUNDING)
        trials = [t for t in self.log.counted() if t.rate <= limit]
        lossy = [t for t in trials if t.lossy]
        sent = sum(t.measured.tx_packets for t in trials)
        lost = sum(t.judgement.lost_packets for t in lossy)
        traffic = sum(t.traffic_s for t in trials)
        floor = Floor(lost / sent, lost, len(lossy), traffic, place(t.measured.evidence for t in lossy))
        if floor.loss_ratio > 0.5:
            return self.failed("the device forwards next to nothing: is it set up?")
        where = f", at {floor.place}" if floor.place else ""
        reason = (
            f"loss does not fall with the load: at a tenth of it {lost} frames were still lost,"
            f" {len(lossy)} times in {traffic:.0f} s{where}"
        )
        return Outcome(self.goal, SearchVerdict.FLOOR, reason, 0.0, self.upper, floor)

    def _control_rate(self) -> float:
        """Return the load of control trials; the same while the upper bound falls slowly."""
        reference = self.forwarding_pps or self.upper
        if not (now := round(max(reference * _CONTROL, self.least()), 2)) <= self._control_pps <= 2 * now:
            self._control_pps = now
        return self._control_pps

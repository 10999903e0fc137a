"""The search where loss is a matter of chance: learn how often it comes at which load, and close in.

What loses late loses at every load sooner or later, so a single trial decides little. The next rate
comes from the model (hazard.py). Above the answer each trial ends at its first loss and costs little, so
it is approached from there. A rate is the answer when it passed for the goal's time, the rate a width
above lost, and the model agrees that this was not luck.
"""

from __future__ import annotations

import math

from netplugin.acceptance.floor import CONTROLS_LOST, CONTROLS_PASSED, FloorTest
from netplugin.acceptance.ground import ROUNDING, Ground
from netplugin.acceptance.hazard import Estimate, HazardModel
from netplugin.acceptance.outcome import Outcome
from netplugin.acceptance.trials import Asking, Trial

#: A floor this likely is looked into before anything else; this likely, before a rate is named.
_FLOOR_LIKELY = 0.5
_FLOOR_POSSIBLE = 0.2
#: Where loss is chance, the rate goes down by at most this factor a trial (more after many of them:
#: the second one), for what loses soon costs little and tells much; and by at least this.
_LARGEST_STEP = (0.85, 0.75)
_STEPS_BEFORE_LARGER = 7
_SMALLEST_STEP = 0.06
#: It is approached from above: this many standard deviations over the estimate.
_FROM_ABOVE = 0.6
#: A pass is believed up to this part above the estimate; where the limit is sharp, up to the second
#: one, for the model's grid is coarse.
_BELIEVED = (1.02, 1.05)
#: A slope beyond this is a sharp limit after all, and is bisected.
_SHARP = 30.0
#: Loss that did not come again in this many times the traffic it took was that of a cold device.
_QUIET = 5.0


class ChanceSearch:
    """Goes on where trials of full length lost late."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._log = ground.log
        self._goal = ground.goal
        self._width = ground.width
        self._floor = FloorTest(ground)

    def run(self) -> Asking[Outcome | None]:
        """Where loss comes late: learn how often it comes at which load, and close in from above.

        None if it was lost only in the beginning: the device was not warm, whatever was assumed.
        """
        model = self._learn()
        while True:
            lower = self._log.lower(self._goal)
            upper = min(self._log.upper(), self._log.ceiling)
            seen = model.estimate()
            closed = lower is not None and self._ground.is_close(lower, upper)
            if seen.floor > (_FLOOR_POSSIBLE if closed else _FLOOR_LIKELY):
                passed, lost = self._floor.counts()
                if lost >= CONTROLS_LOST:
                    return None if self._is_early() else self._floor.outcome()
                if passed < CONTROLS_PASSED:
                    trial = yield from self._floor.trial()
                    if not trial.valid:
                        return self._ground.generator_limited(lower or 0.0)
                    self._teach(model, trial)
                    continue
            if closed and lower is not None and _believed(lower, seen):
                return None if self._lost_only_at_first() else self._bracketed(lower)
            rate = self._next(seen, lower, upper)
            if rate < self._ground.least():
                return (yield from self._floor.search(rate))
            trial = yield from self._ground.ask(
                rate, self._goal.final_trial_s, "how often does it lose?"
            )
            self._teach(model, trial)

    def _bracketed(self, lower: float) -> Outcome:
        upper = self._log.upper()
        if not self._ground.is_close(lower, upper):
            return self._ground.generator_limited(lower)
        return self._ground.ndr(
            lower, upper, "bracketed; loss below capacity is a matter of chance"
        )

    def _is_early(self) -> bool:
        """Whether what looks like a floor may be a device that is still warming up. Once."""
        early = self._log.traffic_s < 2 * self._goal.final_trial_s
        return early and not self._log.cold_before

    def _lost_only_at_first(self) -> bool:
        """Whether nothing was lost for much longer than it took until the last loss. Once."""
        last = [t for t in self._log.counted() if t.lossy][-1]
        until = last.traffic_before_s + last.traffic_s
        return self._log.traffic_s - until > _QUIET * until and not self._log.cold_before

    def _next(self, seen: Estimate, lower: float | None, upper: float) -> float:
        if lower is None:
            lossy = sum(1 for t in self._log.counted() if t.lossy)
            largest = _LARGEST_STEP[lossy > _STEPS_BEFORE_LARGER]
            rate = seen.limit_pps * math.exp(_FROM_ABOVE * seen.spread)
            return min(max(rate, largest * upper), upper / (1 + _SMALLEST_STEP))
        if not _believed(lower, seen) or self._ground.is_close(lower, upper):
            return lower  # It passed by luck, as far as is known: again.
        if upper <= lower * (1 + self._width) ** 2 or seen.slope >= _SHARP:
            return math.sqrt(lower * upper)
        # Far below the estimate, that is the next. Near it, the next width: halving the distance
        # would find a rate that was lucky.
        near = lower * (1 + self._width)
        return max(near, min(seen.limit_pps, upper / (1 + self._width)))

    def _learn(self) -> HazardModel:
        """The model after the trials of full length that there are, without those above capacity."""
        full = [
            t
            for t in self._log.counted()
            if t.request.duration_s >= self._goal.final_trial_s * (1 - ROUNDING)
        ]
        late = [
            t
            for t in full
            if t.passed or t.lost_within_s > self._ground.resolution(t.rate, self._width)
        ]
        trials = late or full
        model = HazardModel(max(t.rate for t in trials), self._goal.sum_s)
        for trial in trials:
            self._teach(model, trial)
        return model

    def _teach(self, model: HazardModel, trial: Trial) -> None:
        if trial.valid:
            model.saw(trial.rate, trial.traffic_s, trial.lossy, trial.measured.aborted)


def _believed(lower: float, seen: Estimate) -> bool:
    """Whether the model agrees with a pass, or it was luck."""
    return lower <= seen.limit_pps * _BELIEVED[seen.slope >= _SHARP]

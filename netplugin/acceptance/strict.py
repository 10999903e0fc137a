"""The search for the highest rate at which not one frame is lost.

The shape is that of MLRsearch (draft-ietf-bmwg-mlrsearch): short trials find where it is worth to
look, trials of full length decide, and every trial serves every conclusion. Three things are added.

- A trial stops at the first certain loss, so only trials that pass take their full time. A device
  with a sharp limit needs one.
- Loss that comes at once is the device's capacity: the next rate is found by short trials. Loss that
  comes late is chance, and the search goes on in chance.py.
- Whether such loss falls with the load at all is tested before a rate is named (floor.py).
"""

from __future__ import annotations

import math

from netplugin.acceptance.chance import ChanceSearch
from netplugin.acceptance.floor import FloorTest
from netplugin.acceptance.ground import ROUNDING, Ground
from netplugin.acceptance.outcome import Outcome
from netplugin.acceptance.trials import Asking, SearchPlan, Trial, TrialLog

#: The part that the rings may have in what a device seems to forward.
_RINGS_PART = 0.05
#: A probe that is nearly long enough is.
_ENOUGH = 0.8
#: How often the probe is run again, longer, because of that.
_LENGTHENED = 3
#: Loss that comes at once wherever it is looked for is not capacity after so many times.
_AT_ONCE_AT_MOST = 4
#: Rings may be as large again as was assumed.
_AT_ONCE = 2.0
#: Rings that fill slowly overflow again within this many times the time it took.
_SAME_TIME = 1.2
#: How long a device that loses everywhere is given to warm up, in turn.
_WARM_UPS_S = (10.0, 30.0)


class StrictSearch:
    """One search for one strict goal; trials go into the log that is shared with other goals."""

    def __init__(self, plan: SearchPlan, log: TrialLog) -> None:
        self._ground = Ground(plan, log)
        self._top = plan.top_pps
        self._width = self._ground.width
        #: Loss was seen that is not counted: a rate must pass once more before it is believed.
        self._suspicious = False

    @property
    def forwarding_pps(self) -> float:
        """What the device forwards when it gets more than it can take (0: not seen)."""
        return self._ground.forwarding_pps

    def run(self) -> Asking[Outcome]:
        """Raises: BudgetExhausted."""
        for seconds in (*_WARM_UPS_S, None):
            found = yield from self._attempt()
            if found is not None:
                return found
            if seconds is not None:
                yield from self._warm_up(seconds)
        return (yield from FloorTest(self._ground).search(self._ground.least()))

    # -- short trials ----------------------------------------------------------------------------

    def _attempt(self) -> Asking[Outcome | None]:
        """An outcome, or None if the device loses at every rate."""
        probe = yield from self._probe()
        if probe is None:
            return self._ground.generator_limited(0.0)
        lo: float | None = None
        hi = math.inf
        if probe.lossy:
            hi = probe.rate
            self._ground.forwarding_pps = _forwarded(probe)
            if self._ground.forwarding_pps > 0:
                # Half a width above and half a width below what it forwarded: if the device is as
                # simple as that, these are the two bounds.
                above = min(self._ground.forwarding_pps * (1 + self._width / 2), hi)
                trial = yield from self._ground.short(above, "just above the forwarding rate")
                lo, hi = (above, hi) if trial.passed else (None, above)
                if lo is None and self._ground.plan.can_abort:
                    # Not tried yet: the trial of full length will, and stops if it is too high.
                    lo = above / (1 + self._width)
        else:
            lo = probe.rate
        return (yield from self._decide(lo, hi))

    def _decide(self, first: float | None, hi: float) -> Asking[Outcome | None]:
        """Full trials at the highest rate that short ones left over, until the bounds are close."""
        step, marginal, at_once = self._width, False, 0
        lo: float | None = first
        while True:
            if lo is None:
                step *= 2
            bracket = yield from self._narrow(lo, hi, step)
            if bracket is None:
                return None
            rate, hi = bracket
            trial = yield from self._full(rate, "full length")
            lo = rate = trial.rate
            if not trial.valid:
                hi = min(hi, self._ground.log.ceiling)
                lo = self._best_short(rate)
                if lo is None and hi < self._ground.least():
                    return self._ground.generator_limited(0.0)
            elif trial.passed:
                closed = yield from self._close(rate, hi)
                if closed is not None:
                    return closed
                failed = min(self._ground.log.upper(), self._ground.log.ceiling)
                lo, hi = max(rate, self._best_short(failed) or rate), math.inf
            elif at_once < _AT_ONCE_AT_MOST and (yield from self._is_capacity(trial)):
                lo, hi, at_once = None, rate, at_once + 1
            elif at_once == _AT_ONCE_AT_MOST and not self._ground.log.is_warm(trial):
                return None
            elif self._ground.log.is_warm(trial):
                if marginal or not (yield from self._is_marginal(trial, hi)):
                    return (yield from ChanceSearch(self._ground).run())
                marginal = self._suspicious = True
                lo, hi = rate / (1 + self._width), rate
            else:
                # It may have been cold: the same rate again.
                self._suspicious = True

    def _probe(self) -> Asking[Trial | None]:
        """What the device forwards under the highest load the generator can do; None: it can nothing."""
        rate, duration, lengthened = self._top, self._ground.goal.initial_trial_s, 0
        for _ in range(12):
            trial = yield from self._ground.ask(rate, duration, "probe", abort=False)
            if trial.valid:
                needed = self._probe_needs(max(_forwarded(trial), 1.0))
                if trial.passed or lengthened == _LENGTHENED or duration >= _ENOUGH * needed:
                    return trial
                # Too much of what came out was in the rings to tell how fast they are emptied.
                duration, lengthened = needed, lengthened + 1
                continue
            achieved = trial.measured.achieved_pps
            # Where it said how much it managed, that is the next to try.
            rate = achieved * (1 - self._width / 2) if 0 < achieved < 0.98 * rate else rate * 0.8
            if not rate > 0:
                break
        return None

    def _probe_needs(self, forwarded: float) -> float:
        """Seconds until what the rings take does not matter: beside the width, or at the very least."""
        exact = self._ground.plan.buffer_packets / (forwarded * self._width / 3)
        rough = self._ground.plan.buffer_packets / (forwarded * _RINGS_PART)
        full = self._ground.goal.final_trial_s
        return min(max(min(exact, full / 4), rough, self._ground.goal.initial_trial_s), full)

    def _narrow(
        self, lo: float | None, hi: float, step: float
    ) -> Asking[tuple[float, float] | None]:
        """A rate that short trials pass and one within the width above it that fails; None: no such.

        ``hi`` is infinite if nothing failed. Steps double until both sides are known.
        """
        while True:
            hi = min(hi, self._ground.log.ceiling)
            if lo is not None and (
                lo >= self._top * (1 - ROUNDING) or self._ground.is_close(lo, hi)
            ):
                return lo, hi
            if lo is None:
                bound = min(hi, self._top)
                rate, gap = bound / (1 + step), step
                if rate < self._ground.least():
                    return None
                step *= 2
            elif math.isinf(hi):
                rate, gap = min(lo * (1 + step), self._top), step
                step *= 2
            else:
                rate, gap = math.sqrt(lo * hi), hi / lo - 1
            trial = yield from self._ground.short(rate, "narrowing", gap)
            if trial.passed:
                lo = rate
            else:
                hi = rate

    def _close(self, lo: float, hi: float) -> Asking[Outcome | None]:
        """After ``lo`` passed: see the rate above it fail, once more if the device was cold then.

        None if it did not fail: the search goes on above.
        """
        if lo >= self._top * (1 - ROUNDING):
            if not self._ground.is_close(self._top, self._ground.plan.line_rate_pps):
                return self._ground.generator_limited(lo)
            return self._ground.ndr(lo, lo, "nothing was lost at the line rate")
        if not self._ground.is_close(lo, self._ground.log.upper()):
            rate = min(lo * (1 + self._width), hi, self._top)
            if rate < self._ground.log.ceiling:
                yield from self._ground.short(rate, "the rate above, again", self._width)
        if self._ground.is_close(lo, self._ground.log.upper()):
            return self._ground.ndr(lo, self._ground.log.upper(), "bracketed")
        if self._ground.is_close(lo, self._ground.log.ceiling):
            return self._ground.generator_limited(lo)
        return None

    def _is_capacity(self, trial: Trial) -> Asking[bool]:
        """Whether loss came at once, as it does where the load is more than the device can take."""
        at_once = self._ground.resolution(trial.rate, self._width)
        if trial.measured.aborted or trial.request.duration_s <= at_once:
            return trial.lost_within_s <= _AT_ONCE * at_once
        # The generator went on after the loss, so it is not known when it came.
        short = yield from self._ground.ask(trial.rate, at_once, "does it lose at once?")
        return short.lossy

    def _is_marginal(self, trial: Trial, hi: float) -> Asking[bool]:
        """Whether a late loss may be that of a load a hair above capacity, which fills rings slowly.

        Then a rate just above lost at once, and this one loses again after the same time.
        """
        if hi > trial.rate * (1 + self._width) ** 2 or not trial.measured.aborted:
            return False
        first = trial.lost_within_s
        seconds = min(first * _SAME_TIME, self._ground.goal.final_trial_s)
        again = yield from self._ground.ask(trial.rate, seconds, "at the same time again?")
        return again.lossy and again.lost_within_s >= first / _SAME_TIME

    def _warm_up(self, seconds: float) -> Asking[None]:
        """Traffic that is not judged; what was seen until now is forgotten."""
        rate = max(self._ground.forwarding_pps / 2, self._ground.least())
        left = seconds
        while left > 0:
            part = min(left, self._ground.goal.final_trial_s)
            yield from self._ground.ask(rate, part, "warming up", abort=False)
            left -= part
        self._ground.log.forget()

    def _full(self, rate: float, why: str) -> Asking[Trial]:
        """Trials until the goal is reached at this rate, or one of them is not passed."""
        rate = round(rate, 2)
        needed = self._ground.goal.trials_needed + self._suspicious
        while self._ground.log.passes(rate, self._ground.goal) < needed:
            trial = yield from self._ground.ask(rate, self._ground.goal.final_trial_s, why)
            if not trial.passed:
                return trial
        return self._last_at(rate)

    def _last_at(self, rate: float) -> Trial:
        return [t for t in self._ground.log.counted() if t.rate == rate and t.passed][-1]

    def _best_short(self, below: float) -> float | None:
        """The highest rate below this that passed in a trial of any length."""
        rates = [t.rate for t in self._ground.log.counted() if t.passed and t.rate < below]
        return max(rates, default=None)


def _forwarded(trial: Trial) -> float:
    """Frames a second that came out, if every direction were as bad as the worst."""
    return trial.rate * (1 - trial.judgement.loss_ratio)

"""Search for goals that allow loss: PDR, or the NDR of CSIT.

As in MLRsearch (draft-ietf-bmwg-mlrsearch), single trials find two loads one width apart; then trials
are added at each load until the goal's duration sum decides. Trials of other goals count where they
fit.
"""

from __future__ import annotations

import math

from netplugin_zeroloss.search.trials import Asking, Outcome, SearchPlan, SearchVerdict, Trial, TrialLog, same
from netplugin_zeroloss.values import Goal

_ROUNDING = 1e-9
_LEAST_OF_ALL = 1e-5


class RatioSearch:
    """A search for one goal in the shared trial log."""

    def __init__(self, plan: SearchPlan, log: TrialLog, goal: Goal, guess_pps: float) -> None:
        self._plan = plan
        self._log = log
        self._goal = goal
        self._guess = guess_pps
        self._top = plan.top_pps
        self._width = goal.relative_width

    def run(self) -> Asking[Outcome]:
        """Search for the goal. Raises: BudgetExhausted."""
        lo = yield from self._bracket()
        failed = math.inf
        down = up = self._width
        while lo is not None:
            if not (yield from self._holds(lo)):
                # The single trials were optimistic: go down in doubling steps.
                failed, down = lo, 2 * down
                lo = lo / (1 + down) if lo > self._top * _LEAST_OF_ALL else None
                continue
            while not self._is_close(lo, min(failed, self._log.ceiling)):
                if lo >= self._top * (1 - _ROUNDING):
                    return self._at_the_top(lo)
                if math.isinf(failed):
                    rate = min(lo * (1 + up), self._top, self._log.ceiling)
                    up *= 2
                else:
                    rate = math.sqrt(lo * failed)
                if (yield from self._holds(rate)):
                    lo = round(rate, 2)
                elif rate < self._log.ceiling:
                    failed = round(rate, 2)
            if self._is_close(lo, failed):
                return Outcome(self._goal, SearchVerdict.NDR, "bracketed", round(lo, 2), failed)
            return self._limited(lo)
        return self._nothing()

    def _bracket(self) -> Asking[float | None]:
        """Find, by single short trials, a load that meets the loss ratio a width below one that does not."""
        lo, hi = self._known()
        rate = min(self._guess, self._top)
        step = self._width
        while True:
            hi = min(hi, self._log.ceiling)
            if lo is not None and lo >= self._top * (1 - _ROUNDING):
                return lo
            if lo is not None and self._is_close(lo, hi):
                return lo
            if lo is None and math.isfinite(hi):
                step *= 2
                rate = hi / (1 + step)
                if rate < self._top * _LEAST_OF_ALL:
                    return None
            elif lo is not None and math.isinf(hi):
                step *= 2
                rate = min(lo * (1 + step), self._top)
            elif lo is not None:
                rate = math.sqrt(lo * hi)
            trial = yield from self._ask(rate, self._goal.initial_trial_s)
            if trial.valid and self._is_good(trial):
                lo = max(lo or 0.0, trial.rate)
            else:
                hi = min(hi, trial.rate)

    def _known(self) -> tuple[float | None, float]:
        """Return the bounds that follow from the trials of other goals."""
        lower: list[float] = []
        upper: list[float] = []
        for rate in {trial.rate for trial in self._log.counted()}:
            good, bad = self._seconds(rate)
            if good + bad >= self._goal.sum_s:
                (upper if bad > self._goal.exceed_ratio * (good + bad) else lower).append(rate)
        hi = min(upper, default=math.inf)
        return max((rate for rate in lower if rate < hi), default=None), hi

    def _holds(self, rate: float) -> Asking[bool]:
        """Add trials at a load until the goal is met or missed there."""
        while True:
            good, bad = self._seconds(rate)
            total = max(self._goal.sum_s, good + bad)
            if total - good <= self._goal.exceed_ratio * total + _ROUNDING:
                return True
            if bad > self._goal.exceed_ratio * total + _ROUNDING:
                return False
            trial = yield from self._ask(rate, self._goal.final_trial_s)
            if not trial.valid:
                return False

    def _seconds(self, rate: float) -> tuple[float, float]:
        """Return the seconds of good and bad trials at this load."""
        good = bad = 0.0
        final = self._goal.final_trial_s
        for trial in self._log.counted():
            if not same(trial.rate, round(rate, 2)):
                continue
            if trial.request.duration_s < final * (1 - _ROUNDING):
                continue
            if trial.measured.aborted and self._goal.max_loss_ratio > 0:
                continue  # Its final loss ratio is unknown.
            if self._is_good(trial):
                good += trial.request.duration_s
            elif trial.request.duration_s <= final * (1 + _ROUNDING):
                bad += final
            elif trial.measured.aborted and self._goal.max_loss_ratio == 0:
                # A longer trial counts as several: all good except the one in which it was stopped.
                good += trial.traffic_s // final * final
                bad += final
        return good, bad

    def _is_good(self, trial: Trial) -> bool:
        return trial.judgement.loss_ratio <= self._goal.max_loss_ratio

    def _is_close(self, lo: float, hi: float) -> bool:
        # Rates are rounded to 0.01 pps, so each may be off by half of that.
        return hi <= lo * (1 + self._width) * (1 + _ROUNDING) + 0.02

    def _ask(self, rate: float, duration_s: float) -> Asking[Trial]:
        return (
            yield from self._log.ask(round(rate, 2), duration_s, f"for {self._goal.name}", goal=self._goal)
        )

    # -- outcomes --------------------------------------------------------------------------------

    def _at_the_top(self, lo: float) -> Outcome:
        if not self._is_close(self._top, self._plan.line_rate_pps):
            return self._limited(lo)
        return Outcome(self._goal, SearchVerdict.NDR, "reached at the line rate", lo, lo)

    def _limited(self, lo: float) -> Outcome:
        trial = self._log.ceiling_trial
        reason = trial.judgement.reason if trial else "the generator does no more"
        return Outcome(self._goal, SearchVerdict.GENERATOR_LIMITED, reason, lo, self._plan.line_rate_pps)

    def _nothing(self) -> Outcome:
        if self._log.ceiling_trial is not None:
            return self._limited(0.0)
        return Outcome(
            self._goal,
            SearchVerdict.FAILED,
            "the goal is reached at no rate",
            0.0,
            self._plan.line_rate_pps,
        )

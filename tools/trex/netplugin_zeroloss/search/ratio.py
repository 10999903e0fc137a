"""Search for any goal of RFC 9971: those that allow loss, and all with ``--strict-rfc9971``.

Single trials find two loads one width apart; then trials are added at each load until it is classified.
Trials of other goals count where they fit.
"""

from __future__ import annotations

import math

from netplugin_zeroloss.search.context import SearchContext
from netplugin_zeroloss.search.rfc9971 import is_lower_bound
from netplugin_zeroloss.search.trials import Asking, Outcome, Trial


class RatioSearch(SearchContext):
    """A search for one goal in the shared trial log."""

    def run(self, guess_pps: float) -> Asking[Outcome]:
        """Search for the goal, from a load that may meet it. Raises: BudgetExhausted."""
        lo = yield from self._bracket(guess_pps)
        failed = math.inf
        down = up = self.width
        while lo is not None:
            if not (yield from self._holds(lo)):
                # The single trials were optimistic: go down in doubling steps.
                failed, down = lo, 2 * down
                lo = lo / (1 + down) if lo > self.least() else None
                continue
            failed = min(failed, self.upper)
            if self.is_close(lo, failed):
                return self.ndr(round(lo, 2), failed, "bracketed")
            if self.is_top(lo):
                return self.at_the_top("reached at the line rate")
            if self.is_close(lo, self.log.ceiling):
                return self.generator_limited(lo)
            if math.isinf(failed):
                rate = min(lo * (1 + up), self.top, self.log.ceiling)
                up *= 2
            else:
                rate = math.sqrt(lo * min(failed, self.log.ceiling))
            if (yield from self._holds(rate)):
                lo = round(rate, 2)
            elif rate < self.log.ceiling:
                failed = round(rate, 2)
        if self.log.ceiling_trial is not None:
            return self.generator_limited(0.0)
        return self.failed("the goal is reached at no rate")

    def _bracket(self, guess_pps: float) -> Asking[float | None]:
        """Find, by single short trials, a load that meets the loss ratio a width below one that does not."""
        lo, hi = self.log.bounds(self.goal)
        rate = min(guess_pps, self.top)
        step = self.width
        while True:
            hi = min(hi, self.log.ceiling)
            if lo is not None and (self.is_top(lo) or self.is_close(lo, hi)):
                return lo
            if lo is None and math.isfinite(hi):
                step *= 2
                rate = hi / (1 + step)
                if rate < self.least():
                    return None
            elif lo is not None and math.isinf(hi):
                step *= 2
                rate = min(lo * (1 + step), self.top)
            elif lo is not None:
                rate = math.sqrt(lo * hi)
            trial = yield from self._ask(rate, self.goal.initial_trial_s)
            if trial.valid and trial.judgement.loss_ratio <= self.goal.max_loss_ratio:
                lo = max(lo or 0.0, trial.rate)
            else:
                hi = min(hi, trial.rate)

    def _holds(self, rate: float) -> Asking[bool]:
        """Add trials at a load until it is a lower or an upper bound."""
        while True:
            here = [trial for trial in self.log.counted() if trial.rate == round(rate, 2)]
            found = is_lower_bound(here, self.goal)
            if found is not None:
                return found
            # Without an exceed ratio a short trial with loss decides.
            first = not here and not self.goal.exceed_ratio
            trial = yield from self._ask(
                rate, self.goal.initial_trial_s if first else self.goal.final_trial_s
            )
            if not trial.valid:
                return False

    def _ask(self, rate: float, duration_s: float) -> Asking[Trial]:
        return (yield from self.ask(rate, duration_s, f"for {self.goal.name}"))

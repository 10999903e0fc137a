"""Search for the highest load without a single lost frame.

A Controller of RFC 9971 (section 4.9.2) for goals without loss: short trials narrow the range,
full-length trials decide, and every trial is used for all conclusions. It adds:

- A trial stops at the first certain loss, so only passing trials take their full duration. A device
  with a sharp limit needs one.
- Immediate loss means that the load exceeds the capacity: short trials find the next load. Late loss is
  random, and the search continues in chance.py.
- Before a rate is reported for such a device, chance.py tests whether the loss falls with the load at
  all.
"""

from __future__ import annotations

import math

from netplugin_zeroloss.search.chance import ChanceSearch
from netplugin_zeroloss.search.trials import Asking, Outcome, Trial

#: Maximum share of frames left in rings in the measured forwarding rate.
_RINGS_PART = 0.05
#: A probe this fraction of the needed duration is long enough.
_ENOUGH = 0.8
#: Maximum number of times the probe is lengthened.
_LENGTHENED = 3
#: After this many loads with immediate loss, the loss is not taken for lack of capacity.
_AT_ONCE_AT_MOST = 4
#: Tolerance factor for immediate loss: rings may be twice as large as assumed.
_AT_ONCE = 2.0
#: So many times the capacity is computed from trials of different durations.
_COMPUTED_AT_MOST = 3
#: Slowly filling rings overflow again within this multiple of the first time.
_SAME_TIME = 1.2
#: Seconds of successive warm-ups for a device that loses at every load.
_WARM_UPS_S = (10.0, 30.0)


class StrictSearch(ChanceSearch):
    """A search for one strict goal in the trial log shared with other goals."""

    #: Uncounted loss occurred: a load must then pass one more trial.
    _suspicious = False

    def run(self, _guess_pps: float) -> Asking[Outcome]:
        """Search for the goal, from the highest load. Raises: BudgetExhausted."""
        for seconds in (*_WARM_UPS_S, None):
            found = yield from self._attempt()
            if found is not None:
                return found
            if seconds is not None:
                yield from self.warm_up(max(self.forwarding_pps / 2, self.least()), seconds)
                self.log.forget()
        return (yield from self.search_floor(self.least()))

    def _attempt(self) -> Asking[Outcome | None]:
        """Run the search once; None if the device loses at every load."""
        probe = yield from self._probe()
        if probe is None:
            return self.generator_limited(0.0)
        lo, hi = None if probe.lossy else probe.rate, math.inf
        if probe.lossy:
            hi = probe.rate
            self.forwarding_pps = self._without_rings(probe) or _forwarded(probe)
            if self.forwarding_pps > 0:
                lo, hi = yield from self._around(self.forwarding_pps, hi)
        return (yield from self._decide(lo, hi))

    def _around(self, forwarding_pps: float, hi: float) -> Asking[tuple[float | None, float]]:
        """Return bounds half a width above and below a forwarding rate; exact for a sharp limit."""
        above = min(forwarding_pps * (1 + self.width / 2), hi)
        trial = yield from self.short(above, "just above the forwarding rate", self.width / 3)
        if trial.passed:
            return above, math.inf
        # Untested: the full-length trial comes next, and stops early if the load is too high.
        return above / (1 + self.width) if self.plan.aborts else None, above

    def _decide(self, first: float | None, hi: float) -> Asking[Outcome | None]:
        """Run full-length trials at the highest load left by short trials, until the bounds are close."""
        step, marginal, at_once, computed = self.width, False, 0, 0
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
                hi = min(hi, self.log.ceiling)
                lo = self._best_short(rate)
                if lo is None and hi < self.least():
                    return self.generator_limited(0.0)
            elif trial.passed:
                closed = yield from self._close(rate, hi)
                if closed is not None:
                    return closed
                failed = min(self.upper, self.log.ceiling)
                lo, hi = max(rate, self._best_short(failed) or rate), math.inf
            elif computed < _COMPUTED_AT_MOST and (capacity := self._below(trial)) is not None:
                lo, hi = yield from self._around(capacity, rate)
                computed += 1
            elif at_once < _AT_ONCE_AT_MOST and (yield from self._is_capacity(trial)):
                lo, hi, at_once = None, rate, at_once + 1
            elif at_once == _AT_ONCE_AT_MOST and not self.log.is_warm(trial):
                return None
            elif self.log.is_warm(trial):
                if marginal or not (yield from self._is_marginal(trial, hi)):
                    return (yield from self.by_chance())
                marginal = self._suspicious = True
                lo, hi = rate / (1 + self.width), rate
            else:
                # The device may have been cold: repeat the same load.
                self._suspicious = True

    def _below(self, trial: Trial) -> float | None:
        """Return the capacity of a warm device if it is clearly below the load of this lossy trial."""
        capacity = self._without_rings(trial) if self.log.is_warm(trial) else None
        return capacity if capacity and capacity * (1 + self.width / 2) < trial.rate else None

    def _without_rings(self, trial: Trial) -> float | None:
        """Return the capacity if rings that filled up explain the loss, else None.

        Each lossy trial forwarded what the device does in its time, and what the rings hold: a shorter one
        tells the two apart.
        """
        seen = self.log.trials[self.log.cold_before :]
        shorter = [t for t in seen if t.lossy and t.traffic_s <= trial.traffic_s / 2]
        if not shorter:
            return None
        other = min(shorter, key=lambda t: t.rate)
        more = _forwarded(trial) * trial.traffic_s - _forwarded(other) * other.traffic_s
        capacity = more / (trial.traffic_s - other.traffic_s)
        held = (_forwarded(trial) - capacity) * trial.traffic_s
        fits = 0 <= held <= _AT_ONCE * self.plan.buffer_packets
        return capacity if fits and capacity > 0 else None

    def _probe(self) -> Asking[Trial | None]:
        """Measure the forwarding rate at the maximum load; None if the generator fails at every load."""
        rate, duration, lengthened = self.top, self.goal.initial_trial_s, 0
        for _ in range(12):
            trial = yield from self.ask(rate, duration, "probe", abort=False)
            if trial.valid:
                needed = self._probe_needs(max(_forwarded(trial), 1.0))
                if trial.passed or lengthened == _LENGTHENED or duration >= _ENOUGH * needed:
                    return trial
                # Too many of the sent frames are still in the rings to measure the forwarding rate.
                duration, lengthened = needed, lengthened + 1
                continue
            achieved = trial.measured.achieved_pps
            # Try the achieved load next, if it is known.
            rate = achieved * (1 - self.width / 2) if 0 < achieved < 0.98 * rate else rate * 0.8
            if not rate > 0:
                break
        return None

    def _probe_needs(self, forwarded: float) -> float:
        """Return the seconds until the frames in the rings are negligible."""
        exact = self.plan.buffer_packets / (forwarded * self.width / 3)
        rough = self.plan.buffer_packets / (forwarded * _RINGS_PART)
        full = self.goal.final_trial_s
        return min(max(min(exact, full / 4), rough, self.goal.initial_trial_s), full)

    def _narrow(self, lo: float | None, hi: float, step: float) -> Asking[tuple[float, float] | None]:
        """Narrow the range with short trials to a passing load and a failing one within the width.

        ``hi`` is infinite if nothing failed. Steps double until both sides are known. None: no load
        passes.
        """
        while True:
            hi = min(hi, self.log.ceiling)
            if lo is not None and (self.is_top(lo) or self.is_close(lo, hi)):
                return lo, hi
            if lo is None:
                bound = min(hi, self.top)
                rate, gap = bound / (1 + step), step
                if rate < self.least():
                    return None
                step *= 2
            elif math.isinf(hi):
                rate, gap = min(lo * (1 + step), self.top), step
                step *= 2
            else:
                rate, gap = math.sqrt(lo * hi), hi / lo - 1
            trial = yield from self.short(rate, "narrowing", gap)
            if trial.passed:
                lo = rate
            else:
                hi = rate

    def _close(self, lo: float, hi: float) -> Asking[Outcome | None]:
        """After ``lo`` passed, confirm that the load above fails; repeats it if the device was cold then.

        None if it did not fail: the search continues above.
        """
        if self.is_top(lo):
            return self.at_the_top("nothing was lost at the line rate")
        if not self.is_close(lo, self.upper):
            rate = min(lo * (1 + self.width), hi, self.top)
            if rate < self.log.ceiling:
                yield from self.short(rate, "the rate above, again", self.width / 3)
        if self.is_close(lo, self.upper):
            return self.ndr(lo, self.upper, "bracketed")
        if self.is_close(lo, self.log.ceiling):
            return self.generator_limited(lo)
        return None

    def _is_capacity(self, trial: Trial) -> Asking[bool]:
        """Whether loss came immediately, as it does above capacity."""
        at_once = self.resolution(trial.rate, self.width)
        if trial.measured.aborted or trial.request.duration_s <= at_once:
            return trial.traffic_s <= _AT_ONCE * at_once
        # Without abort the time of the loss is unknown.
        short = yield from self.ask(trial.rate, at_once, "does it lose at once?")
        return short.lossy

    def _is_marginal(self, trial: Trial, hi: float) -> Asking[bool]:
        """Whether a late loss is explained by a load barely above capacity, which fills rings slowly.

        Then a load just above lost immediately, and this one loses again after the same time.
        """
        if hi > trial.rate * (1 + self.width) ** 2 or not trial.measured.aborted:
            return False
        first = trial.traffic_s
        seconds = min(first * _SAME_TIME, self.goal.final_trial_s)
        again = yield from self.ask(trial.rate, seconds, "at the same time again?")
        return again.lossy and again.traffic_s >= first / _SAME_TIME

    def _full(self, rate: float, why: str) -> Asking[Trial]:
        """Run trials until the goal is met at this load, or one does not pass."""
        rate = round(rate, 2)
        while True:
            passed = [t for t in self.log.full(self.goal) if t.passed and t.rate == rate]
            if len(passed) >= self.goal.trials_needed + self._suspicious:
                return passed[-1]
            trial = yield from self.ask(rate, self.goal.final_trial_s, why)
            if not trial.passed:
                return trial

    def _best_short(self, below: float) -> float | None:
        """Return the highest load below this one that passed a trial of any duration."""
        rates = [t.rate for t in self.log.counted() if t.passed and t.rate < below]
        return max(rates, default=None)


def _forwarded(trial: Trial) -> float:
    """Return the forwarded pps, assuming that every direction loses as much as the worst."""
    return trial.rate * (1 - trial.judgement.loss_ratio)

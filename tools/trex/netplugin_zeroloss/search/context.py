"""What the search for one goal shares: the trial log, the duration of trials, and outcomes."""

from __future__ import annotations

from netplugin_zeroloss.search.rfc9971 import is_close
from netplugin_zeroloss.search.trials import Asking, Outcome, SearchPlan, SearchVerdict, Trial, TrialLog
from netplugin_zeroloss.values import ROUNDING, Goal

#: Lowest searched load as a fraction of the forwarding rate.
_LEAST = 1 / 64
#: The same as a fraction of the highest load, while no forwarding rate is known.
_LEAST_OF_ALL = 1e-5
#: From this fraction of a control's rate the result may be limited by the control.
_AT_CEILING = 0.95


class SearchContext:
    """One goal, the trial log shared with other goals, and what is known of the device."""

    def __init__(self, plan: SearchPlan, log: TrialLog, goal: Goal) -> None:
        self.plan = plan
        self.log = log
        self.goal = goal
        self.width = goal.relative_width
        self.top = plan.top_pps
        #: Rate the overloaded device forwards, in pps (0: unknown).
        self.forwarding_pps = 0.0

    @property
    def lower(self) -> float | None:
        return self.log.bounds(self.goal)[0]

    @property
    def upper(self) -> float:
        return self.log.bounds(self.goal)[1]

    def ask(self, rate: float, duration_s: float, why: str, *, abort: bool = True) -> Asking[Trial]:
        """Request a trial; repeats an invalid one. Raises: BudgetExhausted."""
        # Two decimals: generators take decimal numbers.
        return (yield from self.log.ask(round(rate, 2), duration_s, why, goal=self.goal, abort=abort))

    def short(self, rate: float, why: str, gap: float | None = None) -> Asking[Trial]:
        """Request the shortest trial that can tell ``rate`` from one lower by ``gap`` (default: width)."""
        return (yield from self.ask(rate, self.resolution(rate, gap or self.width), why))

    def warm_up(self, rate: float, seconds: float) -> Asking[None]:
        """Send traffic that is not judged, as long as it takes. Raises: BudgetExhausted."""
        while seconds > 0:
            yield from self.ask(rate, seconds, "warming up", abort=False)
            seconds -= self.goal.final_trial_s  # no trial is longer

    def resolution(self, rate: float, gap: float) -> float:
        """Return the seconds a trial needs to show loss at ``rate`` if that is ``gap`` above capacity.

        The excess must fill the rings first. Beyond a quarter of the full duration the full trial is
        used.
        """
        fill = self.plan.buffer_packets / (gap * rate)
        needed = max(self.goal.initial_trial_s, self.plan.min_trial_s, fill)
        return needed if needed <= self.goal.final_trial_s / 4 else self.goal.final_trial_s

    def least(self) -> float:
        """Return the lowest searched load in pps."""
        return self.forwarding_pps * _LEAST or self.top * _LEAST_OF_ALL

    def is_close(self, lo: float, hi: float) -> bool:
        """Whether two bounds are within the width of the goal."""
        return is_close(lo, hi, self.width)

    def is_top(self, rate: float) -> bool:
        return rate >= self.top * (1 - ROUNDING)

    def at_the_top(self, reason: str) -> Outcome:
        """Return the outcome of a goal that is met at the highest load."""
        if not self.is_close(self.top, self.plan.line_rate_pps):
            return self.generator_limited(self.top)
        return self.ndr(self.top, self.top, reason)

    def ndr(self, lower: float, upper: float, reason: str) -> Outcome:
        """Return the outcome of bracketed bounds; limited near the rate of generator or VNF alone."""
        for who, verdict, ceiling in (
            ("generator", SearchVerdict.GENERATOR_LIMITED, self.plan.generator_ceiling_pps),
            ("VNF", SearchVerdict.VNF_LIMITED, self.plan.vnf_ceiling_pps),
        ):
            if ceiling is not None and self.goal.is_strict and lower >= _AT_CEILING * ceiling:
                why = f"within 5 % of what the {who} does by itself ({ceiling:.6g} pps)"
                return Outcome(self.goal, verdict, why, lower, upper)
        return Outcome(self.goal, SearchVerdict.NDR, reason, lower, upper)

    def generator_limited(self, lower: float) -> Outcome:
        """Return the outcome for a generator that cannot send more; ``lower`` passed, the rest is unknown."""
        trial = self.log.ceiling_trial
        if trial is None:
            reason = f"the generator does no more than {self.top:.6g} pps, and nothing was lost there"
        else:
            reason = f"asked {trial.rate:.6g} pps: {trial.judgement.reason}"
        return Outcome(self.goal, SearchVerdict.GENERATOR_LIMITED, reason, lower, self.plan.line_rate_pps)

    def failed(self, reason: str) -> Outcome:
        """Return an outcome without a verdict, with the known bounds."""
        lower, upper = self.log.bounds(self.goal)
        upper = min(upper, self.plan.line_rate_pps)
        return Outcome(self.goal, SearchVerdict.FAILED, reason, lower or 0.0, upper)

"""What the parts of a strict search share: asking, how long to ask, when bounds are close, outcomes."""

from __future__ import annotations

from netplugin.acceptance.outcome import Outcome, SearchVerdict
from netplugin.acceptance.trials import Asking, SearchPlan, Trial, TrialLog

#: Below this part of the forwarding rate it makes no sense to look further by short trials.
_LEAST = 1 / 64
#: And if not even a forwarding rate was seen, below this part of the highest rate.
_LEAST_OF_ALL = 1e-5
#: From this part of a control's rate on it may be the control that is measured.
_AT_CEILING = 0.95
#: Two rates are within the width of each other even if arithmetic disagrees.
ROUNDING = 1e-9


class Ground:
    """One strict goal, the log that is shared with other goals, and what is known of the device."""

    def __init__(self, plan: SearchPlan, log: TrialLog) -> None:
        self.plan = plan
        self.log = log
        self.goal = plan.headline
        self.width = self.goal.relative_width
        self.top = plan.top_pps
        #: What the device forwards when it gets more than it can take (0: not seen yet).
        self.forwarding_pps = 0.0

    def ask(self, rate: float, duration_s: float, why: str, *, abort: bool = True) -> Asking[Trial]:
        """A trial, again if it was invalid. Raises: BudgetExhausted."""
        # A hundredth of a frame a second: generators take decimal numbers.
        return (
            yield from self.log.ask(round(rate, 2), duration_s, why, goal=self.goal, abort=abort)
        )

    def short(self, rate: float, why: str, gap: float | None = None) -> Asking[Trial]:
        """As short as can tell a rate from one that is lower by this part (the width)."""
        duration = self.resolution(rate, gap or self.width)
        return (yield from self.ask(rate, duration, why))

    def resolution(self, rate: float, gap: float) -> float:
        """How long a trial must be for loss to show at a rate this far above capacity.

        The excess must fill the rings first. A trial of a quarter of the full length may be all of it.
        """
        fill = self.plan.buffer_packets / (gap * rate)
        needed = max(self.goal.initial_trial_s, self.plan.min_trial_s, fill)
        return needed if needed <= self.goal.final_trial_s / 4 else self.goal.final_trial_s

    def least(self) -> float:
        """Lower rates are not searched."""
        if self.forwarding_pps > 0:
            return self.forwarding_pps * _LEAST
        return self.top * _LEAST_OF_ALL

    def is_close(self, lo: float, hi: float) -> bool:
        """Whether two bounds are as close as the goal wants them."""
        # Rates are rounded to 0.01 pps, each by half of that.
        return hi <= lo * (1 + self.width) * (1 + ROUNDING) + 0.02

    # -- outcomes --------------------------------------------------------------------------------

    def ndr(self, lower: float, upper: float, reason: str) -> Outcome:
        """Bracketed; by the generator or by the VNF, if those do no more by themselves."""
        for who, verdict, ceiling in (
            ("generator", SearchVerdict.GENERATOR_LIMITED, self.plan.generator_ceiling_pps),
            ("VNF", SearchVerdict.VNF_LIMITED, self.plan.vnf_ceiling_pps),
        ):
            if ceiling is not None and lower >= _AT_CEILING * ceiling:
                why = f"within 5 % of what the {who} does by itself ({ceiling:.6g} pps)"
                return Outcome(self.goal, verdict, why, lower, upper)
        return Outcome(self.goal, SearchVerdict.NDR, reason, lower, upper)

    def generator_limited(self, lower: float) -> Outcome:
        """``lower`` passed; nothing is known of what is between it and the line."""
        trial = self.log.ceiling_trial
        if trial is None:
            reason = (
                f"the generator does no more than {self.top:.6g} pps, and nothing was lost there"
            )
        else:
            reason = f"asked {trial.rate:.6g} pps: {trial.judgement.reason}"
        return Outcome(
            self.goal, SearchVerdict.GENERATOR_LIMITED, reason, lower, self.plan.line_rate_pps
        )

    def failed(self, reason: str) -> Outcome:
        """No verdict, with what bounds there are."""
        return Outcome(
            self.goal, SearchVerdict.FAILED, reason, self.log.lower(self.goal) or 0.0,
            min(self.log.upper(), self.plan.line_rate_pps),
        )  # fmt: skip

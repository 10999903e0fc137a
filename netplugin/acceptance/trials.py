"""The log of a search: every trial in its order, what may be concluded from it, and what it cost.

All that a search knows is here. It never reads a clock, so a log that is played back leads to the
same requests and to the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.judge import Cause, Judgement, judge
from netplugin.acceptance.values import Goal, Measurement, TrialRequest

T = TypeVar("T")
#: A computation that asks for trials, is sent what they measured, and ends with a ``T``.
Asking: TypeAlias = Generator[TrialRequest, Measurement, T]

#: Rates that differ by less are one rate.
_SAME = 1e-9
#: What may be the fault of a clock rather than of the rate.
_OF_TIME = (Cause.SHORT, Cause.LATE, Cause.FAST)
#: A generator this far behind will not catch up in a longer trial.
_FAR_BEHIND = 0.02


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """What a search is told before it begins. The first goal is the headline."""

    goals: tuple[Goal, ...]
    line_rate_pps: float
    #: What the generator says that it can send, if less than the line.
    generator_max_pps: float = math.inf
    #: Whether the generator can end a trial early.
    can_abort: bool = True
    #: No trial is shorter: what the generator needs to be exact.
    min_trial_s: float = 0.0
    frame_size: int = 64
    flows: int = 1024
    #: The name of a mix of frame sizes, or empty.
    mix: str = ""
    #: Loss within this much traffic from the start is not held against the device.
    warm_up_s: float = 10.0
    #: Frames that all the rings on the way may hold: what a short trial cannot tell from capacity.
    buffer_packets: int = 2048
    #: How often a trial is run before its rate counts as beyond the generator.
    attempts: int = 3
    #: A goal is given up after so many trials for it.
    max_trials: int = 150
    #: A goal is given up after so much traffic for it, in units of its ``sum_s``.
    max_sums: float = 40.0
    #: What the VNF reaches without the backend, from a control run; None: not known.
    vnf_ceiling_pps: float | None = None
    #: What the generator reaches when it is looped back to itself; None: not known.
    generator_ceiling_pps: float | None = None

    def __post_init__(self) -> None:
        """Raises: UnusableInput."""
        for name, value in (
            ("line rate", self.line_rate_pps), ("generator's rate", self.generator_max_pps)
        ):  # fmt: skip
            if not value >= 0.01:
                raise UnusableInput(name, f"must be at least 0.01 pps, not {value:g}")
        if not math.isfinite(self.line_rate_pps):
            raise UnusableInput("line rate", "must be finite")
        if not self.goals:
            raise UnusableInput("goals", "there must be one")

    @property
    def headline(self) -> Goal:
        return self.goals[0]

    @property
    def top_pps(self) -> float:
        """The highest rate that is ever asked; like all of them, in hundredths of a frame a second."""
        return math.floor(100 * min(self.line_rate_pps, self.generator_max_pps)) / 100


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: asked, measured, judged. ``traffic_before_s`` is what the device had had until then."""

    number: int
    request: TrialRequest
    measured: Measurement
    judgement: Judgement
    traffic_before_s: float

    @property
    def rate(self) -> float:
        return self.request.rate_pps

    @property
    def valid(self) -> bool:
        return self.judgement.valid

    @property
    def lossy(self) -> bool:
        return self.judgement.lossy

    @property
    def passed(self) -> bool:
        return self.valid and not self.lossy

    @property
    def traffic_s(self) -> float:
        elapsed = self.measured.elapsed_s
        return elapsed if math.isfinite(elapsed) and elapsed > 0 else 0.0

    @property
    def lost_within_s(self) -> float:
        """When loss was certain; without early abort no sooner than at the end."""
        return self.traffic_s


class BudgetExhausted(Exception):
    """The search has had all the trials or all the traffic that it may have."""


class TrialLog:
    """Asks for trials, judges them, keeps them, and says what bounds follow from them."""

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.trials: list[Trial] = []
        self.traffic_s = 0.0
        #: The lowest rate that the generator could not do, and its own last word on it.
        self.ceiling = math.inf
        self.ceiling_trial: Trial | None = None
        #: Trials before this one were on a device that had not warmed up.
        self.cold_before = 0
        self._goal_trials = 0
        self._goal_traffic_s = 0.0

    def begin(self) -> None:
        """The next goal has a budget of its own."""
        self._goal_trials = len(self.trials)
        self._goal_traffic_s = self.traffic_s

    def ask(
        self, rate: float, duration_s: float, purpose: str, *, goal: Goal, abort: bool = True
    ) -> Asking[Trial]:
        """One valid trial, or (invalid each time) the last of ``attempts``: then ``ceiling`` is moved.

        Raises: BudgetExhausted.
        """
        plan = self.plan
        duration_s = min(max(duration_s, plan.min_trial_s), goal.final_trial_s)
        for attempt in range(plan.attempts):
            again = f", attempt {attempt + 1}" if attempt else ""
            request = TrialRequest(
                rate, duration_s, plan.frame_size, plan.flows,
                abort and plan.can_abort and goal.max_loss_ratio == 0, purpose + again,
                plan.mix,
            )  # fmt: skip
            trial = yield from self._run(request, goal)
            if trial.valid:
                return trial
            if trial.judgement.cause in _OF_TIME:
                # The odd millisecond of a start or a stop weighs less in a longer trial.
                duration_s = min(4 * duration_s, goal.final_trial_s)
            if attempt and _far_behind(trial):
                break
        if rate < self.ceiling:
            self.ceiling, self.ceiling_trial = rate, trial
        return trial

    def _run(self, request: TrialRequest, goal: Goal) -> Asking[Trial]:
        plan = self.plan
        if len(self.trials) - self._goal_trials >= plan.max_trials:
            raise BudgetExhausted(f"{plan.max_trials} trials were not enough")
        if self.traffic_s - self._goal_traffic_s >= plan.max_sums * goal.sum_s:
            raise BudgetExhausted(f"{plan.max_sums * goal.sum_s:g} s of traffic were not enough")
        measured = yield request
        judgement = judge(request, measured, goal.relative_width, goal.max_loss_ratio)
        trial = Trial(len(self.trials) + 1, request, measured, judgement, self.traffic_s)
        self.trials.append(trial)
        self.traffic_s += trial.traffic_s
        return trial

    # -- what follows from the trials ------------------------------------------------------------

    def forget(self) -> None:
        """The device was not warm: what it lost or passed until now says nothing of it."""
        self.cold_before = len(self.trials)

    def counted(self) -> Iterator[Trial]:
        """Valid trials that speak for or against the device.

        Loss while it may still be warming up does not; a pass then is a pass all the same.
        """
        for trial in self.trials[self.cold_before :]:
            if trial.valid and (trial.passed or self.is_warm(trial)):
                yield trial

    def is_warm(self, trial: Trial) -> bool:
        return trial.traffic_before_s + trial.lost_within_s >= self.plan.warm_up_s

    def upper(self) -> float:
        """The lowest rate that lost a frame (strict goal); infinite if none did."""
        return min((t.rate for t in self.counted() if t.lossy), default=math.inf)

    def passes(self, rate: float, goal: Goal) -> int:
        """How many trials of full length passed at this rate."""
        return sum(
            1
            for t in self.counted()
            if t.passed
            and same(t.rate, rate)
            and t.request.duration_s >= goal.final_trial_s * (1 - _SAME)
        )

    def lower(self, goal: Goal) -> float | None:
        """The highest rate below ``upper`` that reached the (strict) goal.

        A pass above a rate that lost is luck and does not count.
        """
        upper = self.upper()
        rates = {t.rate for t in self.counted() if t.passed and t.rate < upper * (1 - _SAME)}
        return max((r for r in rates if self.passes(r, goal) >= goal.trials_needed), default=None)


def same(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * max(a, b)


def _far_behind(trial: Trial) -> bool:
    return trial.measured.achieved_pps < trial.rate * (1 - _FAR_BEHIND)


def numbered(trial: Trial, number: int) -> Trial:
    """The same trial at another place of a longer log."""
    return replace(trial, number=number)

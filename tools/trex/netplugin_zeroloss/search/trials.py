"""The trial log of a search (its trials, the bounds that follow from them, their cost), and its outcomes.

It is the complete state of a search. It never reads a clock, so a replayed log leads to the same
requests and the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

from netplugin_zeroloss.judge import Cause, Judgement, Verdict, judge, judge_by_rfc9971
from netplugin_zeroloss.search import parts
from netplugin_zeroloss.search.rfc9971 import is_full, relevant_bounds
from netplugin_zeroloss.values import Goal, Measurement, TrialRequest, UnusableInput

T = TypeVar("T")
#: A generator function that yields trial requests, receives measurements, and returns a ``T``.
Asking: TypeAlias = Generator[TrialRequest, Measurement, T]

#: Causes that may be timing errors rather than a too high load.
_OF_TIME = (Cause.SHORT, Cause.LATE, Cause.FAST)
#: A generator this fraction below the load will not reach it in a longer trial.
_FAR_BEHIND = 0.02


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """Parameters of a search. The first goal is the headline."""

    goals: tuple[Goal, ...]
    line_rate_pps: float
    #: Maximum rate of the generator, if below the line rate.
    generator_max_pps: float = math.inf
    #: Whether the generator can end a trial early.
    can_abort: bool = True
    #: Minimum duration of an accurate trial.
    min_trial_s: float = 0.0
    frame_size: int = 64
    flows: int = 1024
    #: Name of a mix of frame sizes, or empty.
    mix: str = ""
    #: Warm-up: loss within this many seconds of traffic does not count.
    warm_up_s: float = 10.0
    #: Frames that all rings on the path can hold; they hide overload from a short trial.
    buffer_packets: int = 2048
    #: Maximum attempts for a valid trial; after that the load is beyond the generator.
    attempts: int = 3
    #: Maximum number of trials per goal.
    max_trials: int = 150
    #: Maximum traffic per goal, in multiples of its ``sum_s``.
    max_sums: float = 40.0
    #: Seconds of each measurement of latency at parts of the found rate, and of the soak at it; 0: none.
    latency_s: float = 0.0
    soak_s: float = 0.0
    #: Frames that the generator sends back to back in each direction.
    burst: int = 1
    #: Whether the generator measures the latency of frames.
    measures_latency: bool = False
    #: Rate of the VNF without the backend, from a control; None: unknown.
    vnf_ceiling_pps: float | None = None
    #: Rate of the generator looped back to itself; None: unknown.
    generator_ceiling_pps: float | None = None
    #: Without the extensions to RFC 9971: no early abort, no invalid trials, no warm-up, no floor.
    strict_rfc9971: bool = False

    def __post_init__(self) -> None:
        """Validate the rates and goals. Raises: UnusableInput."""
        for name, value in (("line rate", self.line_rate_pps), ("generator's rate", self.generator_max_pps)):
            if not value >= 0.01:
                raise UnusableInput(name, f"must be at least 0.01 pps, not {value:g}")
        if not math.isfinite(self.line_rate_pps):
            raise UnusableInput("line rate", "must be finite")
        if self.attempts < 1 or not 0 <= self.min_trial_s <= 86_400:
            raise UnusableInput("trial", f"{self.attempts} attempts of at least {self.min_trial_s:g} s")
        if not self.goals:
            raise UnusableInput("goals", "there must be one")

    @property
    def headline(self) -> Goal:
        return self.goals[0]

    @property
    def top_pps(self) -> float:
        """The maximum load, rounded down to 0.01 pps like all loads."""
        return math.floor(100 * min(self.line_rate_pps, self.generator_max_pps)) / 100

    @property
    def aborts(self) -> bool:
        """Whether trials end at their first loss."""
        return self.can_abort and not self.strict_rfc9971

    def request(self, rate_pps: float, duration_s: float, purpose: str, abort: bool) -> TrialRequest:
        frames = {name: getattr(self, name) for name in ("frame_size", "flows", "mix", "burst")}
        return TrialRequest(rate_pps, duration_s, abort_on_loss=abort, purpose=purpose, **frames)

    def judge(self, asked: TrialRequest, measured: Measurement, goal: Goal | None = None) -> Judgement:
        """Judge a trial of this search for a goal, or the headline."""
        goal = goal or self.headline
        if self.strict_rfc9971:
            return judge_by_rfc9971(asked, measured, goal.max_loss_ratio)
        return judge(asked, measured, goal.relative_width, goal.max_loss_ratio)


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: request, measurement, judgement. ``traffic_before_s``: traffic before it, in seconds."""

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
        """Seconds of traffic; of a lossy trial until loss was certain, without early abort its duration."""
        elapsed = self.measured.elapsed_s
        return elapsed if math.isfinite(elapsed) and elapsed > 0 else 0.0


class BudgetExhausted(Exception):
    """The goal has used up its trials or its traffic."""


class NotForwarding(Exception):
    """Some direction loses frames far below the load, for longer than it may take to come up."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class TrialLog:
    """Requests, judges and records trials, and derives the bounds."""

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.trials: list[Trial] = []
        self.traffic_s = 0.0
        #: Lowest load that the generator could not send, and the trial that showed it.
        self.ceiling = math.inf
        self.ceiling_trial: Trial | None = None
        #: Trials before this index were run before the device was warm.
        self.cold_before = 0
        #: Trials before this index raise no doubt: every direction forwarded after them.
        self._sound_before = 0
        self._goal_trials = 0
        self._goal_traffic_s = 0.0

    def begin(self) -> None:
        """Start the budget of the next goal."""
        self._goal_trials = len(self.trials)
        self._goal_traffic_s = self.traffic_s

    def ask(
        self, rate: float, duration_s: float, purpose: str, *, goal: Goal, abort: bool = True
    ) -> Asking[Trial]:
        """Request a valid trial; after ``attempts`` invalid ones returns the last and lowers ``ceiling``.

        Raises: BudgetExhausted, NotForwarding.
        """
        plan = self.plan
        duration_s = min(max(duration_s, plan.min_trial_s), goal.final_trial_s)
        for attempt in range(plan.attempts):
            why = f"{purpose}, attempt {attempt + 1}" if attempt else purpose
            request = plan.request(rate, duration_s, why, abort and plan.aborts and goal.max_loss_ratio == 0)
            self._check_budget(goal)
            trial = yield from self._run(request, goal)
            if (yield from self._came_up_after(trial, goal)):
                trial = yield from self._run(request, goal)
            if trial.valid:
                return trial
            if trial.judgement.cause in _OF_TIME:
                # A few milliseconds at start or stop weigh less in a longer trial.
                duration_s = min(4 * duration_s, goal.final_trial_s)
            if attempt and trial.measured.achieved_pps < trial.rate * (1 - _FAR_BEHIND):
                break
        if rate < self.ceiling:
            self.ceiling, self.ceiling_trial = rate, trial
        return trial

    def _came_up_after(self, trial: Trial, goal: Goal) -> Asking[bool]:
        """Where a trial raises doubt, find out far below its load whether each direction forwards.

        Returns: whether a direction was silent in the trial because it had not come up yet: then the trial
        does not count. Once all have forwarded, a silent one is starved, or out for a moment: that is loss.
        Raises: NotForwarding.
        """
        if self.plan.strict_rfc9971:
            return False
        before = (t for t in self.trials[self._sound_before : trial.number - 1] if t.lossy)
        came_back = min((t.rate * (1 - t.judgement.loss_ratio) for t in before), default=0.0)
        first = not self._sound_before
        low = parts.control_pps(trial.measured, trial.rate, came_back, lossy=trial.lossy, first=first)
        if low is None:
            return False
        seconds = max(parts.CONTROL_S, self.plan.min_trial_s)
        request = self.plan.request(low, seconds, "does each direction forward?", abort=False)
        request = replace(request, burst=1)
        controls: list[Trial] = []
        while len(controls) * seconds < parts.GRACE_S:
            controls.append((yield from self._run(request, goal)))
            self._set_aside(controls[-1])
            if not parts.losing(controls[-1].measured, goal.max_loss_ratio):
                self._sound_before = len(self.trials)
                if came_up := first and parts.silent(trial.measured):
                    self._set_aside(trial)
                return came_up
        raise NotForwarding(self._not_forwarding(goal, controls))

    def _not_forwarding(self, goal: Goal, controls: list[Trial]) -> Outcome:
        """Return the outcome of controls that lost frames until the last: a dead direction, or a floor."""
        last, seconds = controls[-1], sum(t.traffic_s for t in controls)
        dead, counted = parts.dead(last.measured), last.measured.directions
        place = parts.place(t.measured.evidence for t in controls)
        seen = f"at {last.rate:.6g} pps, after {seconds:.0f} s there, these frames came back: "
        seen += parts.described(last.measured) + (f"; lost at {place}" if place else "")
        upper = min((t.rate for t in self.trials if t.lossy), default=self.plan.line_rate_pps)
        if dead and counted:
            named = " and ".join(map(str, dead))
            reason = f"direction {named} is dead: {seen}: is a cable out, or does the VM forward one way?"
            return Outcome(goal, SearchVerdict.DEAD_DIRECTION, reason, 0.0, upper, dead=dead)
        if dead:
            reason = f"the device forwards next to nothing: is it set up? {seen}"
            return Outcome(goal, SearchVerdict.FAILED, reason, 0.0, upper)
        sent = sum(t.measured.tx_packets for t in controls)
        lost = max(0, sent - sum(t.measured.rx_packets for t in controls))
        hint = "" if counted else "; the generator counts no directions: is one dead?"
        floor = Floor(lost / sent, lost, len(controls), seconds, place)
        reason = f"loss does not fall with the load: {seen}{hint}"
        return Outcome(goal, SearchVerdict.FLOOR, reason, 0.0, upper, floor)

    def _set_aside(self, trial: Trial) -> None:
        """Let a trial bound nothing: it was far below the load, or before a direction came up."""
        aside = Judgement(Verdict.INVALID, f"it bounds nothing: {trial.judgement.reason}", Cause.CONTROL)
        self.trials[trial.number - 1] = replace(trial, judgement=aside)

    def _check_budget(self, goal: Goal) -> None:
        plan = self.plan
        if len(self.trials) - self._goal_trials >= plan.max_trials:
            raise BudgetExhausted(f"{plan.max_trials} trials were not enough")
        if self.traffic_s - self._goal_traffic_s >= plan.max_sums * goal.sum_s:
            raise BudgetExhausted(f"{plan.max_sums * goal.sum_s:g} s of traffic were not enough")

    def _run(self, request: TrialRequest, goal: Goal) -> Asking[Trial]:
        measured = yield request
        judgement = self.plan.judge(request, measured, goal)
        trial = Trial(len(self.trials) + 1, request, measured, judgement, self.traffic_s)
        self.trials.append(trial)
        self.traffic_s += trial.traffic_s
        return trial

    def forget(self) -> None:
        """Discard all trials so far, because the device was not warm."""
        self.cold_before = len(self.trials)

    def counted(self) -> Iterator[Trial]:
        """Yield the valid trials that count.

        Loss during warm-up does not count; a pass does.
        """
        for trial in self.trials[self.cold_before :]:
            if trial.valid and (trial.passed or self.is_warm(trial)):
                yield trial

    def is_warm(self, trial: Trial) -> bool:
        return self.plan.strict_rfc9971 or trial.traffic_before_s + trial.traffic_s >= self.plan.warm_up_s

    def bounds(self, goal: Goal) -> tuple[float | None, float]:
        """Return the relevant bounds; infinite if no load is an upper bound."""
        lower, upper = relevant_bounds(self.counted(), goal)
        return lower, math.inf if upper is None else upper

    def full(self, goal: Goal) -> list[Trial]:
        """Return the counted Full-Length Trials of a goal."""
        return [trial for trial in self.counted() if is_full(trial, goal)]


class SearchVerdict(StrEnum):
    """Verdict of a search. Only ``ndr`` and ``vnf_limited`` have a rate."""

    #: The highest load that meets the goal, bracketed.
    NDR = "ndr"
    #: Load-independent loss: no load meets the goal.
    FLOOR = "floor"
    #: The generator could not send the required load; the device forwards at least the lower bound.
    GENERATOR_LIMITED = "generator_limited"
    #: Bracketed, but the VNF is as slow without the backend.
    VNF_LIMITED = "vnf_limited"
    #: Next to no frame comes back in a direction, at any load.
    DEAD_DIRECTION = "dead_direction"
    #: No verdict; see the reason.
    FAILED = "failed"


#: Verdicts on a device that must be mended before it can be measured.
FAILURES: Final = (SearchVerdict.FAILED, SearchVerdict.DEAD_DIRECTION)


@dataclass(frozen=True, slots=True)
class Floor:
    """Load-independent loss."""

    #: Loss ratio at the lowest loads.
    loss_ratio: float
    lost_packets: int
    #: Lossy trials at these loads, and seconds of traffic there.
    events: int
    traffic_s: float
    #: Component with the most lost frames, if loss attribution names one.
    place: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one goal. ``upper_pps`` is the lowest failed load, or the line rate if none failed."""

    goal: Goal
    verdict: SearchVerdict
    reason: str
    lower_pps: float
    upper_pps: float
    floor: Floor | None = None
    #: Numbers of the dead directions.
    dead: tuple[int, ...] = ()

    @property
    def answer_pps(self) -> float | None:
        """The rate of the verdict in pps, if it has one."""
        quotable = (SearchVerdict.NDR, SearchVerdict.VNF_LIMITED)
        return self.lower_pps if self.verdict in quotable else None

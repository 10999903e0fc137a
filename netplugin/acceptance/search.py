"""Search for all goals, as a generator function without I/O, and its replay from recorded trials."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from netplugin.acceptance.errors import ReplayError
from netplugin.acceptance.outcome import Outcome, SearchVerdict
from netplugin.acceptance.ratio import RatioSearch
from netplugin.acceptance.strict import StrictSearch
from netplugin.acceptance.trials import Asking, BudgetExhausted, SearchPlan, T, Trial, TrialLog
from netplugin.acceptance.values import Goal, Measurement, TrialRequest


@dataclass(frozen=True, slots=True)
class Found:
    """Outcomes of all goals, the headline first, and all trials."""

    outcomes: tuple[Outcome, ...]
    trials: tuple[Trial, ...]

    @property
    def headline(self) -> Outcome:
        return self.outcomes[0]


def search(plan: SearchPlan) -> Asking[Found]:
    """Search for all goals: yields trial requests, receives measurements, returns the outcomes."""
    log = TrialLog(plan)
    outcomes = []
    guess = plan.top_pps
    for number, goal in enumerate(plan.goals):
        log.begin()
        try:
            if number == 0 and goal.is_strict:
                strict = StrictSearch(plan, log)
                outcome = yield from strict.run()
                guess = strict.forwarding_pps or guess
            else:
                outcome = yield from RatioSearch(plan, log, goal, guess).run()
        except BudgetExhausted as error:
            outcome = _unfinished(plan, log, goal, str(error))
        outcomes.append(outcome)
    return Found(tuple(outcomes), tuple(log.trials))


def _unfinished(plan: SearchPlan, log: TrialLog, goal: Goal, why: str) -> Outcome:
    lower = log.lower(goal) if goal.is_strict else None
    upper = log.upper() if goal.is_strict else math.inf
    return Outcome(
        goal, SearchVerdict.FAILED, why, lower or 0.0, min(upper, plan.line_rate_pps)
    )  # fmt: skip


def replay(plan: SearchPlan, journal: Iterable[tuple[TrialRequest, Measurement]]) -> Found:
    """Repeat a search with recorded measurements.

    Raises: ReplayError if the search requests other trials, or more than were recorded.
    """
    asking = after(search(plan), journal)
    try:
        request = next(asking)
    except StopIteration as end:
        found: Found = end.value
        return found
    raise ReplayError(f"the journal ends before {request.rate_pps:.2f} pps was measured")


def after(asking: Asking[T], journal: Iterable[tuple[TrialRequest, Measurement]]) -> Asking[T]:
    """Answer the first requests of a search from recorded trials, then pass on the following ones.

    Raises: ReplayError if the search requests other trials than recorded.
    """
    try:
        request = next(asking)
        for asked, measured in journal:
            if (asked.rate_pps, asked.duration_s) != (request.rate_pps, request.duration_s):
                raise ReplayError(
                    f"the search asks {request.rate_pps:.2f} pps for {request.duration_s:g} s,"
                    f" the journal has {asked.rate_pps:.2f} pps for {asked.duration_s:g} s"
                )
            request = asking.send(measured)
        while True:
            request = asking.send((yield request))
    except StopIteration as end:
        result: T = end.value
        return result

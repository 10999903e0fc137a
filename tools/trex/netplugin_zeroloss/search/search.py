"""Search for all goals, its replay, and running it with a generator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.search.ratio import RatioSearch
from netplugin_zeroloss.search.strict import StrictSearch
from netplugin_zeroloss.search.trials import (
    Asking,
    BudgetExhausted,
    NotForwarding,
    Outcome,
    SearchPlan,
    SearchVerdict,
    T,
    Trial,
    TrialLog,
)
from netplugin_zeroloss.values import Goal, Measurement, ReplayError, TrialRequest

# -- Search for all goals, as a generator function without I/O, and its replay from recorded trials.


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Outcomes of all goals, the headline first, and all trials."""

    outcomes: tuple[Outcome, ...]
    trials: tuple[Trial, ...]

    @property
    def headline(self) -> Outcome:
        return self.outcomes[0]


def search(plan: SearchPlan) -> Asking[SearchResult]:
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
        except NotForwarding as error:
            outcomes += [replace(error.args[0], goal=other) for other in plan.goals[number:]]
            break
        outcomes.append(outcome)
    return SearchResult(tuple(outcomes), tuple(log.trials))


def _unfinished(plan: SearchPlan, log: TrialLog, goal: Goal, why: str) -> Outcome:
    lower = log.lower(goal) if goal.is_strict else None
    upper = log.upper() if goal.is_strict else math.inf
    return Outcome(goal, SearchVerdict.FAILED, why, lower or 0.0, min(upper, plan.line_rate_pps))


def replay(plan: SearchPlan, journal: Iterable[tuple[TrialRequest, Measurement]]) -> SearchResult:
    """Repeat a search with recorded measurements.

    Raises: ReplayError if the search requests other trials, or more than were recorded.
    """
    return replayed(search(plan), journal)


def replayed(asking: Asking[T], journal: Iterable[tuple[TrialRequest, Measurement]]) -> T:
    """Answer all requests from recorded trials, see ``replay``. Raises: ReplayError."""
    try:
        request = next(after(asking, journal))
    except StopIteration as end:
        found: T = end.value
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


# -- Runs a search: passes its trial requests to a generator and returns the measurements. --------


#: Called after every trial.
Watcher = Callable[[TrialRequest, Measurement], None]


@dataclass(frozen=True, slots=True)
class SearchRun:
    """A finished search and its real time in seconds."""

    found: SearchResult
    wall_s: float


def carry_out(asking: Asking[T], generator: Generator, watch: Watcher | None = None) -> T:
    """Run trials until the search returns; returns its result. Raises: GeneratorError."""
    try:
        request = next(asking)
        while True:
            measured = generator.run(request)
            if watch is not None:
                watch(request, measured)
            request = asking.send(measured)
    except StopIteration as end:
        result: T = end.value
        return result


def run_search(plan: SearchPlan, generator: Generator, watch: Watcher | None = None) -> SearchRun:
    """Search for all goals of a plan. Raises: GeneratorError."""
    begun = time.monotonic()
    found = carry_out(search(plan), generator, watch)
    return SearchRun(found, time.monotonic() - begun)

"""Search for all goals, its replay, and running it with a generator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.search.context import SearchContext
from netplugin_zeroloss.search.ratio import RatioSearch
from netplugin_zeroloss.search.rfc9971 import GoalResult, goal_result
from netplugin_zeroloss.search.strict import StrictSearch
from netplugin_zeroloss.search.trials import (
    Asking,
    BudgetExhausted,
    NotForwarding,
    Outcome,
    SearchPlan,
    T,
    Trial,
    TrialLog,
)
from netplugin_zeroloss.values import Measurement, ReplayError, TrialRequest


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Outcomes of all goals, the headline first, and all trials."""

    outcomes: tuple[Outcome, ...]
    #: Results of the goals by RFC 9971.
    goal_results: tuple[GoalResult, ...]
    trials: tuple[Trial, ...]

    @property
    def headline(self) -> Outcome:
        return self.outcomes[0]


def search(plan: SearchPlan) -> Asking[SearchResult]:
    """Search for all goals: yields trial requests, receives measurements, returns the outcomes."""
    log = TrialLog(plan)
    outcomes = []
    guess = plan.top_pps
    for goal in plan.goals:
        log.begin()
        if goal is plan.headline and goal.is_strict and not plan.strict_rfc9971:
            ground: SearchContext = (strict := StrictSearch(plan, log, goal))
            asking = strict.run()
        else:
            ground = (ratio := RatioSearch(plan, log, goal))
            asking = ratio.run(guess)
        try:
            outcomes.append((yield from asking))
        except BudgetExhausted as error:
            outcomes.append(ground.failed(str(error)))
        except NotForwarding as error:
            outcomes += [replace(error.outcome, goal=other) for other in plan.goals[len(outcomes) :]]
            break
        guess = ground.forwarding_pps or guess
    counted = list(log.counted())
    results = tuple(goal_result(counted, goal) for goal in plan.goals)
    return SearchResult(tuple(outcomes), results, tuple(log.trials))


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

"""A search for all goals, its repeats and what follows them: run with a generator, resumed, or replayed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.search.follow_up import FollowUp, follow_up
from netplugin_zeroloss.search.ratio import RatioSearch
from netplugin_zeroloss.search.recorded import PastTrial
from netplugin_zeroloss.search.rfc9971 import GoalResult, goal_result
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
        is_strict = goal is plan.headline and goal.is_strict and not plan.strict_rfc9971
        ground = (StrictSearch if is_strict else RatioSearch)(plan, log, goal)
        try:
            outcomes.append((yield from ground.run(guess)))
        except BudgetExhausted as error:
            outcomes.append(ground.failed(str(error)))
        except NotForwarding as error:
            outcomes += [replace(error.outcome, goal=other) for other in plan.goals[len(outcomes) :]]
            break
        guess = ground.forwarding_pps or guess
    counted = list(log.counted())
    results = tuple(goal_result(counted, goal) for goal in plan.goals)
    return SearchResult(tuple(outcomes), results, tuple(log.trials))


def middle(found: Sequence[SearchResult]) -> int:
    """Return which of the repeats is reported: with the most frequent verdict and the (lower) median rate."""
    verdicts = Counter(each.headline.verdict for each in found)
    # On a tie the worse verdict wins: half of the repeats is not enough for a rate.
    order = list(SearchVerdict)
    verdict = max(verdicts, key=lambda v: (verdicts[v], order.index(v)))
    chosen = [n for n, each in enumerate(found) if each.headline.verdict is verdict]
    chosen.sort(key=lambda n: found[n].headline.lower_pps)
    return chosen[(len(chosen) - 1) // 2]


def replayed(asking: Asking[T], journal: Iterable[tuple[TrialRequest, Measurement]]) -> T:
    """Answer all requests from recorded trials.

    Raises: ReplayError if other trials are requested, or more than were recorded.
    """
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


#: Called after each trial with its number within its repeat, to record and show it.
Note = Callable[[int, PastTrial], None]
#: Load of the repeated warm-up, as a fraction of the lowest forwarded rate.
_WARM_UP_PART = 0.5


def run_repeats(
    plan: SearchPlan, generator: Generator, repeats: int, note: Note, past: Sequence[PastTrial] = ()
) -> tuple[list[SearchResult], FollowUp]:
    """Run all repeats, and what follows them, recorded as one more repeat.

    Trials in ``past`` are not run again. ``note`` is called after each new trial.

    Raises: GeneratorError; ReplayError if ``past`` belongs to another search.
    """
    for trial in past:
        generator.recall(trial.request)
    if past and not generator.info.virtual_time:
        _warm_up(plan, generator, past)
    found = [run_repeat(search(plan), generator, repeat, note, past) for repeat in range(repeats)]
    follow = follow_up(plan, found[middle(found)].headline.answer_pps)
    return found, run_repeat(follow, generator, repeats, note, past)


def run_repeat(
    asking: Asking[T], generator: Generator, repeat: int, note: Note, past: Sequence[PastTrial] = ()
) -> T:
    """Run the trials of one repeat that are not in ``past``."""
    recorded = [(trial.request, trial.measured) for trial in past if trial.repeat == repeat]
    number, last = len(recorded), time.monotonic()

    def watch(request: TrialRequest, measured: Measurement) -> None:
        nonlocal number, last
        number, before, last = number + 1, last, time.monotonic()
        note(number, PastTrial(repeat, request, measured, last - before))

    return carry_out(after(asking, recorded), generator, watch)


def _warm_up(plan: SearchPlan, generator: Generator, past: Sequence[PastTrial]) -> None:
    """Send traffic to warm up a device that was set up again, as the search assumes it to be warm.

    It lasts as long as the earlier traffic, up to the warm-up time. It is not judged and is no trial.
    """
    repeat = past[-1].repeat
    traffic = sum(max(0.0, trial.measured.elapsed_s) for trial in past if trial.repeat == repeat)
    rates = [t.measured.rx_packets / t.measured.elapsed_s for t in past if t.measured.elapsed_s > 0]
    rate = round(min([plan.top_pps, *(r for r in rates if r > 0)]) * _WARM_UP_PART, 2)
    seconds = max(min(traffic, plan.warm_up_s), plan.min_trial_s)
    if seconds > 0 and rate > 0:
        frames = (plan.frame_size, plan.flows, False, "warming up again", plan.mix)
        generator.run(TrialRequest(rate, seconds, *frames, burst=plan.burst))

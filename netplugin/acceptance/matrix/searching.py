"""Runs or resumes the searches of one part of a cell, replaying the trials in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from netplugin.acceptance.generators.contract import Generator
from netplugin.acceptance.matrix.journal import PastTrial
from netplugin.acceptance.run import Run, carry_out
from netplugin.acceptance.search import after, search
from netplugin.acceptance.trials import SearchPlan
from netplugin.acceptance.values import Measurement, TrialRequest

#: Called after each trial with its number within its repeat, to record and show it.
Note = Callable[[int, PastTrial], None]

#: Load of the repeated warm-up, as a fraction of the lowest forwarded rate.
_WARM_UP_PART = 0.5


def search_part(
    plan: SearchPlan, generator: Generator, past: Sequence[PastTrial], repeats: int, note: Note
) -> list[Run]:
    """Run all repeats; trials in ``past`` are not run again. ``note`` is called after each new trial.

    Raises: GeneratorError; ReplayError if ``past`` belongs to another search.
    """
    for trial in past:
        generator.recall(trial.request)
    if past and not generator.info.virtual_time:
        _warm_up(plan, generator, past)
    return [
        _search(plan, generator, [t for t in past if t.repeat == repeat], repeat, note)
        for repeat in range(repeats)
    ]


def _search(
    plan: SearchPlan, generator: Generator, past: Sequence[PastTrial], repeat: int, note: Note
) -> Run:
    trials = list(past)
    last = time.monotonic()

    def watch(request: TrialRequest, measured: Measurement) -> None:
        nonlocal last
        now = time.monotonic()
        trials.append(PastTrial(repeat, request, measured, now - last))
        last = now
        note(len(trials), trials[-1])

    asking = after(search(plan), [(trial.request, trial.measured) for trial in past])
    found = carry_out(asking, generator, watch)
    return Run(found, sum(trial.wall_s for trial in trials))


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
        generator.run(
            TrialRequest(
                rate, seconds, plan.frame_size, plan.flows, False, "warming up again", plan.mix
            )
        )

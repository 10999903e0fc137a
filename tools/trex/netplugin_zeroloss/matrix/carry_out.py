"""Runs or resumes one part of a cell: sets the device up, and searches after the trials in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from netplugin.api.errors import NetpluginError
from netplugin.programs.program import ProgramError
from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.journal import (
    Attempt,
    CellRecord,
    Journal,
    JournalError,
    Part,
    PastTrial,
    RunRecord,
    now,
)
from netplugin_zeroloss.loss.contract import AttributionError
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.bench import Bench, CellError, Stand
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription
from netplugin_zeroloss.matrix.progress import Lines
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.follow_up import FollowUpRun, follow_up
from netplugin_zeroloss.search.recorded import SetupEntry
from netplugin_zeroloss.search.search import SearchRun, after, carry_out, search
from netplugin_zeroloss.search.trials import Asking, SearchPlan, T
from netplugin_zeroloss.values import GeneratorError, Measurement, ReplayError, TrialRequest, UnusableInput

#: Errors that fail one cell; the run continues.
OF_A_CELL = (
    *(CellError, AttributionError, GeneratorError, NetpluginError, ReplayError, UnusableInput, ProgramError),
)

#: Called after each trial with its number within its repeat, to record and show it.
Note = Callable[[int, PastTrial], None]

#: Load of the repeated warm-up, as a fraction of the lowest forwarded rate.
_WARM_UP_PART = 0.5


def search_part(
    plan: SearchPlan, generator: Generator, past: Sequence[PastTrial], repeats: int, note: Note
) -> tuple[list[SearchRun], FollowUpRun]:
    """Run all repeats, and what follows them, recorded as one more repeat.

    Trials in ``past`` are not run again. ``note`` is called after each new trial.

    Raises: GeneratorError; ReplayError if ``past`` belongs to another search.
    """
    for trial in past:
        generator.recall(trial.request)
    if past and not generator.info.virtual_time:
        _warm_up(plan, generator, past)
    runs = [SearchRun(*run_repeat(search(plan), generator, past, repeat, note)) for repeat in range(repeats)]
    rate = results.outcome_of(runs).answer_pps
    return runs, FollowUpRun(*run_repeat(follow_up(plan, rate), generator, past, repeats, note))


def run_repeat(
    asking: Asking[T], generator: Generator, past: Sequence[PastTrial], repeat: int, note: Note
) -> tuple[T, float]:
    """Run the trials of one repeat that are not in ``past``; returns the result and its real seconds."""
    recorded = [trial for trial in past if trial.repeat == repeat]
    trials = list(recorded)
    last = time.monotonic()

    def watch(request: TrialRequest, measured: Measurement) -> None:
        nonlocal last
        now = time.monotonic()
        trials.append(PastTrial(repeat, request, measured, now - last))
        last = now
        note(len(trials), trials[-1])

    left = after(asking, [(trial.request, trial.measured) for trial in recorded])
    found = carry_out(left, generator, watch)
    return found, sum(trial.wall_s for trial in trials)


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


@dataclass(frozen=True, slots=True)
class CellRun:
    """One task of the run. ``command``: command line, recorded in results."""

    description: RunDescription
    task: CellTask
    bench: Bench
    journal: Journal
    view: Lines
    command: tuple[str, ...]

    def measure(self, attempt: Attempt | None, records: Sequence[CellRecord]) -> CellRecord:
        """Set the device up, search, and return what the journal has of it. Raises: JournalError."""
        task, begun = self.task, time.monotonic()
        self.view.begins(task)
        started = attempt.at if attempt is not None else now()
        record: CellRecord | None = None
        try:
            with self.bench.stand(task) as stand:
                record = self._search(stand, attempt, started, records)
                # Written before teardown, so that the result is not lost.
                self.journal.end(record)
        except JournalError:
            raise
        except OF_A_CELL as error:
            if record is not None:
                self.view.warns(f"{task}: not all settings could be restored: {error}")
            else:
                why = str(error) or type(error).__name__
                record = CellRecord(task.cell, task.part, started, now(), error=why)
                self.journal.end(record, restart=isinstance(error, ReplayError))
        self.view.ends(record, time.monotonic() - begun)
        return record

    def _search(
        self, stand: Stand, attempt: Attempt | None, started: str, records: Sequence[CellRecord]
    ) -> CellRecord:
        task, info = self.task, stand.generator.info
        ceilings = _ceilings(task, records)
        setup = cast(SetupEntry, {**stand.setup, "ceilings": asdict(ceilings)})
        if attempt is None:
            attempt = Attempt(started, cells.plan(self.description, task, info, ceilings))
        plan = attempt.plan
        self.journal.begin(task.cell, task.part, plan, setup)

        def note(number: int, trial: PastTrial) -> None:
            self.journal.trial(task.cell, task.part, number, trial)
            self.view.trial(plan, number, trial)

        many = cells.repeats(self.description, task)
        runs, followed = search_part(plan, stand.generator, attempt.trials, many, note)
        where = results.environment(info.name, self.command, started) | {"seed": self.description.seed}
        result = results.result_of(plan, runs, where, followed)
        return CellRecord(task.cell, task.part, started, now(), result, setup=setup)


def _ceilings(task: CellTask, records: Sequence[CellRecord]) -> cells.Ceilings:
    """Return the ceilings from the controls of this cell; a control has none."""
    if task.part is not Part.SEARCH:
        return cells.Ceilings()
    run = RunRecord("", "", {}, (), tuple(records))
    return cells.ceilings(run.control(task.cell, Part.LOOPBACK), run.control(task.cell, Part.VNF))

"""Runs all tasks of a run in order, each from its state in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, cast

from netplugin.api.errors import NetpluginError
from netplugin.programs.program import ProgramError
from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.journal import (
    Attempt,
    CellRecord,
    Journal,
    JournalError,
    Part,
    Past,
    PastTrial,
    RunRecord,
    now,
)
from netplugin_zeroloss.loss.contract import AttributionError
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.bench import Bench, CellError, Stand
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.follow_up import FollowUpRun, follow_up
from netplugin_zeroloss.search.recorded import SetupEntry
from netplugin_zeroloss.search.search import SearchRun, after, carry_out, search
from netplugin_zeroloss.search.trials import Asking, SearchPlan, T
from netplugin_zeroloss.values import (
    GeneratorError,
    Measurement,
    ReplayError,
    TrialRequest,
    UnusableInput,
)

# -- Runs or resumes the searches of one part of a cell, replaying the trials in the journal. -----


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
    runs = [SearchRun(*_run(search(plan), generator, past, repeat, note)) for repeat in range(repeats)]
    rate = results.outcome_of(runs).answer_pps
    return runs, FollowUpRun(*_run(follow_up(plan, rate), generator, past, repeats, note))


def _run(
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
        generator.run(
            TrialRequest(
                rate_pps=rate,
                duration_s=seconds,
                frame_size=plan.frame_size,
                flows=plan.flows,
                abort_on_loss=False,
                purpose="warming up again",
                mix=plan.mix,
                burst=plan.burst,
            )
        )


# -- Runs all tasks of a run in order, each from its state in the journal. ------------------------


#: Errors that fail one cell; the run continues.
_OF_A_CELL = (
    CellError,
    AttributionError,
    GeneratorError,
    NetpluginError,
    ReplayError,
    UnusableInput,
    ProgramError,
)


class View(Protocol):
    """Observer of a run."""

    def begins(self, task: CellTask) -> None:
        """Called before a task is set up."""

    def trial(self, task: CellTask, plan: SearchPlan, number: int, trial: PastTrial) -> None:
        """Called after each trial."""

    def ends(self, record: CellRecord, seconds: float) -> None:
        """Called with the result or error of a task, and its seconds in this session."""

    def warns(self, text: str) -> None:
        """Called on a problem that does not affect results."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """Runs the tasks. ``command``: command line, recorded in results."""

    description: RunDescription
    bench: Bench
    journal: Journal
    view: View
    command: tuple[str, ...] = ()

    def carry_out(self, past: Past) -> RunRecord:
        """Run all remaining tasks. After KeyboardInterrupt the journal can be resumed."""
        records = list(past.run.records)
        for task in cells.tasks(self.description):
            if not is_done(task, records):
                records.append(self._part(task, past.open.get((task.cell, task.part)), records))
        run = past.run
        return RunRecord(run.name, run.description, run.environment, run.cells, tuple(records))

    def _part(self, task: CellTask, attempt: Attempt | None, records: list[CellRecord]) -> CellRecord:
        self.view.begins(task)
        begun = time.monotonic()
        started = attempt.started if attempt is not None else now()
        record: CellRecord | None = None
        try:
            with self.bench.stand(task) as stand:
                record = self._search(task, stand, attempt, started, records)
                # Written before teardown, so that the result is not lost.
                self.journal.end(record)
        except JournalError:
            raise
        except _OF_A_CELL as error:
            if record is not None:
                self.view.warns(f"{task}: not all settings could be restored: {error}")
            else:
                why = str(error) or type(error).__name__
                record = CellRecord(task.cell, task.part, started, now(), error=why)
                self.journal.end(record, restart=isinstance(error, ReplayError))
        self.view.ends(record, time.monotonic() - begun)
        return record

    def _search(
        self,
        task: CellTask,
        stand: Stand,
        attempt: Attempt | None,
        started: str,
        records: list[CellRecord],
    ) -> CellRecord:
        description = self.description
        ceilings = _ceilings(task, records)
        setup = cast(SetupEntry, {**stand.setup, "ceilings": asdict(ceilings)})
        if attempt is None:
            plan = cells.plan(description, task, stand.generator.info, ceilings)
            attempt = Attempt(started, plan)
        plan = attempt.plan
        self.journal.begin(task.cell, task.part, plan, setup)

        def note(number: int, trial: PastTrial) -> None:
            self.journal.trial(task.cell, task.part, number, trial)
            self.view.trial(task, plan, number, trial)

        many = cells.repeats(description, task)
        runs, followed = search_part(plan, stand.generator, attempt.trials, many, note)
        where = results.environment(stand.generator.info.name, self.command, started)
        result = results.result_of(plan, runs, where | {"seed": description.seed}, followed)
        return CellRecord(task.cell, task.part, started, now(), result, setup=setup)


def is_done(task: CellTask, records: Iterable[CellRecord]) -> bool:
    """Whether a task has a result. A task that ended with an error is resumed."""
    return any(r.cell == task.cell and r.part is task.part and r.result is not None for r in records)


def _ceilings(task: CellTask, records: list[CellRecord]) -> cells.Ceilings:
    """Return the ceilings from the controls of this cell; a control has none."""
    if task.part is not Part.SEARCH:
        return cells.Ceilings()
    run = RunRecord("", "", {}, (), tuple(records))
    return cells.ceilings(run.control(task.cell, Part.LOOPBACK), run.control(task.cell, Part.VNF))

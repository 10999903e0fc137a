"""Runs all tasks of a run in order, each from its state in the journal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Protocol

from netplugin.acceptance import result as results
from netplugin.acceptance.errors import GeneratorError, ReplayError, UnusableInput
from netplugin.acceptance.evidence.contract import EvidenceError
from netplugin.acceptance.matrix import cells
from netplugin.acceptance.matrix.bench import Bench, CellError, Stand
from netplugin.acceptance.matrix.cells import Task
from netplugin.acceptance.matrix.description import Description
from netplugin.acceptance.matrix.journal import Attempt, Past, PastTrial
from netplugin.acceptance.matrix.records import CellRecord, Part, RunRecord
from netplugin.acceptance.matrix.searching import search_part
from netplugin.acceptance.matrix.writer import Journal, JournalError, now
from netplugin.acceptance.trials import SearchPlan
from netplugin.acceptance.vnf.contract import VnfError
from netplugin.errors import NetpluginError

#: Errors that fail one cell; the run continues.
_OF_A_CELL = (
    CellError, EvidenceError, GeneratorError, NetpluginError, ReplayError, UnusableInput, VnfError
)  # fmt: skip


class View(Protocol):
    """Observer of a run."""

    def begins(self, task: Task) -> None:
        """Called before a task is set up."""

    def trial(self, task: Task, plan: SearchPlan, number: int, trial: PastTrial) -> None:
        """Called after each trial."""

    def ends(self, record: CellRecord, seconds: float) -> None:
        """Called with the result or error of a task, and its seconds in this session."""

    def warns(self, text: str) -> None:
        """Called on a problem that does not affect results."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """Runs the tasks. ``command``: command line, recorded in results."""

    description: Description
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

    def _part(self, task: Task, attempt: Attempt | None, records: list[CellRecord]) -> CellRecord:
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
                self.view.warns(f"{task}: not everything could be given back: {error}")
            else:
                why = str(error) or type(error).__name__
                record = CellRecord(task.cell, task.part, started, now(), error=why)
                self.journal.end(record, anew=isinstance(error, ReplayError))
        self.view.ends(record, time.monotonic() - begun)
        return record

    def _search(
        self,
        task: Task,
        stand: Stand,
        attempt: Attempt | None,
        started: str,
        records: list[CellRecord],
    ) -> CellRecord:
        description = self.description
        ceilings = _ceilings(task, records)
        setup = {**stand.setup, "ceilings": asdict(ceilings)}
        if attempt is None:
            plan = cells.plan(description, task, stand.generator.info, ceilings)
            attempt = Attempt(started, plan)
        plan = attempt.plan
        self.journal.begin(task.cell, task.part, plan, setup)

        def note(number: int, trial: PastTrial) -> None:
            self.journal.trial(task.cell, task.part, number, trial)
            self.view.trial(task, plan, number, trial)

        many = cells.repeats(description, task)
        runs = search_part(plan, stand.generator, attempt.trials, many, note)
        where = results.environment(stand.generator.info.name, self.command, started)
        result = results.result_of(plan, runs, where | {"seed": description.seed})
        return CellRecord(task.cell, task.part, started, now(), result, setup=setup)


def is_done(task: Task, records: Iterable[CellRecord]) -> bool:
    """Whether a task has a result. A task that ended with an error is resumed."""
    return any(
        r.cell == task.cell and r.part is task.part and r.result is not None for r in records
    )


def _ceilings(task: Task, records: list[CellRecord]) -> cells.Ceilings:
    """Return the ceilings from the controls of this cell; a control has none."""
    if task.part is not Part.SEARCH:
        return cells.Ceilings()
    run = RunRecord("", "", {}, (), tuple(records))
    return cells.ceilings(run.control(task.cell, Part.LOOPBACK), run.control(task.cell, Part.VNF))

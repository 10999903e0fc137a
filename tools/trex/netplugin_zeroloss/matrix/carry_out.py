"""Runs or resumes one part of a cell: sets the device up, and searches after the trials in the journal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

from netplugin.api.errors import NetpluginError
from netplugin.programs.program import ProgramError
from netplugin_zeroloss.journal import Attempt, CellRecord, Journal, JournalError, Part, RunRecord, now
from netplugin_zeroloss.loss.contract import AttributionError
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.bench import Bench, CellError, Stand
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription
from netplugin_zeroloss.matrix.progress import Lines
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.recorded import PastTrial, SetupEntry
from netplugin_zeroloss.search.search import run_repeats
from netplugin_zeroloss.values import GeneratorError, ReplayError, UnusableInput

#: Errors that fail one cell; the run continues.
OF_A_CELL = (
    *(CellError, AttributionError, GeneratorError, NetpluginError, ReplayError, UnusableInput, ProgramError),
)


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
        plan, wall_s = attempt.plan, sum(trial.wall_s for trial in attempt.trials)
        self.journal.begin(task.cell, task.part, plan, setup)

        def note(number: int, trial: PastTrial) -> None:
            nonlocal wall_s
            wall_s += trial.wall_s
            self.journal.trial(task.cell, task.part, number, trial)
            self.view.trial(plan, number, trial)

        many = self.description.search.repeats if task.part is Part.SEARCH else 1
        found, followed = run_repeats(plan, stand.generator, many, note, attempt.trials)
        where = results.environment(info.name, self.command, started) | {"seed": self.description.seed}
        result = results.result_of(plan, found, where, followed, wall_s)
        return CellRecord(task.cell, task.part, started, now(), result, setup=setup)


def _ceilings(task: CellTask, records: Sequence[CellRecord]) -> cells.Ceilings:
    """Return the ceilings from the controls of this cell; a control has none."""
    if task.part is not Part.SEARCH:
        return cells.Ceilings()
    run = RunRecord("", "", {}, (), tuple(records))
    return cells.ceilings(run.control(task.cell, Part.LOOPBACK), run.control(task.cell, Part.VNF))

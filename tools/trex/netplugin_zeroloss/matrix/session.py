"""One invocation of ``zeroloss matrix``: makes all checks, then runs or resumes each cell in order."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, cast

from netplugin_zeroloss.journal import CellRecord, Journal, Past, RunRecord, now, read_past
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.bench import BareBench, Bench, generator_of
from netplugin_zeroloss.matrix.carry_out import CellRun
from netplugin_zeroloss.matrix.cells import CellTask, TimeEstimate, in_words
from netplugin_zeroloss.matrix.description import RunDescription, check_same, read
from netplugin_zeroloss.matrix.progress import view
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.table import markdown
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.recorded import RunEnvironment
from netplugin_zeroloss.search.trials import FAILURES
from netplugin_zeroloss.values import UnusableInput


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Parsed command line."""

    description: Path
    folder: Path | None
    resume: bool = False
    quiet: bool = False
    command: tuple[str, ...] = ()
    #: Of a new run; empty: one of its own.
    run_id: str = ""


# -- The description and the folder of a run, read and validated. ---------------------------------


@dataclass(frozen=True, slots=True)
class _Session:
    """The description and state of a run. ``text``: the description as it is written."""

    description: RunDescription
    text: str
    folder: Path
    past: Past | None
    run_id: str = ""

    @property
    def left(self) -> tuple[CellTask, ...]:
        return _left(self.description, self.past)

    def bench(self) -> Bench:
        if self.description.agent is None:
            return BareBench(self.description)
        # Imported here: a simulation needs neither the agent's client nor VNFs.
        from netplugin_zeroloss.matrix.agent_bench import AgentBench

        found = self.past.run.environment if self.past is not None else RunEnvironment()
        return AgentBench(
            self.description,
            run_id=str(found.get("run_id") or self.run_id or uuid.uuid4()),
            pmd_cpus=found.get("pmd_cpus"),
            pmd_mask=found.get("pmd_mask"),
            nics=found.get("nics"),
        )


def _left(description: RunDescription, past: Past | None) -> tuple[CellTask, ...]:
    """Return the tasks without a result. A task that ended with an error is resumed."""
    done = {(r.cell, r.part) for r in _records(past) if r.result is not None}
    return tuple(task for task in cells.tasks(description) if (task.cell, task.part) not in done)


def _records(past: Past | None) -> tuple[CellRecord, ...]:
    return past.run.records if past is not None else ()


def _estimate(description: RunDescription, past: Past | None) -> TimeEstimate:
    """Create the estimate from the journal, which records the real time of trials."""
    ended = [(CellTask(record.cell, record.part), record.result) for record in _records(past)]
    took = {task: float(result["wall_s"]) for task, result in ended if result is not None}
    tasks = cells.tasks(description)
    virtual = frozenset(task for task in tasks if generator_of(description, task).type == "sim")
    return TimeEstimate(description, tasks, took, virtual)


def folder_of(asked: RunOptions) -> Path:
    """Return the folder of the run. Raises: UnusableInput if the description cannot be read."""
    return asked.folder or Path(read_file(asked.description)[0].name)


def read_file(path: Path) -> tuple[RunDescription, str]:
    """Read a description, and its text. Raises: UnusableInput."""
    text = read_text(path)
    return read(text, str(path)), text


def _open(asked: RunOptions) -> _Session:
    """Read and validate the description and the folder, without changes. Raises: UnusableInput."""
    description, text = read_file(asked.description)
    if not cells.cells(description):
        raise UnusableInput(str(asked.description), "exclude leaves no cell")
    folder = asked.folder or Path(description.name)
    return _Session(description, text, folder, _past(folder, description, asked.resume), asked.run_id)


def _past(folder: Path, description: RunDescription, resume: bool) -> Past | None:
    """Return the past of a resumed run, or None for a new run.

    Raises: UnusableInput if the folder fits neither.
    """
    past = read_past(folder)
    if past is not None and resume:
        check_same(read(past.run.description, f"the description in {folder}"), description, str(folder))
        return past
    try:
        files = list(folder.iterdir())
    except FileNotFoundError:
        files = []
    except OSError as error:
        raise UnusableInput(str(folder), error.strerror or str(error)) from error
    # A run that was killed before its first line leaves an empty file.
    if past is not None or any(not file.is_file() or file.stat().st_size for file in files):
        why = "it is not empty: take another --folder, or --resume to go on with its run"
        raise UnusableInput(str(folder), "there are files in it, and no run to go on with" if resume else why)
    return None


def recover(asked: RunOptions) -> None:
    """Remove what a run left that was killed, which is resumed later. Raises: UnusableInput."""
    with closing(_open(asked).bench()) as bench:
        bench.recover()


# -- The run. -------------------------------------------------------------------------------------


def dry_run(asked: RunOptions) -> str:
    """Run all checks and return the remaining tasks. Raises: UnusableInput, GeneratorError."""
    session = _open(asked)
    with closing(session.bench()) as bench:
        bench.check(session.left)
    estimate = _estimate(session.description, session.past)
    seconds = estimate.left_s()
    about = f", about {in_words(seconds)}" if seconds else ""
    again = ["netplugin-zeroloss", "matrix", str(asked.description)]
    again += ["--folder", str(asked.folder)] if asked.folder else []
    again += ["--resume"] if asked.resume else []
    lines = [*map(str, session.left), f"{len(session.left)} of {len(estimate.tasks)} to do{about}"]
    return "\n".join((*lines, "", f"Next: {shlex.join(again)}", ""))


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that was begun or resumed, its journal locked and its bench open."""

    description: RunDescription
    bench: Bench
    journal: Journal
    past: Past

    def put_back(self) -> Sequence[str]:
        """Put back what was changed for several cells; returns what stays, with a fix."""
        return (*self.bench.restore(), *self.bench.not_restored())


@contextmanager
def begun(asked: RunOptions) -> Iterator[Begun]:
    """Check everything, and begin or resume the run. Raises: UnusableInput, GeneratorError."""
    session = _open(asked)
    with closing(session.bench()) as bench:
        here = results.environment(session.description.generator.type, asked.command, now())
        environment = cast(RunEnvironment, {**here, **bench.check(session.left)})
        with closing(Journal(session.folder)) as journal:
            # Read again under the lock: no other process writes to the journal now.
            past = _past(session.folder, session.description, asked.resume)
            if past is None:
                found = cells.cells(session.description)
                past = Past(RunRecord(session.description.name, session.text, environment, found))
                journal.run(past.run)
            else:
                journal.session(environment)
                bench.recover()
            yield Begun(session.description, bench, journal, past)


def carry_out(asked: RunOptions, output: TextIO) -> int:
    """Run the remaining tasks and write the table. Returns the exit status.

    Raises: UnusableInput, GeneratorError before any traffic; KeyboardInterrupt, after which the journal can
    be resumed.
    """
    with begun(asked) as run, view(_estimate(run.description, run.past), asked.quiet) as shown:
        records = list(run.past.run.records)
        try:
            for task in _left(run.description, run.past):
                cell = CellRun(run.description, task, run.bench, run.journal, shown, asked.command)
                records.append(cell.measure(run.past.open.get((task.cell, task.part)), records))
        finally:
            for text in run.put_back():
                shown.warns(text)
    ended = replace(run.past.run, records=tuple(records))
    output.write(markdown(report_of(ended)))
    return 1 if _failed(ended) else 0


def _failed(run: RunRecord) -> bool:
    last = [run.record(cell) for cell in run.cells]
    return any(r is None or r.verdict in FAILURES for r in last)

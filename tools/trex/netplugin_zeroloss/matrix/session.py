"""One invocation of ``zeroloss matrix``: makes all checks, then runs or resumes each cell in order."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, cast

from netplugin_zeroloss.journal import Journal, Past, RunRecord, now, read_past
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.bench import BareBench, Bench, generator_of
from netplugin_zeroloss.matrix.carry_out import CellRun
from netplugin_zeroloss.matrix.cells import CellTask, TimeEstimate
from netplugin_zeroloss.matrix.description import RunDescription, check_same, read
from netplugin_zeroloss.matrix.progress import view
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.report import words
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


@dataclass(frozen=True, slots=True)
class _Session:
    """A run to begin or to resume. ``past``: of a run to begin it has no environment and no records."""

    description: RunDescription
    folder: Path
    past: Past

    def bench(self) -> Bench:
        if self.description.agent is None:
            return BareBench(self.description)
        # Imported here: a simulation needs neither the agent's client nor VNFs.
        from netplugin_zeroloss.matrix.agent_bench import AgentBench

        found = self.past.run.environment
        return AgentBench(
            self.description,
            run_id=str(found.get("run_id") or uuid.uuid4()),
            pmd_cpus=found.get("pmd_cpus"),
            pmd_mask=found.get("pmd_mask"),
            nics=found.get("nics"),
        )


def _left(description: RunDescription, run: RunRecord) -> tuple[CellTask, ...]:
    """Return the tasks without a result. A task that ended with an error is resumed."""
    done = {(r.cell, r.part) for r in run.records if r.result is not None}
    return tuple(task for task in cells.tasks(description) if (task.cell, task.part) not in done)


def _estimate(description: RunDescription, run: RunRecord) -> TimeEstimate:
    """Create the estimate from the journal, which records the real time of trials."""
    took = {CellTask(r.cell, r.part): float(r.result["wall_s"]) for r in run.records if r.result is not None}
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
    found = cells.cells(description)
    if not found:
        raise UnusableInput(str(asked.description), "exclude leaves no cell")
    folder = asked.folder or Path(description.name)
    new = Past(RunRecord(description.name, text, RunEnvironment(run_id=asked.run_id), found))
    return _Session(description, folder, _past(folder, description, asked.resume) or new)


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


def dry_run(asked: RunOptions) -> str:
    """Run all checks and return the remaining tasks. Raises: UnusableInput, GeneratorError."""
    session = _open(asked)
    left = _left(session.description, session.past.run)
    with closing(session.bench()) as bench:
        bench.check(left)
    estimate = _estimate(session.description, session.past.run)
    seconds = estimate.left_s()
    about = f", about {words.seconds(round(seconds))}" if seconds else ""
    again = ["netplugin-zeroloss", "matrix", str(asked.description)]
    again += ["--folder", str(asked.folder)] if asked.folder else []
    again += ["--resume"] if asked.resume else []
    lines = [*map(str, left), f"{len(left)} of {len(estimate.tasks)} to do{about}"]
    return "\n".join((*lines, "", f"Next: {shlex.join(again)}", ""))


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that was begun or resumed, its journal locked and its bench open."""

    description: RunDescription
    bench: Bench
    journal: Journal
    past: Past


@contextmanager
def begun(asked: RunOptions) -> Iterator[Begun]:
    """Check everything, and begin or resume the run. Raises: UnusableInput, GeneratorError."""
    session = _open(asked)
    with closing(session.bench()) as bench:
        here = results.environment(session.description.generator.type, asked.command, now())
        found = bench.check(_left(session.description, session.past.run))
        environment = cast(RunEnvironment, {**here, **found})
        with closing(Journal(session.folder)) as journal:
            # Read again under the lock: no other process writes to the journal now.
            past = _past(session.folder, session.description, asked.resume)
            if past is None:
                past = Past(replace(session.past.run, environment=environment, records=()))
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
    with begun(asked) as run, view(_estimate(run.description, run.past.run), asked.quiet) as shown:
        records = list(run.past.run.records)
        try:
            for task in _left(run.description, run.past.run):
                cell = CellRun(run.description, task, run.bench, run.journal, shown, asked.command)
                records.append(cell.measure(run.past.open.get((task.cell, task.part)), records))
        finally:
            for text in run.bench.restore():
                shown.warns(text)
    ended = replace(run.past.run, records=tuple(records))
    output.write(markdown(report_of(ended)))
    return 1 if _failed(ended) else 0


def _failed(run: RunRecord) -> bool:
    last = [run.record(cell) for cell in run.cells]
    return any(r is None or r.verdict in FAILURES for r in last)

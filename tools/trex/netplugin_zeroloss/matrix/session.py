"""One invocation of ``zeroloss matrix``: runs all checks, then starts or resumes the run."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from netplugin_zeroloss.journal import Journal, Past, RunRecord, now, read_past
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.bench import BareBench, Bench, generator_of
from netplugin_zeroloss.matrix.carry_out import Carrier, is_done
from netplugin_zeroloss.matrix.cells import CellTask, TimeEstimate, in_words
from netplugin_zeroloss.matrix.description import RunDescription, check_same, read
from netplugin_zeroloss.matrix.progress import view
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.table import markdown
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.recorded import RunEnvironment
from netplugin_zeroloss.search.trials import SearchVerdict
from netplugin_zeroloss.values import UnusableInput


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Parsed command line."""

    description: Path
    folder: Path | None
    resume: bool = False
    quiet: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Session:
    """The description and state of a run, read and validated."""

    description: RunDescription
    text: str
    folder: Path
    past: Past | None

    @property
    def tasks(self) -> tuple[CellTask, ...]:
        return cells.tasks(self.description)

    @property
    def left(self) -> tuple[CellTask, ...]:
        """The remaining tasks."""
        done = self.past.run.records if self.past is not None else ()
        return tuple(task for task in self.tasks if not is_done(task, done))


def folder_of(asked: RunOptions) -> Path:
    """Return the folder of the run. Raises: UnusableInput if the description cannot be read."""
    return asked.folder or Path(_read(asked.description)[0].name)


def carry_out(asked: RunOptions, output: TextIO) -> int:
    """Run the remaining tasks and write the table. Returns the exit status.

    Raises: UnusableInput, GeneratorError before any traffic; KeyboardInterrupt.
    """
    session = _open(asked)
    with closing(_bench(session)) as bench:
        here = results.environment(session.description.generator.type, asked.command, now())
        environment = cast(RunEnvironment, {**here, **bench.check(session.left)})
        with closing(Journal(session.folder)) as journal:
            # Read again under the lock: no other process writes to the journal now.
            past = _checked_past(session.folder, session.description, asked.resume)
            if past is None:
                past = Past(
                    RunRecord(
                        session.description.name,
                        session.text,
                        environment,
                        cells.cells(session.description),
                        (),
                    )
                )
                journal.run(past.run)
            else:
                journal.session(environment)
                bench.recover()
            with view(_estimate(session, past), asked.quiet) as shown:
                carrier = Carrier(session.description, bench, journal, shown, asked.command)
                try:
                    run = carrier.carry_out(past)
                finally:
                    for text in (*bench.restore(), *bench.not_restored()):
                        shown.warns(text)
    output.write(markdown(report_of(run)))
    return 1 if _failed(run) else 0


def dry_run(asked: RunOptions) -> str:
    """Run all checks and return the remaining tasks. Raises: UnusableInput, GeneratorError."""
    session = _open(asked)
    with closing(_bench(session)) as bench:
        bench.check(session.left)
    lines = [f"{task}\n" for task in session.left]
    left = _estimate(session, session.past).left_s()
    about = f", about {in_words(left)}" if left else ""
    again = ["netplugin-zeroloss", "matrix", str(asked.description)]
    again += ["--folder", str(asked.folder)] if asked.folder else []
    again += ["--resume"] if asked.resume else []
    return (
        "".join(lines) + f"{len(lines)} of {len(session.tasks)} to do{about}\n\nNext: {shlex.join(again)}\n"
    )


def _open(asked: RunOptions) -> _Session:
    """Read and validate the description and the folder, without changes. Raises: UnusableInput."""
    description, text = _read(asked.description)
    if not cells.cells(description):
        raise UnusableInput(str(asked.description), "exclude leaves no cell")
    folder = asked.folder or Path(description.name)
    return _Session(description, text, folder, _checked_past(folder, description, asked.resume))


def _read(path: Path) -> tuple[RunDescription, str]:
    text = read_text(path)
    return read(text, str(path)), text


def _checked_past(folder: Path, description: RunDescription, resume: bool) -> Past | None:
    """Return the past of a resumed run, or None for a new run.

    Raises: UnusableInput if the folder fits neither.
    """
    past = read_past(folder)
    if not resume:
        others = _files(folder, ignoring_empty=past is None)
        if past is not None or others:
            raise UnusableInput(
                str(folder),
                "it is not empty: take another --folder, or --resume to go on with its run",
            )
        return None
    if past is not None:
        before = read(past.run.description, f"the description in {folder}")
        check_same(before, description, str(folder))
    elif _files(folder, ignoring_empty=True):
        raise UnusableInput(str(folder), "there are files in it, and no run to go on with")
    return past


def _files(folder: Path, ignoring_empty: bool) -> Sequence[Path]:
    """Return the files in the folder. Raises: UnusableInput if it is not a folder."""
    try:
        found = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnusableInput(str(folder), error.strerror or str(error)) from error
    return [f for f in found if not (ignoring_empty and f.is_file() and f.stat().st_size == 0)]


def _bench(session: _Session) -> Bench:
    if session.description.agent is None:
        return BareBench(session.description)
    # Imported here: a simulation needs neither the agent's client nor VNFs.
    from netplugin_zeroloss.matrix.agent_bench import AgentBench

    found = session.past.run.environment if session.past is not None else RunEnvironment()
    return AgentBench(
        session.description,
        run_id=str(found.get("run_id") or uuid.uuid4()),
        pmd_cpus=found.get("pmd_cpus"),
        pmd_mask=found.get("pmd_mask"),
        nics=found.get("nics"),
    )


def _estimate(session: _Session, past: Past | None) -> TimeEstimate:
    """Create the estimate from the journal, which records the real time of trials."""
    took = {
        CellTask(record.cell, record.part): float(record.result["wall_s"])
        for record in (past.run.records if past is not None else ())
        if record.result is not None
    }
    virtual = frozenset(
        task for task in session.tasks if generator_of(session.description, task).type == "sim"
    )
    return TimeEstimate(session.description, session.tasks, took, virtual)


def _failed(run: RunRecord) -> bool:
    last = [run.record(cell) for cell in run.cells]
    return any(r is None or r.verdict in (SearchVerdict.FAILED, SearchVerdict.DEAD_DIRECTION) for r in last)

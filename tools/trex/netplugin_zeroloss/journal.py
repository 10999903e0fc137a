"""The journal of a run: its values, reader and writer; one JSON object per line, append-only, fsynced."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from netplugin.host.safe_files import open_own, sync
from netplugin.programs import bounded
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.recorded import PastTrial, Plan, ResultEntry, RunEnvironment, SetupEntry
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import UnusableInput

# -- Values of a run: cells, and the results of their parts. --------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One combination of the axes. ``pmd_cores`` is None for a backend without PMD threads."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    backend: str
    pmd_cores: int | None = None
    #: Frame size in bytes with FCS (``64``), or the name of a mix (``imix``).
    frame: str = "64"
    flows: int = 1024
    queues: int = 1
    #: Forward mode of the VNF; empty: that of the description.
    vnf_mode: str = ""
    #: Frames that the generator sends back to back in each direction.
    burst: int = 1
    #: NUMA placement of the VM or VNF relative to the NICs; empty: that of the description.
    numa: str = ""

    @property
    def key(self) -> str:
        """Unique and stable key: ``dpdkvhostuser,pmd=2,frame=64,flows=1024,queues=1``."""
        pmd = "-" if self.pmd_cores is None else str(self.pmd_cores)
        mode = f",vnf={self.vnf_mode}" if self.vnf_mode else ""
        burst = f",burst={self.burst}" if self.burst > 1 else ""
        whole = f"{self.backend},pmd={pmd},frame={self.frame},flows={self.flows},queues={self.queues}"
        return whole + mode + burst + (f",numa={self.numa}" if self.numa else "")


#: Backend name in the cell of a control.
NO_BACKEND = "none"


class Part(StrEnum):
    """The measured part of a cell: the backend, or a control that measures a limit of the setup.

    A control is measured once for all backends: see ``control_cell``.
    """

    SEARCH = "search"
    #: The generator looped back to itself, without device and VNF.
    LOOPBACK = "loopback"
    #: The VNF directly connected to the generator, without the backend.
    VNF = "vnf"


def control_cell(cell: Cell, part: Part) -> Cell:
    """Return the cell of the control in the journal: without backend and PMD cores.

    Queues, mode and NUMA placement are properties of the VNF: the loopback control has one queue and none
    of the others.
    """
    alike = dataclasses.replace(cell, backend=NO_BACKEND, pmd_cores=None)
    return alike if part is Part.VNF else dataclasses.replace(alike, queues=1, vnf_mode="", numa="")


@dataclass(frozen=True, slots=True)
class CellRecord:
    """Result of one part of a cell. ``result`` is the output of ``search --json``; otherwise ``error``."""

    cell: Cell
    part: Part
    started: str
    ended: str
    result: ResultEntry | None = None
    error: str | None = None
    setup: SetupEntry = field(default_factory=SetupEntry)

    @property
    def verdict(self) -> str:
        return str(self.result["verdict"]) if self.result else "failed"

    @property
    def zero_loss_pps(self) -> float | None:
        """The NDR in pps, if there is one."""
        return self.result["zero_loss_pps"] if self.result else None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as recorded in its folder, complete or not."""

    name: str
    #: YAML text of the run description; machine and versions of the run.
    description: str
    environment: RunEnvironment
    #: All cells in order; finished parts in order of completion.
    cells: tuple[Cell, ...]
    records: tuple[CellRecord, ...] = ()

    def record(self, cell: Cell, part: Part = Part.SEARCH) -> CellRecord | None:
        """Return the last record of a cell: a repeated cell replaces the failed one."""
        found = [r for r in self.records if r.cell == cell and r.part is part]
        return found[-1] if found else None

    def control(self, cell: Cell, part: Part) -> CellRecord | None:
        """Return the last ``LOOPBACK`` or ``VNF`` control for the frames, flows and queues of this cell."""
        return self.record(control_cell(cell, part), part)


# -- The journal of a run: one JSON object per line. -----------------------------------------------
# The first line describes the run, the others are events in order:
#     {"entry": "run", "format": 1, "name", "started", "description", "environment", "cells": [..]}
#     {"entry": "session", "started", "environment"}             the run was resumed
#     {"entry": "begin", "cell", "part", "at", "plan", "setup"}  the device is set up, the search begins
#     {"entry": "trial", "cell", "part", "repeat", "number", "at", "wall_s", "request", "measured"}
#     {"entry": "end", "cell", "part", "started", "ended", "result", "error", "setup", "restart"}
# ``cell`` has the fields of a cell, ``result`` the output of ``search --json``. A part that ended with an
# error continues when the run is resumed; with ``restart`` it starts over and its trials are discarded. Only
# the last line can be incomplete after a crash; it was not acknowledged and is dropped.


FILE = "journal.jsonl"
FORMAT = 1
#: Bytes of a line; the result of a search with a thousand trials has some MB.
_LONGEST_LINE = 1 << 28


@dataclass(slots=True)
class Attempt:
    """A started and unfinished part of a cell, which a resumed run continues."""

    at: str
    plan: Plan
    trials: list[PastTrial] = field(default_factory=list, init=False)


@dataclass(slots=True)
class Past:
    """The content of a journal: the run as reports read it, and the unfinished parts."""

    run: RunRecord
    open: dict[tuple[Cell, Part], Attempt] = field(default_factory=dict)


class _Session(TypedDict):
    started: str
    environment: RunEnvironment


class _Place(TypedDict):
    cell: Cell
    part: Part


class _End(TypedDict):
    result: Any
    error: Any
    setup: Any
    restart: bool


_RUN, _SESSION, _PLACE = TypeAdapter(RunRecord), TypeAdapter(_Session), TypeAdapter(_Place)
_ATTEMPT, _TRIAL = TypeAdapter(Attempt), TypeAdapter(PastTrial)
_RECORD, _END = TypeAdapter(CellRecord), TypeAdapter(_End)


def read_run(folder: Path) -> RunRecord:
    """Read a run from its folder; it may still be running. Raises: UnusableInput."""
    past = read_past(folder)
    if past is None:
        raise UnusableInput(str(folder), "no run was begun in it")
    return past.run


def read_past(folder: Path) -> Past | None:
    """Read the journal of a folder; None if there is none, or no complete line in it.

    Raises: UnusableInput, which names line and field, if it is not a journal of this format.
    """
    past: Past | None = None
    records: list[CellRecord] = []
    sessions: list[dict[str, Any]] = []
    for number, line, is_last in _lines(path := folder / FILE):
        where = f"{path}, line {number}"
        try:
            if not line.endswith(b"\n"):
                if is_last:
                    break  # incomplete write: the machine crashed
                raise ValueError("it is longer than a line may be")
            value = bounded.parse(line)
            if not isinstance(value, dict):
                raise ValueError("it is no JSON object")
            if past is None:
                if value.get("entry") != "run":
                    raise ValueError("entry: the first is not that of a run")
                if value.get("format") != FORMAT:
                    raise ValueError(
                        f"its format is {value.get('format')!s:.40}, this program reads {FORMAT}"
                    )
                past = Past(bounded.validated(value, _RUN))
            elif value.get("entry") == "session":
                session = bounded.validated(value, _SESSION)
                sessions.append({"started": session["started"], **session["environment"]})
            else:
                _take(past, value, records)
        except bounded.NoJson as error:
            if is_last:
                break
            raise UnusableInput(where, "it is no JSON") from error
        except (ValueError, UnusableInput) as error:
            raise UnusableInput(where, f"it is not of a run: {error}") from error
    if past is not None:
        environment: RunEnvironment = {**past.run.environment, "sessions": sessions}
        past.run = dataclasses.replace(past.run, environment=environment, records=tuple(records))
    return past


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the lines with their numbers, from 1, and whether each is the last one. Raises: UnusableInput."""
    try:
        # Not blocked by a FIFO, which is refused.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnusableInput(str(path), "it is no file")
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                yield number, line, file.tell() >= status.st_size
    except FileNotFoundError:
        return
    except OSError as error:
        raise UnusableInput(str(path), f"it cannot be read: {error.strerror}") from error


def _take(past: Past, value: Mapping[str, Any], records: list[CellRecord]) -> None:
    """Account for an entry of a part. Raises: ValueError, UnusableInput."""
    place = bounded.validated(value, _PLACE)
    where = place["cell"], place["part"]
    match value.get("entry"):
        case "begin":
            # A repeated setup keeps the plan of the first.
            past.open.setdefault(where, bounded.validated(value, _ATTEMPT))
        case "trial":
            if where not in past.open:
                raise ValueError("cell: no search of it has begun")
            past.open[where].trials.append(bounded.validated(value, _TRIAL))
        case "end":
            restart = bounded.validated(value, _END)["restart"]
            records.append(record := bounded.validated(value, _RECORD))
            if record.result is not None or restart:
                past.open.pop(where, None)
        case _:
            raise ValueError("entry: neither session, begin, trial nor end")


# -- Writer of the journal: every line is on disk (fsync) before the run continues. ---------------


class JournalError(UnusableInput):
    """The journal cannot be written; ends the run."""


class Journal:
    """Appends to the journal of a folder, which is locked (flock) until ``close``."""

    def __init__(self, folder: Path) -> None:
        """Create folder and file if needed, and drop an incomplete last line. Raises: UnusableInput."""
        self._path = path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode=0o644)
        except OSError as error:
            raise UnusableInput(str(error.filename), f"{error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise UnusableInput(str(folder), "another zeroloss is running in it") from None
        _drop_torn_line(self._file)
        sync(folder)  # its entry of the file survives a power failure too

    def close(self) -> None:
        """Close the journal and release the lock."""
        os.close(self._file)

    def run(self, run: RunRecord) -> None:
        """Write the first line."""
        described = dataclasses.asdict(dataclasses.replace(run, records=()))
        del described["records"]
        self._append("run", format=FORMAT, started=now(), **described)

    def session(self, environment: Mapping[str, Any]) -> None:
        self._append("session", started=now(), environment=environment)

    def begin(self, cell: Cell, part: Part, plan: SearchPlan, setup: Mapping[str, Any]) -> None:
        self._append("begin", cell, part, at=now(), plan=results.describe_plan(plan), setup=setup)

    def trial(self, cell: Cell, part: Part, number: int, trial: PastTrial) -> None:
        request, measured = dataclasses.asdict(trial.request), results.describe_measurement(trial.measured)
        about = {"repeat": trial.repeat, "number": number, "at": now(), "wall_s": trial.wall_s}
        self._append("trial", cell, part, **about, request=request, measured=measured)

    def end(self, record: CellRecord, restart: bool = False) -> None:
        """Record the end of a part; ``restart``: a failed part starts over, without its trials."""
        found = {name: getattr(record, name) for name in ("started", "ended", "result", "error", "setup")}
        self._append("end", record.cell, record.part, **found, restart=restart)

    def _append(self, entry: str, cell: Cell | None = None, part: Part | None = None, **more: Any) -> None:
        """Append one entry and sync it. Raises: JournalError; do not append after that."""
        where = {"cell": dataclasses.asdict(cell), "part": part} if cell is not None else {}
        line = results.dumps({"entry": entry, **where, **more}, indent=None).encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            why = f"it cannot be written: {error.strerror}; then --resume"
            raise JournalError(str(self._path), why) from error


def now() -> str:
    """Return the current time in the format of the journal (UTC, milliseconds)."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _drop_torn_line(file: int) -> None:
    size = os.fstat(file).st_size
    text = os.pread(file, size, 0)
    end = text.rfind(b"\n") + 1
    last = text[text.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end]
    try:
        bounded.parse(last or b"{}")
    except bounded.NoJson:
        end -= len(last)
    if end < size:
        os.ftruncate(file, end)

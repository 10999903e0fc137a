"""Writer of the journal: every line is on disk (fsync) before the run continues."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from netplugin.acceptance import result as results
from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.matrix.journal import FILE, FORMAT, PastTrial
from netplugin.acceptance.matrix.records import Cell, CellRecord, Part, RunRecord
from netplugin.acceptance.trials import SearchPlan


class JournalError(UnusableInput):
    """The journal cannot be written; ends the run."""


class Journal:
    """Appends to the journal of a folder, which is locked (flock) until ``close``."""

    def __init__(self, folder: Path) -> None:
        """Create folder and file if needed, and drop an incomplete last line. Raises: UnusableInput."""
        self._path = path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UnusableInput(str(error.filename), f"{error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise UnusableInput(str(folder), "another zeroloss is running in it") from None
        _drop_torn_line(self._file)
        _sync_directory(folder)

    def close(self) -> None:
        """Close the journal and release the lock."""
        os.close(self._file)

    def run(self, run: RunRecord) -> None:
        """Write the first line."""
        self._append(
            "run", format=FORMAT, name=run.name, started=now(), description=run.description,
            environment=run.environment, cells=[dataclasses.asdict(cell) for cell in run.cells],
        )  # fmt: skip

    def session(self, environment: Mapping[str, Any]) -> None:
        self._append("session", started=now(), environment=environment)

    def begin(self, cell: Cell, part: Part, plan: SearchPlan, setup: Mapping[str, Any]) -> None:
        described = results.describe_plan(plan)
        self._append("begin", **_where(cell, part), at=now(), plan=described, setup=setup)

    def trial(self, cell: Cell, part: Part, number: int, trial: PastTrial) -> None:
        self._append(
            "trial", **_where(cell, part), repeat=trial.repeat, number=number, at=now(),
            wall_s=trial.wall_s, request=dataclasses.asdict(trial.request),
            measured=results.describe_measurement(trial.measured),
        )  # fmt: skip

    def end(self, record: CellRecord, anew: bool = False) -> None:
        """Record the end of a part; ``anew``: a failed part starts over, without its trials."""
        self._append(
            "end", **_where(record.cell, record.part), started=record.started, ended=record.ended,
            result=record.result, error=record.error, setup=record.setup, anew=anew,
        )  # fmt: skip

    def _append(self, entry: str, **fields: Any) -> None:
        """Append one entry and sync it. Raises: JournalError; do not append after that."""
        line = results.dumps({"entry": entry, **fields}, indent=None).encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            raise JournalError(
                str(self._path), f"it cannot be written: {error.strerror}; then --resume"
            ) from error


def now() -> str:
    """Return the current time in the format of the journal (UTC, milliseconds)."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _where(cell: Cell, part: Part) -> dict[str, Any]:
    return {"cell": dataclasses.asdict(cell), "part": part.value}


def _drop_torn_line(file: int) -> None:
    size = os.fstat(file).st_size
    text = os.pread(file, size, 0)
    end = text.rfind(b"\n") + 1
    last = text[text.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end]
    try:
        json.loads(last or b"{}")
    except ValueError:
        end -= len(last)
    if end < size:
        os.ftruncate(file, end)


def _sync_directory(folder: Path) -> None:
    """Sync the directory entry, so that the file itself survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

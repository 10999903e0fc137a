"""Journal of original values: a file of lines, each synced to disk before the host is changed.

Only the end of the file changes. After a crash it has whole lines and at most one partial line, whose
change was not started.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from netplugin.errors import Conflict, HostError
from netplugin.tuning.applying.changes import Event, History, history, line
from netplugin.tuning.applying.place import Raw
from netplugin.tuning.root import sync_folder
from netplugin.tuning.steps import Group, Target

DEFAULT = Path("/var/lib/netplugin/tuning.journal")


class Journal:
    """Context manager; one process at a time holds the journal.

    Methods that write raise HostError on a disk error; the caller must then change nothing more.
    """

    def __init__(self, path: Path, boot: str) -> None:
        self.path, self._boot = path, boot
        self._descriptor = -1
        #: Offset of the last line.
        self._last = 0

    def __enter__(self) -> Self:
        """Open and lock. Raises: Conflict if another process holds it, HostError if it cannot be used."""
        try:
            self._open()
        except BlockingIOError as busy:
            raise Conflict(
                f"another apply or undo holds {self.path}",
                step="journal",
                fix="wait until it has ended",
            ) from busy
        except OSError as refused:
            raise _unusable(self.path, refused) from refused
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def history(self) -> History:
        """Raises: HostError if the file is not a journal."""
        return _read(self.path, self._data(), self._boot)

    def writing(self, group: Group, target: Target, before: Raw, wanted: str | None) -> None:
        """Log that ``target`` is about to be set to ``wanted``; ``before`` is its raw value."""
        self._append(line(Event.WRITING, self._boot, group, target, before=before, wanted=wanted))

    def withdraw(self) -> None:
        """Remove the last line: its change left no trace on the host."""
        self._cut(self._last)

    def mark(self, event: Event, group: Group, target: Target) -> None:
        """Log an event without values."""
        self._append(line(event, self._boot, group, target))

    def clear(self) -> None:
        """Empty the journal; only when nothing is left to undo."""
        self._cut(0)

    # -- the file ----------------------------------------------------------------------------------

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sync_folder(self.path.parent)
            os.ftruncate(self._descriptor, len(_whole(self._data())))
        except BaseException:
            self._close()
            raise

    def _append(self, text: str) -> None:
        data = f"{text}\n".encode()
        try:
            self._last = os.lseek(self._descriptor, 0, os.SEEK_END)
            if os.write(self._descriptor, data) < len(data):  # short write: the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)
        except OSError as refused:
            raise _unusable(self.path, refused) from refused

    def _cut(self, length: int) -> None:
        try:
            os.ftruncate(self._descriptor, length)
            os.fsync(self._descriptor)
        except OSError as refused:
            raise _unusable(self.path, refused) from refused

    def _data(self) -> bytes:
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def look(path: Path, boot: str) -> History:
    """Read what is left to undo, without locking the journal. Raises: HostError."""
    try:
        return _read(path, path.read_bytes(), boot)
    except FileNotFoundError:
        return History()
    except OSError as refused:
        raise _unusable(path, refused) from refused


def _read(path: Path, data: bytes, boot: str) -> History:
    try:
        return history(_whole(data).decode().splitlines(), boot)
    except ValueError as wrong:
        raise HostError(
            f"{path} is no journal of this program: {wrong}", step="journal",
            fix="name another with --journal, or look into it and put back by hand what it says",
        ) from wrong  # fmt: skip


def _whole(data: bytes) -> bytes:
    """Strip a partial last line."""
    return data[: data.rfind(b"\n") + 1]


def _unusable(path: Path, refused: OSError) -> HostError:
    return HostError(
        f"the journal {path} cannot be used: {refused.strerror or refused}", step="journal",
        fix="run it as root, or name another file with --journal",
    )  # fmt: skip

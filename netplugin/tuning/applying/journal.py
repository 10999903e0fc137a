"""What was there before: a file of lines, each on the disk before the host is touched.

Only its end ever changes, so that whatever ends the program leaves whole lines, and perhaps a piece of
one that nothing was done for yet.
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
    """Held by one process at a time, as long as the block lasts.

    All that writes raises HostError where the disk refuses: nothing else may be done then.
    """

    def __init__(self, path: Path, boot: str) -> None:
        self.path, self._boot = path, boot
        self._descriptor = -1
        #: Where the last line begins.
        self._last = 0

    def __enter__(self) -> Self:
        """Raises: Conflict if another process has it, HostError if it cannot be used."""
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
        """Raises: HostError if it is no journal."""
        return _read(self.path, self._data(), self._boot)

    def writing(self, group: Group, target: Target, before: Raw, wanted: str | None) -> None:
        self._append(line(Event.WRITING, self._boot, group, target, before=before, wanted=wanted))

    def withdraw(self) -> None:
        """Take the last line away: what it announced has left no trace."""
        self._cut(self._last)

    def mark(self, event: Event, group: Group, target: Target) -> None:
        self._append(line(event, self._boot, group, target))

    def clear(self) -> None:
        """Once there is nothing to take back."""
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
            if os.write(self._descriptor, data) < len(data):  # what the disk had room for
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
    """What there is to take back, without holding the journal. Raises: HostError."""
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
    """Without the piece of a line at the end."""
    return data[: data.rfind(b"\n") + 1]


def _unusable(path: Path, refused: OSError) -> HostError:
    return HostError(
        f"the journal {path} cannot be used: {refused.strerror or refused}", step="journal",
        fix="run it as root, or name another file with --journal",
    )  # fmt: skip

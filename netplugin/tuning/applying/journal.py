"""The journal of original values, on disk before the host is changed, and what is left to undo."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from netplugin.api.errors import Conflict, HostError, reason
from netplugin.host.safe_files import UnsafeFile, open_own, own_directory, sync
from netplugin.tuning import steps
from netplugin.tuning.applying import targets
from netplugin.tuning.applying.accessor import Raw
from netplugin.tuning.output.text import as_json
from netplugin.tuning.steps import BannedCpus, Group, Target, TunedProfile

#: Targets that are set only at boot.
_AT_BOOT = (steps.KernelArgument, steps.ServiceCpus, steps.BootPages)
_KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in Target.__subclasses__() if kind not in _AT_BOOT}
#: Targets stored on disk. All others are kernel state, which a reboot resets.
_ON_DISK = (steps.OtherConfig, TunedProfile, steps.TunedVariable, BannedCpus)


class JournalEvent(StrEnum):
    """``WRITING`` and ``UNDOING`` are logged before the host is changed, the other two after."""

    WRITING = "writing"
    WRITTEN = "written"
    UNDOING = "undoing"
    UNDONE = "undone"


class JournalLine(BaseModel):
    """``before`` is a raw value, ``desired`` a plan value; only ``writing`` lines have them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    event: JournalEvent
    boot: str
    group: Group
    target: dict[str, Any]
    before: Raw = None
    desired: str | None = None

    @property
    def of(self) -> Target:
        """The target of the line. Raises: ValueError."""
        words = dict(self.target)
        try:
            found: Target = _KINDS[words.pop("kind")](**words)
        except (KeyError, TypeError) as wrong:
            raise ValueError(f"there is no such target: {self.target}") from wrong
        targets.check(found, self.before)
        return found


@dataclass(frozen=True)
class AppliedChange:
    """All writes to one target. ``before`` is the value before the first; ``ours`` are all values written.

    ``open``: a write started and its end is not in the journal, so the value may be partly written.
    """

    group: Group
    target: Target
    before: Raw
    ours: frozenset[str | None]
    open: bool


@dataclass(frozen=True)
class History:
    """``changes`` in the order of their first write; ``gone`` are changes that a reboot has undone."""

    changes: tuple[AppliedChange, ...] = ()
    gone: tuple[tuple[Group, Target], ...] = ()


def line(event: JournalEvent, boot: str, group: Group, target: Target, **more: Raw) -> str:
    return json.dumps({"event": event, "boot": boot, "group": group, "target": as_json(target), **more})


def history(lines: Iterable[str], boot: str) -> History:
    """Return what is left to undo; ``boot`` is the kernel's current boot id. Raises: ValueError."""
    changes: dict[Target, AppliedChange] = {}
    gone: dict[Target, Group] = {}
    profile_set = False
    for text in lines:
        try:
            entry = JournalLine.model_validate_json(text)
        except ValidationError as wrong:
            raise ValueError(f"{text[:60]!r} is no line of a journal") from wrong
        target = entry.of
        profile_set |= isinstance(target, TunedProfile)
        if entry.boot != boot and not isinstance(target, _ON_DISK):
            gone[target] = entry.group
            if entry.event is JournalEvent.UNDONE:
                del gone[target]
        else:
            gone.pop(target, None)
            _take(changes, entry, target)
    found = (_as_profile_leaves_it(change) if profile_set else change for change in changes.values())
    return History(tuple(found), tuple((g, t) for t, g in gone.items()))


def _as_profile_leaves_it(change: AppliedChange) -> AppliedChange:
    """Accept a missing irqbalance list as our own value: a tuned profile that ends removes the list, whoever
    wrote it (``_restore_banned_cpus`` in tuned's tuned/plugins/plugin_irqbalance.py)."""
    if not isinstance(change.target, BannedCpus):
        return change
    return replace(change, ours=change.ours | {None})


def _take(changes: dict[Target, AppliedChange], entry: JournalLine, target: Target) -> None:
    there = changes.get(target)
    if entry.event is JournalEvent.WRITING:
        before = there.before if there else entry.before
        ours = (there.ours if there else frozenset()) | {entry.desired}
        changes[target] = AppliedChange(entry.group, target, before, ours, open=True)
    elif there is None:
        raise ValueError(f"{entry.event} of {target}, which nothing was written to")
    elif entry.event is JournalEvent.UNDONE:
        del changes[target]
    else:
        changes[target] = replace(there, open=entry.event is JournalEvent.UNDOING)


DEFAULT = Path("/var/lib/netplugin/tuning.journal")


class ApplyJournal:
    """Context manager; one process at a time holds the journal. Only the end of the file changes: after a
    crash it has whole lines and at most one partial line, whose change was not started.

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
            wait = "wait until it has ended"
            raise Conflict(f"another apply or undo holds {self.path}", step="journal", fix=wait) from busy
        except OSError as refused:
            raise _unusable(self.path, refused) from refused
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def history(self) -> History:
        """Raises: HostError if the file is not a journal."""
        return _read(self.path, self._data(), self._boot)

    def writing(self, group: Group, target: Target, before: Raw, desired: str | None) -> None:
        """Log that ``target`` is about to be set to ``desired``; ``before`` is its raw value."""
        self._append(line(JournalEvent.WRITING, self._boot, group, target, before=before, desired=desired))

    def withdraw(self) -> None:
        """Remove the last line: its change left no trace on the host."""
        self._cut(self._last)

    def mark(self, event: JournalEvent, group: Group, target: Target) -> None:
        """Log an event without values."""
        self._append(line(event, self._boot, group, target))

    def clear(self) -> None:
        """Empty the journal; only when nothing is left to undo."""
        self._cut(0)

    def _open(self) -> None:
        own_directory(self.path.parent, 0o700)
        self._descriptor = open_own(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sync(self.path.parent)
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
            # A later line would join the partial one. If this fails too, the next open removes it.
            with contextlib.suppress(HostError):
                self._cut(self._last)
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
        with open(open_own(path), "rb") as file:
            return _read(path, file.read(), boot)
    except FileNotFoundError:
        return History()
    except OSError as refused:
        raise _unusable(path, refused) from refused


def _read(path: Path, data: bytes, boot: str) -> History:
    try:
        return history(_whole(data).decode().splitlines(), boot)
    except ValueError as wrong:
        raise HostError(
            f"{path} is no journal of this program: {reason(wrong)}",
            step="journal",
            fix="name another with --journal, or look into it and put back by hand what it says",
        ) from wrong


def _whole(data: bytes) -> bytes:
    """Strip a partial last line."""
    return data[: data.rfind(b"\n") + 1]


def _unusable(path: Path, refused: OSError) -> HostError:
    if isinstance(refused, UnsafeFile):
        found = f"the journal: {refused.filename} {refused.strerror}"
        return HostError(found, step="journal", fix=refused.fix)
    return HostError(
        f"the journal {path} cannot be used: {refused.strerror or refused}",
        step="journal",
        fix="run it as root, or name another file with --journal",
    )

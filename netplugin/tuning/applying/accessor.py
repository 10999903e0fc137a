"""Access to the host while applying: the protocol of a kind of target, programs, files below a root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from netplugin.host.processes import run
from netplugin.host.safe_files import open_within, opened, replacing
from netplugin.tuning.root import Root

# -- Accessor protocol of a kind of target: read, write, restore. ---------------------------------


T = TypeVar("T", contravariant=True)

#: A value in the host's own format, from which it can be restored exactly; None: not set.
Raw: TypeAlias = str | None


class WriteIgnored(Exception):
    """The write was ignored or the target has gone, which is not a failure; the message says why."""


class SettingAccessor(Protocol[T]):
    """Reads and writes targets of one kind. All methods raise: NetpluginError, ``WriteIgnored``."""

    def read(self, target: T) -> Raw: ...

    def value(self, target: T, raw: Raw) -> str | None:
        """Normalise ``raw`` to a plan value; equivalent texts give the same value."""
        ...

    def write(self, target: T, desired: str | None) -> None:
        """Set ``desired``, a plan value."""
        ...

    def restore(self, target: T, raw: Raw) -> None:
        """Set ``raw``, which was read earlier."""
        ...


# -- Runs host programs while applying. -----------------------------------------------------------


#: (arguments, timeout in seconds) -> standard output. Raises: as ``netplugin.host.processes.run``.
Run: TypeAlias = Callable[[Sequence[str], float], str]


def run_program(args: Sequence[str], seconds: float) -> str:
    return run(args, step="apply", deadline=time.monotonic() + seconds)


# -- Read and write a host's files below one root directory. --------------------------------------


class WritableRoot(Root):
    """``Root`` with writes: kernel files are written in place, other files are replaced atomically.

    All methods here raise OSError.
    """

    def whole(self, path: str) -> str | None:
        """The file's exact text, white space included; None if the file does not exist."""
        try:
            return self._bytes(path).decode(errors="surrogateescape")
        except FileNotFoundError:
            return None

    def write(self, path: str, text: str) -> None:
        """Write one line to an existing file in a single write(2), as kernel files require."""
        self._write(path, f"{text}\n".encode())

    def replace(self, path: str, text: str) -> None:
        """Replace the file atomically; mode and owner are kept."""
        self._replace(path, text.encode(errors="surrogateescape"))

    def remove(self, path: str) -> None:
        """Remove a file; a missing file is no error."""
        folder, name = os.path.split(path)
        with contextlib.suppress(FileNotFoundError), opened(self._folder(folder)) as above:
            os.unlink(name, dir_fd=above)

    def _write(self, path: str, data: bytes) -> None:
        # No O_CREAT or O_TRUNC: kernel files support neither, and only these are written in place.
        with opened(open_within(self.path, path, os.O_WRONLY)) as descriptor:
            os.write(descriptor, data)

    def _replace(self, path: str, data: bytes) -> None:
        """Of a link, the file that it leads to is replaced."""
        try:
            with opened(open_within(self.path, path, os.O_RDONLY)) as there:
                old, file = os.fstat(there), Path(f"/proc/self/fd/{there}").readlink()
        except FileNotFoundError:
            folder, name = os.path.split(path)
            with opened(self._folder(folder)) as above:
                old, file = None, Path(f"/proc/self/fd/{above}").readlink() / name
        mode = old.st_mode & 0o7777 if old else 0o644
        with replacing(file, mode, (old.st_uid, old.st_gid) if old else None) as draft:
            draft.write(data)

    def _folder(self, path: str) -> int:
        return open_within(self.path, path, os.O_RDONLY | os.O_DIRECTORY)

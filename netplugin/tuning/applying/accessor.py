"""Access to the host while applying: programs, files below a root, the base of each kind of target."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from netplugin.api.errors import HostError
from netplugin.host.processes import run
from netplugin.host.safe_files import open_within, opened, replacing
from netplugin.tuning.root import Fact, Root, Unknown

T = TypeVar("T")
K = TypeVar("K")

#: A value in the host's own format, from which it can be restored exactly; None: not set.
Raw: TypeAlias = str | None


class WriteIgnored(Exception):
    """The write was ignored or the target has gone, which is not a failure; the message says why."""


#: (arguments, timeout in seconds) -> standard output. Raises: as ``netplugin.host.processes.run``.
Run: TypeAlias = Callable[[Sequence[str], float], str]


def run_program(args: Sequence[str], seconds: float) -> str:
    return run(args, step="apply", deadline=time.monotonic() + seconds)


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


class SettingAccessor(ABC, Generic[K]):
    """Reads and writes targets of one kind. All methods raise: NetpluginError, ``WriteIgnored``."""

    def __init__(self, root: WritableRoot, run: Run = run_program) -> None:
        self._root, self._run = root, run

    @abstractmethod
    def read(self, target: K) -> Raw: ...

    def value(self, target: K, raw: Raw) -> str | None:
        """Normalise ``raw`` to a plan value; equivalent texts give the same value."""
        return raw

    def write(self, target: K, desired: str | None) -> None:
        """Set ``desired``, a plan value."""
        self.restore(target, desired)

    @abstractmethod
    def restore(self, target: K, raw: Raw) -> None:
        """Set ``raw``, which was read earlier."""


def required(fact: Fact[T]) -> T:
    """Raises: HostError naming the file that cannot be read."""
    if isinstance(fact, Unknown):
        raise HostError(f"{fact.path}: {fact.reason}", step="read")
    return fact

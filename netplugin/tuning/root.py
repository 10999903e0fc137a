"""The one directory that a machine is read under: ``/`` for this one, a copy of its files for another."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

T = TypeVar("T")
D = TypeVar("D")

#: More than any file that is read here has; a tree may come from elsewhere.
_MOST_BYTES = 1 << 20
#: How sysfs says that a device has no such value (the speed of a link that is down, say), and /proc
#: that a process has just ended.
_NO_VALUE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ESRCH)


@dataclass(frozen=True)
class Unknown:
    """What could not be read, and why. ``missing``: there is no such file, or nothing in it now.

    ``fix`` is what to do about it, where one thing is known to help; asking again does not, then.
    """

    path: str
    reason: str
    missing: bool = False
    fix: str | None = None

    def __str__(self) -> str:
        return f"unknown ({self.path}: {self.reason})"


#: A value, or why there is none.
Fact: TypeAlias = T | Unknown


def known(fact: Fact[T], default: D) -> T | D:
    return default if isinstance(fact, Unknown) else fact


class Root:
    """Reads files, folders and links by their absolute paths on the machine. Raises nothing."""

    def __init__(self, path: Path = Path("/")) -> None:
        self.path = path

    def text(self, path: str) -> Fact[str]:
        """The file's text without the white space around it."""
        try:
            return self._bytes(path).decode().replace("\0", " ").strip()
        except UnicodeDecodeError:
            return Unknown(path, "is not text")
        except OSError as wrong:
            return _unknown(path, wrong)

    def parsed(self, path: str, parse: Callable[[str], T]) -> Fact[T]:
        """The file's text through ``parse``, which raises ValueError for what it cannot read."""
        text = self.text(path)
        if isinstance(text, Unknown):
            return text
        try:
            return parse(text)
        except (ValueError, IndexError):
            return Unknown(path, f"cannot be made sense of: {text[:60]!r}")

    def optional(self, path: str, parse: Callable[[str], T | None]) -> Fact[T | None]:
        """As ``parsed``; None where there is no such file, because the kernel lacks the feature."""
        found = self.parsed(path, parse)
        return None if isinstance(found, Unknown) and found.missing else found

    def names(self, path: str) -> Fact[tuple[str, ...]]:
        """What is in a folder, sorted."""
        try:
            return tuple(sorted(self._list(path)))
        except OSError as wrong:
            return _unknown(path, wrong)

    def link(self, path: str) -> str | None:
        """The last name of a link's target; None if there is no link."""
        try:
            return self._target(path).rstrip("/").rpartition("/")[2]
        except OSError:
            return None

    # -- how, for a tree that is no directory to do it otherwise -----------------------------------

    def _bytes(self, path: str) -> bytes:
        with self._at(path).open("rb") as file:
            return file.read(_MOST_BYTES)

    def _list(self, path: str) -> list[str]:
        return os.listdir(self._at(path))

    def _target(self, path: str) -> str:
        return os.readlink(self._at(path))

    def _at(self, path: str) -> Path:
        return self.path / path.lstrip("/")


def _unknown(path: str, wrong: OSError) -> Unknown:
    gone = isinstance(wrong, FileNotFoundError | NotADirectoryError)
    reason = "there is no such file" if gone else wrong.strerror or str(wrong)
    missing = gone or wrong.errno in _NO_VALUE
    return Unknown(path, reason[:1].lower() + reason[1:], missing)


def sync_folder(folder: Path) -> None:
    """A file that was just made, or has taken another's place, is in its folder for good (fsync(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

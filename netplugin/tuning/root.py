"""Read a host's files below one root: ``/`` for this host, a copy of the files for another.

The links of a copy lead to places in the copy, and only its regular files are read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

from netplugin.host.safe_files import open_file_within, open_within, opened

T = TypeVar("T")
D = TypeVar("D")
P = ParamSpec("P")

#: Read limit in bytes, above any expected file; a copied tree is not trusted.
_MOST_BYTES = 1 << 20
#: Errors for a value that does not exist: sysfs, for example the speed of a link that is down; /proc, if
#: the process has just ended.
_NO_VALUE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ESRCH)


@dataclass(frozen=True)
class Unknown:
    """A fact that could not be read, with the reason. ``missing``: the file or its value does not exist.

    ``fix`` is the remedy, if one is known; retrying does not help then.
    """

    path: str
    reason: str
    missing: bool = False
    fix: str | None = None

    def __str__(self) -> str:
        return f"unknown ({self.path}: {self.reason})"


#: A value, or the reason why there is none.
Fact: TypeAlias = T | Unknown


def known(fact: Fact[T], default: D) -> T | D:
    return default if isinstance(fact, Unknown) else fact


class _Refused(Exception):
    def __init__(self, fact: Unknown) -> None:
        self.fact = fact


def sure(fact: Fact[T], missing: T | None = None) -> T:
    """The value, for use below ``@whole``; ``missing``, if given, where there is no such file."""
    if not isinstance(fact, Unknown):
        return fact
    if fact.missing and missing is not None:
        return missing
    raise _Refused(fact)


def whole(read: Callable[P, T]) -> Callable[P, Fact[T]]:
    """Return the first Unknown that ``sure`` meets instead of a part, which would look complete."""

    @wraps(read)
    def reading(*args: P.args, **given: P.kwargs) -> Fact[T]:
        try:
            return read(*args, **given)
        except _Refused as refused:
            return refused.fact

    return reading


class Root:
    """Reads files, directories and links by their absolute path on the host. Raises nothing."""

    def __init__(self, path: Path = Path("/")) -> None:
        self.path = path

    def text(self, path: str) -> Fact[str]:
        """The file's text, stripped of white space."""
        try:
            return self._bytes(path).decode().replace("\0", " ").strip()
        except UnicodeDecodeError:
            return Unknown(path, "is not text")
        except OSError as wrong:
            return _unknown(path, wrong)

    def parsed(self, path: str, parse: Callable[[str], T]) -> Fact[T]:
        """The file's text converted by ``parse``, which raises ValueError for invalid text."""
        text = self.text(path)
        if isinstance(text, Unknown):
            return text
        try:
            return parse(text)
        except (ValueError, IndexError):
            return Unknown(path, f"cannot be made sense of: {text[:60]!r}")

    def optional(self, path: str, parse: Callable[[str], T | None]) -> Fact[T | None]:
        """Like ``parsed``, but None if the file does not exist because the kernel lacks the feature."""
        found = self.parsed(path, parse)
        return None if isinstance(found, Unknown) and found.missing else found

    def names(self, path: str) -> Fact[tuple[str, ...]]:
        """Sorted names in a directory."""
        try:
            return tuple(sorted(self._list(path)))
        except OSError as wrong:
            return _unknown(path, wrong)

    def link(self, path: str) -> str | None:
        """Last path component of a link's target; None if it is not a link."""
        try:
            return self._target(path).rstrip("/").rpartition("/")[2]
        except OSError:
            return None

    # -- access to the file system, for subclasses to override --------------------------------------

    def _bytes(self, path: str) -> bytes:
        with open_file_within(self.path, path) as file:
            return file.read(_MOST_BYTES)

    def _list(self, path: str) -> list[str]:
        with opened(open_within(self.path, path, os.O_RDONLY | os.O_DIRECTORY)) as folder:
            return os.listdir(folder)

    def _target(self, path: str) -> str:
        with opened(open_within(self.path, path, os.O_PATH | os.O_NOFOLLOW)) as link:
            return os.readlink("", dir_fd=link)


def _unknown(path: str, wrong: OSError) -> Unknown:
    gone = isinstance(wrong, FileNotFoundError | NotADirectoryError)
    reason = "there is no such file" if gone else wrong.strerror or str(wrong)
    missing = gone or wrong.errno in _NO_VALUE
    return Unknown(path, reason[:1].lower() + reason[1:], missing)

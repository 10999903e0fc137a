"""The processes of a PID namespace: no process can leave one, and one that is held open keeps its number.

The number of a namespace that is gone is given to the next one at once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Self

OWN = "self"


def open_namespace(process: int | str = OWN) -> int:
    """A descriptor of a process's PID namespace."""
    return os.open(_path(process), os.O_RDONLY | os.O_CLOEXEC)


class Inmates:
    """The processes in the PID namespace that a descriptor is of, which this closes at its end."""

    def __init__(self, namespace: int) -> None:
        self._namespace = namespace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._namespace)

    def pids(self) -> list[int]:
        """Those that run now."""
        ours = os.fstat(self._namespace).st_ino
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _number(pid) == ours]


def _path(process: int | str) -> str:
    return f"/proc/{process}/ns/pid"


def _number(pid: int) -> int | None:
    with suppress(OSError):  # it has ended
        return os.stat(_path(pid)).st_ino
    return None

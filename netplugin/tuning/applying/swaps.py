"""Switch swap areas off and on with swapoff and swapon."""

from __future__ import annotations

import re
from collections.abc import Iterator

from netplugin.errors import HostError
from netplugin.tuning.applying.place import Raw
from netplugin.tuning.applying.programs import Run
from netplugin.tuning.applying.writable import WritableRoot
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import Swap

_PATH = "/proc/swaps"
#: Timeouts in seconds: swapoff may have to read back gigabytes from disk.
_OFF_S, _ON_S = 600.0, 30.0


class Swaps:
    """Raw value: one line of name and priority per area, as in /proc/swaps, highest priority first."""

    def __init__(self, root: WritableRoot, run: Run) -> None:
        self._root, self._run = root, run

    def read(self, target: Swap) -> Raw:
        text = self._root.text(_PATH)
        if isinstance(text, Unknown):
            raise HostError(f"{_PATH}: {text.reason}", step="read")
        rows = [row.split() for row in text.splitlines()[1:]]
        rows.sort(key=lambda row: -int(row[-1]))
        return "\n".join(f"{row[0]} {row[-1]}" for row in rows) or None

    def value(self, target: Swap, raw: Raw) -> str | None:
        return ",".join(name for name, _ in _rows(raw)) or None

    def write(self, target: Swap, wanted: str | None) -> None:
        """Switch all swap areas off; a plan never wants any."""
        for name, _ in _rows(self.read(target)):
            self._run(["swapoff", _plain(name)], _OFF_S)

    def restore(self, target: Swap, raw: Raw) -> None:
        """Switch areas on again. The kernel assigns negative priorities in order of swapon(2)."""
        there = {name for name, _ in _rows(self.read(target))}
        for name, priority in _rows(raw):
            if name not in there:
                own = [f"--priority={priority}"] if priority >= 0 else []
                self._run(["swapon", *own, _plain(name)], _ON_S)


def _rows(raw: Raw) -> Iterator[tuple[str, int]]:
    for line in (raw or "").splitlines():
        name, _, priority = line.rpartition(" ")
        yield name, int(priority)


def _plain(name: str) -> str:
    r"""Decode octal escapes of /proc/swaps: white space is ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)

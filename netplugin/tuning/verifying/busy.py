"""How many CPUs of this host are busy, all programs and the kernel together, from /proc/stat."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
#: Columns of proc_pid_stat(5), "/proc/stat": user, nice, system; then irq and softirq. Guests are in user.
_BUSY = (0, 1, 2, 5, 6)


class BusyClock:
    """Counts from its creation."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._began, self._before = time.monotonic(), self._busy_s()

    def cpus(self) -> float:
        """Return the mean number of busy CPUs since the creation."""
        return (self._busy_s() - self._before) / max(1e-9, time.monotonic() - self._began)

    def _busy_s(self) -> float:
        columns = [int(word) for word in self._stat.read_text().splitlines()[0].split()[1:]]
        return sum(columns[n] for n in _BUSY) / os.sysconf("SC_CLK_TCK")

"""A clock for stored data, independent of the system time and continuous across restarts.

It uses CLOCK_BOOTTIME (clock_gettime(2): monotonic, includes suspend), which restarts at each boot.
Its value is stored with the boot ID and continues from there after a reboot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StoredClock:
    """Starts with the time of day, because older versions stored that."""

    def __init__(
        self,
        stored: str | None,
        boot: str | None = None,
        boottime: Callable[[], float] = _boottime,
        today: Callable[[], float] = time.time,
    ) -> None:
        """``stored`` is an earlier result of ``state``."""
        self._boottime = boottime
        self._boot = boot if boot is not None else _BOOT_ID.read_text().strip()
        if stored is None:
            value = today()
        else:
            was = json.loads(stored)
            value = float(was["value"])
            if was["boot"] == self._boot:
                value += boottime() - float(was["boottime"])
        self._offset = value - boottime()

    def now(self) -> float:
        return self._offset + self._boottime()

    def state(self) -> str:
        """The state to store periodically; after a reboot, the time since the last call is lost."""
        at = self._boottime()
        return json.dumps({"boot": self._boot, "boottime": at, "value": self._offset + at})

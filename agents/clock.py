"""The age of what is stored: seconds that no step of the system's clock changes, across restarts.

It counts with CLOCK_BOOTTIME (clock_gettime(2): monotonic, suspend included), which begins anew with
each boot. What it was is stored with the id of the boot: after a reboot it goes on from there.
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
    """Begins with the time of day, as what older versions stored is of that."""

    def __init__(
        self,
        stored: str | None,
        boot: str | None = None,
        boottime: Callable[[], float] = _boottime,
        today: Callable[[], float] = time.time,
    ) -> None:
        """``stored`` is what ``state`` gave at some time before."""
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
        """To be stored now and then: what passes after the last time is lost in a reboot."""
        at = self._boottime()
        return json.dumps({"boot": self._boot, "boottime": at, "value": self._offset + at})

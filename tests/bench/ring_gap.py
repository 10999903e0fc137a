"""How long neither of two OVS had the rings of a migrated guest: by the logs of both."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

_LINE = re.compile(r"(?P<at>\d{4}-\d\d-\d\dT[\d:.]+)Z\|")
# QEMU asks for them as it stops the rings (the vhost-user protocol); DPDK and OVS log it.
_STOPPED, _STARTED = "read message VHOST_USER_GET_VRING_BASE", "has been added on numa node"


class RingGap:
    """From now on: made before the migration, and read after it."""

    def __init__(self, source: Path, destination: Path, device: str) -> None:
        """The logs of ovs-vswitchd, and the port's name, which is the same on both."""
        self._device = device
        self._logs = {source: _STOPPED, destination: _STARTED}
        self._sizes = {log: log.stat().st_size for log in self._logs}

    def milliseconds(self) -> float:
        """From the first ring that stopped at the source to the start of all at the destination.

        Raises: ValueError if a log does not have it.
        """
        stopped, started = (self._first(log, printed) for log, printed in self._logs.items())
        return (started - stopped).total_seconds() * 1e3

    def _first(self, log: Path, printed: str) -> datetime:
        with log.open(encoding="utf-8", errors="replace") as lines:
            lines.seek(self._sizes[log])
            return when(lines, self._device, printed)


def when(lines: Iterable[str], device: str, printed: str) -> datetime:
    """When this was said of a device first. Raises: ValueError if it was not."""
    for line in lines:
        found = _LINE.match(line)
        if found and device in line and printed in line:
            return datetime.fromisoformat(found["at"]).replace(tzinfo=UTC)
    raise ValueError(f"the log does not say {printed!r} of {device}")

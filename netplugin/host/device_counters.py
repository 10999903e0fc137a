"""The kernel's counters of network devices, of all by one read, and of one in detail."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from netplugin.api.errors import HostError

_ALL = Path("/proc/net/dev")
_SYS = Path("/sys/class/net")
_STEP = "device-counters"
#: The columns of /proc/net/dev behind the name (``dev_seq_printf_stats`` in net/core/net-procfs.c).
_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """The counters of a device; ``rx`` is what the kernel receives from it. ``index`` is 0 if it has gone."""

    index: int
    rx_bytes: int
    rx_packets: int
    rx_errors: int
    rx_dropped: int
    tx_bytes: int
    tx_packets: int
    tx_errors: int
    tx_dropped: int


def parse(text: str, indices: Mapping[str, int]) -> dict[str, DeviceCounters]:
    """The devices of the text of /proc/net/dev, by name. A line that is none of a device is left out."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.rpartition(": ")
        if name and len(columns := rest.split()) == _COLUMNS:
            rx, tx = columns[:4], columns[8:12]
            found[name.strip()] = DeviceCounters(indices.get(name.strip(), 0), *map(int, (*rx, *tx)))
    return found


def read_all() -> dict[str, DeviceCounters]:
    """The counters of all devices of the process's network namespace. Raises: HostError."""
    try:
        return parse(_ALL.read_text(), {name: index for index, name in socket.if_nameindex()})
    except OSError as refused:
        raise HostError(f"{_ALL}: {refused.strerror}", step=_STEP) from refused


def detail(name: str, *counters: str) -> dict[str, int]:
    """These of /sys/class/net/NAME/statistics (Documentation/networking/statistics.rst), where they are."""
    found = {}
    for each in counters:
        try:
            found[each] = int((_SYS / name / "statistics" / each).read_text())
        except (OSError, ValueError):
            continue
    return found

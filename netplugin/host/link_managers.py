"""Which network managers of the host configure a device, by the state files that they keep in ``/run``.

Both have a file for each device, with its index as the name: systemd-networkd names the matching file of its
configuration in it (``NETWORK_FILE``), NetworkManager whether it manages the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: By manager: its folder below ``/run``, and the begin of the line of a device that it configures.
_STATES = {
    "systemd-networkd": ("systemd/netif/links", "NETWORK_FILE=/"),
    "NetworkManager": ("NetworkManager/devices", "managed=true"),
}


def managers(devices: Mapping[int, str], run: Path = Path("/run")) -> Mapping[str, tuple[str, ...]]:
    """Return the names of those devices (names by index) that each manager configures, sorted.

    The files are about the network namespace of process 1; in another, nothing is known.
    """
    if not _is_of_host():
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for manager, (folder, line) in _STATES.items():
        names = [name for index, name in devices.items() if _has(run / folder / str(index), line)]
        if names:
            found[manager] = tuple(sorted(names))
    return found


def _has(file: Path, line: str) -> bool:
    try:
        return any(each.startswith(line) for each in file.read_text(errors="replace").splitlines())
    except OSError:
        return False


def _is_of_host() -> bool:
    try:
        host = os.stat("/proc/1/ns/net")
    except OSError:
        return True  # without CAP_SYS_PTRACE: the agent's unit is in that namespace
    own = os.stat("/proc/thread-self/ns/net")
    return (host.st_dev, host.st_ino) == (own.st_dev, own.st_ino)

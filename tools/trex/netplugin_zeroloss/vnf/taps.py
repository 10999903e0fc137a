"""The VNF ``taps``: a Python forwarder for taps where neither a VM nor DPDK is available.

It forwards about ten thousand frames per second: enough for tests and demonstrations, not for measuring
a backend.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from netplugin_zeroloss.loss.contract import DropCounters
from netplugin_zeroloss.machines import LocalMachine
from netplugin_zeroloss.vnf.contract import (
    Attachment,
    Forwarded,
    PortCounts,
    ProgramVnf,
    VnfCores,
    VnfError,
    VnfInfo,
    VnfPort,
)
from netplugin_zeroloss.vnf.dpdk import check_cores, device_there

_START_S = 20.0


class Taps(ProgramVnf):
    """One local process with one thread."""

    name = "taps"

    def __init__(self, ports: tuple[VnfPort, ...], cores: VnfCores) -> None:
        """Raises: VnfError for a port that is not a tap."""
        super().__init__(ports, cores)
        for port in ports:
            if port.attachment is not Attachment.TAP:
                raise VnfError(f"{port.device} is no tap: the VNF 'taps' takes nothing else")

    def start(self) -> VnfInfo:
        deadline = time.monotonic() + _START_S
        check_cores(self._cores)
        for port in self._ports:
            device_there(port.device)
        machine = self._on(LocalMachine(), deadline)
        pinned = ["taskset", "--cpu-list", str(self._cores.workers[0])] if self._cores.workers else []
        words = [*pinned, machine.python, "-m", "netplugin_zeroloss.vnf.tap_forwarder"]
        words += [word for port in self._ports for word in (port.device, port.mac, port.peer_mac)]
        self._run(machine, words)
        self._wait_for_links(deadline)
        version = f"Python {platform.python_version()}"
        return VnfInfo(self.name, version, (1,) * len(self._ports), {"command": " ".join(words)})

    @property
    def place(self) -> DropCounters:
        return Forwarded(self._counts)

    def _links(self) -> Sequence[bool]:
        """Whether a program has the tap open: it has a carrier then."""
        return [_read(port, "carrier") == 1 for port in self._ports]

    def _counts(self) -> list[PortCounts]:
        """Return the counters of the kernel: what it sends to a tap is what the program receives."""
        self.check()
        counted = [[_read(port, f"statistics/{way}_packets") for way in ("tx", "rx")] for port in self._ports]
        return [PortCounts(received, sent) for received, sent in counted]


def _read(port: VnfPort, name: str) -> int:
    """Return a number of a tap; 0 if it has none, as a tap that is down has no carrier."""
    with suppress(OSError):
        return int(Path("/sys/class/net", port.device, name).read_text())
    return 0

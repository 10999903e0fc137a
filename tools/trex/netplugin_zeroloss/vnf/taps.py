"""The VNF ``taps``: a Python forwarder for taps where neither a VM nor DPDK is available.

It forwards about ten thousand frames per second: enough for tests and demonstrations, not for measuring
a backend.
"""

from __future__ import annotations

import platform
import struct
import time
from pathlib import Path

from netplugin_zeroloss.loss.contract import DropCounters
from netplugin_zeroloss.machines.contract import LocalMachine
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
from netplugin_zeroloss.vnf.dpdk import check_cores, check_there

_START_S = 20.0


class Taps(ProgramVnf):
    """One local process with one thread. Its counters are in a file: received and sent frames per port."""

    name = "taps"
    _counters: Path | None = None

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
            check_there(port.device)
        machine = self._on(LocalMachine(), deadline)
        self._counters = counters = Path(machine.directory) / "counters"
        words = [machine.python, "-m", "netplugin_zeroloss.vnf.tap_forwarder", "--counters", str(counters)]
        for port in self._ports:
            words += ["--tap", port.device, port.mac, port.peer_mac]
        for cpu in self._cores.workers[:1]:
            words += ["--cpu", str(cpu)]
        self._run(machine, words).wait_for(counters.exists, deadline, "it opens its taps")
        version = f"Python {platform.python_version()}"
        return VnfInfo(self.name, version, (1,) * len(self._ports), {"command": " ".join(words)})

    @property
    def place(self) -> DropCounters:
        return Forwarded(self._counts)

    def _counts(self) -> list[PortCounts]:
        self.check()
        assert self._counters is not None
        return [PortCounts(*pair) for pair in struct.iter_unpack("=QQ", self._counters.read_bytes())]

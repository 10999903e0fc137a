"""The VNF ``taps``: a Python forwarder for taps where neither a VM nor DPDK is available.

It forwards about ten thousand frames per second: enough for tests and demonstrations, not for measuring
a backend.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from netplugin.programs.program import Program, Telemetry, own_directory
from netplugin_zeroloss.loss.contract import DropCounters
from netplugin_zeroloss.vnf.contract import (
    Attachment,
    Forwarded,
    PortCounts,
    Vnf,
    VnfCores,
    VnfError,
    VnfInfo,
    VnfPort,
)
from netplugin_zeroloss.vnf.dpdk import check_cores

_START_S = 20.0


class Taps(Vnf):
    """One local process with one thread."""

    _directory: Path | None = None
    _program: Program | None = None
    _telemetry: Telemetry | None = None

    def __init__(self, ports: tuple[VnfPort, ...], cores: VnfCores) -> None:
        """Raises: VnfError for a port that is not a tap."""
        for port in ports:
            if port.attachment is not Attachment.TAP:
                raise VnfError(f"{port.device} is no tap: the VNF 'taps' takes nothing else")
        self._ports, self._cores = ports, cores

    def start(self) -> VnfInfo:
        deadline = time.monotonic() + _START_S
        check_cores(self._cores)
        for port in self._ports:
            if not Path(f"/sys/class/net/{port.device}").exists():
                raise VnfError(f"{port.device}: there is no such tap in this network namespace")
        self._directory = own_directory()
        path = self._directory / "counts"
        words = [
            sys.executable,
            "-m",
            "netplugin_zeroloss.vnf.tap_forwarder",
            "--socket",
            str(path),
        ]
        for port in self._ports:
            words += ["--tap", port.device, port.mac, port.peer_mac]
        for cpu in self._cores.workers[:1]:
            words += ["--cpu", str(cpu)]
        self._telemetry = telemetry = Telemetry(path)
        self._program = Program("the forwarder of taps", words, self._directory / "log")
        self._program.start()
        self._program.wait_for(lambda: telemetry.there, deadline, "it opens its taps")
        self._counts()
        return VnfInfo("taps", telemetry.version, (1,) * len(self._ports), {"command": " ".join(words)})

    def check(self) -> None:
        if self._program is None:
            raise VnfError("the forwarder of taps has not been started")
        self._program.check()

    @property
    def place(self) -> DropCounters:
        return Forwarded(self._counts)

    def close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
        if self._program is not None:
            self._program.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _counts(self) -> list[PortCounts]:
        if self._telemetry is None:
            raise VnfError("the forwarder of taps has not been started")
        counts = self._telemetry.ask("/counts")
        pairs = zip(counts["received"], counts["sent"], strict=True)
        return [PortCounts(received, sent) for received, sent in pairs]

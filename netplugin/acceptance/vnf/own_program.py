"""Base of VNFs that are one local program with its own directory and telemetry socket."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from netplugin.acceptance.evidence.contract import Place
from netplugin.acceptance.vnf.contract import Vnf
from netplugin.acceptance.vnf.forwarded import Forwarded, PortCounts
from netplugin.acceptance.vnf.process import Program
from netplugin.acceptance.vnf.telemetry import Telemetry


class OwnProgram(Vnf):
    """``start`` sets the attributes; ``close`` releases those that are set."""

    _directory: Path | None = None
    _program: Program | None = None
    _telemetry: Telemetry | None = None

    @property
    def place(self) -> Place:
        return Forwarded(self._counts)

    @abstractmethod
    def _counts(self) -> Sequence[PortCounts]:
        """Return the counters per port. Raises: VnfError."""

    def close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
        if self._program is not None:
            self._program.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

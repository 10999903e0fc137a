"""The VNF ``external``, run by the operator: not checked, and without counters."""

from __future__ import annotations

from netplugin.acceptance.evidence.contract import Place, Reading
from netplugin.acceptance.vnf.contract import Vnf, VnfInfo, VnfPort
from netplugin.acceptance.vnf.description import ExternalDescription


class External(Vnf):
    """Starts, checks and stops nothing."""

    def __init__(self, description: ExternalDescription, ports: tuple[VnfPort, ...]) -> None:
        self._description = description
        self._ports = ports

    def start(self) -> VnfInfo:
        queues = tuple(port.queues for port in self._ports)
        return VnfInfo(self._description.name, self._description.version, queues, {})

    def check(self) -> None:
        """Do nothing: there is no way to check it."""

    @property
    def place(self) -> Place:
        return _Silent()


class _Silent(Place):
    """Has no counters: loss in the VNF stays unexplained."""

    @property
    def name(self) -> str:
        return "vnf"

    def read(self) -> Reading:
        return Reading()

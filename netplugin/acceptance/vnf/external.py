"""The VNF ``external``: the operator runs it. It is believed, and says nothing of lost frames."""

from __future__ import annotations

from netplugin.acceptance.evidence.contract import Place, Reading
from netplugin.acceptance.vnf.contract import Vnf, VnfInfo, VnfPort
from netplugin.acceptance.vnf.description import ExternalDescription


class External(Vnf):
    """Nothing is started, checked or ended."""

    def __init__(self, description: ExternalDescription, ports: tuple[VnfPort, ...]) -> None:
        self._description = description
        self._ports = ports

    def start(self) -> VnfInfo:
        queues = tuple(port.queues for port in self._ports)
        return VnfInfo(self._description.name, self._description.version, queues, {})

    def check(self) -> None:
        """It cannot be asked."""

    @property
    def place(self) -> Place:
        return _Silent()


class _Silent(Place):
    """Counts nothing: what is lost in the VNF is unexplained."""

    @property
    def name(self) -> str:
        return "vnf"

    def read(self) -> Reading:
        return Reading()

"""Changes of who may send into VXLAN networks: one transaction per network, since few change at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from drivers.linuxbridge.commands import BridgeChange, BridgeKernel
from netplugin.host.vxlan_filter import VxlanKey


@dataclass(frozen=True)
class AllowPeers(BridgeChange):
    """Accept VXLAN packets of a network from its peers only; ``gone``: peers to remove.

    ``base``: the table is missing, or its rules are not as intended.
    """

    closes, blocks = True, True
    part: ClassVar[str] = "nftables"
    network: VxlanKey
    peers: frozenset[str]
    gone: frozenset[str] = frozenset()
    base: bool = True

    def describe(self) -> str:
        vni, port = self.network.vni, self.network.udp_port
        return f"let {len(self.peers)} peers alone send to VNI {vni} on UDP port {port}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        kernel.vxlan.allow(self.network, self.peers, self.gone, deadline, base=self.base)


@dataclass(frozen=True)
class ForgetPeers(BridgeChange):
    part: ClassVar[str] = "nftables"
    network: VxlanKey
    peers: frozenset[str]

    def describe(self) -> str:
        return f"forget who may send to VNI {self.network.vni} on UDP port {self.network.udp_port}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        kernel.vxlan.forget(self.network, self.peers, deadline)


@dataclass(frozen=True)
class RemoveVxlanTable(BridgeChange):
    part: ClassVar[str] = "nftables"

    def describe(self) -> str:
        return "remove nftables table inet netplugin, which no network needs any more"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        kernel.vxlan.remove(deadline)

"""What VXLAN networks need in OVS in addition to ports of VMs: two bridges, and ports that networks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from drivers.ovs.ports import PortRows
from netplugin.host.flow import Flow
from netplugin.host.names import VXLAN
from netplugin.host.ovs_rows import TUNNEL_MARK, OvsPort
from netplugin.host.ovs_underlay import Underlay

#: The bridges of VXLAN networks (for VM ports, and for tunnels) and the patch ports that join them.
OVERLAY, TUNNELS = "np-overlay", "np-tunnels"
TO_TUNNELS, TO_OVERLAY = "np-to-tunnels", "np-to-overlay"
PATCHES = (TO_TUNNELS, TO_OVERLAY)
#: The name prefixes of the ports that VXLAN networks share.
SHARED_NAMES = (VXLAN, "np-to-")
#: The marks of the two bridges. The colon cannot occur in a physical network's name.
BRIDGE_MARKS: Mapping[str, str] = {OVERLAY: "vxlan:overlay", TUNNELS: "vxlan:tunnels"}
#: The tunnel bridge exists while the overlay bridge has ports.
HOMES: Mapping[str, str] = {TUNNELS: OVERLAY}


@dataclass(frozen=True)
class ObservedTunnels:
    """The observed state that the host's VXLAN networks share."""

    #: Ports with our tunnel mark: the two patch ports, and one VXLAN port per UDP port.
    ports: Mapping[str, OvsPort] = field(default_factory=dict)
    #: The flows of the networks that were read, by cookie, without learned flows.
    flows: Mapping[int, frozenset[Flow]] = field(default_factory=dict)
    #: Networks that have ports outside the observed scope, each with its UDP port.
    neighbours: Mapping[str, int] = field(default_factory=dict)
    #: Those of them whose ports outside the scope are all of other backends.
    of_others: frozenset[str] = frozenset()
    #: The uplink path of the tunnels; None without ``[ovs] local_ip``.
    underlay: Underlay | None = None

    @property
    def local_ip(self) -> str | None:
        """The ``local_ip`` of the existing tunnel ports; None if there are none."""
        rows = (self.ports[name] for name in sorted(self.ports))
        addresses = (row.interface.options.get("local_ip") for row in rows if row.interface)
        return next((address for address in addresses if address), None)


NO_TUNNELS = ObservedTunnels()


@dataclass(frozen=True)
class TunnelPort(PortRows):
    """A port that VXLAN networks share: a patch port, or the tunnel port of one UDP port."""

    shared_mark: ClassVar[str] = TUNNEL_MARK

    name: str
    bridge: str
    type: str
    options: Mapping[str, str]

    @staticmethod
    def patch(name: str) -> TunnelPort:
        bridge, peer = {TO_TUNNELS: (OVERLAY, TO_OVERLAY), TO_OVERLAY: (TUNNELS, TO_TUNNELS)}[name]
        return TunnelPort(name, bridge, "patch", {"peer": peer})

    @staticmethod
    def vxlan(udp_port: int, local_ip: str) -> TunnelPort:
        """Flows set the VNI and the destination. The outer header has OVS's defaults: DF set, TTL 64."""
        options = {"remote_ip": "flow", "key": "flow", "local_ip": local_ip, "dst_port": str(udp_port)}
        return TunnelPort(vxlan_name(udp_port), TUNNELS, "vxlan", options)

    def summary(self, *, is_new: bool) -> str:
        return self.type

    def port_columns(self) -> dict[str, Any]:
        """No tag, so the patch is a trunk for the local VLANs of all networks."""
        return {"tag": [], "vlan_mode": [], "external_ids": {TUNNEL_MARK: self.type}}

    def interfaces(self, *, is_new: bool = False) -> dict[str, dict[str, Any]]:
        ids = {TUNNEL_MARK: self.type}
        return {self.name: {"type": self.type, "options": dict(self.options), "external_ids": ids}}

    def must_be_remade(self, row: OvsPort) -> bool:
        return row.bridge != self.bridge or row.interface is None


def vxlan_name(udp_port: int) -> str:
    """Return the name of a tunnel port. It stays within the 15 characters of an interface name."""
    return f"{VXLAN}{udp_port}"

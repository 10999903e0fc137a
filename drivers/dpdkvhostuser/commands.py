"""Changes to OVS that only the dpdkvhostuser backend makes: tunnel ports and flows of VXLAN networks."""

from __future__ import annotations

from dataclasses import dataclass

from drivers.dpdkvhostuser import tunnels
from drivers.dpdkvhostuser.model import TO_OVERLAY, TunnelPort, vxlan_name
from drivers.ovs.commands import FlowChange, FlowEdit, RowChange, ofport
from drivers.ovs.row_writes import add_port, delete_port, set_port
from netplugin.backend import Overlay
from netplugin.host.ovs import OvsHost
from netplugin.host.ovsdb_writes import Tables


@dataclass(frozen=True)
class AddTunnelPort(RowChange):
    port: TunnelPort

    def write(self, tables: Tables) -> None:
        add_port(tables, self.port)

    def describe(self) -> str:
        return f"add {self.port.type} port {self.port.name} to {self.port.bridge}"


@dataclass(frozen=True)
class SetTunnelPort(RowChange):
    port: TunnelPort

    def write(self, tables: Tables) -> None:
        set_port(tables, self.port)

    def describe(self) -> str:
        return f"set {self.port.type} port {self.port.name}"


@dataclass(frozen=True)
class RemoveTunnelPort(RowChange):
    bridge: str
    name: str

    def write(self, tables: Tables) -> None:
        delete_port(tables, self.bridge, self.name)

    def describe(self) -> str:
        return f"remove port {self.name} from {self.bridge}"


@dataclass(frozen=True)
class SetNetwork(FlowChange):
    """Bring the flows of one VXLAN network to the desired set; correct flows are not touched."""

    overlay: Overlay
    local_ip: str

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        """Return the flows to delete and to add. Correct flows stay, because they carry traffic."""
        overlay, local_ip = self.overlay, self.local_ip
        tunnel = ofport(ovs, vxlan_name(overlay.spec.udp_port))
        patch = ofport(ovs, TO_OVERLAY)
        if not (tunnel and patch):
            return FlowEdit()
        cookie, of_learned = tunnels.with_learned(tunnels.network_cookie(overlay.network_id))
        found = ovs.flows.dump(self.bridge, (cookie, of_learned), deadline)
        own = [flow for flow in found if flow.cookie == cookie]
        learned = [flow for flow in found if flow.cookie == of_learned]
        wanted = tunnels.network_flows(overlay, local_ip, tunnel, patch)
        stays = {flow.identity for flow in wanted}
        gone = [flow for flow in own if flow.identity not in stays]
        gone += tunnels.stale(learned, overlay, local_ip, tunnel)
        return FlowEdit(flows=tuple(f for f in wanted if f not in own), gone=tuple(gone))

    def describe(self) -> str:
        spec = self.overlay.spec
        return (
            f"set flows of network {self.overlay.network_id}: VNI {spec.vni} is VLAN "
            f"{self.overlay.local_vlan}, {len(spec.peers)} peers"
        )

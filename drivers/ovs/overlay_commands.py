"""The changes of VXLAN networks: the ports that they share, and their flows.

Several backends may have ports on one network, and each works on what it observed before. Changes of the
database are composed one transaction at a time, so a removal looks there whether a port has come that needs
what it removes. The flows of a bridge are edited by one thread at a time, and a port is in the database
before its flows: so an edit looks there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drivers.ovs import tunnels
from drivers.ovs.commands import FlowChange, FlowEdit, RowChange, ofport
from drivers.ovs.overlays import OVERLAY, PATCHES, TO_OVERLAY, TunnelPort, network_of, vxlan_name
from drivers.ovs.row_writes import AddOrSetPort, DeletePort, SetPort, owned_ports
from netplugin.api.errors import TryAgain
from netplugin.backend import Overlay
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import TUNNEL_MARK
from netplugin.host.ovsdb_commands import Api, Command, Transaction


@dataclass(frozen=True)
class AddTunnelPort(RowChange):
    port: TunnelPort

    def commands(self, api: Api) -> Iterable[Command]:
        """Another backend may have added it meanwhile."""
        return [AddOrSetPort(api, self.port, TUNNEL_MARK)]

    def describe(self) -> str:
        return f"add {self.port.type} port {self.port.name} to {self.port.bridge}"


@dataclass(frozen=True)
class SetTunnelPort(RowChange):
    port: TunnelPort

    def commands(self, api: Api) -> Iterable[Command]:
        return [SetPort(api, self.port)]

    def describe(self) -> str:
        return f"set {self.port.type} port {self.port.name}"


@dataclass(frozen=True)
class RemoveTunnelPort(RowChange):
    """Remove a port that no network needs, or (``is_remade``) one that is made again."""

    bridge: str
    name: str
    is_remade: bool = False

    def commands(self, api: Api) -> Iterable[Command]:
        kind = DeletePort if self.is_remade else _DeleteUnneeded
        return [kind(api, self.bridge, self.name)]

    def describe(self) -> str:
        return f"remove port {self.name} from {self.bridge}"


class _DeleteUnneeded(DeletePort):
    def run_idl(self, txn: Transaction) -> None:
        """Raises: TryAgain if a port has come that needs it."""
        networks: dict[str, int] = {}
        for port in owned_ports(self.api, OVERLAY):
            networks |= network_of(port.external_ids)
        if networks and self.name in {*PATCHES, *map(vxlan_name, networks.values())}:
            raise TryAgain(f"a port on a VXLAN network needs {self.name} by now", step="plan")
        super().run_idl(txn)


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


@dataclass(frozen=True)
class DropNetwork(FlowChange):
    """Remove the flows of a network without ports, with those that were learned."""

    cookie: int

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        overlay = ovs.view.bridge(OVERLAY)
        networks: Mapping[tuple[str, int], int] = ovs.view.networks_on(overlay) if overlay else {}
        if self.cookie in {tunnels.network_cookie(network_id) for network_id, _ in networks}:
            return FlowEdit()  # another backend has got a port on it meanwhile
        return FlowEdit(tunnels.with_learned(self.cookie))

    def describe(self) -> str:
        return f"remove the flows of a network without ports from {self.bridge} ({self.cookie:#x})"

"""The rows that the dpdkvhostuser backend wants OVS to have, each made from what was asked alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from drivers.dpdkvhostuser.policers import Policer
from netplugin.backend import Intent
from netplugin.host.names import UPLINK, VHOST, VXLAN, device_name
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import (
    BACKEND_MARK,
    NETWORK_MARK,
    PORT_MARK,
    TUNNEL_MARK,
    UDP_MARK,
    UPLINK_MARK,
    OvsPort,
)

BACKEND = "dpdkvhostuser"
PORT_TYPE = "dpdkvhostuserclient"
#: How many queues the VM was promised: the guest decides how many it uses.
QUEUES_MARK = "netplugin-queues"

#: The bridges of VXLAN networks: one for the VMs' ports, one for the tunnels, and what joins them.
OVERLAY, TUNNELS = "np-overlay", "np-tunnels"
TO_TUNNELS, TO_OVERLAY = "np-to-tunnels", "np-to-overlay"
#: What the names of ports begin with that VXLAN networks share.
SHARED_NAMES = (VXLAN, "np-to-")
#: What the two are marked with. A colon is in the name of no physical network.
BRIDGE_MARKS: Mapping[str, str] = {OVERLAY: "vxlan:overlay", TUNNELS: "vxlan:tunnels"}


@dataclass(frozen=True)
class VhostPort:
    """All that the rows of one port say."""

    port_id: str
    name: str
    bridge: str
    tag: int
    socket: str
    mtu: int
    mac: str
    vm_id: str
    queues: int
    #: What the VM may send (OVS polices what it receives) and what it may receive.
    sends: Policer | None = None
    receives: Policer | None = None
    #: The VXLAN network it is on, and the UDP port of that network's tunnels.
    network_id: str | None = None
    udp_port: int | None = None

    @staticmethod
    def of(settings: OvsSettings, intent: Intent, tso: bool) -> VhostPort:
        """The rows of a port that is wanted. ``tso``: its VM may send segments of 64 KiB."""
        spec, overlay = intent.spec, intent.overlay
        assert spec is not None and (overlay is None) == (spec.overlay_id is None)
        name = device_name(VHOST, intent.port_id)
        network, qos = spec.network, spec.qos
        physical = str(network.physical_network)
        return VhostPort(
            port_id=intent.port_id,
            name=name,
            bridge=OVERLAY if overlay else settings.bridge_mappings[physical],
            tag=overlay.local_vlan if overlay else network.vlan_id or 0,
            socket=str(settings.vhost_socket_dir / name),
            mtu=network.mtu,
            mac=spec.mac,
            vm_id=spec.vm_id,
            queues=spec.queues,
            sends=Policer.of(qos.egress_kbps, network.mtu, tso),
            receives=Policer.of(qos.ingress_kbps, network.mtu, tso),
            network_id=overlay.network_id if overlay else None,
            udp_port=overlay.spec.udp_port if overlay else None,
        )

    def port_columns(self) -> dict[str, Any]:
        """A flat port is an access port of tag 0: without a tag it would be a trunk of all VLANs."""
        ids = {PORT_MARK: self.port_id, BACKEND_MARK: BACKEND}
        if self.network_id is not None:
            ids |= {NETWORK_MARK: self.network_id, UDP_MARK: str(self.udp_port)}
        return {"tag": [self.tag], "vlan_mode": ["access"], "external_ids": ids}

    def interface_columns(self) -> dict[str, Any]:
        """The ids are those of OVS's integration guide, so that other tools know the NIC."""
        return {
            "type": PORT_TYPE,
            "options": {"vhost-server-path": self.socket},
            "mtu_request": [self.mtu],
            "ingress_policing_rate": self.sends.kbps if self.sends else 0,
            "ingress_policing_burst": self.sends.burst_kbit if self.sends else 0,
            "external_ids": {
                "iface-id": self.port_id,
                "attached-mac": self.mac,
                "vm-uuid": self.vm_id,
                PORT_MARK: self.port_id,
                QUEUES_MARK: str(self.queues),
            },
        }

    def interfaces(self) -> dict[str, dict[str, Any]]:
        return {self.name: self.interface_columns()}

    def qos_columns(self) -> dict[str, Any] | None:
        """Of the row of QoS that says what the VM may receive, which carries the port's mark."""
        if self.receives is None:
            return None
        ids = {PORT_MARK: self.port_id, BACKEND_MARK: BACKEND}
        return {**self.receives.qos_columns(), "external_ids": ids}

    def must_be_remade(self, row: OvsPort) -> bool:
        """Whether the port must go and come again: OVS changes neither of these on a live port."""
        interface = row.interface
        return (
            interface is None
            or row.name != self.name
            or row.bridge != self.bridge
            or interface.type != PORT_TYPE
            or interface.options.get("vhost-server-path") != self.socket
        )

    def differs(self, row: OvsPort) -> bool:
        """Whether a column that can be changed live is not as wanted."""
        return _differs(row, self.port_columns(), self.interfaces())

    def qos_differs(self, row: OvsPort) -> bool:
        if row.qos is None or self.receives is None:
            return (row.qos is None) != (self.receives is None)
        found = {
            "type": row.qos.type,
            "other_config": dict(row.qos.other_config),
            "external_ids": dict(row.qos.external_ids),
        }
        return found != self.qos_columns()


#: Columns of an uplink whose other keys are kept.
MERGED_OF_UPLINKS = ("external_ids", "options")

#: How [ovs] bonds says it, and the columns ``bond_mode`` and ``lacp`` of Port.
BOND_COLUMNS: Mapping[str, tuple[str, str]] = {
    "active-backup": ("active-backup", "off"),
    "balance-slb": ("balance-slb", "off"),
    "lacp": ("balance-tcp", "active"),
}


@dataclass(frozen=True)
class Uplink:
    """The DPDK port that joins a bridge to its physical network: one device, or a bond of several.

    Other ``options`` of its interfaces, such as ``n_rxq``, are the operator's.
    """

    name: str
    bridge: str
    physical_network: str
    devices: tuple[str, ...]
    bond: str | None
    mtu: int

    @staticmethod
    def of(settings: OvsSettings, bridge: str, network: str, mtu: int) -> Uplink | None:
        """None if the network has no devices."""
        devices = settings.uplinks.get(network, ())
        if not devices:
            return None
        several = len(devices) > 1
        identity = f"bond {network}" if several else devices[0]
        return Uplink(
            name=device_name(UPLINK, identity),
            bridge=bridge,
            physical_network=network,
            devices=devices,
            bond=settings.bonds.get(network, "active-backup") if several else None,
            mtu=mtu,
        )

    def port_columns(self) -> dict[str, Any]:
        mode, lacp = BOND_COLUMNS[self.bond] if self.bond else (None, None)
        return {
            "bond_mode": [mode] if mode else [],
            "lacp": [lacp] if lacp else [],
            "external_ids": {UPLINK_MARK: self.physical_network},
        }

    def interfaces(self) -> dict[str, dict[str, Any]]:
        return {
            device_name(UPLINK, device): {
                "type": "dpdk",
                "options": {"dpdk-devargs": device},
                "mtu_request": [self.mtu],
                "external_ids": {UPLINK_MARK: self.physical_network},
            }
            for device in self.devices
        }

    def differs(self, row: OvsPort) -> bool:
        return _differs(row, self.port_columns(), self.interfaces(), merged=MERGED_OF_UPLINKS)


@dataclass(frozen=True)
class TunnelPort:
    """A port that VXLAN networks share: an end of the patch, or the tunnels of one UDP port."""

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
        """VNI and destination are each flow's. The outer packet has OVS's defaults: DF, a TTL of 64."""
        options = {
            "remote_ip": "flow",
            "key": "flow",
            "local_ip": local_ip,
            "dst_port": str(udp_port),
        }
        return TunnelPort(vxlan_name(udp_port), TUNNELS, "vxlan", options)

    def port_columns(self) -> dict[str, Any]:
        """Without a tag, as a trunk: the local VLANs of all networks pass the patch."""
        return {"tag": [], "vlan_mode": [], "external_ids": {TUNNEL_MARK: self.type}}

    def interfaces(self) -> dict[str, dict[str, Any]]:
        columns = {
            "type": self.type,
            "options": dict(self.options),
            "external_ids": {TUNNEL_MARK: self.type},
        }
        return {self.name: columns}

    def must_be_remade(self, row: OvsPort) -> bool:
        return row.bridge != self.bridge or row.interface is None

    def differs(self, row: OvsPort) -> bool:
        return _differs(row, self.port_columns(), self.interfaces())


def vxlan_name(udp_port: int) -> str:
    """Below the 15 characters that a name may have, whatever the port."""
    return f"{VXLAN}{udp_port}"


def is_ours(external_ids: Mapping[str, str]) -> bool:
    """Whether the row is marked as a port's of this backend."""
    return PORT_MARK in external_ids and external_ids.get(BACKEND_MARK) == BACKEND


def _differs(
    row: OvsPort,
    port: Mapping[str, Any],
    interfaces: Mapping[str, Mapping[str, Any]],
    merged: Collection[str] = ("external_ids",),
) -> bool:
    found = {interface.name: interface for interface in row.interfaces}
    return (
        found.keys() != interfaces.keys()
        or _columns_differ(row, port, merged)
        or any(_columns_differ(found[name], wish, merged) for name, wish in interfaces.items())
    )


def _columns_differ(row: object, columns: Mapping[str, Any], merged: Collection[str]) -> bool:
    """As the database has them: an optional column is a list, a map that is merged may have more."""
    for column, wanted in columns.items():
        found = getattr(row, column)
        if column in merged:
            if any(found.get(key) != value for key, value in wanted.items()):
                return True
        elif isinstance(wanted, list):
            if found != (wanted[0] if wanted else None):
                return True
        elif found != wanted:
            return True
    return False

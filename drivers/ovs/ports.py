"""The desired OVSDB rows of ports, their policers and uplinks, derived from the intent alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from drivers.ovs.sockets import is_chosen
from netplugin.api.models import PortSpec
from netplugin.backend import Claim, Intent, Overlay
from netplugin.host.names import UPLINK, VHOST, device_name
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import (
    BACKEND_MARK,
    BESIDE_MARK,
    IFINDEX_MARK,
    INTERNAL_TYPE,
    MAC_MARK,
    MAPPING_MARK,
    MTU_MARK,
    NETWORK_MARK,
    PORT_MARK,
    STORE_MARK,
    UDP_MARK,
    UPLINK_MARK,
    OvsPort,
)

#: The interface type for which QEMU creates the socket and OVS connects to it.
VHOST_TYPE = "dpdkvhostuserclient"
#: The interface type of a device of the host, which the userspace datapath opens by AF_PACKET.
SERVICE_TYPE = ""
#: The number of queues configured for the VM; the guest decides how many it uses.
QUEUES_MARK = "netplugin-queues"


class Rows(Protocol):
    """A port as its rows. Values have the form of the database: an optional column is a list."""

    @property
    def name(self) -> str: ...
    @property
    def bridge(self) -> str: ...
    def port_columns(self) -> dict[str, Any]: ...
    def interfaces(self) -> dict[str, dict[str, Any]]: ...


# -- policers ----------------------------------------------------------------------------------------


_QOS_TYPE = "egress-policer"

# vswitch.xml, ingress_policing_burst: a burst "numerically at least as large as 80% of" the rate
# "helps TCP come closer to achieving the full rate", and "should be at least the size of the MTU".
_BURST_TENTHS = 8
_LEAST_FRAMES = 4
# A policer counts a segment before segmentation (netdev_dpdk_srtcm_policer_pkt_handle): a segment
# larger than the burst would never pass.
_LARGEST_SEGMENT = 65535


@dataclass(frozen=True)
class Policer:
    """A token bucket: rate in kbit/s (1000 bit/s) and burst in kbit."""

    kbps: int
    burst_kbit: int

    @staticmethod
    def of(kbps: int | None, mtu: int, tso: bool) -> Policer | None:
        """The policer for a rate in kbit/s; None for no limit."""
        if kbps is None:
            return None
        least = max(_LEAST_FRAMES * mtu, _LARGEST_SEGMENT if tso else 0)
        return Policer(kbps, max(-(-kbps * _BURST_TENTHS // 10), -(-least * 8 // 1000)))

    def qos_columns(self) -> dict[str, Any]:
        """The columns of a QoS row, in bytes (vswitch.xml, egress-policer)."""
        return {"type": _QOS_TYPE, "other_config": {"cir": str(self.cir), "cbs": str(self.cbs)}}

    @property
    def cir(self) -> int:
        """The committed information rate in bytes/s."""
        return self.kbps * 1000 // 8

    @property
    def cbs(self) -> int:
        """The committed burst size in bytes."""
        return self.burst_kbit * 1000 // 8


_SHOWN = re.compile(r"^(cir|cbs): (\d+)$", re.MULTILINE)


def policer_refused(shown: str, wanted: Policer | None) -> str | None:
    """Compare with ``ovs-appctl qos/show <interface>``: the difference, or None if it is as requested.

    vswitchd reports a refused policer only in its log, so this output is the only way to detect it.
    """
    found: Mapping[str, str] = dict(_SHOWN.findall(shown))
    expected = {"cir": str(wanted.cir), "cbs": str(wanted.cbs)} if wanted else {}
    if found == expected:
        return None
    return f"vswitchd did not take the policer {expected or 'away'}, it has {found or 'none'}"


# -- ports of VMs, relay VFs and uplinks ---------------------------------------------------------------


@dataclass(frozen=True)
class RelayVfPort:
    """The relay VF of a VM's port: a DPDK port on the same bridge that takes all of its frames."""

    backend: str
    port_id: str
    name: str
    bridge: str
    #: The PCI address for ``dpdk-devargs``.
    device: str
    mtu: int
    queues: int
    #: The MAC with which OVS must have opened it, where that is not the VM's and matters.
    opened_with: str = ""

    def port_columns(self) -> dict[str, Any]:
        return {"external_ids": {BESIDE_MARK: self.port_id, BACKEND_MARK: self.backend}}

    def interfaces(self) -> dict[str, dict[str, Any]]:
        """The columns of Interface. OVS uses a device with fewer receive queues with those that it has."""
        ids = {BESIDE_MARK: self.port_id} | ({MAC_MARK: self.opened_with} if self.opened_with else {})
        columns = {
            "type": "dpdk",
            "options": {"dpdk-devargs": self.device, "n_rxq": str(self.queues)},
            "mtu_request": [self.mtu],
            "external_ids": ids,
        }
        return {self.name: columns}

    def must_be_remade(self, row: OvsPort) -> bool:
        """Whether it must be deleted and added again: OVS opens the VF then, with the MAC that it has."""
        if cannot_become(row, self.bridge, "dpdk", {"dpdk-devargs": self.device}) or row.interface is None:
            return True
        return row.interface.external_ids.get(MAC_MARK, "") != self.opened_with

    def differs(self, row: OvsPort) -> bool:
        return rows_differ(row, self)


@dataclass(frozen=True)
class VhostPort:
    """A VM's port as OVS should have it: its rows, the spec for its flows, and its relay VF port."""

    backend: str
    port_id: str
    spec: PortSpec
    bridge: str
    tag: int
    socket: str
    type: str
    options: Mapping[str, str]
    #: The rate limits: ``sends`` polices what OVS receives from the VM, ``receives`` the opposite.
    sends: Policer | None = None
    receives: Policer | None = None
    #: The VXLAN network of the port.
    overlay: Overlay | None = None
    #: The mark of the store; empty: keep the mark that is there.
    stamp: str = ""
    beside: RelayVfPort | None = None
    #: The index of a service port's device when the port is added; None otherwise.
    ifindex: int | None = None
    #: Whether OVS must reopen the relay VF although its row is correct.
    reopen: bool = False
    #: The claim on the path of its socket, if the caller chose the path.
    chosen: Claim | None = None
    #: Whether nothing is forwarded from or to it.
    closed: bool = False
    #: Whether it is announced at the request of the host that its VM leaves.
    follows: bool = False
    #: The physical network to mark it with, on a bridge that has no mark (``mapping.on_bridge``).
    mapped_network: str = ""

    @staticmethod
    def of(backend: str, intent: Intent, bridge: str, tag: int, *, socket: str, tso: bool) -> VhostPort:
        """The port for an intent. ``tso``: the VM may send segments of 64 KiB."""
        spec, overlay = intent.spec, intent.overlay
        assert spec is not None and (overlay is None) == (spec.overlay_id is None)
        is_service = spec.device is not None
        service_type = INTERNAL_TYPE if spec.internal else SERVICE_TYPE
        return VhostPort(
            backend=backend,
            port_id=intent.port_id,
            spec=spec,
            bridge=bridge,
            tag=tag,
            socket=socket,
            type=service_type if is_service else VHOST_TYPE,
            options={} if is_service else {"vhost-server-path": socket},
            sends=Policer.of(spec.qos.egress_kbps, spec.network.mtu, tso),
            receives=Policer.of(spec.qos.ingress_kbps, spec.network.mtu, tso),
            overlay=overlay,
            stamp=intent.stamp,
            chosen=next(filter(is_chosen, intent.claims), None),
            closed=intent.closed,
            follows=intent.follows_guest,
        )

    @property
    def name(self) -> str:
        return port_name(self.port_id, self.spec)

    @property
    def mtu(self) -> int:
        return self.spec.network.mtu

    @property
    def opened(self) -> str | None:
        """The device of the host that OVS opens for a service port."""
        return None if self.spec.internal else self.spec.device

    def port_columns(self) -> dict[str, Any]:
        """The columns of Port: an access port. A flat port has tag 0; without a tag it is a trunk."""
        ids = {PORT_MARK: self.port_id, BACKEND_MARK: self.backend}
        if self.overlay is not None:
            ids |= {NETWORK_MARK: self.overlay.network_id, UDP_MARK: str(self.overlay.spec.udp_port)}
        if self.mapped_network:
            ids[MAPPING_MARK] = f"{self.mapped_network}:{self.bridge}"
        if self.stamp:
            ids[STORE_MARK] = self.stamp
        return {"tag": [self.tag], "vlan_mode": ["access"], "external_ids": ids}

    def interface_columns(self) -> dict[str, Any]:
        """The columns of Interface, with the external ids of OVS's integration guide."""
        ids = {"iface-id": self.port_id, "attached-mac": self.spec.mac, PORT_MARK: self.port_id}
        if self.opened:
            ids[MTU_MARK] = str(self.mtu)
            ids |= {} if self.ifindex is None else {IFINDEX_MARK: str(self.ifindex)}
        elif not self.spec.device:
            # kvmagent reads vm-id, as XenServer's integration writes it; others vm-uuid.
            ids |= dict.fromkeys(("vm-id", "vm-uuid"), self.spec.vm_id)
            ids[QUEUES_MARK] = str(self.spec.queues)
        return {
            "type": self.type,
            "options": dict(self.options),
            "mtu_request": [] if self.opened else [self.mtu],
            "ingress_policing_rate": self.sends.kbps if self.sends else 0,
            "ingress_policing_burst": self.sends.burst_kbit if self.sends else 0,
            "external_ids": ids,
        }

    def interfaces(self) -> dict[str, dict[str, Any]]:
        return {self.name: self.interface_columns()}

    def qos_columns(self) -> dict[str, Any] | None:
        """The columns of the QoS row that limits what the VM receives; None: no limit."""
        if self.receives is None:
            return None
        ids = {PORT_MARK: self.port_id, BACKEND_MARK: self.backend}
        return {**self.receives.qos_columns(), "external_ids": ids}

    def must_be_remade(self, row: OvsPort) -> bool:
        """Whether the port must be deleted and added again, because OVS cannot change it live."""
        is_another = row.interface is not None and bool(row.interface.other_ifindex)
        return is_another or row.name != self.name or cannot_become(row, self.bridge, self.type, self.options)

    def differs(self, row: OvsPort) -> bool:
        """Whether a column that can be changed live differs."""
        return rows_differ(row, self)

    def qos_differs(self, row: OvsPort) -> bool:
        if row.qos is None or self.receives is None:
            return (row.qos is None) != (self.receives is None)
        found = {
            "type": row.qos.type,
            "other_config": dict(row.qos.other_config),
            "external_ids": dict(row.qos.external_ids),
        }
        return found != self.qos_columns()


def access_vlan(intent: Intent) -> int:
    """The tag of a port on the bridge of its network; a flat port has 0."""
    assert intent.spec is not None
    return intent.overlay.local_vlan if intent.overlay else intent.spec.network.vlan_id or 0


def port_name(port_id: str, spec: PortSpec) -> str:
    """The name of a port in OVS."""
    return spec.device or spec.port_name or device_name(VHOST, port_id)


#: Map columns of an uplink in which other keys are kept.
MERGED_OF_UPLINKS = ("external_ids", "options")

#: Values of [ovs] bonds, and the columns ``bond_mode`` and ``lacp`` of Port.
BOND_COLUMNS: Mapping[str, tuple[str, str]] = {
    "active-backup": ("active-backup", "off"),
    "balance-slb": ("balance-slb", "off"),
    "lacp": ("balance-tcp", "active"),
}


@dataclass(frozen=True)
class OvsUplink:
    """The DPDK port that connects a bridge to its physical network: a device or a bond.

    Other ``options`` of its interfaces, such as ``n_rxq``, belong to the operator. So does the MTU
    of existing interfaces, because a change stops the NIC for all its users; unless the API made the
    network with this MTU (``sets_mtu``).
    """

    name: str
    bridge: str
    physical_network: str
    devices: tuple[str, ...]
    bond: str | None
    #: The MTU of a new interface.
    mtu: int
    sets_mtu: bool = False

    @staticmethod
    def of(settings: OvsSettings, bridge: str, network: str) -> OvsUplink | None:
        """The uplink of a network; None if the network has no devices."""
        devices = settings.uplinks.get(network, ())
        if not devices:
            return None
        several = len(devices) > 1
        identity = f"bond {network}" if several else devices[0]
        return OvsUplink(
            name=device_name(UPLINK, identity),
            bridge=bridge,
            physical_network=network,
            devices=devices,
            bond=settings.bonds.get(network, "active-backup") if several else None,
            mtu=settings.mtu_of_uplinks(network),
            sets_mtu=network in settings.made and network in settings.uplink_mtu,
        )

    def port_columns(self) -> dict[str, Any]:
        mode, lacp = BOND_COLUMNS[self.bond] if self.bond else (None, None)
        return {
            "bond_mode": [mode] if mode else [],
            "lacp": [lacp] if lacp else [],
            "external_ids": {UPLINK_MARK: self.physical_network},
        }

    def interfaces(self) -> dict[str, dict[str, Any]]:
        mtu = {"mtu_request": [self.mtu]} if self.sets_mtu else {}
        return {
            device_name(UPLINK, device): {
                "type": "dpdk",
                "options": {"dpdk-devargs": device},
                "external_ids": {UPLINK_MARK: self.physical_network},
                **mtu,
            }
            for device in self.devices
        }

    def new_interfaces(self) -> dict[str, dict[str, Any]]:
        """The columns that are set only when an interface is created."""
        return {} if self.sets_mtu else {name: {"mtu_request": [self.mtu]} for name in self.interfaces()}

    def differs(self, row: OvsPort) -> bool:
        return rows_differ(row, self, merged=MERGED_OF_UPLINKS)


def is_marked(external_ids: Mapping[str, str], backend: str) -> bool:
    """Whether a row is marked as a port of this backend."""
    return PORT_MARK in external_ids and external_ids.get(BACKEND_MARK) == backend


def cannot_become(row: OvsPort, bridge: str, kind: str, options: Mapping[str, str]) -> bool:
    """Whether a live port cannot get this bridge, type and options."""
    interface = row.interface
    return (
        interface is None
        or row.bridge != bridge
        or interface.type != kind
        or any(interface.options.get(name) != value for name, value in options.items())
    )


def rows_differ(row: OvsPort, wish: Rows, merged: Collection[str] = ("external_ids",)) -> bool:
    """Whether the rows of a port differ from the desired ones. Maps in ``merged`` may have other keys."""
    found = {interface.name: interface for interface in row.interfaces}
    interfaces = wish.interfaces()
    return (
        found.keys() != interfaces.keys()
        or _columns_differ(row, wish.port_columns(), merged)
        or any(_columns_differ(found[name], columns, merged) for name, columns in interfaces.items())
    )


def _columns_differ(row: object, columns: Mapping[str, Any], merged: Collection[str]) -> bool:
    """Compare a row with columns in the form of the database: an optional column is a list."""
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

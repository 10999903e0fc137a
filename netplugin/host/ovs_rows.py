"""Rows of an Open vSwitch database as immutable values: the tables and columns that netplugin reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from netplugin.host.names import Mark
from netplugin.host.ovs_versions import Version, parse_version

#: Keys in ``external_ids`` that mark rows as ours.
PORT_MARK = "netplugin-port"
BACKEND_MARK = "netplugin-backend"
#: The store that created a VM's port, and its commit sequence (``agents.store.store``).
STORE_MARK = "netplugin-store"
BRIDGE_MARK = "netplugin-bridge"
#: In Open_vSwitch: the last holder of the database lock. Informational: no decision depends on it.
HOLDER_MARK = "netplugin-agent"
UPLINK_MARK = "netplugin-uplink"
TUNNEL_MARK = "netplugin-tunnel"
#: In a relay's VF port: the port id of the VM's port it serves (with the backend's mark).
VF_PORT_MARK = "netplugin-vf-port"
#: In the interface of such a port: the MAC that its VF had when OVS opened it, if that is not the VM's.
MAC_MARK = "netplugin-opened-with"
#: In the interface of a VM's port: the ID of the VM, under the name of XenServer's integration.
VM_ID = "vm-id"
#: In a VM's port: its VXLAN network, and the UDP port of that network's tunnels.
NETWORK_MARK = "netplugin-network"
UDP_MARK = "netplugin-udp-port"
#: In a VM's port on a bridge of the operator's, which carries no mark itself: the entry of ``[ovs]
#: bridge_mappings`` by which the port was added to it, such as ``physnet1:br-ex``.
MAPPING_MARK = "netplugin-mapping"
#: In the interface of a service port: the MTU of its network, which is not requested of the device.
MTU_MARK = "netplugin-mtu"
#: In the interface of a service port: the index of the device for which the port was added.
IFINDEX_MARK = "netplugin-ifindex"
#: The interface type of a device that vswitchd makes: a tap, on the userspace datapath.
INTERNAL_TYPE = "internal"
#: The interface types of tunnels that the userspace datapath ends by itself (``tnl_type_to_nw_proto`` in
#: lib/tnl-ports.c), each with its IP protocols and, of UDP, the port that it has by default.
TUNNEL_TYPES: Mapping[str, tuple[tuple[int, ...], int]] = {
    "vxlan": ((17,), 4789),
    "geneve": ((17,), 6081),
    "gtpu": ((17,), 2152),
    **dict.fromkeys(("gre", "ip6gre", "erspan", "ip6erspan"), ((47,), 0)),
    "srv6": ((4, 41), 0),
}

#: The columns that are read, by table.
COLUMNS = {
    table: columns.split()
    for table, columns in {
        "Open_vSwitch": "bridges next_cfg cur_cfg other_config dpdk_initialized dpdk_version ovs_version "
        "iface_types external_ids",
        "Bridge": "name ports datapath_type fail_mode external_ids",
        "Port": "name interfaces tag vlan_mode bond_mode lacp qos external_ids",
        "Interface": "name type options external_ids mtu_request mtu ofport error ifindex link_state status "
        "ingress_policing_rate ingress_policing_burst other_config",
        "QoS": "type other_config external_ids",
    }.items()
}
#: The columns that this can do without: releases of OVS have come to have them since 2.4.
MAY_LACK = {
    *(f"Open_vSwitch.{column}" for column in ("dpdk_initialized", "dpdk_version", "iface_types")),
    *(f"Interface.{column}" for column in ("error", "ifindex", "mtu_request")),
}
#: The keys that are read of maps, by table and column; of others all.
KEYS = {("Interface", "status"): ("status", "num_of_vrings", "n_rxq", "numa_id", "numa")}


def values(row: Any) -> dict[str, Any]:
    """The columns of a row of the Idl, without those that refer to rows.

    An optional column is None or its value, as is one that the schema of this OVS does not have; a map is a
    dictionary. The committed values: a transaction that is being composed does not show.
    """
    table = row._table
    found: dict[str, Any] = {}
    for name in COLUMNS[table.name]:
        column = table.columns.get(name)
        if column is None:
            found[name] = None
        elif column.type.is_map():
            keys, pairs = KEYS.get((table.name, name)), row._data[name].values.items()
            found[name] = {k.value: v.value for k, v in pairs if keys is None or k.value in keys}
        elif not column.type.key.is_ref():
            datum = row._data[name]
            found[name] = datum.as_list() if column.type.n_max > 1 else datum.as_scalar()
    return found


@dataclass(frozen=True, slots=True)
class OvsInterface:
    """A row of Interface. ``ofport`` is -1 if vswitchd could not create the device."""

    name: str
    type: str
    options: Mapping[str, str]
    external_ids: Mapping[str, str]
    mtu_request: int | None
    mtu: int | None
    ofport: int | None
    error: str | None
    link_state: str | None
    #: vhost-user: whether a VM is connected to the socket, and its number of queue pairs; None if vswitchd
    #: has not reported it yet, or the port is none of vhost-user.
    connection: bool | None = None
    queues: int | None = None
    #: kbit/s and kbit; 0 is no limit.
    ingress_policing_rate: int = 0
    ingress_policing_burst: int = 0
    other_config: Mapping[str, str] = field(default_factory=dict)
    #: NUMA node of the NIC, or of the VM's memory while it is connected.
    numa_node: int | None = None
    #: The index of the kernel's device; 0 if the device is gone.
    ifindex: int | None = None

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> OvsInterface:
        """The values of a row of the database."""
        status = row["status"]
        return cls(
            **{name: value for name, value in row.items() if name != "status"},
            connection={"connected": True, "disconnected": False}.get(status.get("status", "")),
            queues=_queues(status),
            numa_node=_numa_node(status),
        )

    @property
    def starved(self) -> bool:
        """Whether a VM is connected but OVS has no mbufs for the device.

        vswitchd then removes the port from the datapath and reports that in its log only. In the database
        ``ofport`` and ``error`` do not change; only ``mtu`` stays empty (observed with OVS 3.1).
        """
        return bool(self.connection and not self.mtu)

    @property
    def other_ifindex(self) -> int | None:
        """The index if a service port's device is not the one for which the port was added; 0: it is gone.

        vswitchd keeps the sockets of the device that it has opened, which another one of the same name
        never uses, and does not report that (observed with OVS 3.1).
        """
        opened = self.external_ids.get(IFINDEX_MARK)
        is_other = opened is not None and self.ifindex is not None and opened != str(self.ifindex)
        return self.ifindex if is_other else None

    @property
    def moved(self) -> bool | None:
        """Whether the device of an internal port is in another namespace, or gone with it; None for others.

        vswitchd then reports 0 as its index.
        """
        return not self.ifindex if self.type == INTERNAL_TYPE else None

    @property
    def has_no_link(self) -> bool:
        """Whether a service port's device, or its other end, is down."""
        return IFINDEX_MARK in self.external_ids and self.link_state == "down"

    @property
    def watched(self) -> tuple[object, ...]:
        """The values that only a third party changes, or with which vswitchd reports a fault."""
        return (
            self.type,
            self.options,
            self.mtu_request,
            self.error,
            self.starved,
            self.other_ifindex,
            self.moved,
            self.has_no_link,
            self.ingress_policing_rate,
            self.ingress_policing_burst,
        )

    @property
    def needed_mtu(self) -> int:
        """The MTU requested of the device, or needed of a service port's device; 0 if there is none."""
        marked = self.external_ids.get(MTU_MARK, "")
        return self.mtu_request or (int(marked) if marked.isdecimal() else 0)

    @property
    def works_at(self) -> int | None:
        """The OpenFlow port number; None if vswitchd has not created the device, or could not."""
        return self.ofport if self.ofport and self.ofport > 0 else None


@dataclass(frozen=True, slots=True)
class OvsQos:
    """A row of QoS. QoS is a root table, so the row stays when the port that uses it is deleted."""

    uuid: str
    type: str
    other_config: Mapping[str, str]
    external_ids: Mapping[str, str]

    @property
    def owner(self) -> tuple[str, str] | None:
        return _owner(self.external_ids)


@dataclass(frozen=True, slots=True)
class OvsPort:
    """A row of Port with its Interface rows (several for a bond), sorted by name."""

    name: str
    bridge: str | None
    tag: int | None
    vlan_mode: str | None
    external_ids: Mapping[str, str]
    interfaces: tuple[OvsInterface, ...] = ()
    bond_mode: str | None = None
    lacp: str | None = None
    qos: OvsQos | None = None

    @property
    def interface(self) -> OvsInterface | None:
        """The interface of a port that is not a bond."""
        return self.interfaces[0] if self.interfaces else None

    @property
    def works_at(self) -> int | None:
        """The OpenFlow port number of a port that is not a bond; None if it has no working interface."""
        return self.interfaces[0].works_at if self.interfaces else None

    @property
    def owner(self) -> tuple[str, str] | None:
        """The backend and port id that the port is marked with; None if it is not ours."""
        return _owner(self.external_ids)

    @property
    def stamp(self) -> str:
        """The store mark of the port; empty if it has none."""
        return self.external_ids.get(STORE_MARK, "")

    @property
    def network(self) -> tuple[str, int] | None:
        """The VXLAN network of a VM's port, and the UDP port of its tunnels."""
        return network_of(self.external_ids)

    @property
    def mapped_network(self) -> str:
        """The physical network for which the port was put on the bridge that it is on; empty if unmarked."""
        network, _, bridge = self.external_ids.get(MAPPING_MARK, "").partition(":")
        return network if bridge == self.bridge else ""

    @property
    def serves(self) -> tuple[str, str] | None:
        """The backend and port id that the port belongs to, as the port itself or as a relay's VF port."""
        return self.owner or _owner(self.external_ids, VF_PORT_MARK)


def network_of(external_ids: Mapping[str, str]) -> tuple[str, int] | None:
    """The network that the marks of a port name, with its UDP port."""
    network, udp_port = external_ids.get(NETWORK_MARK), external_ids.get(UDP_MARK, "")
    return (network, int(udp_port)) if network and udp_port.isdecimal() else None


def _owner(external_ids: Mapping[str, str], mark: str = PORT_MARK) -> tuple[str, str] | None:
    port_id = external_ids.get(mark)
    backend = external_ids.get(BACKEND_MARK)
    return (backend, port_id) if port_id and backend else None


@dataclass(frozen=True, slots=True)
class OvsBridge:
    """A row of Bridge."""

    name: str
    datapath_type: str
    fail_mode: str | None
    external_ids: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OvsRoot:
    """The only row of Open_vSwitch."""

    next_cfg: int = 0
    cur_cfg: int = 0
    dpdk_initialized: bool = False
    dpdk_version: str | None = None
    ovs_version: str | None = None
    iface_types: frozenset[str] = frozenset()
    other_config: Mapping[str, str] = field(default_factory=dict)
    #: The last recorded holder of the database lock.
    holder: str | None = None
    #: The mark of the store that changed the database last, to compare with (``CarriedMark``).
    store_mark: str = ""
    #: The mark that is there.
    found_mark: str = ""

    @classmethod
    def read(cls, row: Mapping[str, Any], found: Mark) -> OvsRoot:
        """The values of the row of the database. ``found``: see ``CarriedMark.found``."""
        mark = row["external_ids"].get(STORE_MARK, "")
        return cls(
            next_cfg=row["next_cfg"],
            cur_cfg=row["cur_cfg"],
            dpdk_initialized=bool(row["dpdk_initialized"]),
            dpdk_version=row["dpdk_version"],
            ovs_version=row["ovs_version"],
            iface_types=frozenset(row["iface_types"] or ()),
            other_config=row["other_config"],
            holder=row["external_ids"].get(HOLDER_MARK),
            store_mark=found(mark),
            found_mark=mark,
        )

    def has_on(self, key: str) -> bool:
        """Whether ``other_config`` turns this on."""
        return self.other_config.get(key, "").lower() == "true"

    @property
    def version(self) -> Version:
        """``ovs_version`` as numbers; zeros (the oldest) if it is not reported."""
        return parse_version(self.ovs_version)


def _queues(status: Mapping[str, str]) -> int | None:
    """The queue pairs of a vhost-user port. Newer vswitchds report how many are polled (``n_rxq``)."""
    rings = status.get("num_of_vrings", "")
    polled = status.get("n_rxq", "")
    if polled.isdecimal():
        return int(polled)
    return int(rings) // 2 if rings.isdecimal() else None


def _numa_node(status: Mapping[str, str]) -> int | None:
    """The NUMA node of a NIC (``numa_id``, -1 if the firmware has none) or of a VM's memory (``numa``)."""
    node = status.get("numa_id", status.get("numa", ""))
    return int(node) if node.isdecimal() else None

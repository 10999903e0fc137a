"""What an Open vSwitch database holds, as values: the rows and columns that netplugin reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

#: The marks in ``external_ids`` of what is ours.
PORT_MARK = "netplugin-port"
BACKEND_MARK = "netplugin-backend"
#: Which store made a VM's port, and under which number (``agents.store``).
STORE_MARK = "netplugin-store"
BRIDGE_MARK = "netplugin-bridge"
#: Of Open_vSwitch: who had the lock of the database last. For people: nothing follows from it.
HOLDER_MARK = "netplugin-agent"
UPLINK_MARK = "netplugin-uplink"
TUNNEL_MARK = "netplugin-tunnel"
#: The port id of the VM's port that this one stands beside (with the backend's mark).
BESIDE_MARK = "netplugin-beside"
#: Of a VM's port: the VXLAN network it is on, and the UDP port of that network's tunnels.
NETWORK_MARK = "netplugin-network"
UDP_MARK = "netplugin-udp-port"


@dataclass(frozen=True, slots=True)
class OvsInterface:
    """A row of Interface; ``ofport`` is -1 where vswitchd could not make the device."""

    name: str
    type: str
    options: Mapping[str, str]
    external_ids: Mapping[str, str]
    mtu_request: int | None
    mtu: int | None
    ofport: int | None
    error: str | None
    link_state: str | None
    #: vhost-user: whether a VM's side is on the socket, and the queues that it has.
    connected: bool = False
    queues: int | None = None
    #: kbit/s and kbit; 0 is no limit.
    ingress_policing_rate: int = 0
    ingress_policing_burst: int = 0
    other_config: Mapping[str, str] = field(default_factory=dict)
    #: Of the NIC, or of a VM's memory while it is connected.
    numa_node: int | None = None

    @property
    def starved(self) -> bool:
        """A VM is connected and OVS has not set the device up: it found no memory for its buffers.

        vswitchd takes such a port out of the datapath and says so in its log alone; in the database
        ``ofport`` and ``error`` stay as they were, only ``mtu`` is never filled in (seen in 3.1).
        """
        return self.connected and not self.mtu

    @property
    def works_at(self) -> int | None:
        """Its OpenFlow port number; None if vswitchd could not make the device, or not yet."""
        return self.ofport if self.ofport and self.ofport > 0 else None


@dataclass(frozen=True, slots=True)
class OvsQos:
    """A row of QoS. It is a root row: it stays when the port that uses it goes."""

    uuid: UUID
    type: str
    other_config: Mapping[str, str]
    external_ids: Mapping[str, str]

    @property
    def owner(self) -> tuple[str, str] | None:
        return _owner(self.external_ids)


@dataclass(frozen=True, slots=True)
class OvsPort:
    """A row of Port with its rows of Interface (one, or of a bond several), by their names."""

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
        """The interface of a port that is no bond."""
        return self.interfaces[0] if self.interfaces else None

    @property
    def owner(self) -> tuple[str, str] | None:
        """The backend and the port id it is marked with; None if it is not ours."""
        return _owner(self.external_ids)

    @property
    def stamp(self) -> str:
        """The mark of the store that made it; empty if it carries none."""
        return self.external_ids.get(STORE_MARK, "")

    @property
    def serves(self) -> tuple[str, str] | None:
        """The backend and the port that it is, or that it stands beside."""
        return self.owner or _owner(self.external_ids, BESIDE_MARK)


def _owner(external_ids: Mapping[str, str], mark: str = PORT_MARK) -> tuple[str, str] | None:
    port_id = external_ids.get(mark)
    backend = external_ids.get(BACKEND_MARK)
    return (backend, port_id) if port_id and backend else None


@dataclass(frozen=True, slots=True)
class OvsBridge:
    """A row of Bridge; ``ports`` are the rows of its ports."""

    name: str
    datapath_type: str
    fail_mode: str | None
    external_ids: Mapping[str, str]
    ports: frozenset[UUID]


@dataclass(frozen=True, slots=True)
class OvsRoot:
    """The one row of Open_vSwitch."""

    next_cfg: int = 0
    cur_cfg: int = 0
    dpdk_initialized: bool = False
    dpdk_version: str | None = None
    ovs_version: str | None = None
    iface_types: frozenset[str] = frozenset()
    other_config: Mapping[str, str] = field(default_factory=dict)
    #: Who said last that it has the lock of the database.
    holder: str | None = None
    #: The mark of the store that changed the database last.
    store_mark: str = ""

    @property
    def version(self) -> tuple[int, int, int]:
        """``ovs_version`` as numbers; zeros, the oldest, where it is not told."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.ovs_version or "")
        return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)

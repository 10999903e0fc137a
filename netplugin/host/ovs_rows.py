"""What an Open vSwitch database holds, as values: the rows and columns that netplugin reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

#: The marks in ``external_ids`` of what is ours.
PORT_MARK = "netplugin-port"
BACKEND_MARK = "netplugin-backend"
BRIDGE_MARK = "netplugin-bridge"
UPLINK_MARK = "netplugin-uplink"


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
    #: vhost-user: whether a VM's side is on the socket.
    connected: bool = False

    @property
    def starved(self) -> bool:
        """A VM is connected and OVS has not set the device up: it found no memory for its buffers.

        vswitchd takes such a port out of the datapath and says so in its log alone; in the database
        ``ofport`` and ``error`` stay as they were, only ``mtu`` is never filled in (seen in 3.1).
        """
        return self.connected and not self.mtu


@dataclass(frozen=True, slots=True)
class OvsPort:
    """A row of Port with its first Interface (netplugin makes no kernel bonds)."""

    name: str
    bridge: str | None
    tag: int | None
    vlan_mode: str | None
    external_ids: Mapping[str, str]
    interface: OvsInterface | None

    @property
    def owner(self) -> tuple[str, str] | None:
        """The backend and the port id it is marked with; None if it is not ours."""
        port_id = self.external_ids.get(PORT_MARK)
        backend = self.external_ids.get(BACKEND_MARK)
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

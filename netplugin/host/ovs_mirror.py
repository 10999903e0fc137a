"""A copy of the OVS database as values, kept up by the IDL's notices, read without blocking it.

Reading a row through the Python IDL converts it each time (about 30 us); a plug must not pay that
for a thousand neighbours, so each row is converted once, when it changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from netplugin.host.ovs_rows import BRIDGE_MARK, OvsBridge, OvsInterface, OvsPort, OvsRoot
from netplugin.host.processes import remaining

COLUMNS = {
    "Open_vSwitch": [
        "bridges", "next_cfg", "cur_cfg", "other_config", "dpdk_initialized", "dpdk_version",
        "ovs_version", "iface_types", "external_ids",
    ],
    "Bridge": ["name", "ports", "datapath_type", "fail_mode", "external_ids"],
    "Port": ["name", "interfaces", "tag", "vlan_mode", "external_ids"],
    "Interface": [
        "name", "type", "options", "external_ids", "mtu_request", "mtu", "ofport", "error",
        "link_state", "status",
    ],
}  # fmt: skip

# A change of these columns by another hand is drift, or vswitchd's word that something broke.
_WATCHED = ("type", "options", "mtu_request", "error", "starved")


@dataclass(frozen=True)
class Drift:
    """A marked port of a backend has changed; without a port, one of our bridges has."""

    backend: str | None = None
    port_id: str | None = None


class Mirror:
    """Rows as frozen values. Written by the IDL's thread alone, read by any."""

    def __init__(self, drifted: Callable[[Drift], None]) -> None:
        """``drifted`` is called when a marked port or bridge changes after it was made."""
        self._drifted = drifted
        self._changed = threading.Condition()
        self._root = OvsRoot()
        self._bridges: dict[UUID, OvsBridge] = {}
        self._ports: dict[UUID, OvsPort] = {}
        self._interfaces: dict[UUID, OvsInterface] = {}
        self._port_interface: dict[UUID, UUID | None] = {}
        self._interface_port: dict[UUID, UUID] = {}
        self._port_bridge: dict[UUID, str] = {}
        self._port_by_name: dict[str, UUID] = {}
        self._owned: dict[tuple[str, str], UUID] = {}
        self._strangers: set[UUID] = set()  # ports without our mark

    # -- reading -------------------------------------------------------------------------------

    @property
    def root(self) -> OvsRoot:
        return self._root

    def bridge(self, name: str) -> OvsBridge | None:
        with self._changed:
            return next((b for b in self._bridges.values() if b.name == name), None)

    def bridges(self) -> list[OvsBridge]:
        with self._changed:
            return list(self._bridges.values())

    def port(self, name: str) -> OvsPort | None:
        with self._changed:
            uuid = self._port_by_name.get(name)
            return self._whole(uuid) if uuid else None

    def owned(self, backend: str, port_id: str) -> OvsPort | None:
        with self._changed:
            uuid = self._owned.get((backend, port_id))
            return self._whole(uuid) if uuid else None

    def all_owned(self, backend: str) -> dict[str, OvsPort]:
        with self._changed:
            return {
                port_id: self._whole(uuid)
                for (owner, port_id), uuid in self._owned.items()
                if owner == backend
            }

    def strangers_on(self, bridge: OvsBridge) -> list[OvsPort]:
        """The bridge's ports that are nobody's NIC by our marks: its internal port, uplinks, others'."""
        with self._changed:
            return [self._whole(uuid) for uuid in bridge.ports & self._strangers]

    def owned_on(self, bridge: OvsBridge) -> list[OvsPort]:
        """The bridge's ports that carry a port id, whichever backend's."""
        with self._changed:
            return [
                self._whole(uuid) for uuid in bridge.ports - self._strangers if uuid in self._ports
            ]

    def count_owned_on(self, bridge: OvsBridge) -> int:
        with self._changed:
            return len(bridge.ports - self._strangers)

    def names_of_others(self, backend: str) -> list[str]:
        """The names of all ports that are not this backend's."""
        with self._changed:
            return [p.name for p in self._ports.values() if (p.owner or ("",))[0] != backend]

    def count_interfaces(self, *types: str) -> int:
        with self._changed:
            return sum(1 for i in self._interfaces.values() if i.type in types)

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition holds of what was read; False at the deadline."""
        with self._changed:
            return self._changed.wait_for(condition, remaining(deadline))

    def _whole(self, uuid: UUID) -> OvsPort:
        port = self._ports[uuid]
        interface = self._port_interface.get(uuid)
        return OvsPort(
            name=port.name,
            bridge=self._port_bridge.get(uuid),
            tag=port.tag,
            vlan_mode=port.vlan_mode,
            external_ids=port.external_ids,
            interface=self._interfaces.get(interface) if interface else None,
        )

    # -- writing, from the IDL's thread ----------------------------------------------------------

    def reset(self, tables: Any) -> None:
        """Forget all and read every row: after a reconnect the IDL tells of no deletions."""
        with self._changed:
            for store in (
                self._bridges, self._ports, self._interfaces, self._port_interface,
                self._interface_port, self._port_bridge, self._port_by_name, self._owned,
                self._strangers,
            ):  # fmt: skip
                store.clear()
            for name in ("Open_vSwitch", "Interface", "Port", "Bridge"):
                for row in list(tables[name].rows.values()):
                    self._put(name, row)
            self._changed.notify_all()

    def update(self, row: Any, deleted: bool) -> None:
        """One row was made, changed or deleted."""
        table = row._table.name
        with self._changed:
            drifted = self._delete(table, row.uuid) if deleted else self._put(table, row)
            self._changed.notify_all()
        if drifted:
            self._drifted(drifted)

    def _put(self, table: str, row: Any) -> Drift | None:
        if table == "Open_vSwitch":
            self._root = _root(row)
            return None
        if table == "Bridge":
            return self._put_bridge(row)
        if table == "Port":
            return self._put_port(row)
        return self._put_interface(row)

    def _put_bridge(self, row: Any) -> Drift | None:
        old = self._bridges.get(row.uuid)
        new = OvsBridge(
            name=row.name,
            datapath_type=row.datapath_type,
            fail_mode=_optional(row.fail_mode),
            external_ids=row.external_ids,
            ports=frozenset(port.uuid for port in row.ports),
        )
        for uuid in (old.ports - new.ports) if old else ():
            self._port_bridge.pop(uuid, None)
        for uuid in new.ports - (old.ports if old else frozenset()):
            self._port_bridge[uuid] = new.name
        self._bridges[row.uuid] = new
        if old and BRIDGE_MARK in old.external_ids and old.fail_mode != new.fail_mode:
            return Drift()
        return None

    def _put_port(self, row: Any) -> Drift | None:
        old = self._ports.get(row.uuid)
        new = OvsPort(
            name=row.name,
            bridge=None,
            tag=_optional(row.tag),
            vlan_mode=_optional(row.vlan_mode),
            external_ids=row.external_ids,
            interface=None,
        )
        interfaces = row.interfaces
        interface = interfaces[0].uuid if interfaces else None
        if old and old.owner and old.owner != new.owner:
            self._owned.pop(old.owner, None)
        self._ports[row.uuid] = new
        self._port_interface[row.uuid] = interface
        if interface:
            self._interface_port[interface] = row.uuid
        self._port_by_name[new.name] = row.uuid
        if new.owner:
            self._owned[new.owner] = row.uuid
            self._strangers.discard(row.uuid)
        else:
            self._strangers.add(row.uuid)
        return _drift(old.owner or new.owner) if old and old != new else None

    def _put_interface(self, row: Any) -> Drift | None:
        old = self._interfaces.get(row.uuid)
        new = OvsInterface(
            name=row.name,
            type=row.type,
            options=row.options,
            external_ids=row.external_ids,
            mtu_request=_optional(row.mtu_request),
            mtu=_optional(row.mtu),
            ofport=_optional(row.ofport),
            error=_optional(row.error),
            link_state=_optional(row.link_state),
            connected=row.status.get("status") == "connected",
        )
        self._interfaces[row.uuid] = new
        lost = old is not None and (old.ofport or 0) > 0 and (new.ofport or 0) <= 0
        if old and (lost or any(getattr(old, c) != getattr(new, c) for c in _WATCHED)):
            port = self._interface_port.get(row.uuid)
            return _drift(self._ports[port].owner) if port in self._ports else None
        return None

    def _delete(self, table: str, uuid: UUID) -> Drift | None:
        if table == "Bridge":
            gone = self._bridges.pop(uuid, None)
            for port in gone.ports if gone else ():
                self._port_bridge.pop(port, None)
        elif table == "Interface":
            self._interfaces.pop(uuid, None)
            self._interface_port.pop(uuid, None)
        elif table == "Port":
            return self._delete_port(uuid)
        return None

    def _delete_port(self, uuid: UUID) -> Drift | None:
        port = self._ports.pop(uuid, None)
        self._strangers.discard(uuid)
        self._port_interface.pop(uuid, None)
        self._port_bridge.pop(uuid, None)
        if port is None:
            return None
        # A row of the same name may already stand in its place: made in the same transaction.
        if self._port_by_name.get(port.name) == uuid:
            del self._port_by_name[port.name]
        if port.owner and self._owned.get(port.owner) == uuid:
            del self._owned[port.owner]
        return _drift(port.owner)


def _drift(owner: tuple[str, str] | None) -> Drift | None:
    return Drift(*owner) if owner else None


def _optional(column: Any) -> Any:
    """The IDL gives an optional column as a list of none or one."""
    return column[0] if column else None


def _root(row: Any) -> OvsRoot:
    return OvsRoot(
        next_cfg=row.next_cfg,
        cur_cfg=row.cur_cfg,
        dpdk_initialized=row.dpdk_initialized,
        dpdk_version=_optional(row.dpdk_version),
        ovs_version=_optional(row.ovs_version),
        iface_types=frozenset(row.iface_types),
        other_config=row.other_config,
    )

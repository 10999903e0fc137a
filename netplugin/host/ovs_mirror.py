"""An in-memory copy of the OVS database, updated by IDL notifications.

Reading a row through the Python IDL converts it every time (about 30 us). A plug must not pay that
for a thousand other ports, so each row is converted once per change. Reads do not block the IDL.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from netplugin.host.names import Mark, unmarked
from netplugin.host.ovs_rows import (
    BRIDGE_MARK,
    NETWORK_MARK,
    STORE_MARK,
    TUNNEL_MARK,
    UPLINK_MARK,
    OvsBridge,
    OvsInterface,
    OvsPort,
    OvsQos,
    OvsRoot,
    optional,
)
from netplugin.host.processes import remaining

COLUMNS = {
    "Open_vSwitch": [
        "bridges",
        "next_cfg",
        "cur_cfg",
        "other_config",
        "dpdk_initialized",
        "dpdk_version",
        "ovs_version",
        "iface_types",
        "external_ids",
    ],
    "Bridge": ["name", "ports", "datapath_type", "fail_mode", "external_ids"],
    "Port": [
        "name",
        "interfaces",
        "tag",
        "vlan_mode",
        "bond_mode",
        "lacp",
        "qos",
        "external_ids",
    ],
    "Interface": [
        "name",
        "type",
        "options",
        "external_ids",
        "mtu_request",
        "mtu",
        "ofport",
        "error",
        "ifindex",
        "link_state",
        "status",
        "ingress_policing_rate",
        "ingress_policing_burst",
        "other_config",
    ],
    "QoS": ["type", "other_config", "external_ids"],
}

# If these columns change, a third party caused drift, or vswitchd reported a fault.
_WATCHED = (
    "type",
    "options",
    "mtu_request",
    "error",
    "starved",
    "other_ifindex",
    "moved",
    "has_no_link",
    "ingress_policing_rate",
    "ingress_policing_burst",
)


@dataclass(frozen=True)
class MirrorDrift:
    """A marked port of a backend has changed; without a port, one of our bridges or uplinks has."""

    backend: str | None = None
    port_id: str | None = None


@dataclass(frozen=True)
class Connection:
    """A VM has connected to the vhost-user socket of a port (its driver is ready), or disconnected."""

    backend: str
    port_id: str
    connected: bool


@dataclass(frozen=True, slots=True)
class _PortRow:
    """A row of Port, with the rows it refers to."""

    port: OvsPort
    interfaces: frozenset[UUID]
    qos: UUID | None


class Mirror:
    """Rows as immutable values. Only the IDL's thread writes; any thread may read."""

    def __init__(
        self,
        drifted: Callable[[MirrorDrift], None],
        found: Mark = unmarked,
        connection: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        """``drifted`` is called when a marked port or bridge changes after its creation.

        ``connection`` is called when a VM connects to a marked vhost-user port or disconnects.

        ``found`` maps the store mark in the database to the one to compare with (see
        ``CarriedMark``).
        """
        self._drifted = drifted
        self._connection = connection
        self._found = found
        self._changed = threading.Condition()
        self._root = OvsRoot()
        self._bridges: dict[UUID, OvsBridge] = {}
        self._ports: dict[UUID, _PortRow] = {}
        self._interfaces: dict[UUID, OvsInterface] = {}
        self._qos: dict[UUID, OvsQos] = {}
        self._qos_owned: dict[tuple[str, str], set[UUID]] = defaultdict(set)
        self._interface_port: dict[UUID, UUID] = {}
        self._port_bridge: dict[UUID, UUID] = {}
        self._port_by_name: dict[str, UUID] = {}
        self._owned: dict[tuple[str, str], UUID] = {}
        self._besides: dict[tuple[str, str], UUID] = {}
        self._unmanaged: set[UUID] = set()  # ports without our mark
        #: Whether a VM is connected, by owner of the port, as far as vswitchd reported it.
        self._vms: dict[tuple[str, str], bool] = {}

    # -- reading -------------------------------------------------------------------------------

    @property
    def root(self) -> OvsRoot:
        return self._root

    def bridge(self, name: str) -> OvsBridge | None:
        return next((b for b in self.bridges() if b.name == name), None)

    def bridges(self) -> list[OvsBridge]:
        with self._changed:
            return list(self._bridges.values())

    def port(self, name: str) -> OvsPort | None:
        with self._changed:
            uuid = self._port_by_name.get(name)
            return self._whole(uuid) if uuid else None

    def owned(self, backend: str, port_id: str) -> OvsPort | None:
        """The port that is marked with this backend and port id."""
        with self._changed:
            uuid = self._owned.get((backend, port_id))
            return self._whole(uuid) if uuid else None

    def all_owned(self, backend: str) -> dict[str, OvsPort]:
        """The ports that are marked with this backend, by port id."""
        with self._changed:
            return {
                port_id: self._whole(uuid)
                for (owner, port_id), uuid in self._owned.items()
                if owner == backend
            }

    def beside(self, backend: str, port_id: str) -> OvsPort | None:
        """The relay's VF port of this port."""
        with self._changed:
            uuid = self._besides.get((backend, port_id))
            return self._whole(uuid) if uuid else None

    def all_beside(self, backend: str) -> dict[str, OvsPort]:
        """The VF ports of this backend's relays, by the id of the port that they serve."""
        with self._changed:
            return {
                port_id: self._whole(uuid)
                for (owner, port_id), uuid in self._besides.items()
                if owner == backend
            }

    def unmanaged_on(self, bridge: OvsBridge) -> list[OvsPort]:
        """Ports of the bridge without our port mark: its internal port, uplinks, ports of others."""
        with self._changed:
            return [self._whole(uuid) for uuid in bridge.ports & self._unmanaged]

    def owned_on(self, bridge: OvsBridge) -> list[OvsPort]:
        """Ports of the bridge that carry a port id, of any backend."""
        with self._changed:
            return [self._whole(uuid) for uuid in bridge.ports - self._unmanaged if uuid in self._ports]

    def count_owned_on(self, bridge: OvsBridge) -> int:
        with self._changed:
            return len(bridge.ports - self._unmanaged)

    def ids_on(self, bridge: OvsBridge) -> list[Mapping[str, str]]:
        """The ``external_ids`` of those ports of the bridge that carry a port id."""
        with self._changed:
            here = bridge.ports - self._unmanaged
            return [self._ports[uuid].port.external_ids for uuid in here if uuid in self._ports]

    def networks(self, backend: str) -> dict[int, str]:
        """The VXLAN networks of this backend's ports, by their local VLAN tag."""
        with self._changed:
            ports = [row.port for row in self._ports.values()]
        return {
            port.tag: port.external_ids[NETWORK_MARK]
            for port in ports
            if port.tag and NETWORK_MARK in port.external_ids and (port.owner or ("",))[0] == backend
        }

    def qos_of(self, backend: str, port_id: str) -> list[OvsQos]:
        """The QoS rows that are marked with this port id."""
        with self._changed:
            return [self._qos[uuid] for uuid in self._qos_owned.get((backend, port_id), ())]

    def all_qos(self, backend: str) -> list[OvsQos]:
        """All QoS rows that are marked with this backend."""
        with self._changed:
            return [qos for qos in self._qos.values() if (qos.owner or ("",))[0] == backend]

    def names(self) -> dict[str, tuple[str, str] | None]:
        """The names of all ports and interfaces, with backend and id of the VM's port that each serves."""
        with self._changed:
            members = dict.fromkeys(i.name for i in self._interfaces.values())
            return members | {n: self._ports[uuid].port.serves for n, uuid in self._port_by_name.items()}

    def ports_named(self, prefixes: tuple[str, ...]) -> list[OvsPort]:
        """The ports whose names begin with one of these prefixes."""
        with self._changed:
            return [self._whole(u) for name, u in self._port_by_name.items() if name.startswith(prefixes)]

    def interfaces(self) -> dict[str, OvsInterface]:
        """All interfaces by name, including bond members."""
        with self._changed:
            return {interface.name: interface for interface in self._interfaces.values()}

    def count_interfaces(self, *types: str) -> int:
        return sum(1 for i in self.interfaces().values() if i.type in types)

    def devices(self, *options: str) -> dict[str, str]:
        """The values that interfaces have in these options, each with the name of the interface."""
        with self._changed:
            return {
                i.options[option]: i.name
                for i in self._interfaces.values()
                for option in options
                if option in i.options
            }

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition on the mirror holds; False at the deadline (monotonic seconds)."""
        with self._changed:
            return self._changed.wait_for(condition, remaining(deadline))

    def _whole(self, uuid: UUID) -> OvsPort:
        row = self._ports[uuid]
        bridge = self._port_bridge.get(uuid)
        found = [self._interfaces[i] for i in row.interfaces if i in self._interfaces]
        if len(found) > 1:
            found.sort(key=lambda interface: interface.name)
        return OvsPort(
            name=row.port.name,
            bridge=self._bridges[bridge].name if bridge else None,
            tag=row.port.tag,
            vlan_mode=row.port.vlan_mode,
            external_ids=row.port.external_ids,
            interfaces=tuple(found),
            bond_mode=row.port.bond_mode,
            lacp=row.port.lacp,
            qos=self._qos.get(row.qos) if row.qos else None,
        )

    # -- writing, from the IDL's thread ----------------------------------------------------------

    def reset(self, tables: Any) -> None:
        """Discard everything and read every row again: after a reconnect the IDL reports no deletions."""
        with self._changed:
            for store in (
                self._bridges,
                self._ports,
                self._interfaces,
                self._qos,
                self._qos_owned,
                self._interface_port,
                self._port_bridge,
                self._port_by_name,
                self._owned,
                self._besides,
                self._unmanaged,
            ):
                store.clear()
            for name in ("Open_vSwitch", "QoS", "Interface", "Port", "Bridge"):
                for row in list(tables[name].rows.values()):
                    self._put(name, row)
            changed = self._compare_vms({*self._owned, *self._vms})
            self._changed.notify_all()
        for connection in changed:
            self._connection(connection)

    def update(self, row: Any, deleted: bool) -> None:
        """Apply the insertion, change or deletion of one row."""
        table = row._table.name
        with self._changed:
            owners = {self._owner_of(table, row.uuid)}
            drifted = self._delete(table, row.uuid) if deleted else self._put(table, row)
            owners.add(self._owner_of(table, row.uuid))
            changed = self._compare_vms({owner for owner in owners if owner})
            self._changed.notify_all()
        for connection in changed:
            self._connection(connection)
        if drifted:
            self._drifted(drifted)

    def connections(self) -> dict[tuple[str, str], bool]:
        """Whether a VM is connected, by backend and id of each marked port of which that is known."""
        with self._changed:
            return dict(self._vms)

    def _owner_of(self, table: str, uuid: UUID) -> tuple[str, str] | None:
        """The backend and port id of a row of Port or Interface."""
        if table not in ("Port", "Interface"):
            return None
        port = self._ports.get(self._interface_port.get(uuid, uuid))
        return port.port.owner if port else None

    def _compare_vms(self, owners: Collection[tuple[str, str]]) -> list[Connection]:
        """The connections of these ports that have changed.

        vswitchd writes ``status``, which ovsdb-server does not keep across a restart: a port without
        it has the VM that it had.
        """
        changed: list[Connection] = []
        for owner in owners:
            uuid, before = self._owned.get(owner), self._vms.get(owner)
            if uuid is None:
                self._vms.pop(owner, None)
                now: bool | None = False
            else:
                rows = (self._interfaces.get(each) for each in self._ports[uuid].interfaces)
                now = next((row.connection for row in rows if row and row.connection is not None), None)
                if now is not None:
                    self._vms[owner] = now
            if now is not None and now != bool(before):
                changed.append(Connection(*owner, now))
        return changed

    def _put(self, table: str, row: Any) -> MirrorDrift | None:
        if table == "Open_vSwitch":
            self._root = OvsRoot.read(row, self._found(row.external_ids.get(STORE_MARK, "")))
            return None
        if table == "Bridge":
            return self._put_bridge(row)
        if table == "Port":
            return self._put_port(row)
        if table == "QoS":
            return self._put_qos(row)
        return self._put_interface(row)

    def _put_bridge(self, row: Any) -> MirrorDrift | None:
        old = self._bridges.get(row.uuid)
        new = OvsBridge(
            name=row.name,
            datapath_type=row.datapath_type,
            fail_mode=optional(row.fail_mode),
            external_ids=row.external_ids,
            ports=frozenset(port.uuid for port in row.ports),
        )
        self._bridges[row.uuid] = new
        for uuid in (old.ports - new.ports) if old else ():
            self._leave_bridge(uuid, row.uuid)
        for uuid in new.ports - (old.ports if old else frozenset()):
            self._port_bridge[uuid] = row.uuid
        if old and BRIDGE_MARK in old.external_ids and old.fail_mode != new.fail_mode:
            return MirrorDrift()
        return None

    def _leave_bridge(self, port: UUID, bridge: UUID) -> None:
        """Forget the bridge of a port, unless another bridge has it already.

        The rows of one transaction come in any order, so the new bridge of a port may come before
        the old one.
        """
        if self._port_bridge.get(port) == bridge:
            del self._port_bridge[port]

    def _put_port(self, row: Any) -> MirrorDrift | None:
        old = self._ports.get(row.uuid)
        port = OvsPort(
            name=row.name,
            bridge=None,
            tag=optional(row.tag),
            vlan_mode=optional(row.vlan_mode),
            external_ids=row.external_ids,
            bond_mode=optional(row.bond_mode),
            lacp=optional(row.lacp),
        )
        qos = optional(row.qos)
        new = _PortRow(port, frozenset(i.uuid for i in row.interfaces), qos.uuid if qos else None)
        if old and old.port.serves != port.serves:
            self._drop_mark(row.uuid, old.port)
        self._ports[row.uuid] = new
        for interface in new.interfaces:
            self._interface_port[interface] = row.uuid
        self._port_by_name[port.name] = row.uuid
        if port.serves:
            self._kept_in(port)[port.serves] = row.uuid
        if port.owner:
            self._unmanaged.discard(row.uuid)
        else:
            self._unmanaged.add(row.uuid)
        return _drift(old.port, port) if old and old != new else None

    def _put_qos(self, row: Any) -> MirrorDrift | None:
        old = self._qos.get(row.uuid)
        new = OvsQos(row.uuid, row.type, row.other_config, row.external_ids)
        self._forget_qos(row.uuid)
        self._qos[row.uuid] = new
        if new.owner:
            self._qos_owned[new.owner].add(row.uuid)
        return MirrorDrift(*old.owner) if old and old.owner and old != new else None

    def _forget_qos(self, uuid: UUID) -> MirrorDrift | None:
        qos = self._qos.pop(uuid, None)
        if qos is None or qos.owner is None:
            return None
        self._qos_owned[qos.owner].discard(uuid)
        if not self._qos_owned[qos.owner]:
            del self._qos_owned[qos.owner]
        return MirrorDrift(*qos.owner)

    def _put_interface(self, row: Any) -> MirrorDrift | None:
        old = self._interfaces.get(row.uuid)
        new = OvsInterface.read(row)
        self._interfaces[row.uuid] = new
        lost = old is not None and (old.ofport or 0) > 0 and (new.ofport or 0) <= 0
        if old and (lost or any(getattr(old, c) != getattr(new, c) for c in _WATCHED)):
            port = self._interface_port.get(row.uuid)
            return _drift(self._ports[port].port) if port in self._ports else None
        return None

    def _delete(self, table: str, uuid: UUID) -> MirrorDrift | None:
        if table == "Bridge":
            gone = self._bridges.pop(uuid, None)
            for port in gone.ports if gone else ():
                self._leave_bridge(port, uuid)
        elif table == "Interface":
            self._interfaces.pop(uuid, None)
            self._interface_port.pop(uuid, None)
        elif table == "QoS":
            return self._forget_qos(uuid)
        elif table == "Port":
            return self._delete_port(uuid)
        return None

    def _delete_port(self, uuid: UUID) -> MirrorDrift | None:
        row = self._ports.pop(uuid, None)
        self._unmanaged.discard(uuid)
        self._port_bridge.pop(uuid, None)
        if row is None:
            return None
        port = row.port
        # A row of the same name may already be in its place, inserted in the same transaction.
        if self._port_by_name.get(port.name) == uuid:
            del self._port_by_name[port.name]
        self._drop_mark(uuid, port)
        return _drift(port)

    def _drop_mark(self, uuid: UUID, port: OvsPort) -> None:
        """Remove a port from the index of its mark, unless another row has the mark already."""
        if port.serves and self._kept_in(port).get(port.serves) == uuid:
            del self._kept_in(port)[port.serves]

    def _kept_in(self, port: OvsPort) -> dict[tuple[str, str], UUID]:
        """The index (port or relay VF port) that a marked port belongs to."""
        return self._owned if port.owner else self._besides


def _drift(*ports: OvsPort) -> MirrorDrift | None:
    """The drift that a changed port causes: of one port, or of many if it is an uplink or tunnel."""
    for port in ports:
        if port.serves:
            return MirrorDrift(*port.serves)
    shared = any({UPLINK_MARK, TUNNEL_MARK} & port.external_ids.keys() for port in ports)
    return MirrorDrift() if shared else None

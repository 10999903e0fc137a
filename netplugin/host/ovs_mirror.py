"""An in-memory copy of the OVS database, updated by the notices of ovsdb-server.

Each row is converted once per change, and frequent questions are answered from indices, which are
changed with the rows. So what a port costs does not depend on the number of ports. Reads do not wait
for the server.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from netplugin.host.names import DERIVED, Mark, unmarked
from netplugin.host.ovs_rows import (
    BRIDGE_MARK,
    NETWORK_MARK,
    TUNNEL_MARK,
    TUNNEL_TYPES,
    UPLINK_MARK,
    OvsBridge,
    OvsInterface,
    OvsPort,
    OvsQos,
    OvsRoot,
)
from netplugin.host.ovsdb_rows import RowChange, Rows, Updates, Was
from netplugin.host.processes import remaining

# The names of devices that we choose begin with a prefix of three letters.
_PREFIX = 3

Owner = tuple[str, str]
K = TypeVar("K")


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


class Mirror:
    """Rows as immutable values. Only the connection's thread writes; any thread may read."""

    def __init__(
        self,
        drifted: Callable[[Collection[MirrorDrift]], None],
        found: Mark = unmarked,
        connection: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        """``drifted`` is called when marked ports or bridges change after their creation: once for all
        changes of a notice.

        ``connection`` is called when a VM connects to a marked vhost-user port or disconnects.

        ``found`` maps the store mark in the database to the one to compare with (see
        ``CarriedMark``).
        """
        self._drifted = drifted
        self._connection = connection
        self._found = found
        self._changed = threading.Condition()
        #: Whether a VM is connected, by owner of the port, as far as vswitchd reported it.
        self._vms: dict[Owner, bool] = {}
        self._root = OvsRoot()
        self._clear(Rows({}, {}, {}))

    def _clear(self, rows: Rows) -> None:
        self._rows = rows
        self._bridges: dict[str, OvsBridge] = {}
        self._bridge_named: dict[str, str] = {}
        self._ports: dict[str, OvsPort] = {}
        self._interfaces: dict[str, OvsInterface] = {}
        self._types: Counter[str] = Counter()
        self._tunnels: dict[str, OvsInterface] = {}
        self._with: dict[str, set[str]] = defaultdict(set)  # by option
        self._qos: dict[str, OvsQos] = {}
        self._qos_owned: dict[Owner, set[str]] = defaultdict(set)
        # What refers to a row.
        self._bridge_of: dict[str, str] = {}
        self._port_of: dict[str, str] = {}
        self._users_of_qos: dict[str, set[str]] = defaultdict(set)
        # Indices of the ports.
        self._named: dict[str, str] = {}
        self._prefixed: dict[str, set[str]] = defaultdict(set)
        self._given: dict[str, Owner | None] = {}
        self._given_now: Mapping[str, Owner | None] | None = None
        self._owned: dict[Owner, str] = {}
        self._besides: dict[Owner, str] = {}
        self._owned_on: dict[str, set[str]] = defaultdict(set)
        self._unmanaged_on: dict[str, set[str]] = defaultdict(set)
        self._networks_on: dict[str, Counter[tuple[str, tuple[str, int]]]] = defaultdict(Counter)

    # -- reading -------------------------------------------------------------------------------

    @property
    def root(self) -> OvsRoot:
        return self._root

    def bridge(self, name: str) -> OvsBridge | None:
        with self._changed:
            uuid = self._bridge_named.get(name)
            return self._bridges[uuid] if uuid else None

    def bridges(self) -> list[OvsBridge]:
        with self._changed:
            return list(self._bridges.values())

    def port(self, name: str) -> OvsPort | None:
        with self._changed:
            return self._ports.get(self._named.get(name, ""))

    def ports(self) -> list[OvsPort]:
        with self._changed:
            return list(self._ports.values())

    def owned(self, backend: str, port_id: str) -> OvsPort | None:
        """The port that is marked with this backend and port id."""
        with self._changed:
            return self._ports.get(self._owned.get((backend, port_id), ""))

    def all_owned(self, backend: str) -> dict[str, OvsPort]:
        """The ports that are marked with this backend, by port id."""
        with self._changed:
            return self._of(backend, self._owned)

    def beside(self, backend: str, port_id: str) -> OvsPort | None:
        """The relay's VF port of this port."""
        with self._changed:
            return self._ports.get(self._besides.get((backend, port_id), ""))

    def all_beside(self, backend: str) -> dict[str, OvsPort]:
        """The VF ports of this backend's relays, by the id of the port that they serve."""
        with self._changed:
            return self._of(backend, self._besides)

    def unmanaged_on(self, bridge: OvsBridge) -> list[OvsPort]:
        """Ports of the bridge without our port mark: its internal port, uplinks, ports of others."""
        with self._changed:
            return [self._ports[uuid] for uuid in self._unmanaged_on.get(bridge.name, ())]

    def owned_on(self, bridge: OvsBridge) -> list[OvsPort]:
        """Ports of the bridge that carry a port id, of any backend."""
        with self._changed:
            return [self._ports[uuid] for uuid in self._owned_on.get(bridge.name, ())]

    def count_owned_on(self, bridge: OvsBridge) -> int:
        with self._changed:
            return len(self._owned_on.get(bridge.name, ()))

    def networks_on(self, bridge: OvsBridge, backend: str | None = None) -> Counter[tuple[str, int]]:
        """The VXLAN networks of the ports on a bridge, with their UDP ports, and how many ports each has;
        those of this backend, or (None) of all."""
        found: Counter[tuple[str, int]] = Counter()
        with self._changed:
            for (owner, network), ports in self._networks_on.get(bridge.name, Counter()).items():
                if backend in (None, owner):
                    found[network] += ports
        return found

    def networks(self) -> dict[int, str]:
        """The VXLAN networks of the ports of all backends, by their local VLAN tag."""
        with self._changed:
            ports = [self._ports[uuid] for name in self._networks_on for uuid in self._owned_on[name]]
        return {
            port.tag: port.external_ids[NETWORK_MARK]
            for port in ports
            if port.tag and NETWORK_MARK in port.external_ids
        }

    def qos_of(self, backend: str, port_id: str) -> list[OvsQos]:
        """The QoS rows that are marked with this port id."""
        with self._changed:
            return [self._qos[uuid] for uuid in self._qos_owned.get((backend, port_id), ())]

    def all_qos(self, backend: str) -> list[OvsQos]:
        """All QoS rows that are marked with this backend."""
        with self._changed:
            return [qos for qos in self._qos.values() if (qos.owner or ("",))[0] == backend]

    def names(self) -> dict[str, Owner | None]:
        """The names of all ports and interfaces, with backend and id of the VM's port that each serves."""
        with self._changed:
            members = dict.fromkeys(i.name for i in self._interfaces.values())
            return members | {name: self._ports[uuid].serves for name, uuid in self._named.items()}

    def given_names(self) -> Mapping[str, Owner | None]:
        """Those of ``names`` that we did not derive."""
        with self._changed:
            if self._given_now is None:
                self._given_now = dict(self._given)
            return self._given_now

    def ports_named(self, prefixes: tuple[str, ...]) -> list[OvsPort]:
        """The ports whose names begin with one of these prefixes, of three or more letters."""
        with self._changed:
            alike = {uuid for prefix in prefixes for uuid in self._prefixed.get(prefix[:_PREFIX], ())}
            return [port for each in alike if (port := self._ports[each]).name.startswith(prefixes)]

    def interfaces(self) -> dict[str, OvsInterface]:
        """All interfaces by name, including bond members."""
        with self._changed:
            return {interface.name: interface for interface in self._interfaces.values()}

    def count_interfaces(self, *types: str) -> int:
        with self._changed:
            return sum(self._types[each] for each in types)

    def tunnels(self) -> list[OvsInterface]:
        """The ends of tunnels, of any bridge and owner."""
        with self._changed:
            return list(self._tunnels.values())

    def devices(self, *options: str) -> dict[str, str]:
        """The values that interfaces have in these options, each with the name of the interface."""
        with self._changed:
            found = [(option, self._interfaces[uuid]) for option in options for uuid in self._with[option]]
            return {interface.options[option]: interface.name for option, interface in found}

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition on the mirror holds; False at the deadline (monotonic seconds).

        The condition is evaluated once for each notice.
        """
        with self._changed:
            return self._changed.wait_for(condition, remaining(deadline))

    def _of(self, backend: str, index: Mapping[Owner, str]) -> dict[str, OvsPort]:
        return {port_id: self._ports[uuid] for (owner, port_id), uuid in index.items() if owner == backend}

    # -- for transactions ------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all rows as they are meanwhile."""
        with self._changed:
            yield

    def row(self, table: str, uuid: str) -> Mapping[str, Any] | None:
        """The values of a row; call it while they are ``held``."""
        return self._rows.tables.get(table, {}).get(uuid)

    def id_of(self, table: str, key: str) -> str | None:
        """The id of the row with this name or id; that of Open_vSwitch, which has one row."""
        rows = self._rows.tables.get(table, {})
        if table in ("Bridge", "Port"):
            return (self._bridge_named if table == "Bridge" else self._named).get(key)
        if table == "Open_vSwitch":
            return next(iter(rows), None)
        if table == "Interface":
            return next((uuid for uuid, row in rows.items() if row["name"] == key), None)
        return key if key in rows else None

    # -- writing, from the connection's thread ---------------------------------------------------

    def reset(self, rows: Rows, updates: Updates) -> None:
        """Discard everything and read every row: after a reconnect the server reports no deletions."""
        with self._changed:
            self._clear(rows)
            self._apply(rows.apply(updates))
            connections = self._compare_vms({*self._owned, *self._vms})
            self._changed.notify_all()
        for connection in connections:
            self._connection(connection)

    def update(self, updates: Updates) -> None:
        """Apply a notice: the insertions, changes and deletions of rows of one or several transactions."""
        with self._changed:
            drifts, owners = self._apply(self._rows.apply(updates))
            connections = self._compare_vms(owners)
            self._changed.notify_all()
        for connection in connections:
            self._connection(connection)
        if drifts:
            self._drifted(drifts)

    def connections(self) -> dict[Owner, bool]:
        """Whether a VM is connected, by backend and id of each marked port of which that is known."""
        with self._changed:
            return dict(self._vms)

    def _compare_vms(self, owners: Collection[Owner]) -> list[Connection]:
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
                rows = self._ports[uuid].interfaces
                now = next((row.connection for row in rows if row.connection is not None), None)
                if now is not None:
                    self._vms[owner] = now
            if now is not None and now != bool(before):
                changed.append(Connection(*owner, now))
        return changed

    def _apply(self, changes: Iterable[RowChange]) -> tuple[Collection[MirrorDrift], Collection[Owner]]:
        """Convert the rows that changed, and change the indices.

        The rows of a notice come in any order. So all references are changed before anything is made
        of them, and a port leaves all indices before any port enters one.

        Returns the drift, and the owners of ports that changed.
        """
        by_table: dict[str, list[RowChange]] = defaultdict(list)
        for change in changes:
            by_table[change.table].append(change)
        for change in by_table["Open_vSwitch"]:
            if change.was is not Was.DELETED:
                self._root = OvsRoot.read(change.row, self._found)
        touched = self._refer(by_table["Bridge"], "ports", self._bridge_of)
        moved = self._refer(by_table["Port"], "interfaces", self._port_of)
        drifts = [self._put_bridge(change) for change in by_table["Bridge"]]
        drifts += [self._put_qos(change) for change in by_table["QoS"]]
        idle = {c.uuid for c in by_table["Interface"] if not self._works(c.uuid)}
        faulty = {change.uuid for change in by_table["Interface"] if self._put_interface(change)}
        come = {self._port_of[uuid] for uuid in idle & self._port_of.keys() if self._works(uuid)}
        moved |= {change.uuid for change in by_table["Interface"]}
        touched |= {change.uuid for change in by_table["Port"]}
        touched |= {self._port_of[uuid] for uuid in moved if uuid in self._port_of}
        touched |= {port for c in by_table["QoS"] for port in self._users_of_qos.get(c.uuid, ())}
        before = {uuid: self._ports.pop(uuid) for uuid in touched if uuid in self._ports}
        for uuid, port in before.items():
            self._leave(uuid, port)
        after = {uuid: self._port(uuid) for uuid in touched & self._rows.tables["Port"].keys()}
        self._ports |= after
        for uuid, port in after.items():
            self._enter(uuid, port)
        for change in by_table["Port"]:
            if change.was is not Was.INSERTED:
                drifts.append(_drift(*(p[change.uuid] for p in (before, after) if change.uuid in p)))
        drifts += [_drift(after[self._port_of[uuid]]) for uuid in faulty if self._port_of.get(uuid) in after]
        drifts += [MirrorDrift() for uuid in come & after.keys() if self._is_stray(after[uuid])]
        owners = {port.owner for port in (*before.values(), *after.values())}
        return dict.fromkeys(filter(None, drifts)), {owner for owner in owners if owner}

    def _refer(self, changes: Collection[RowChange], column: str, owner_of: dict[str, str]) -> set[str]:
        """Note to which row the elements of a column belong now. Returns those that moved."""
        moved: set[str] = set()
        for change in changes:
            for uuid in change.removed.get(column, ()):
                moved.add(uuid)
                if owner_of.get(uuid) == change.uuid:
                    del owner_of[uuid]
        for change in changes:
            for uuid in change.added.get(column, ()):
                moved.add(uuid)
                owner_of[uuid] = change.uuid
        return moved

    def _put_bridge(self, change: RowChange) -> MirrorDrift | None:
        old = self._bridges.get(change.uuid)
        if change.was is Was.DELETED:
            gone = self._bridges.pop(change.uuid)
            if self._bridge_named.get(gone.name) == change.uuid:
                del self._bridge_named[gone.name]
            return None
        new = self._bridges[change.uuid] = OvsBridge.read(change.row)
        self._bridge_named[new.name] = change.uuid
        if old and BRIDGE_MARK in old.external_ids and old.fail_mode != new.fail_mode:
            return MirrorDrift()
        return None

    def _put_qos(self, change: RowChange) -> MirrorDrift | None:
        old = self._qos.pop(change.uuid, None)
        if old and old.owner:
            _discard(self._qos_owned, old.owner, change.uuid)
        if change.was is not Was.DELETED:
            new = self._qos[change.uuid] = OvsQos.read(change.uuid, change.row)
            if new.owner:
                self._qos_owned[new.owner].add(change.uuid)
        return MirrorDrift(*old.owner) if old and old.owner else None

    def _put_interface(self, change: RowChange) -> bool:
        """Whether it changed as no interface does by itself, or vswitchd reported a fault."""
        old = self._interfaces.pop(change.uuid, None)
        self._tunnels.pop(change.uuid, None)
        if old:
            self._types[old.type] -= 1
            for option in old.options:
                _discard(self._with, option, change.uuid)
        if change.was is Was.DELETED:
            return False
        new = self._interfaces[change.uuid] = OvsInterface.read(change.row)
        self._types[new.type] += 1
        if new.type in TUNNEL_TYPES:
            self._tunnels[change.uuid] = new
        for option in new.options:
            self._with[option].add(change.uuid)
        if old is None:
            return False
        lost = (old.ofport or 0) > 0 and (new.ofport or 0) <= 0
        return lost or old.watched != new.watched

    def _works(self, uuid: str) -> bool:
        interface = self._interfaces.get(uuid)
        return interface is not None and interface.works_at is not None

    def _is_stray(self, port: OvsPort) -> bool:
        """Whether others have added the port to a bridge of ours, which then must forward nothing to it."""
        bridge = self._bridges.get(self._bridge_named.get(port.bridge or "", ""))
        ours = bridge is not None and BRIDGE_MARK in bridge.external_ids
        marked = {UPLINK_MARK, TUNNEL_MARK} & port.external_ids.keys()
        return ours and not port.serves and not marked and port.name != port.bridge

    def _port(self, uuid: str) -> OvsPort:
        """A port as its rows are now."""
        row = self._rows.tables["Port"][uuid]
        bridge = self._bridges.get(self._bridge_of.get(uuid, ""))
        found = [self._interfaces[i] for i in row["interfaces"] if i in self._interfaces]
        found.sort(key=lambda interface: interface.name)
        return OvsPort(
            name=row["name"],
            bridge=bridge.name if bridge else None,
            tag=row["tag"],
            vlan_mode=row["vlan_mode"],
            external_ids=row["external_ids"],
            interfaces=tuple(found),
            bond_mode=row["bond_mode"],
            lacp=row["lacp"],
            qos=self._qos.get(row["qos"]),
        )

    def _enter(self, uuid: str, port: OvsPort) -> None:
        """Add a port to the indices."""
        self._named[port.name] = uuid
        if port.name.startswith(DERIVED):
            self._prefixed[port.name[:_PREFIX]].add(uuid)
        for name in _given_by(port):
            self._given[name] = port.serves if name == port.name else None
            self._given_now = None
        if port.serves:
            (self._owned if port.owner else self._besides)[port.serves] = uuid
        if port.bridge is not None:
            (self._owned_on if port.owner else self._unmanaged_on)[port.bridge].add(uuid)
            if port.owner and port.network:
                self._networks_on[port.bridge][port.owner[0], port.network] += 1
        if port.qos:
            self._users_of_qos[port.qos.uuid].add(uuid)

    def _leave(self, uuid: str, port: OvsPort) -> None:
        """Remove a port from the indices. Another port may have the same mark: it stays."""
        if self._named.get(port.name) == uuid:
            del self._named[port.name]
        _discard(self._prefixed, port.name[:_PREFIX], uuid)
        for name in _given_by(port):
            self._given.pop(name, None)
            self._given_now = None
        kept_in = self._owned if port.owner else self._besides
        if port.serves and kept_in.get(port.serves) == uuid:
            del kept_in[port.serves]
        if port.bridge is not None:
            _discard(self._owned_on if port.owner else self._unmanaged_on, port.bridge, uuid)
            if port.owner and port.network:
                networks, key = self._networks_on[port.bridge], (port.owner[0], port.network)
                networks[key] -= 1
                if not networks[key]:
                    del networks[key]
                if not networks:
                    del self._networks_on[port.bridge]
        if port.qos:
            _discard(self._users_of_qos, port.qos.uuid, uuid)


def _discard(index: dict[K, set[str]], key: K, uuid: str) -> None:
    """Remove an element, and the key of the last one: an index would grow with all that ever was."""
    there = index.get(key, set())
    there.discard(uuid)
    if not there:
        index.pop(key, None)


def _given_by(port: OvsPort) -> list[str]:
    """The names of the port and its interfaces that we did not derive; that of the port is the last."""
    members = [interface.name for interface in port.interfaces if interface.name != port.name]
    return [name for name in (*members, port.name) if not name.startswith(DERIVED)]


def _drift(*ports: OvsPort) -> MirrorDrift | None:
    """The drift that a changed port causes: of one port, or of many if it is an uplink or tunnel."""
    for port in ports:
        if port.serves:
            return MirrorDrift(*port.serves)
    shared = any({UPLINK_MARK, TUNNEL_MARK} & port.external_ids.keys() for port in ports)
    return MirrorDrift() if shared else None

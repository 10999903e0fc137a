"""The rows of the OVS database as plain values, with indices: what plans and checks read.

The replica is that of the Idl. A value is made again when its row changes, so that what a port costs does
not depend on the number of ports. Reads do not wait for ovsdb-server.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from ovs.db.idl import ROW_CREATE, ROW_DELETE

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
    values,
)

# The names of devices that we choose begin with a prefix of three letters.
_PREFIX = 3
#: The columns by which a row has others as its own, by table.
_MEMBERS = {"Bridge": "ports", "Port": "interfaces"}

Owner = tuple[str, str]
V = TypeVar("V")


@dataclass(frozen=True)
class Drift:
    """A marked port of a backend has changed; without a port, one of our bridges or uplinks has."""

    backend: str | None = None
    port_id: str | None = None


@dataclass(frozen=True)
class VmConnection:
    """A VM has connected to the vhost-user socket of a port (its driver is ready), or disconnected."""

    backend: str
    port_id: str
    connected: bool


class _Index(Generic[V]):
    """Values by the id of their row and by keys of several kinds."""

    def __init__(self, keys: Callable[[V], Iterable[tuple[str, Hashable]]]) -> None:
        self._keys = keys
        self.values: dict[UUID, V] = {}
        self._kinds: dict[str, dict[Any, dict[UUID, V]]] = defaultdict(dict)

    def put(self, uuid: UUID, value: V | None) -> None:
        """Replace the value of a row; None: the row is gone."""
        old = self.values.pop(uuid, None)
        for kind, key in self._keys(old) if old is not None else ():
            there = self._kinds[kind][key]
            there.pop(uuid, None)
            if not there:  # or it would grow with all that ever was
                del self._kinds[kind][key]
        if value is not None:
            self.values[uuid] = value
            for kind, key in self._keys(value):
                self._kinds[kind].setdefault(key, {})[uuid] = value

    def kind(self, kind: str) -> Mapping[Any, Mapping[UUID, V]]:
        return self._kinds.get(kind, {})

    def all(self, kind: str, key: Hashable) -> list[V]:
        return [*self.kind(kind).get(key, {}).values()]

    def one(self, kind: str, key: Hashable) -> V | None:
        """The last value that has got the key."""
        found = self.all(kind, key)
        return found[-1] if found else None

    def each(self, kind: str) -> dict[Any, V]:
        """``one`` of each key."""
        return {key: [*found.values()][-1] for key, found in self.kind(kind).items()}


class OvsView:
    """The values of one connection's rows. Only the connection's thread writes; any thread may read."""

    def __init__(
        self,
        idl: Any = None,
        lock: threading.Condition | None = None,
        found: Mark = unmarked,
        vms: Mapping[Owner, bool] | None = None,
    ) -> None:
        """Follow an Idl that has read nothing yet; ``lock`` is held by whom it runs. None: there are no rows.

        ``found`` maps the store mark in the database to the one to compare with (see ``CarriedMark``).
        ``vms``: the connections of VMs as they were known (``connections``).
        """
        self._lock = lock or threading.Condition()
        self._tables = idl.tables if idl is not None else {}
        self._found = found
        self.root = OvsRoot()
        self._bridges: _Index[OvsBridge] = _Index(lambda bridge: [("name", bridge.name)])
        self._ports: _Index[OvsPort] = _Index(_port_keys)
        self._interfaces: _Index[OvsInterface] = _Index(_interface_keys)
        self._qos: _Index[OvsQos] = _Index(lambda qos: [("owner", qos.owner)] if qos.owner else [])
        self._given: dict[str, Owner | None] | None = None
        #: The row that has another one as its own, by the table of the first.
        self._holder: dict[str, dict[UUID, UUID]] = {table: {} for table in _MEMBERS}
        #: Whether a VM is connected, by owner of the port, as far as vswitchd reported it.
        self._vms = dict(vms or {})
        # Since the values were settled: the rows that changed, and those that got another holder.
        self._changed: dict[str, set[UUID]] = defaultdict(set)
        self._moved: dict[str, set[UUID]] = defaultdict(set)
        self._owners: set[Owner] = {*self._vms}
        if idl is not None:
            idl.notify = self._note

    def bridge(self, name: str) -> OvsBridge | None:
        with self._lock:
            return self._bridges.one("name", name)

    def bridges(self) -> list[OvsBridge]:
        with self._lock:
            return [*self._bridges.values.values()]

    def port(self, name: str) -> OvsPort | None:
        with self._lock:
            return self._ports.one("name", name)

    def ports(self) -> list[OvsPort]:
        with self._lock:
            return [*self._ports.values.values()]

    def owned(self, backend: str, port_id: str) -> OvsPort | None:
        """The port that is marked with this backend and port id."""
        with self._lock:
            return self._ports.one("owner", (backend, port_id))

    def all_owned(self, backend: str) -> dict[str, OvsPort]:
        """The ports that are marked with this backend, by port id."""
        return self._of(backend, "owner")

    def vf_port(self, backend: str, port_id: str) -> OvsPort | None:
        """The relay's VF port of this port."""
        with self._lock:
            return self._ports.one("vf port", (backend, port_id))

    def vf_ports(self, backend: str) -> dict[str, OvsPort]:
        """The VF ports of this backend's relays, by the id of the port that they serve."""
        return self._of(backend, "vf port")

    def unmanaged_on(self, bridge: OvsBridge) -> list[OvsPort]:
        """Ports of the bridge without our port mark: its internal port, uplinks, ports of others."""
        with self._lock:
            return self._ports.all("unmanaged on", bridge.name)

    def owned_on(self, bridge: OvsBridge) -> list[OvsPort]:
        """Ports of the bridge that carry a port id, of any backend."""
        with self._lock:
            return self._ports.all("owned on", bridge.name)

    def count_owned_on(self, bridge: OvsBridge) -> int:
        with self._lock:
            return len(self._ports.kind("owned on").get(bridge.name, ()))

    def networks_on(self, bridge: OvsBridge, backend: str | None = None) -> Counter[tuple[str, int]]:
        """The VXLAN networks of the ports on a bridge, with their UDP ports, and how many ports each has;
        those of this backend, or (None) of all."""
        found: Counter[tuple[str, int]] = Counter()
        with self._lock:
            for (on, owner, network), ports in self._ports.kind("network").items():
                if on == bridge.name and backend in (None, owner):
                    found[network] += len(ports)
        return found

    def networks(self) -> dict[int, str]:
        """The VXLAN networks of the ports of all backends, by their local VLAN tag."""
        with self._lock:
            ports = [port for found in self._ports.kind("network").values() for port in found.values()]
        return {port.tag: port.external_ids[NETWORK_MARK] for port in ports if port.tag}

    def qos_of(self, backend: str, port_id: str) -> list[OvsQos]:
        """The QoS rows that are marked with this port id."""
        with self._lock:
            return self._qos.all("owner", (backend, port_id))

    def all_qos(self, backend: str) -> list[OvsQos]:
        """All QoS rows that are marked with this backend."""
        with self._lock:
            return [qos for qos in self._qos.values.values() if (qos.owner or ("",))[0] == backend]

    def names(self) -> dict[str, Owner | None]:
        """The names of all ports and interfaces, with backend and id of the VM's port that each serves."""
        with self._lock:
            members = dict.fromkeys(i.name for i in self._interfaces.values.values())
            return members | {port.name: port.serves for port in self._ports.values.values()}

    def given_names(self) -> dict[str, Owner | None]:
        """Those of ``names`` that we did not derive."""
        with self._lock:
            if self._given is None:
                ports = self._ports.each("given").items()
                self._given = {name: port.serves if name == port.name else None for name, port in ports}
            return self._given

    def ports_named(self, prefixes: tuple[str, ...]) -> list[OvsPort]:
        """The ports whose names begin with one of these prefixes, of three or more letters."""
        with self._lock:
            shorts = {each[:_PREFIX] for each in prefixes}
            alike = [port for short in shorts for port in self._ports.all("prefix", short)]
        return [port for port in alike if port.name.startswith(prefixes)]

    def interfaces(self) -> dict[str, OvsInterface]:
        """All interfaces by name, including bond members."""
        with self._lock:
            return {interface.name: interface for interface in self._interfaces.values.values()}

    def count_interfaces(self, *types: str) -> int:
        with self._lock:
            return sum(len(self._interfaces.kind("type").get(each, ())) for each in types)

    def tunnels(self) -> list[OvsInterface]:
        """The ends of tunnels, of any bridge and owner."""
        with self._lock:
            return [end for kind in TUNNEL_TYPES for end in self._interfaces.all("type", kind)]

    def devices(self, *options: str) -> dict[str, str]:
        """The values that interfaces have in these options, each with the name of the interface."""
        with self._lock:
            found = [(option, i) for option in options for i in self._interfaces.all("option", option)]
        return {interface.options[option]: interface.name for option, interface in found}

    def connections(self) -> dict[Owner, bool]:
        """Whether a VM is connected, by backend and id of each marked port of which that is known."""
        with self._lock:
            return dict(self._vms)

    def _of(self, backend: str, kind: str) -> dict[str, OvsPort]:
        with self._lock:
            found = self._ports.each(kind).items()
        return {port_id: port for (owner, port_id), port in found if owner == backend}

    # -- following the Idl, in the connection's thread -------------------------------------------

    def _note(self, event: str, row: Any, updates: Any = None) -> None:
        """Take note of a row that was inserted, changed or deleted (``Idl.notify``)."""
        table = row._table.name
        self._changed[table].add(row.uuid)
        column = _MEMBERS.get(table)
        if column is None:
            return
        # As the Idl keeps them: ``row.ports`` would convert and sort all ports of a bridge for the one that
        # came, and sets of these keys are compared without their Python code.
        now: Mapping[Any, Any] = {} if event == ROW_DELETE else row._data[column].values
        before: Mapping[Any, Any] = {}
        if event == ROW_DELETE:
            before = row._data[column].values
        elif event != ROW_CREATE:
            before = updates._data[column].values if column in updates._data else now
        holder, moved = self._holder[table], self._moved[table]
        for atom in set(before).difference(now):
            moved.add(atom.value)
            if holder.get(atom.value) == row.uuid:
                del holder[atom.value]
        for atom in set(now).difference(before):
            moved.add(atom.value)
            holder[atom.value] = row.uuid

    def settle(self) -> tuple[Collection[Drift], Collection[VmConnection]]:
        """Make the values of the rows that changed since the last call, in whatever order they were noted.

        Returns the drift: marked ports, bridges and uplinks that have changed after their creation. And the
        VMs that have connected to marked vhost-user ports, or disconnected.
        """
        changed, self._changed = self._changed, defaultdict(set)
        moved, self._moved = self._moved, defaultdict(set)
        for uuid in changed["Open_vSwitch"]:
            if (row := self._tables["Open_vSwitch"].rows.get(uuid)) is not None:
                self.root = OvsRoot.read(values(row), self._found)
        drifts = [self._put_bridge(uuid) for uuid in changed["Bridge"]]
        drifts += [self._put_qos(uuid) for uuid in changed["QoS"]]
        come, faulty = self._put_interfaces(changed["Interface"])
        members = changed["Interface"] | moved["Port"]
        touched = changed["Port"] | moved["Bridge"]
        touched |= {self._holder["Port"][uuid] for uuid in members if uuid in self._holder["Port"]}
        users = self._ports.kind("qos")
        touched |= {port for uuid in changed["QoS"] for port in users.get(str(uuid), ())}
        for uuid in touched:
            old, new = self._ports.values.get(uuid), self._port(uuid)
            if old is not None and uuid in changed["Port"]:
                drifts.append(_drift(*(port for port in (old, new) if port)))
            if old == new:
                continue
            self._ports.put(uuid, new)
            self._owners |= {port.owner for port in (old, new) if port and port.owner}
            if any(port and any(_given_by(port)) for port in (old, new)):
                self._given = None
        for uuid in faulty | come:
            port = self._ports.values.get(self._holder["Port"].get(uuid, uuid))
            if port is not None:
                drifts.append(_drift(port) if uuid in faulty else None)
                drifts.append(Drift() if uuid in come and self._is_stray(port) else None)
        return dict.fromkeys(filter(None, drifts)), self._compare_vms()

    def _put_bridge(self, uuid: UUID) -> Drift | None:
        old, row = self._bridges.values.get(uuid), self._tables["Bridge"].rows.get(uuid)
        new = OvsBridge(**values(row)) if row is not None else None
        self._bridges.put(uuid, new)
        ours = old is not None and BRIDGE_MARK in old.external_ids
        return Drift() if old and new and ours and old.fail_mode != new.fail_mode else None

    def _put_qos(self, uuid: UUID) -> Drift | None:
        old, row = self._qos.values.get(uuid), self._tables["QoS"].rows.get(uuid)
        self._qos.put(uuid, OvsQos(str(uuid), **values(row)) if row is not None else None)
        return Drift(*old.owner) if old and old.owner else None

    def _put_interfaces(self, changed: Collection[UUID]) -> tuple[set[UUID], set[UUID]]:
        """Returns those whose device has come, and those with a fault or a change that is somebody's."""
        come: set[UUID] = set()
        faulty: set[UUID] = set()
        for uuid in changed:
            old, row = self._interfaces.values.get(uuid), self._tables["Interface"].rows.get(uuid)
            new = OvsInterface.read(values(row)) if row is not None else None
            if new == old:  # what is not read of a map has changed
                continue
            self._interfaces.put(uuid, new)
            if new and new.works_at and not (old and old.works_at):
                come.add(uuid)
            if old and new and (old.watched != new.watched or (old.works_at and not new.works_at)):
                faulty.add(uuid)
        return come, faulty

    def _port(self, uuid: UUID) -> OvsPort | None:
        """A port as its rows are now."""
        row = self._tables["Port"].rows.get(uuid)
        if row is None:
            return None
        bridge = self._bridges.values.get(self._holder["Bridge"].get(uuid, uuid))
        interfaces, qos = self._interfaces.values, row._data["qos"].as_scalar()
        members = (atom.value for atom in row._data["interfaces"].values)
        found = sorted((interfaces[i] for i in members if i in interfaces), key=lambda each: each.name)
        name = bridge.name if bridge else None
        return OvsPort(bridge=name, interfaces=tuple(found), qos=self._qos.values.get(qos), **values(row))

    def _is_stray(self, port: OvsPort) -> bool:
        """Whether others have added the port to a bridge of ours, which then must forward nothing to it."""
        bridge = self._bridges.one("name", port.bridge)
        ours = bridge is not None and BRIDGE_MARK in bridge.external_ids
        marked = {UPLINK_MARK, TUNNEL_MARK} & port.external_ids.keys()
        return ours and not port.serves and not marked and port.name != port.bridge

    def _compare_vms(self) -> list[VmConnection]:
        """The connections of changed ports that have changed.

        vswitchd writes ``status``, which ovsdb-server does not keep across a restart: a port without
        it has the VM that it had.
        """
        owners, self._owners = self._owners, set()
        changed: list[VmConnection] = []
        for owner in owners:
            port, before = self._ports.one("owner", owner), self._vms.get(owner)
            now: bool | None = False
            if port is None:
                self._vms.pop(owner, None)
            else:
                now = next((row.connection for row in port.interfaces if row.connection is not None), None)
                if now is not None:
                    self._vms[owner] = now
            if now is not None and now != bool(before):
                changed.append(VmConnection(*owner, now))
        return changed


def _port_keys(port: OvsPort) -> Iterator[tuple[str, Hashable]]:
    yield "name", port.name
    if port.name.startswith(DERIVED):
        yield "prefix", port.name[:_PREFIX]
    if port.serves:
        yield ("owner" if port.owner else "vf port"), port.serves
    if port.bridge is not None:
        yield ("owned on" if port.owner else "unmanaged on"), port.bridge
        if port.owner and port.network:
            yield "network", (port.bridge, port.owner[0], port.network)
    if port.qos:
        yield "qos", port.qos.uuid
    for name in _given_by(port):
        yield "given", name


def _interface_keys(interface: OvsInterface) -> Iterator[tuple[str, Hashable]]:
    yield "type", interface.type
    for option in interface.options:
        yield "option", option


def _given_by(port: OvsPort) -> list[str]:
    """The names of the port and its interfaces that we did not derive."""
    names = dict.fromkeys((port.name, *(interface.name for interface in port.interfaces)))
    return [name for name in names if not name.startswith(DERIVED)]


def _drift(*ports: OvsPort) -> Drift | None:
    """The drift that a changed port causes: of one port, or of many if it is an uplink or tunnel."""
    for port in ports:
        if port.serves:
            return Drift(*port.serves)
    shared = any({UPLINK_MARK, TUNNEL_MARK} & port.external_ids.keys() for port in ports)
    return Drift() if shared else None

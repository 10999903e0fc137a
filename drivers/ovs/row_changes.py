"""The changes of the OVS database that its backends make: each describes itself and writes itself.

Several backends share bridges, uplinks and tunnels, and each plans on what it observed before. Transactions
are composed one at a time, so a change looks at the rows that there are then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from uuid import UUID

from drivers.ovs.overlays import HOMES, OVERLAY, PATCHES, TunnelPort, vxlan_name
from drivers.ovs.ports import RelayVfPort, VhostPort, is_marked
from drivers.ovs.service_ports import index_of
from drivers.ovs.uplinks import OvsUplink
from netplugin.api.errors import TryAgain
from netplugin.backend import Change
from netplugin.host.ovs_rows import BACKEND_MARK, BRIDGE_MARK, PORT_MARK, network_of
from netplugin.host.ovsdb_replica import (
    Api,
    Row,
    Transaction,
    find,
    get,
    insert,
    root,
    set_column,
    set_key,
)

AnyPort: TypeAlias = VhostPort | RelayVfPort | OvsUplink | TunnelPort


@dataclass(frozen=True)
class RowChange(Change, ABC):
    """A change of the database."""

    @abstractmethod
    def write(self, api: Api, txn: Transaction) -> None:
        """Make the change as part of a transaction. Raises: HostError, RowNotFound, TryAgain."""


# -- bridges -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CreateBridge(RowChange):
    """Create a bridge with its internal port, unless it is there with this mark."""

    described_as = "create bridge {self.name} for {self.mark}"

    name: str
    mark: str

    def write(self, api: Api, txn: Transaction) -> None:
        if (found := find(api, "Bridge", self.name)) is not None:
            # The uplink that follows in this transaction would join their bridge to our network.
            if found.external_ids.get(BRIDGE_MARK) != self.mark:
                raise TryAgain(f"bridge {self.name} has been created by others meanwhile", step="plan")
            return
        interface = insert(api, txn, "Interface", name=self.name, type="internal")
        bridge = insert(
            api,
            txn,
            "Bridge",
            name=self.name,
            datapath_type="netdev",
            fail_mode="secure",
            external_ids={BRIDGE_MARK: self.mark},
            ports=[insert(api, txn, "Port", name=self.name, interfaces=[interface])],
        )
        root(api).addvalue("bridges", bridge)


@dataclass(frozen=True)
class SecureBridge(RowChange):
    """Restore ``fail_mode``: in standalone mode, filters would be open after a restart of vswitchd."""

    described_as = "set fail_mode of bridge {self.name} to secure"

    name: str

    def write(self, api: Api, txn: Transaction) -> None:
        api.set_fail_mode(self.name, "secure").run_idl(txn)


@dataclass(frozen=True)
class RemoveBridge(RowChange):
    """Remove a bridge of ours without ports of VMs, or one that serves a bridge without (``HOMES``).

    No error if it is gone, or of others by now.
    """

    described_as = "remove bridge {self.name}, which nothing needs any more"

    name: str

    def write(self, api: Api, txn: Transaction) -> None:
        home = HOMES.get(self.name, self.name)
        if _owned_ports(api, home):
            raise TryAgain(f"bridge {home} has got a port meanwhile", step="plan")
        bridge = find(api, "Bridge", self.name)
        if bridge is not None and BRIDGE_MARK in bridge.external_ids:
            api.del_br(self.name).run_idl(txn)


# -- ports, of VMs and others ------------------------------------------------------------------------


@dataclass(frozen=True)
class PortChange(RowChange):
    """A port of any kind gets its rows."""

    port: AnyPort

    def _set(self, api: Api, txn: Transaction) -> None:
        """Set a port and its interfaces to their rows; remove other interfaces. Raises: RowNotFound."""
        row, desired = get(api, "Port", self.port.name), self.port.interfaces()
        there = {interface.name: interface for interface in row.interfaces}
        _set_row(row, self.port.port_columns(), self.port.merged)
        for name, columns in desired.items():
            if name in there:
                _set_row(there[name], columns, self.port.merged)
        for made in _insert_interfaces(api, txn, self.port, desired.keys() - there.keys()):
            row.addvalue("interfaces", made)
        for name in there.keys() - desired.keys():
            row.delvalue("interfaces", there[name])
            there[name].delete()


@dataclass(frozen=True)
class AddPort(PortChange):
    """Create a port with its interfaces and QoS row. One that backends share may be there already."""

    def write(self, api: Api, txn: Transaction) -> None:
        port, found = self.port, find(api, "Port", self.port.name)
        bridge = find(api, "Bridge", port.bridge)
        if bridge is None:  # another backend has removed its own last port from it
            raise TryAgain(f"bridge {port.bridge} is not there any more", step="plan")
        is_shared = bool(port.shared_mark) and found is not None and port.shared_mark in found.external_ids
        if is_shared and found in bridge.ports:
            self._set(api, txn)
            return
        if isinstance(port, VhostPort) and port.opened:
            port = replace(port, ifindex=index_of(port.opened))
        columns, qos = port.port_columns(), port.qos_columns()
        columns["interfaces"] = _insert_interfaces(api, txn, port)
        columns["qos"] = [] if qos is None else [insert(api, txn, "QoS", **qos)]
        bridge.addvalue("ports", insert(api, txn, "Port", name=port.name, **columns))

    def describe(self) -> str:
        port = self.port
        return f"add {port.kind} {port.name} to {port.bridge}: {port.summary(is_new=True)}"


@dataclass(frozen=True)
class SetPort(PortChange):
    """Set what can be changed live."""

    def write(self, api: Api, txn: Transaction) -> None:
        self._set(api, txn)

    def describe(self) -> str:
        return f"set {self.port.kind} {self.port.name}: {self.port.summary(is_new=False)}"


@dataclass(frozen=True)
class RemovePort(RowChange):
    """Remove a port with its rows from its bridge. No error if it does not exist.

    ``backend``: whose port of a VM it is; empty: it is none. ``device``: the VF that OVS closes with it.
    ``unless_needed``: not if a VXLAN network needs it by now.
    """

    bridge: str
    name: str
    backend: str = ""
    device: str = ""
    unless_needed: bool = False

    def write(self, api: Api, txn: Transaction) -> None:
        if self.unless_needed and self._is_needed(api):
            raise TryAgain(f"a port on a VXLAN network needs {self.name} by now", step="plan")
        port, bridge = find(api, "Port", self.name), find(api, "Bridge", self.bridge)
        if port is None or bridge is None:
            return
        bridge.delvalue("ports", port)
        for row in port.qos:  # a root table in the schema: its rows are not deleted with the port
            if self.backend and is_marked(row.external_ids, self.backend):
                row.delete()
                # The server deletes the port only after it has checked references to the QoS row, and
                # the Idl leaves that to the server.
                where = [["_uuid", "==", ["uuid", str(port.uuid)]]]
                txn.add_op({"op": "delete", "table": "Port", "where": where})
        for interface in port.interfaces:
            interface.delete()
        port.delete()

    def _is_needed(self, api: Api) -> bool:
        networks = [found for port in _owned_ports(api, OVERLAY) if (found := network_of(port.external_ids))]
        return bool(networks) and self.name in {*PATCHES, *(vxlan_name(udp_port) for _, udp_port in networks)}

    def describe(self) -> str:
        device = f" ({self.device})" if self.device else ""
        return f"remove port {self.name}{device} from {self.bridge}"


# -- rate limits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetQos(RowChange):
    """Set the rate limit on what the VM receives; the port's other columns do not change.

    A QoS row that is not ours is detached and kept.
    """

    port: VhostPort

    def write(self, api: Api, txn: Transaction) -> None:
        port, columns = get(api, "Port", self.port.name), self.port.qos_columns()
        ours = [row for row in port.qos if is_marked(row.external_ids, self.port.backend)]
        if columns is None:
            set_column(port, "qos", [])
            for row in ours:
                row.delete()
        elif ours:
            _set_row(ours[0], columns, ())
        else:
            set_column(port, "qos", [insert(api, txn, "QoS", **columns)])

    def describe(self) -> str:
        rate = f"{self.port.receives.kbps} kbit/s" if self.port.receives else "any rate"
        return f"let port {self.port.name} receive {rate}"


@dataclass(frozen=True)
class DropQos(RowChange):
    """Remove one of our QoS rows that no port uses."""

    described_as = "remove QoS {self.row}, which no port uses"

    row: str

    def write(self, api: Api, txn: Transaction) -> None:
        if UUID(self.row) in api.tables["QoS"].rows:
            api.db_destroy("QoS", self.row).run_idl(txn)


# -- rows --------------------------------------------------------------------------------------------


def _insert_interfaces(
    api: Api, txn: Transaction, port: AnyPort, names: Collection[str] | None = None
) -> list[Row]:
    """Insert those interfaces of a port, or all."""
    return [
        insert(api, txn, "Interface", name=name, **columns)
        for name, columns in port.interfaces(is_new=True).items()
        if names is None or name in names
    ]


def _set_row(row: Row, columns: Mapping[str, Any], merged: Collection[str]) -> None:
    """Set columns of a row; of those that are ``merged`` the other keys stay."""
    for column, value in columns.items():
        if column in merged:
            for key, text in value.items():
                set_key(row, column, key, text)
        else:
            set_column(row, column, value)


def _owned_ports(api: Api, bridge_name: str) -> list[Row]:
    """The ports of VMs that a bridge has, of all backends, without those that the transaction removes."""
    bridge = find(api, "Bridge", bridge_name)
    ports = bridge.ports if bridge is not None else []
    return [port for port in ports if {PORT_MARK, BACKEND_MARK} <= port.external_ids.keys()]

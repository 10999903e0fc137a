"""The commands by which ports come, change and go in the database, with the rows that they need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ovsdbapp.backend.ovs_idl.command import BaseCommand

from drivers.ovs.ports import Rows, is_marked
from netplugin.api.errors import TryAgain
from netplugin.host.ovs_rows import BACKEND_MARK, BRIDGE_MARK, PORT_MARK
from netplugin.host.ovsdb_commands import (
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

_Columns = Mapping[str, Mapping[str, Any]]


class AddBridge(BaseCommand):  # type: ignore[misc]
    """Create a bridge with its internal port, unless it is there with this mark."""

    def __init__(self, api: Api, name: str, mark: str) -> None:
        super().__init__(api)
        self.name, self.mark = name, mark

    def run_idl(self, txn: Transaction) -> None:
        """Raises: TryAgain if others have created it meanwhile."""
        if (found := find(self.api, "Bridge", self.name)) is not None:
            # The uplink that follows in this transaction would join their bridge to our network.
            if found.external_ids.get(BRIDGE_MARK) != self.mark:
                raise TryAgain(f"bridge {self.name} has been created by others meanwhile", step="plan")
            return
        interface = insert(self.api, txn, "Interface", name=self.name, type="internal")
        bridge = insert(
            self.api,
            txn,
            "Bridge",
            name=self.name,
            datapath_type="netdev",
            fail_mode="secure",
            external_ids={BRIDGE_MARK: self.mark},
            ports=[insert(self.api, txn, "Port", name=self.name, interfaces=[interface])],
        )
        root(self.api).addvalue("bridges", bridge)


class DeleteBridge(BaseCommand):  # type: ignore[misc]
    """Remove a bridge of ours. No error if it is gone, or of others by now."""

    def __init__(self, api: Api, name: str, home: str) -> None:
        """``home``: the bridge whose ports keep it in existence."""
        super().__init__(api)
        self.name, self.home = name, home

    def run_idl(self, txn: Transaction) -> None:
        """Raises: TryAgain if another backend has added a port meanwhile."""
        if owned_ports(self.api, self.home):
            raise TryAgain(f"bridge {self.home} has got a port meanwhile", step="plan")
        bridge = find(self.api, "Bridge", self.name)
        if bridge is not None and BRIDGE_MARK in bridge.external_ids:
            self.api.del_br(self.name).run_idl(txn)


class AddPort(BaseCommand):  # type: ignore[misc]
    """Create a port with its interfaces (several for a bond), their ``new`` columns, and its QoS row."""

    def __init__(
        self, api: Api, rows: Rows, qos: Mapping[str, Any] | None = None, new: _Columns | None = None
    ) -> None:
        super().__init__(api)
        self.rows, self.qos, self.new = rows, qos, new or {}

    def run_idl(self, txn: Transaction) -> None:
        """Raises: TryAgain if its bridge is gone: another backend has removed its own last port from it."""
        bridge = find(self.api, "Bridge", self.rows.bridge)
        if bridge is None:
            raise TryAgain(f"bridge {self.rows.bridge} is not there any more", step="plan")
        interfaces = [
            insert(self.api, txn, "Interface", name=name, **columns, **self.new.get(name, {}))
            for name, columns in self.rows.interfaces().items()
        ]
        qos = [] if self.qos is None else [insert(self.api, txn, "QoS", **self.qos)]
        columns = {**self.rows.port_columns(), "interfaces": interfaces, "qos": qos}
        bridge.addvalue("ports", insert(self.api, txn, "Port", name=self.rows.name, **columns))


class SetPort(BaseCommand):  # type: ignore[misc]
    """Set a port and its interfaces to their rows; keep other keys of the maps in ``merged``.

    Other interfaces are removed from the port. One that it did not have also gets its columns of
    ``new``.
    """

    def __init__(
        self,
        api: Api,
        rows: Rows,
        merged: Collection[str] = ("external_ids",),
        new: _Columns | None = None,
    ) -> None:
        super().__init__(api)
        self.rows, self.merged, self.new = rows, merged, new or {}

    def run_idl(self, txn: Transaction) -> None:
        port = get(self.api, "Port", self.rows.name)
        there = {interface.name: interface for interface in port.interfaces}
        interfaces = self.rows.interfaces()
        set_row(port, self.rows.port_columns(), self.merged)
        for name, columns in interfaces.items():
            if name in there:
                set_row(there[name], columns, self.merged)
            else:
                made = insert(self.api, txn, "Interface", name=name, **columns, **self.new.get(name, {}))
                port.addvalue("interfaces", made)
        for name in there.keys() - interfaces.keys():
            port.delvalue("interfaces", there[name])
            there[name].delete()


class AddOrSetPort(SetPort):
    """As ``AddPort``, for a port that several backends share: another may have added it, with this mark."""

    def __init__(
        self,
        api: Api,
        rows: Rows,
        mark: str,
        merged: Collection[str] = ("external_ids",),
        new: _Columns | None = None,
    ) -> None:
        super().__init__(api, rows, merged, new)
        self.mark = mark

    def run_idl(self, txn: Transaction) -> None:
        found, bridge = find(self.api, "Port", self.rows.name), find(self.api, "Bridge", self.rows.bridge)
        is_ours = found is not None and self.mark in found.external_ids
        if is_ours and bridge is not None and found in bridge.ports:
            super().run_idl(txn)
        else:
            AddPort(self.api, self.rows, new=self.new).run_idl(txn)


class DeletePort(BaseCommand):  # type: ignore[misc]
    """Remove a port with its rows from its bridge. No error if it does not exist.

    QoS is a root table in the schema, so the port's QoS row is deleted explicitly if it is marked as
    one of ``backend``.
    """

    def __init__(self, api: Api, bridge: str, name: str, backend: str | None = None) -> None:
        super().__init__(api)
        self.bridge, self.name, self.backend = bridge, name, backend

    def run_idl(self, txn: Transaction) -> None:
        port, bridge = find(self.api, "Port", self.name), find(self.api, "Bridge", self.bridge)
        if port is None or bridge is None:
            return
        bridge.delvalue("ports", port)
        for row in port.qos:
            if self.backend and is_marked(row.external_ids, self.backend):
                row.delete()
                # The server deletes the port only after it has checked references to the QoS row, and
                # the Idl leaves that to the server.
                where = [["_uuid", "==", ["uuid", str(port.uuid)]]]
                txn.add_op({"op": "delete", "table": "Port", "where": where})
        for interface in port.interfaces:
            interface.delete()
        port.delete()


class SetQos(BaseCommand):  # type: ignore[misc]
    """Set the QoS row of a port in place; None: remove it. A row that is not ours is detached and kept."""

    def __init__(self, api: Api, name: str, backend: str, columns: Mapping[str, Any] | None) -> None:
        super().__init__(api)
        self.name, self.backend, self.columns = name, backend, columns

    def run_idl(self, txn: Transaction) -> None:
        port = get(self.api, "Port", self.name)
        ours = [row for row in port.qos if is_marked(row.external_ids, self.backend)]
        if self.columns is None:
            set_column(port, "qos", [])
            for row in ours:
                row.delete()
        elif ours:
            set_row(ours[0], self.columns, ())
        else:
            set_column(port, "qos", [insert(self.api, txn, "QoS", **self.columns)])


def set_row(row: Row, columns: Mapping[str, Any], merged: Collection[str]) -> None:
    """Set columns of a row; of those that are ``merged`` the other keys stay."""
    for column, value in columns.items():
        if column in merged:
            for key, text in value.items():
                set_key(row, column, key, text)
        else:
            set_column(row, column, value)


def owned_ports(api: Api, bridge_name: str) -> list[Row]:
    """The ports of VMs that a bridge has, of all backends, without those that the transaction removes."""
    bridge = find(api, "Bridge", bridge_name)
    ports = bridge.ports if bridge is not None else []
    return [port for port in ports if {PORT_MARK, BACKEND_MARK} <= port.external_ids.keys()]

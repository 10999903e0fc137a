"""OVSDB write commands of netplugin, batched into one transaction.

Unlike ovsdbapp's own commands, they set every attribute in the transaction that creates the row,
and they change sets by mutation, so the cost per port does not depend on the number of ports.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ovsdbapp.backend.ovs_idl.command import BaseCommand


class AddBridge(BaseCommand):  # type: ignore[misc]
    """Create a bridge with its internal port. An existing bridge is not changed."""

    def __init__(
        self,
        api: Any,
        name: str,
        datapath_type: str,
        fail_mode: str,
        external_ids: Mapping[str, str],
    ) -> None:
        super().__init__(api)
        self.name, self.datapath_type, self.fail_mode = name, datapath_type, fail_mode
        self.external_ids = dict(external_ids)

    def run_idl(self, txn: Any) -> None:
        if self.api.lookup("Bridge", self.name, None) is not None:
            return
        tables = self.api._tables
        interface = txn.insert(tables["Interface"])
        interface.name, interface.type = self.name, "internal"
        port = txn.insert(tables["Port"])
        port.name, port.interfaces = self.name, [interface]
        bridge = txn.insert(tables["Bridge"])
        bridge.name, bridge.datapath_type = self.name, self.datapath_type
        bridge.fail_mode, bridge.external_ids = [self.fail_mode], self.external_ids
        bridge.ports = [port]
        self.api._ovs.addvalue("bridges", bridge)


class SetBridge(BaseCommand):  # type: ignore[misc]
    """Set columns of a bridge."""

    def __init__(self, api: Any, name: str, **columns: Any) -> None:
        super().__init__(api)
        self.name, self.columns = name, columns

    def run_idl(self, txn: Any) -> None:
        bridge = self.api.lookup("Bridge", self.name)
        for column, value in self.columns.items():
            setattr(bridge, column, value)


class DeleteBridge(BaseCommand):  # type: ignore[misc]
    """Delete a bridge and its ports (its children in the schema). No error if it does not exist."""

    def __init__(self, api: Any, name: str) -> None:
        super().__init__(api)
        self.name = name

    def run_idl(self, txn: Any) -> None:
        bridge = self.api.lookup("Bridge", self.name, None)
        if bridge is not None:
            self.api._ovs.delvalue("bridges", bridge)
            bridge.delete()


class AddPortCommand(BaseCommand):  # type: ignore[misc]
    """Create a port on a bridge, with its interfaces (several for a bond) and all attributes.

    ``interfaces`` maps the name of each interface to its columns. ``qos`` has the columns of a QoS
    row for the port.
    """

    def __init__(
        self,
        api: Any,
        bridge: str,
        name: str,
        port: Mapping[str, Any],
        interfaces: Mapping[str, Mapping[str, Any]],
        qos: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(api)
        self.bridge, self.name, self.port = bridge, name, port
        self.interfaces, self.qos = interfaces, qos

    def run_idl(self, txn: Any) -> None:
        tables = self.api._tables
        port = txn.insert(tables["Port"])
        port.name = self.name
        port.interfaces = [_interface(txn, tables, *one) for one in self.interfaces.items()]
        for column, value in self.port.items():
            setattr(port, column, value)
        if self.qos is not None:
            port.qos = [_qos(txn, tables, self.qos)]
        self.api.lookup("Bridge", self.bridge).addvalue("ports", port)


class SetPortCommand(BaseCommand):  # type: ignore[misc]
    """Set columns of a port and its interfaces; keep other keys of the maps in ``merged``.

    Interfaces that are not named are removed from the port. An interface that the port did not have
    also gets its columns of ``new``.
    """

    def __init__(
        self,
        api: Any,
        name: str,
        port: Mapping[str, Any],
        interfaces: Mapping[str, Mapping[str, Any]],
        merged: Collection[str] = ("external_ids",),
        new: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(api)
        self.name, self.port, self.interfaces, self.merged = name, port, interfaces, merged
        self.new = new or {}

    def run_idl(self, txn: Any) -> None:
        port = self.api.lookup("Port", self.name)
        there = {interface.name: interface for interface in port.interfaces}
        _set(port, self.port, self.merged)
        for name, columns in self.interfaces.items():
            if name in there:
                _set(there[name], columns, self.merged)
            else:
                whole = {**columns, **self.new.get(name, {})}
                port.addvalue("interfaces", _interface(txn, self.api._tables, name, whole))
        for name in there.keys() - self.interfaces.keys():
            port.delvalue("interfaces", there[name])
            there[name].delete()


class SetQosCommand(BaseCommand):  # type: ignore[misc]
    """Set the port's QoS row to these columns (our row in place), or (None) remove it.

    A row that ``ours`` does not accept is detached from the port and kept.
    """

    def __init__(
        self,
        api: Any,
        name: str,
        qos: Mapping[str, Any] | None,
        ours: Callable[[Mapping[str, str]], bool],
    ) -> None:
        super().__init__(api)
        self.name, self.qos, self.ours = name, qos, ours

    def run_idl(self, txn: Any) -> None:
        port = self.api.lookup("Port", self.name)
        found = [row for row in port.qos if self.ours(row.external_ids)]
        if self.qos is None:
            port.qos = []
            for row in found:
                row.delete()
        elif found:
            for column, value in self.qos.items():
                setattr(found[0], column, value)
        else:
            port.qos = [_qos(txn, self.api._tables, self.qos)]


class DeleteQos(BaseCommand):  # type: ignore[misc]
    """Delete an unused QoS row. No error if it does not exist."""

    def __init__(self, api: Any, row: uuid.UUID) -> None:
        super().__init__(api)
        self.row = row

    def run_idl(self, txn: Any) -> None:
        row = self.api._tables["QoS"].rows.get(self.row)
        if row is not None:
            row.delete()


class DeletePort(BaseCommand):  # type: ignore[misc]
    """Remove a port with its rows from its bridge. No error if it does not exist.

    QoS is a root table in the schema, so the port's QoS row is deleted explicitly if ``ours``
    accepts it.
    """

    def __init__(
        self,
        api: Any,
        bridge: str,
        name: str,
        ours: Callable[[Mapping[str, str]], bool] = lambda ids: False,
    ) -> None:
        super().__init__(api)
        self.bridge, self.name, self.ours = bridge, name, ours

    def run_idl(self, txn: Any) -> None:
        port = self.api.lookup("Port", self.name, None)
        bridge = self.api.lookup("Bridge", self.bridge, None)
        if port is not None and bridge is not None:
            bridge.delvalue("ports", port)
            own = [row for row in port.qos if self.ours(row.external_ids)]
            for row in own:
                row.delete()
            if own:
                # The server garbage-collects the port only after it has checked references to the
                # QoS row.
                port.qos = []
                return
            for interface in port.interfaces:
                interface.delete()
            port.delete()


def _interface(txn: Any, tables: Any, name: str, columns: Mapping[str, Any]) -> Any:
    row = txn.insert(tables["Interface"])
    row.name = name
    for column, value in columns.items():
        setattr(row, column, value)
    return row


def _qos(txn: Any, tables: Any, columns: Mapping[str, Any]) -> Any:
    row = txn.insert(tables["QoS"])
    for column, value in columns.items():
        setattr(row, column, value)
    return row


def _set(row: Any, columns: Mapping[str, Any], merged: Collection[str]) -> None:
    for column, value in columns.items():
        if column in merged:
            for key, text in value.items():
                row.setkey(column, key, text)
        else:
            setattr(row, column, value)


class SetOtherConfig(BaseCommand):  # type: ignore[misc]
    """Set one key of Open_vSwitch's ``other_config``, or (None) remove it."""

    def __init__(self, api: Any, key: str, value: str | None) -> None:
        super().__init__(api)
        self.key, self.value = key, value

    def run_idl(self, txn: Any) -> None:
        if self.value is None:
            self.api._ovs.delkey("other_config", self.key)
        else:
            self.api._ovs.setkey("other_config", self.key, self.value)


class SetInterfaceConfig(BaseCommand):  # type: ignore[misc]
    """Set one key of an interface's ``other_config``, or (None) remove it."""

    def __init__(self, api: Any, name: str, key: str, value: str | None) -> None:
        super().__init__(api)
        self.name, self.key, self.value = name, key, value

    def run_idl(self, txn: Any) -> None:
        interface = self.api.lookup("Interface", self.name)
        if self.value is None:
            interface.delkey("other_config", self.key)
        else:
            interface.setkey("other_config", self.key, self.value)


class Touch(BaseCommand):  # type: ignore[misc]
    """Change a key of ours to increment ``next_cfg``, which vswitchd then confirms in ``cur_cfg``.

    The Python IDL drops a transaction that only increments ``next_cfg``.
    """

    def run_idl(self, txn: Any) -> None:
        self.api._ovs.setkey("external_ids", "netplugin-settled", str(uuid.uuid4()))

"""The writes netplugin makes to an OVS database, each a command that a transaction batches.

They do what ovsdbapp's own commands do not: every attribute in the transaction that makes the row,
and sets changed by mutation, so that the cost of a port does not grow with the ports there are.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ovsdbapp.backend.ovs_idl.command import BaseCommand


class AddBridge(BaseCommand):  # type: ignore[misc]
    """Make a bridge with its internal port; one that is there stays as it is."""

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
    """Delete a bridge and its ports (they are its children in the schema). Absent is no error."""

    def __init__(self, api: Any, name: str) -> None:
        super().__init__(api)
        self.name = name

    def run_idl(self, txn: Any) -> None:
        bridge = self.api.lookup("Bridge", self.name, None)
        if bridge is not None:
            self.api._ovs.delvalue("bridges", bridge)
            bridge.delete()


class AddPort(BaseCommand):  # type: ignore[misc]
    """Make a port and its interfaces (of a bond several), with every attribute, on a bridge.

    ``interfaces`` has the columns of each by its name; ``qos`` those of a row of QoS for the port.
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


class SetPort(BaseCommand):  # type: ignore[misc]
    """Set columns of a port and of its interfaces; of maps in ``merged`` keys of others are kept.

    The port then has the interfaces that are named here, and no others. Those that it did not have
    get the columns of ``new`` too.
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


class SetQos(BaseCommand):  # type: ignore[misc]
    """Give a port a row of QoS with these columns, or (None) none. A row of ours is re-used.

    What ``ours`` does not say yes to stays as it is, without the port.
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
    """Delete a row of QoS that no port needs. Absent is no error."""

    def __init__(self, api: Any, row: uuid.UUID) -> None:
        super().__init__(api)
        self.row = row

    def run_idl(self, txn: Any) -> None:
        row = self.api._tables["QoS"].rows.get(self.row)
        if row is not None:
            row.delete()


class DeletePort(BaseCommand):  # type: ignore[misc]
    """Take a port off its bridge; its rows go with it. Absent is no error.

    A row of QoS is nobody's child in the schema: the port's goes too, if ``ours`` says so of it.
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
                # The server takes the port away only after it has looked for references to the row.
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
    """Set one key of Open_vSwitch's ``other_config``, or (None) take it away."""

    def __init__(self, api: Any, key: str, value: str | None) -> None:
        super().__init__(api)
        self.key, self.value = key, value

    def run_idl(self, txn: Any) -> None:
        if self.value is None:
            self.api._ovs.delkey("other_config", self.key)
        else:
            self.api._ovs.setkey("other_config", self.key, self.value)


class SetInterfaceConfig(BaseCommand):  # type: ignore[misc]
    """Set one key of an interface's ``other_config``, or (None) take it away."""

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
    """Change a key of ours, so that ``next_cfg`` moves: vswitchd answers when it is configured.

    (The Python IDL drops a transaction that would do nothing but bump ``next_cfg``.)
    """

    def run_idl(self, txn: Any) -> None:
        self.api._ovs.setkey("external_ids", "netplugin-settled", str(uuid.uuid4()))

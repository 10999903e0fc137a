"""The writes netplugin makes to an OVS database, each a command that a transaction batches.

They do what ovsdbapp's own commands do not: every attribute in the transaction that makes the row,
and sets changed by mutation, so that the cost of a port does not grow with the ports there are.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
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
    """Make a port and its interface, with every attribute, on a bridge."""

    def __init__(
        self,
        api: Any,
        bridge: str,
        name: str,
        port: Mapping[str, Any],
        interface: Mapping[str, Any],
    ) -> None:
        super().__init__(api)
        self.bridge, self.name, self.port, self.interface = bridge, name, port, interface

    def run_idl(self, txn: Any) -> None:
        tables = self.api._tables
        interface = txn.insert(tables["Interface"])
        interface.name = self.name
        for column, value in self.interface.items():
            setattr(interface, column, value)
        port = txn.insert(tables["Port"])
        port.name, port.interfaces = self.name, [interface]
        for column, value in self.port.items():
            setattr(port, column, value)
        self.api.lookup("Bridge", self.bridge).addvalue("ports", port)


class SetPort(BaseCommand):  # type: ignore[misc]
    """Set columns of a port and of its interface; ``external_ids`` keys of others are kept."""

    def __init__(
        self, api: Any, name: str, port: Mapping[str, Any], interface: Mapping[str, Any]
    ) -> None:
        super().__init__(api)
        self.name, self.port, self.interface = name, port, interface

    def run_idl(self, txn: Any) -> None:
        port = self.api.lookup("Port", self.name)
        for row, columns in ((port, self.port), (port.interfaces[0], self.interface)):
            for column, value in columns.items():
                if column == "external_ids":
                    for key, text in value.items():
                        row.setkey(column, key, text)
                else:
                    setattr(row, column, value)


class DeletePort(BaseCommand):  # type: ignore[misc]
    """Take a port off its bridge; its rows go with it. Absent is no error."""

    def __init__(self, api: Any, bridge: str, name: str) -> None:
        super().__init__(api)
        self.bridge, self.name = bridge, name

    def run_idl(self, txn: Any) -> None:
        port = self.api.lookup("Port", self.name, None)
        bridge = self.api.lookup("Bridge", self.bridge, None)
        if port is not None and bridge is not None:
            bridge.delvalue("ports", port)
            for interface in port.interfaces:
                interface.delete()
            port.delete()


class SetOtherConfig(BaseCommand):  # type: ignore[misc]
    """Set one key of Open_vSwitch's ``other_config``."""

    def __init__(self, api: Any, key: str, value: str) -> None:
        super().__init__(api)
        self.key, self.value = key, value

    def run_idl(self, txn: Any) -> None:
        self.api._ovs.setkey("other_config", self.key, self.value)


class Touch(BaseCommand):  # type: ignore[misc]
    """Change a key of ours, so that ``next_cfg`` moves: vswitchd answers when it is configured.

    (The Python IDL drops a transaction that would do nothing but bump ``next_cfg``.)
    """

    def run_idl(self, txn: Any) -> None:
        self.api._ovs.setkey("external_ids", "netplugin-settled", str(uuid.uuid4()))

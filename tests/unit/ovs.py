"""The product's connections to an Open vSwitch of dummy devices, and what a test does with them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from drivers.ovs.ports import PortRows
from drivers.ovs.row_changes import AddPort, CreateBridge
from netplugin.host.names import Mark, unmarked
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovsdb_replica import Api, Transaction, Writable
from netplugin.host.supervisor import Supervisor
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

#: For what comes at once, however busy the machine is.
PATIENCE_S = 90.0


def settings_of(switch: PrivateOvs, timeout_s: float = PATIENCE_S, connection: str = "") -> OvsSettings:
    return OvsSettings(
        sockets=OvsSockets(connection or switch.connection, switch.rundir),
        vhost_socket_dir=switch.directory / "vhost",
        vhost_socket_group="root",
        bridge_mappings={"net1": "br-net1"},
        service_ports=frozenset({"service"}),
        timeout_s=timeout_s,
    )


def soon() -> float:
    """A deadline that a busy machine meets."""
    return time.monotonic() + PATIENCE_S


@contextmanager
def started(settings: OvsSettings, holder: str | None = None, mark: Mark = unmarked) -> Iterator[OvsHost]:
    """The connections, once they are there; the lock, if ``holder`` is given, may be another's."""
    host = OvsHost(settings, Supervisor(), holder, mark)
    try:
        host.db.require_online(PATIENCE_S)
        yield host
    finally:
        host.close()


def usable(host: OvsHost) -> None:
    """Wait until OVS can be used."""
    wait_for(lambda: host.usable().usable, PATIENCE_S, "OVS can be used")


@dataclass(frozen=True)
class _Bridge:
    name: str
    external_ids: Mapping[str, str]

    def write(self, api: Api, txn: Transaction) -> None:
        CreateBridge((), self.name, "").write(api, txn)
        api.db_clear("Bridge", self.name, "external_ids").run_idl(txn)
        api.db_set("Bridge", self.name, ("external_ids", dict(self.external_ids))).run_idl(txn)


def bridge(name: str, **external_ids: str) -> Writable:
    """Make a bridge, as the backends do."""
    return _Bridge(name, {key.replace("_", "-"): value for key, value in external_ids.items()})


@dataclass(frozen=True)
class _Port(PortRows):
    bridge: str
    name: str
    type: str
    columns: Mapping[str, Any]

    def port_columns(self) -> dict[str, Any]:
        return dict(self.columns)

    def interfaces(self, *, is_new: bool = False) -> dict[str, dict[str, Any]]:
        return {self.name: {"type": self.type}}

    def summary(self, *, is_new: bool) -> str:
        return self.type


def port(on: str, name: str, kind: str = "dummy", **columns: Any) -> Writable:
    """Make a port with a device that works without root."""
    return AddPort((), _Port(on, name, kind, columns))

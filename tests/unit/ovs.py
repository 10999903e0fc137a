"""The product's connections to an Open vSwitch of dummy devices, and what a test does with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from netplugin.host import ovs_commands as write
from netplugin.host.names import Mark, unmarked
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.ovsdb import CommandFactory
from netplugin.host.supervisor import Supervisor
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

#: For what comes at once, however busy the machine is.
PATIENCE_S = 30.0


def settings_of(switch: PrivateOvs, timeout_s: float = PATIENCE_S) -> OvsSettings:
    return OvsSettings(
        connection=switch.connection,
        rundir=switch.rundir,
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


def bridge(name: str, **external_ids: str) -> CommandFactory:
    """Make a bridge, as the backends do."""
    ids = {key.replace("_", "-"): value for key, value in external_ids.items()}
    return partial(write.AddBridge, name=name, datapath_type="netdev", fail_mode="secure", external_ids=ids)


def port(on: str, name: str, **columns: object) -> CommandFactory:
    """Make a port with a dummy device."""
    interfaces = {name: {"type": "dummy"}}
    return partial(write.AddPortCommand, bridge=on, name=name, port=columns, interfaces=interfaces)

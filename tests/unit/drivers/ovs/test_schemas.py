"""An Open vSwitch whose schema is older, or lacks columns: what it lacks fails by name, nothing else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drivers.ovs.row_changes import AddPort, CreateBridge, RemovePort, SetPort
from drivers.ovs.usability import dpdk_usable
from netplugin.api.errors import BackendUnavailable, HostError
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import COLUMNS, MAY_LACK
from netplugin.host.supervisor import Supervisor
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.unit.drivers.ovs.conftest import BRIDGE, vhost
from tests.unit.ovs import PATIENCE_S, settings_of, soon, started

#: The tables and columns that are read, of vswitchd/vswitch.ovsschema in Open vSwitch 2.17.0.
SCHEMA = Path(__file__).parents[3] / "data/ovs-2.17/vswitch.ovsschema"
IDS = ("p1",)
VM = vhost("p1")
PLUG = [CreateBridge(IDS, BRIDGE, "net1"), AddPort(IDS, VM)]


@contextmanager
def _server(lacks: Collection[str] = ()) -> Iterator[PrivateOvs]:
    """A database without these columns (``table.column``) or tables. It has no vswitchd."""
    schema: dict[str, Any] = json.loads(SCHEMA.read_text())
    for name in lacks:
        table, _, column = name.partition(".")
        del (schema["tables"][table]["columns"] if column else schema["tables"])[column or table]
    with tempfile.TemporaryDirectory() as name:
        switch = PrivateOvs(Path(name), dummy=True)
        own = switch.directory / "own.ovsschema"
        own.write_text(json.dumps(schema))
        run(["ovsdb-tool", "create", switch.database, own])
        root = {"op": "insert", "table": "Open_vSwitch", "row": {}}
        run(["ovsdb-tool", "transact", switch.database, json.dumps(["Open_vSwitch", root])])
        switch.start_ovsdb()
        try:
            yield switch
        finally:
            switch.stop_ovsdb()


def test_2_17_has_every_column() -> None:
    tables = json.loads(SCHEMA.read_text())["tables"]
    assert {name: {*table["columns"]} for name, table in tables.items()} == {
        name: {*columns} for name, columns in COLUMNS.items()
    }


@pytest.mark.parametrize("lacks", ["", *sorted(MAY_LACK - {"Interface.mtu_request"})])
def test_a_port_is_plugged_and_read_without_what_is_not_needed(lacks: str) -> None:
    with _server([lacks] if lacks else []) as switch, started(settings_of(switch), holder="agent") as host:
        host.db.require_lock(PATIENCE_S)
        assert not dpdk_usable(host, VM.type).usable
        host.db.commit(PLUG, soon())
        row = host.view.owned(VM.backend, "p1")
        assert row and row.interface and row.bridge == BRIDGE and not VM.differs(row)
        assert (row.interface.error, row.interface.mtu_request) == (None, VM.mtu)
        host.db.commit([RemovePort(IDS, BRIDGE, VM.name, VM.backend)], soon())
        assert host.view.owned(VM.backend, "p1") is None


def test_a_column_that_a_port_needs_is_named_in_its_error() -> None:
    """What is written in the same transaction is not there either, and the next one is not hindered."""
    with _server(["Interface.mtu_request"]) as switch, started(settings_of(switch)) as host:
        with pytest.raises(HostError, match="has no column mtu_request in table Interface") as refused:
            host.db.commit(PLUG, soon())
        assert refused.value.step == "ovsdb-commit" and refused.value.fix
        assert host.view.bridge(BRIDGE) is None
        host.db.commit([CreateBridge(IDS, BRIDGE, "net1")], soon())
        assert host.view.bridge(BRIDGE)
        with pytest.raises(HostError, match="mtu_request"):
            host.db.commit([AddPort(IDS, VM), SetPort(IDS, VM)], soon())
        assert host.view.port(VM.name) is None


@pytest.mark.parametrize("lacks", ["Port.tag", "Open_vSwitch.cur_cfg", "QoS"])
def test_an_unusable_database_is_reported_with_what_it_lacks(lacks: str) -> None:
    needs = {"QoS": ["QoS", "Port.qos"]}.get(lacks, [lacks])
    with _server(needs) as switch:
        host = OvsHost(settings_of(switch), Supervisor())
        try:
            reason = f"its schema 8.3.0 has no .*{lacks}"
            wait_for(lambda: lacks in str(host.usable().reason), PATIENCE_S, "the reason")
            with pytest.raises(BackendUnavailable, match=reason) as unusable:
                host.db.commit(PLUG, soon())
            assert unusable.value.step == "ovsdb-connect"
        finally:
            host.close()

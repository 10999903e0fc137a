"""What is kept by the notices of a real ovsdb-server is what others read: a new connection, and ovsdbapp."""

from __future__ import annotations

import itertools
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ovsdbapp.backend.ovs_idl.connection import Connection, OvsdbIdl
from ovsdbapp.schema.open_vswitch.impl_idl import OvsdbIdl as Api

from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovs_rows import COLUMNS, KEYS
from netplugin.host.ovsdb import Ovsdb
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import CommandError, run, wait_for
from tests.unit.ovs import PATIENCE_S

BRIDGES, PORTS = ("br-a", "br-b"), ("npv1", "npx4789", "tap1", "npu1")
_TYPES = ("dummy", "dpdk", "dpdkvhostuserclient")
_CONFIGURATIONS = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateOvs]:
    """A database that no vswitchd applies."""
    with tempfile.TemporaryDirectory() as name:
        switch = PrivateOvs(Path(name) / "ovs", dummy=True)
        switch.directory.mkdir()
        run(["ovsdb-tool", "create", switch.database, switch.programs.schema])
        switch.start_ovsdb()
        try:
            switch.vsctl("--no-wait", "init")
            yield switch
        finally:
            switch.stop_ovsdb()


@contextmanager
def connected(server: PrivateOvs) -> Iterator[Mirror]:
    database = Ovsdb(server.connection).start()
    try:
        database.require_online(PATIENCE_S)
        yield database.mirror
    finally:
        database.close()


def _marks(port: str, kind: str) -> list[str]:
    beside = "netplugin-beside" if kind == "beside" else "netplugin-port"
    marks = [f"external_ids:{beside}={port}-id", "external_ids:netplugin-backend=b"]
    network = ["external_ids:netplugin-network=n1", "external_ids:netplugin-udp-port=4789"]
    return ["set", "Port", port, *marks, *(network if kind == "network" else ())]


bridges, ports = st.sampled_from(BRIDGES), st.sampled_from(PORTS)
commands = st.one_of(
    st.builds(lambda b: ["--may-exist", "add-br", b], bridges),
    st.builds(lambda b: ["--if-exists", "del-br", b], bridges),
    st.builds(
        lambda b, p, t: ["add-port", b, p, "--", "set", "Interface", p, f"type={t}"],
        bridges,
        ports,
        st.sampled_from(_TYPES),
    ),
    st.builds(lambda b, p: ["add-bond", b, p, f"{p}-m1", f"{p}-m2"], bridges, ports),
    st.builds(lambda p: ["--if-exists", "del-port", p], ports),
    st.builds(_marks, ports, st.sampled_from(["port", "beside", "network"])),
    st.builds(lambda p: ["clear", "Port", p, "external_ids"], ports),
    st.builds(lambda p, n: ["set", "Port", p, f"tag={n}"], ports, st.integers(1, 9)),
    st.builds(lambda p: ["clear", "Port", p, "tag"], ports),
    st.builds(
        lambda p, s, n: ["set", "Interface", p, f"status:status={s}", f"status:n_rxq={n}", f"ofport={n}"],
        ports,
        st.sampled_from(["connected", "disconnected"]),
        st.integers(1, 3),
    ),
    st.builds(lambda p, k: ["remove", "Interface", p, "status", k], ports, st.sampled_from(["status", "x"])),
    st.builds(
        lambda p, b: [
            *("--", "--id=@q", "create", "QoS", "type=t", f"external_ids:netplugin-port={p}-id"),
            *(f"external_ids:netplugin-backend={b}", "--", "set", "Port", p, "qos=@q"),
        ],
        ports,
        st.sampled_from(["b", "c"]),
    ),
    st.builds(lambda p: ["clear", "Port", p, "qos"], ports),
    st.builds(
        lambda p, o: ["set", "Interface", p, f"options:{o}={p}"],
        ports,
        st.sampled_from(["dpdk-devargs", "x"]),
    ),
    st.builds(lambda p: ["remove", "Interface", p, "options", "x"], ports),
    st.builds(
        lambda p, b: [
            *("--", "--id=@p", "get", "Port", p),
            *(word for a in BRIDGES for word in ("--", "--if-exists", "remove", "Bridge", a, "ports", "@p")),
            *("--", "add", "Bridge", b, "ports", "@p"),
        ],
        ports,
        bridges,
    ),
    st.builds(
        lambda k, v: ["set", "Open_vSwitch", ".", f"other_config:{k}={v}"],
        st.sampled_from("ab"),
        st.sampled_from("12"),
    ),
)
transactions = st.lists(commands, min_size=1, max_size=2)
#: What each example begins with.
_FIRST = [
    *([*("--if-exists", "del-br", bridge), "--", *("add-br", bridge)] for bridge in BRIDGES),
    *(["add-port", "br-a", "npv1"], ["add-port", "br-a", "tap1"], ["add-port", "br-b", "npx4789"]),
    ["add-bond", "br-b", "npu1", "npu1-m1", "npu1-m2"],
    *(_marks("npv1", "port"), _marks("tap1", "beside"), _marks("npx4789", "network")),
]


def everything(mirror: Mirror) -> dict[str, Any]:
    """The answers of a mirror, without the order of what has none."""
    owners = [("b", f"{port}-id") for port in PORTS]
    found: dict[str, Any] = {
        "root": mirror.root,
        "bridges": {b.name: b for b in mirror.bridges()},
        "ports": {p.name: p for p in mirror.ports()},
        "named": {p: mirror.port(p) for p in PORTS},
        "owned": (mirror.all_owned("b"), [mirror.owned(*owner) for owner in owners]),
        "beside": (mirror.all_beside("b"), [mirror.beside(*owner) for owner in owners]),
        "qos": {q.uuid: q for q in mirror.all_qos("b")},
        "qos of": [sorted(q.uuid for q in mirror.qos_of(*owner)) for owner in owners],
        "names": mirror.names(),
        "given": mirror.given_names(),
        "prefixed": {p.name for p in mirror.ports_named(("npx", "npu"))},
        "interfaces": mirror.interfaces(),
        "types": [mirror.count_interfaces(kind) for kind in _TYPES],
        "devices": mirror.devices("dpdk-devargs", "x"),
        "networks": mirror.networks(),
    }
    for bridge in mirror.bridges():
        found[bridge.name] = (
            {p.name for p in mirror.owned_on(bridge)},
            {p.name for p in mirror.unmanaged_on(bridge)},
            mirror.count_owned_on(bridge),
            [mirror.networks_on(bridge, backend) for backend in (None, "b", "other")],
        )
    return found


@contextmanager
def ovsdbapp(server: PrivateOvs) -> Iterator[Api]:
    """OpenStack's client of the same database, which reads it by the IDL of Open vSwitch."""
    connection = Connection(OvsdbIdl.from_server(server.connection, "Open_vSwitch"), timeout=PATIENCE_S)
    try:
        yield Api(connection)
    finally:
        connection.stop(timeout=PATIENCE_S)


def of_ovsdbapp(api: Api) -> dict[str, dict[str, Any]]:
    """All rows by table and id, in the form of ours."""
    found: dict[str, dict[str, Any]] = {}
    for table, columns in COLUMNS.items():
        rows = api.db_list(table, columns=["_uuid", *columns]).execute(check_error=True)
        found[table] = {
            str(row.pop("_uuid")): {column: _plain(table, column, value) for column, value in row.items()}
            for row in rows
        }
    return found


def _plain(table: str, column: str, value: Any) -> Any:
    """A value of ovsdbapp: ids as text, of a map what we keep; of no elements all are alike."""
    if isinstance(value, dict):
        keys = KEYS.get((table, column), value)
        return {key: text for key, text in value.items() if key in keys}
    if isinstance(value, list):
        return {_plain(table, column, each) for each in value}
    return str(value) if isinstance(value, uuid.UUID) else value


def of_ours(mirror: Mirror) -> dict[str, dict[str, Any]]:
    """All rows that a mirror keeps; ovsdbapp has an empty list for an optional value that is not there."""
    return {
        table: {
            uuid: {column: set() if value is None else value for column, value in row.items()}
            for uuid, row in rows.items()
        }
        for table, rows in mirror._rows.tables.items()
    }


def commit(server: PrivateOvs, transaction: list[list[str]]) -> int | None:
    """Returns the number of the configuration; None if it does not fit what is there."""
    number = next(_CONFIGURATIONS)
    words = [word for command in transaction for word in ("--", *command)]
    try:
        server.vsctl("--no-wait", *words, "--", "set", "Open_vSwitch", ".", f"next_cfg={number}")
    except CommandError:
        return None
    return number


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(transactions, min_size=3, max_size=10))
def test_a_mirror_is_kept_as_it_would_be_read(server: PrivateOvs, wanted: list[list[list[str]]]) -> None:
    assert commit(server, _FIRST)
    with connected(server) as kept:
        for transaction in wanted:
            number = commit(server, transaction)
            if number is not None:
                wait_for(lambda n=number: kept.root.next_cfg == n, PATIENCE_S, "the notice")  # type: ignore[misc]
        with ovsdbapp(server) as peer:
            # It is ready with the first that it is sent, which may be an older state and its changes later.
            last = peer.db_get("Open_vSwitch", ".", "next_cfg")
            wait_for(lambda: last.execute(check_error=True) == kept.root.next_cfg, PATIENCE_S, "all is read")
            assert of_ours(kept) == of_ovsdbapp(peer)
        with connected(server) as read:
            assert everything(kept) == everything(read)
            # A port without a status has the VM that it had.
            assert {vm: kept.connections()[vm] for vm in read.connections()} == read.connections()

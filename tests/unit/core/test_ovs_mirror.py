"""The mirror of the OVS database, whatever the order in which the rows of a transaction come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovs_rows import BACKEND_MARK, PORT_MARK

MARK = {BACKEND_MARK: "b", PORT_MARK: "p1"}


def _row(table: str, name: str, **columns: Any) -> Any:
    kind = SimpleNamespace(name=table)
    return SimpleNamespace(_table=kind, uuid=uuid4(), name=name, external_ids={}, **columns)


def _port(name: str) -> Any:
    columns = ("interfaces", "tag", "vlan_mode", "bond_mode", "lacp", "qos")
    return _row("Port", name, **{column: [] for column in columns})


def _bridge(name: str, *ports: Any) -> Any:
    return _row("Bridge", name, ports=list(ports), datapath_type="netdev", fail_mode=[])


def _mirror(*rows: Any) -> Mirror:
    mirror = Mirror(lambda _: None)
    for row in rows:
        mirror.update(row, deleted=False)
    return mirror


def _bridge_of(mirror: Mirror, name: str) -> str | None:
    port = mirror.port(name)
    assert port
    return port.bridge


@pytest.mark.parametrize("new_first", [False, True])
def test_a_port_that_moves_is_on_its_new_bridge(new_first: bool) -> None:
    port = _port("p")
    old, new = _bridge("br-old", port), _bridge("br-new")
    mirror = _mirror(port, old, new)
    assert _bridge_of(mirror, "p") == "br-old"
    old.ports, new.ports = [], [port]
    for row in (new, old) if new_first else (old, new):
        mirror.update(row, deleted=False)
    assert _bridge_of(mirror, "p") == "br-new"
    new.ports = []
    mirror.update(new, deleted=False)
    assert _bridge_of(mirror, "p") is None


@pytest.mark.parametrize("name", ["br-old", "br-new"])
@pytest.mark.parametrize("new_first", [False, True])
def test_a_port_whose_bridge_is_replaced_is_on_the_new_one(new_first: bool, name: str) -> None:
    port = _port("p")
    old, new = _bridge("br-old", port), _bridge(name, port)
    mirror = _mirror(port, old)
    for row in (new, old) if new_first else (old, new):
        mirror.update(row, deleted=row is old)
    assert _bridge_of(mirror, "p") == name
    mirror.update(new, deleted=True)
    assert _bridge_of(mirror, "p") is None


@pytest.mark.parametrize("new_first", [False, True])
def test_a_mark_that_moves_is_that_of_its_new_port(new_first: bool) -> None:
    old, new = _port("old"), _port("new")
    old.external_ids = MARK
    mirror = _mirror(old, new)
    old.external_ids, new.external_ids = {}, MARK
    for row in (new, old) if new_first else (old, new):
        mirror.update(row, deleted=False)
    owned = mirror.owned("b", "p1")
    assert owned and owned.name == "new"


@pytest.mark.parametrize("text", ["", "x", "-1", "\N{SUPERSCRIPT TWO}"])
def test_a_status_that_is_no_number_is_unknown(text: str) -> None:
    columns = ("mtu_request", "mtu", "ofport", "error", "link_state", "ifindex")
    status = {"n_rxq": text, "num_of_vrings": text, "numa_id": text}
    row = _row(
        "Interface",
        "p",
        type="dpdk",
        options={},
        status=status,
        other_config={},
        ingress_policing_rate=0,
        ingress_policing_burst=0,
        **{column: [] for column in columns},
    )
    [seen] = _mirror(row).interfaces().values()
    assert (seen.queues, seen.numa_node) == (None, None)

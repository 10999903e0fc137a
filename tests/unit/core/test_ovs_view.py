"""The values of the OVS database, whatever the order in which the rows of a notice come."""

from __future__ import annotations

from typing import Any

import pytest

from netplugin.host.ovs_rows import IFINDEX_MARK
from netplugin.host.ovs_view import Drift, OvsView, VmConnection
from tests.unit.ovs_rows import (
    Replica,
    bridge_row,
    identity,
    inserted,
    marks,
    references,
    replica_of,
    text_map,
    vhost_rows,
)


def _notice(table: str, rows: dict[str, Any], turned: bool) -> dict[str, dict[str, Any]]:
    return {table: dict(reversed(rows.items()) if turned else rows.items())}


def _bridge_of(view: OvsView, name: str) -> str | None:
    port = view.port(name)
    assert port
    return port.bridge


@pytest.mark.parametrize("turned", [False, True])
def test_a_port_that_moves_is_on_its_new_bridge(turned: bool) -> None:
    bridges = {"old": bridge_row("br-old", "p-1"), "new": bridge_row("br-new")}
    replica = replica_of({"Bridge": bridges, **vhost_rows("1", 1)})
    assert _bridge_of(replica.view, "npv1") == "br-old"
    change = {"modify": {"ports": references("p-1")}}
    replica.update(_notice("Bridge", {"old": change, "new": change}, turned))
    assert _bridge_of(replica.view, "npv1") == "br-new"
    old, new = replica.view.bridge("br-old"), replica.view.bridge("br-new")
    assert old and new
    assert (replica.view.owned_on(old), replica.view.count_owned_on(new)) == ([], 1)
    replica.update({"Bridge": {"new": change}})
    assert _bridge_of(replica.view, "npv1") is None and replica.view.owned_on(new) == []


@pytest.mark.parametrize("name", ["br-old", "br-new"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_port_whose_bridge_is_replaced_is_on_the_new_one(turned: bool, name: str) -> None:
    replica = replica_of({"Bridge": {"old": bridge_row("br-old", "p-1")}, **vhost_rows("1", 1)})
    rows = {"old": {"delete": None}, "new": {"insert": bridge_row(name, "p-1")}}
    replica.update(_notice("Bridge", rows, turned))
    assert _bridge_of(replica.view, "npv1") == name and [b.name for b in replica.view.bridges()] == [name]
    replica.update({"Bridge": {"new": {"delete": None}}})
    assert _bridge_of(replica.view, "npv1") is None and replica.view.bridge(name) is None


@pytest.mark.parametrize("turned", [False, True])
def test_a_mark_that_moves_is_that_of_its_new_port(turned: bool) -> None:
    rows = vhost_rows("1", 1)["Port"] | vhost_rows("2", 2)["Port"]
    rows["p-2"]["external_ids"] = text_map({})
    replica = replica_of({"Port": rows})
    change = {"modify": {"external_ids": text_map(marks("dpdkvhostuser", "1"))}}
    replica.update(_notice("Port", {"p-1": change, "p-2": change}, turned))
    owned = replica.view.owned("dpdkvhostuser", "1")
    assert owned and owned.name == "npv2"
    without = replica.view.port("npv1")
    assert without and without.external_ids == {}


@pytest.mark.parametrize("turned", [False, True])
def test_a_port_that_is_made_again_keeps_its_name_and_mark(turned: bool) -> None:
    replica = replica_of({"Bridge": {"b": bridge_row("br", "p-1")}, **vhost_rows("1", 1)})
    again = vhost_rows("1", 2)
    again["Port"]["p-1"]["interfaces"] = ["uuid", "i-new"]
    ports = {"p-1": {"delete": None}, "p-new": {"insert": again["Port"]["p-1"]}}
    interfaces = {"i-1": {"delete": None}, "i-new": {"insert": again["Interface"]["i-1"]}}
    bridges = {"b": {"modify": {"ports": references("p-1", "p-new")}}}
    tables = {"Bridge": bridges, **_notice("Port", ports, turned), **_notice("Interface", interfaces, turned)}
    replica.update(dict(reversed(tables.items())) if turned else tables)
    owned = replica.view.owned("dpdkvhostuser", "1")
    assert owned and owned.interface and owned == replica.view.port("npv1")
    assert (owned.bridge, owned.interface.ofport) == ("br", 2)
    assert replica.view.count_interfaces("dpdkvhostuserclient") == 1


def test_a_notice_is_reported_once_however_many_rows_it_has() -> None:
    """Of each port that changed."""
    found = replica_of({"Bridge": {"b": bridge_row("br", "p-0", "p-1", "p-2")}})
    for rows in [vhost_rows(str(n), n) for n in range(3)]:
        assert found.update(inserted(rows)) == ({}, [])
    drifts, connections = found.update(
        {
            "Port": {f"p-{n}": {"modify": {"tag": 7}} for n in range(3)},
            "Interface": {
                "i-0": {
                    "modify": {"mtu_request": 9000, "status": text_map({"status": "connected", "mode": "x"})}
                }
            },
            "Open_vSwitch": {"r": {"insert": {"next_cfg": 1}}},
        }
    )
    assert set(drifts) == {Drift("dpdkvhostuser", str(n)) for n in range(3)} and len(drifts) == 3
    assert connections == [VmConnection("dpdkvhostuser", "0", True)]


def test_what_is_not_read_of_a_map_is_no_change() -> None:
    replica = replica_of({"Bridge": {"b": bridge_row("br", "p-1")}, **vhost_rows("1", 1)})
    before = replica.view.port("npv1")
    replica.update({"Interface": {"i-1": {"modify": {"status": text_map({"features": "0x1"})}}}})
    assert replica.view.port("npv1") is before


@pytest.mark.parametrize("text", ["", "x", "-1", "\N{SUPERSCRIPT TWO}"])
def test_a_status_that_is_no_number_is_unknown(text: str) -> None:
    rows = vhost_rows("1", 1)
    rows["Interface"]["i-1"]["status"] = text_map(dict.fromkeys(("n_rxq", "num_of_vrings", "numa_id"), text))
    [seen] = replica_of(rows).view.interfaces().values()
    assert (seen.queues, seen.numa_node) == (None, None)


def test_a_mark_that_others_have_spoiled_is_that_of_another_device() -> None:
    rows = vhost_rows("1", 1)
    rows["Interface"]["i-1"] |= {"ifindex": 7, "external_ids": text_map({IFINDEX_MARK: "x"})}
    replica = replica_of(rows)
    replica.update({"Interface": {"i-1": {"modify": {"ifindex": 8}}}})
    [seen] = replica.view.interfaces().values()
    assert seen.other_ifindex == 8


def test_nothing_is_kept_of_what_has_gone() -> None:
    """A host's agent runs for months: an index would have each port, QoS row and network that ever was."""
    replica = replica_of({})
    empty = _sizes(replica)
    tables = vhost_rows("1", 1)
    network = {"netplugin-network": "n1", "netplugin-udp-port": "4789"}
    tables["Port"]["p-1"]["external_ids"] = text_map(marks("dpdkvhostuser", "1") | network)
    tables["Port"]["p-1"]["qos"] = ["uuid", "q-1"]
    qos = {"type": "egress-policer", "external_ids": text_map(marks("dpdkvhostuser", "1"))}
    others = {"name": "eth7", "interfaces": ["uuid", "i-7"], "external_ids": text_map({})}
    tables["Port"]["p-7"] = others
    tables["Interface"]["i-7"] = {"name": "eth7", "type": "dpdk", "options": text_map({"dpdk-devargs": "7"})}
    tables |= {"QoS": {"q-1": qos}, "Bridge": {"b": bridge_row("br-a", "p-1", "p-7", network="physnet1")}}
    replica.update(inserted(tables))
    bridge = replica.view.bridge("br-a")
    assert bridge and replica.view.networks_on(bridge) == {("n1", 4789): 1}
    assert replica.view.networks() == {100: "n1"}
    assert [q.uuid for q in replica.view.qos_of("dpdkvhostuser", "1")] == [str(identity("q-1"))]
    assert replica.view.devices("dpdk-devargs") == {"7": "eth7"}
    replica.update({table: {uuid: {"delete": None} for uuid in rows} for table, rows in tables.items()})
    assert replica.view.networks_on(bridge) == {} and replica.view.networks() == {}
    assert _sizes(replica) == empty


def _sizes(replica: Replica) -> dict[str, int]:
    """How much is in each collection of the view."""
    view = replica.view
    own = {n: len(v) for n, v in vars(view).items() if isinstance(v, dict | set)}
    holders = {f"holders of {table}": len(rows) for table, rows in view._holder.items()}
    indices = {n: (len(index.values), sum(map(len, index._kinds.values()))) for n, index in _indices(view)}
    return (
        own
        | holders
        | {f"{n} {part}": size for n, sizes in indices.items() for part, size in enumerate(sizes)}
    )


def _indices(view: OvsView) -> list[tuple[str, Any]]:
    return [(name, index) for name, index in vars(view).items() if hasattr(index, "_kinds")]


def test_a_schema_that_lacks_a_column_is_read_without_it() -> None:
    """As that of an older OVS: what is written of it fails, and nothing else."""
    rows = vhost_rows("1", 1)
    del rows["Interface"]["i-1"]["mtu_request"]
    replica = replica_of(rows, {"Interface": ["mtu_request"], "Open_vSwitch": ["dpdk_version"]})
    port = replica.view.port("npv1")
    assert port and port.interface and port.interface.mtu_request is None and port.interface.mtu == 1500

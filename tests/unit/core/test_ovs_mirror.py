"""The mirror of the OVS database, whatever the order in which the rows of a notice come."""

from __future__ import annotations

from typing import Any

import pytest

from netplugin.host.ovs_mirror import Connection, Mirror, MirrorDrift
from tests.unit.ovs_rows import bridge_row, inserted, marks, mirror_of, references, text_map, vhost_rows


def _notice(table: str, rows: dict[str, Any], turned: bool) -> dict[str, dict[str, Any]]:
    return {table: dict(reversed(rows.items()) if turned else rows.items())}


def _bridge_of(mirror: Mirror, name: str) -> str | None:
    port = mirror.port(name)
    assert port
    return port.bridge


@pytest.mark.parametrize("turned", [False, True])
def test_a_port_that_moves_is_on_its_new_bridge(turned: bool) -> None:
    bridges = {"old": bridge_row("br-old", "p-1"), "new": bridge_row("br-new")}
    mirror = mirror_of({"Bridge": bridges, **vhost_rows("1", 1)})
    assert _bridge_of(mirror, "npv1") == "br-old"
    change = {"modify": {"ports": references("p-1")}}
    mirror.update(_notice("Bridge", {"old": change, "new": change}, turned))
    assert _bridge_of(mirror, "npv1") == "br-new"
    old, new = mirror.bridge("br-old"), mirror.bridge("br-new")
    assert old and new
    assert (mirror.owned_on(old), mirror.count_owned_on(new)) == ([], 1)
    mirror.update({"Bridge": {"new": change}})
    assert _bridge_of(mirror, "npv1") is None and mirror.owned_on(new) == []


@pytest.mark.parametrize("name", ["br-old", "br-new"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_port_whose_bridge_is_replaced_is_on_the_new_one(turned: bool, name: str) -> None:
    mirror = mirror_of({"Bridge": {"old": bridge_row("br-old", "p-1")}, **vhost_rows("1", 1)})
    rows = {"old": {"delete": None}, "new": {"insert": bridge_row(name, "p-1")}}
    mirror.update(_notice("Bridge", rows, turned))
    assert _bridge_of(mirror, "npv1") == name and [b.name for b in mirror.bridges()] == [name]
    mirror.update({"Bridge": {"new": {"delete": None}}})
    assert _bridge_of(mirror, "npv1") is None and mirror.bridge(name) is None


@pytest.mark.parametrize("turned", [False, True])
def test_a_mark_that_moves_is_that_of_its_new_port(turned: bool) -> None:
    rows = vhost_rows("1", 1)["Port"] | vhost_rows("2", 2)["Port"]
    rows["p-2"]["external_ids"] = text_map({})
    mirror = mirror_of({"Port": rows})
    change = {"modify": {"external_ids": text_map(marks("dpdkvhostuser", "1"))}}
    mirror.update(_notice("Port", {"p-1": change, "p-2": change}, turned))
    owned = mirror.owned("dpdkvhostuser", "1")
    assert owned and owned.name == "npv2"
    without = mirror.port("npv1")
    assert without and without.external_ids == {}


@pytest.mark.parametrize("turned", [False, True])
def test_a_port_that_is_made_again_keeps_its_name_and_mark(turned: bool) -> None:
    mirror = mirror_of({"Bridge": {"b": bridge_row("br", "p-1")}, **vhost_rows("1", 1)})
    again = vhost_rows("1", 2)
    again["Port"]["p-1"]["interfaces"] = ["uuid", "i-new"]
    ports = {"p-1": {"delete": None}, "p-new": {"insert": again["Port"]["p-1"]}}
    interfaces = {"i-1": {"delete": None}, "i-new": {"insert": again["Interface"]["i-1"]}}
    bridges = {"b": {"modify": {"ports": references("p-1", "p-new")}}}
    tables = {"Bridge": bridges, **_notice("Port", ports, turned), **_notice("Interface", interfaces, turned)}
    mirror.update(dict(reversed(tables.items())) if turned else tables)
    owned = mirror.owned("dpdkvhostuser", "1")
    assert owned and owned.interface and owned == mirror.port("npv1")
    assert (owned.bridge, owned.interface.ofport) == ("br", 2)
    assert mirror.count_interfaces("dpdkvhostuserclient") == 1


def test_a_notice_is_told_once_however_many_rows_it_has() -> None:
    """Of each port that changed, and to those who wait."""
    told: list[list[MirrorDrift]] = []
    known: list[Connection] = []
    mirror = Mirror(lambda drifts: told.append([*drifts]), connection=known.append)
    rows = [vhost_rows(str(n), n) for n in range(3)]
    mirror.reset(
        mirror_of({})._rows,
        {"Bridge": {"b": {"initial": bridge_row("br", "p-0", "p-1", "p-2")}}},
    )
    for each in rows:
        mirror.update(inserted(each))
    assert told == []
    mirror.update(
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
    assert [set(drifts) for drifts in told] == [{MirrorDrift("dpdkvhostuser", str(n)) for n in range(3)}]
    assert known == [Connection("dpdkvhostuser", "0", True)]


def test_what_is_not_read_of_a_map_is_no_change() -> None:
    mirror = mirror_of({"Bridge": {"b": bridge_row("br", "p-1")}, **vhost_rows("1", 1)})
    before = mirror.port("npv1")
    mirror.update({"Interface": {"i-1": {"modify": {"status": text_map({"features": "0x1"})}}}})
    assert mirror.port("npv1") is before


@pytest.mark.parametrize("text", ["", "x", "-1", "\N{SUPERSCRIPT TWO}"])
def test_a_status_that_is_no_number_is_unknown(text: str) -> None:
    rows = vhost_rows("1", 1)
    rows["Interface"]["i-1"]["status"] = text_map(dict.fromkeys(("n_rxq", "num_of_vrings", "numa_id"), text))
    [seen] = mirror_of(rows).interfaces().values()
    assert (seen.queues, seen.numa_node) == (None, None)


def test_nothing_is_kept_of_what_has_gone() -> None:
    """A host's agent runs for months: an index would have each port, QoS row and network that ever was."""
    mirror = mirror_of({})
    empty = _sizes(mirror)
    tables = vhost_rows("1", 1)
    network = {"netplugin-network": "n1", "netplugin-udp-port": "4789"}
    tables["Port"]["p-1"]["external_ids"] = text_map(marks("dpdkvhostuser", "1") | network)
    tables["Port"]["p-1"]["qos"] = ["uuid", "q-1"]
    qos = {"type": "egress-policer", "external_ids": text_map(marks("dpdkvhostuser", "1"))}
    others = {"name": "eth7", "interfaces": ["uuid", "i-7"], "external_ids": text_map({})}
    tables["Port"]["p-7"] = others
    tables["Interface"]["i-7"] = {"name": "eth7", "type": "dpdk", "options": text_map({"dpdk-devargs": "7"})}
    tables |= {"QoS": {"q-1": qos}, "Bridge": {"b": bridge_row("br-a", "p-1", "p-7", network="physnet1")}}
    mirror.update(inserted(tables))
    bridge = mirror.bridge("br-a")
    assert bridge and mirror.networks_on(bridge) == {("n1", 4789): 1}
    assert mirror.networks() == {100: "n1"}
    assert [q.uuid for q in mirror.qos_of("dpdkvhostuser", "1")] == ["q-1"]
    assert mirror.devices("dpdk-devargs") == {"7": "eth7"}
    mirror.update({table: {uuid: {"delete": None} for uuid in rows} for table, rows in tables.items()})
    assert mirror.networks_on(bridge) == {} and mirror.networks() == {}
    assert _sizes(mirror) == empty


def _sizes(mirror: Mirror) -> dict[str, int]:
    """How much is in each collection of the mirror; counts of types are as many as there are types."""
    tables = {f"rows of {name}": len(rows) for name, rows in mirror._rows.tables.items()}
    own = {n: len(v) for n, v in vars(mirror).items() if isinstance(v, dict) and n != "_types"}
    return tables | own

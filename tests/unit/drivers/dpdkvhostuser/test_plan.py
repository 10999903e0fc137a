"""Planning is pure: properties that hold of any requests on any host."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.dpdkvhostuser.plan import LAYOUT
from drivers.dpdkvhostuser.plan import make_plan as plan
from drivers.ovs.flow_changes import FlowChange
from drivers.ovs.overlays import TUNNELS
from drivers.ovs.placing import MAX_VHOST_SOCKETS
from drivers.ovs.row_changes import SetPort
from drivers.ovs.tunnels import network_cookie
from drivers.ovs.uplinks import OvsUplink
from netplugin.backend import Intent
from netplugin.host.flow import Flow
from netplugin.host.ovs_rows import OvsPort
from tests.unit.drivers.dpdkvhostuser import columns
from tests.unit.drivers.dpdkvhostuser.model import SETTINGS, Bridge, Model
from tests.unit.drivers.dpdkvhostuser.scenes import (
    BREAKS,
    converge,
    kinds,
    on_network,
    overlay,
    plain_spec,
    scenes,
)


@given(scenes())
def test_planning_after_applying_gives_nothing(scene: tuple[Model, list[Intent]]) -> None:
    host, desired = scene
    refused = converge(host, desired)
    seen = host.observe()
    assert plan(SETTINGS, desired, seen).changes == ()
    for intent in desired:
        if intent.port_id not in refused:
            assert (intent.port_id in seen.rows) == (intent.spec is not None)


@pytest.mark.parametrize("what", BREAKS)
def test_a_column_that_others_change_is_what_ovs_needs_again(what: str) -> None:
    """But the MTU of an uplink, which is the operator's once it is there."""
    host, rate = Model(), {"ingress_kbps": 8000, "egress_kbps": 8000}
    desired = [
        Intent("one", plain_spec(qos=rate)),
        Intent("two", plain_spec(type="vlan", physical_network="net3", vlan_id=5)),
        on_network(overlay(1), "three"),
    ]
    converge(host, desired)
    for bridge in host.bridges.values():
        bridge.ports = {name: BREAKS[what](row) for name, row in bridge.ports.items()}
    converge(host, desired)
    rows = {name: row for bridge in host.bridges.values() for name, row in bridge.ports.items()}
    assert len(rows) == 7
    wrong = [found for name, row in rows.items() for found in columns.wrong(row, host.made[name])]
    assert [found for found in wrong if not (found.startswith("npu") and what == "mtu")] == []
    assert [row.qos and row.qos.other_config["cir"] for row in rows.values() if row.qos] == ["1000000"]


@given(scenes(), st.randoms())
def test_the_order_of_intents_does_not_matter(scene: tuple[Model, list[Intent]], dice: Any) -> None:
    host, desired = scene
    shuffled = list(desired)
    dice.shuffle(shuffled)
    seen = host.observe()
    assert plan(SETTINGS, desired, seen).changes == plan(SETTINGS, shuffled, seen).changes


@given(scenes())
def test_what_is_not_ours_is_never_changed(scene: tuple[Model, list[Intent]]) -> None:
    host, desired = scene
    before, qos = copy.deepcopy(host.foreign()), {u: q for u, q in host.qos.items() if not q.owner}
    converge(host, desired)
    after = host.foreign()
    for name, (kind, ports, flows) in before.items():
        assert name in after, f"bridge {name} has gone"
        assert after[name][0] == kind and after[name][1] == ports
        assert flows <= after[name][2]
    assert qos.items() <= host.qos.items()


@given(scenes())
def test_a_bridge_of_ours_takes_nothing_from_a_port_without_a_mark(
    scene: tuple[Model, list[Intent]],
) -> None:
    """But from those that the operator names."""
    host, desired = scene
    converge(host, desired)
    for name, bridge in host.bridges.items():
        if not bridge.ours or name in LAYOUT.base:
            continue
        unmarked = [port for port in bridge.ports.values() if not port.external_ids]
        for port in unmarked:
            (ofport,) = (f"in_port={interface.ofport}" for interface in port.interfaces)
            taken = any(ofport in f.match.split(",") for f in bridge.flows if f.cookie != 0x1234)
            assert taken == (port.name in SETTINGS.service_ports), port.name


@given(scenes())
def test_a_partial_look_does_no_harm(scene: tuple[Model, list[Intent]]) -> None:
    """Converging some ports leaves all others as they are, and the flows of their networks."""
    host, desired = scene
    ids = [intent.port_id for intent in desired]
    others = {i: row for i, row in host.observe().rows.items() if i not in ids}
    theirs = _networks_of(others) - {i.overlay.network_id for i in desired if i.overlay}
    flows = _network_flows(host, theirs)
    for _ in range(3):
        host.apply(plan(SETTINGS, desired, host.observe(ids)).changes)
    after = host.observe().rows
    assert {i: after.get(i) for i in others} == others
    assert _network_flows(host, theirs) == flows
    assert plan(SETTINGS, desired, host.observe(ids)).changes == ()


def _networks_of(rows: dict[str, OvsPort]) -> set[str]:
    marks = (row.external_ids.get("netplugin-network") for row in rows.values())
    return {network for network in marks if network}


def _network_flows(host: Model, networks: set[str]) -> set[Flow]:
    cookies = {network_cookie(network) for network in networks}
    bridge = host.bridges.get(TUNNELS)
    return {flow for flow in bridge.flows if flow.cookie in cookies} if bridge else set()


@given(scenes(), st.data())
def test_a_crash_at_any_boundary_is_healed(scene: tuple[Model, list[Intent]], data: st.DataObject) -> None:
    """The rows are one transaction; what follows it (flows, a bridge at a time) may be cut off."""
    host, desired = scene
    straight = host.copy()
    converge(straight, desired)
    for _ in range(2):
        changes = plan(SETTINGS, desired, host.observe()).changes
        rows = [ch for ch in changes if not _is_of_flows(ch)]
        cut = data.draw(st.integers(0, len(changes) - len(rows)))
        host.apply(rows)
        flows = [ch for ch in changes if _is_of_flows(ch)]
        host.apply([ch for ch in flows[:cut] if getattr(ch, "bridge", "") in host.bridges])
    converge(host, desired)
    assert plan(SETTINGS, desired, host.observe()).changes == ()
    assert _summary(host) == _summary(straight)


def _is_of_flows(change: Any) -> bool:
    return isinstance(change, FlowChange)


def _summary(host: Model) -> Any:
    """What is there, without the numbers that differ by the order of creation."""
    return {
        name: (bridge.fail_mode, sorted(bridge.ports), sorted(f.cookie for f in bridge.flows))
        for name, bridge in host.bridges.items()
    }


@given(scenes())
def test_removing_all_leaves_no_trace(scene: tuple[Model, list[Intent]]) -> None:
    host, _ = scene
    marked = {qos.owner[1] for qos in host.qos.values() if qos.owner}
    everything = [Intent(port_id, None) for port_id in {*host.observe().rows, *marked}]
    converge(host, everything)
    for name, bridge in host.bridges.items():
        if bridge.ours:
            assert any(port.startswith("foreign") for port in bridge.ports), name
        assert not any(p.owner for p in bridge.ports.values()), name
    assert not any(qos.owner for qos in host.qos.values())


# -- single cases ---------------------------------------------------------------------------------


def test_the_last_vhost_sockets_go_to_the_first_ports() -> None:
    model = Model()
    seen = replace(model.observe(), vhost_sockets=MAX_VHOST_SOCKETS - 2)
    desired = [Intent(f"p{n}", plain_spec()) for n in range(4)]
    found = plan(SETTINGS, desired, seen)
    assert {i: e.code for i, e in found.refused.items()} == {
        "p2": "capacity_exhausted",
        "p3": "capacity_exhausted",
    }


def test_a_kernel_bridge_in_the_way_is_a_conflict() -> None:
    model = Model()
    model.bridges["br1"] = Bridge(ours=False, datapath_type="")
    found = plan(SETTINGS, [Intent("p1", plain_spec())], model.observe())
    assert found.changes == () and found.refused["p1"].code == "conflict"


def test_no_port_changes_the_mtu_of_an_uplink() -> None:
    for network in ("net2", "net3"):
        model = Model()
        desired = [
            Intent("p1", plain_spec(physical_network=network, mtu=1500)),
            Intent("p2", plain_spec(physical_network=network, mtu=9000)),
        ]
        converge(model, desired)
        (uplink,) = model.observe().bridges[SETTINGS.bridge_mappings[network]].uplinks.values()
        assert {i.mtu_request for i in uplink.interfaces} == {9000}
        found = plan(SETTINGS, [Intent("p2", None)], model.observe(["p2"]))
        assert not any(isinstance(ch, SetPort) and isinstance(ch.port, OvsUplink) for ch in found.changes)
        refused = plan(
            SETTINGS,
            [Intent("p", plain_spec(physical_network=network, mtu=9001))],
            Model().observe(),
        ).refused["p"]
        assert (refused.code, refused.step) == ("unsupported", "mtu")
        assert f"uplink_mtu = {network}:9001" in str(refused.fix)


def test_a_port_stays_where_it_is_when_its_network_is_not_mapped_any_more() -> None:
    model = Model()
    live = Intent("p1", plain_spec(physical_network="net2"))
    converge(model, [live])
    settings = replace(SETTINGS, bridge_mappings={"net1": "br1"}, uplinks={}, bonds={})
    found = plan(settings, [live], model.observe())
    assert found.changes == () and found.refused == {}
    assert found.kept["p1"].code == "backend_unavailable"
    new = plan(settings, [Intent("p2", plain_spec(physical_network="net2"))], model.observe(["p2"]))
    assert new.changes == () and "bridge_mappings" in new.refused["p2"].detail
    gone = plan(settings, [Intent("p1", None)], model.observe())
    model.apply(gone.changes)
    assert model.bridges == {}


def test_a_port_stays_where_it_is_when_its_network_has_another_bridge() -> None:
    """With its uplink; and the NIC is not taken to the other bridge for a port that comes."""
    model = Model()
    live = [Intent(f"p{n}", plain_spec(physical_network=f"net{n}")) for n in (2, 3)]
    converge(model, live)
    before = model.copy()
    for mappings in ({"net2": "br9", "net3": "br3"}, {"net2": "br3", "net3": "br2"}):
        model.settings = replace(SETTINGS, bridge_mappings=mappings)
        found = plan(model.settings, live, model.observe())
        assert found.changes == () and found.refused == {}
        assert "is on bridge br2" in found.kept["p2"].detail
        assert ("p3" in found.kept) == (mappings["net3"] != "br3")
        new = Intent("p1", plain_spec(physical_network="net2"))
        refused = plan(model.settings, [*live, new], model.observe())
        assert refused.changes == () and refused.refused["p1"].code == "conflict"
    assert model.bridges == before.bridges
    model.settings = replace(SETTINGS, bridge_mappings={"net2": "br9", "net3": "br3"})
    converge(model, [Intent("p2", None), live[1]])
    assert converge(model, live) == set()
    assert model.bridges.keys() == {"br3", "br9"} and len(model.bridges["br9"].ports) == 2


def test_ports_say_that_their_bridge_was_made_for_a_network_of_another_name() -> None:
    """It keeps its uplink, which nothing repairs until the operator says which network it is."""
    model = Model()
    converge(model, [Intent("p", plain_spec(physical_network="net2"))])
    model.settings = replace(SETTINGS, bridge_mappings={"new": "br2"}, uplinks={}, bonds={})
    live = Intent("p", plain_spec(physical_network="new"))
    found = plan(model.settings, [live], model.observe())
    assert found.refused == {} and "was made for net2" in found.kept["p"].detail
    assert "netplugin-bridge=new" in str(found.kept["p"].fix)
    assert not {"RemovePort uplink", "AddPort uplink"} & set(kinds(found.changes))


@pytest.mark.parametrize("devices", [None, ("0000:05:00.0",)])
def test_live_ports_keep_an_uplink_that_the_option_has_lost(
    devices: tuple[str, ...] | None,
) -> None:
    model = Model()
    live = Intent("p", plain_spec(physical_network="net2"))
    converge(model, [live])
    before = model.copy()
    model.settings = replace(SETTINGS, uplinks={"net2": devices} if devices else {}, bonds={})
    found = plan(model.settings, [live], model.observe())
    assert found.changes == () and found.refused == {}
    assert "[ovs] uplinks" in found.kept["p"].detail and "0000:03:00.0" in found.kept["p"].detail
    # Nor does a look that is not at the live port take it, or add one for a port that comes.
    new = Intent("q", plain_spec(physical_network="net2"))
    found = plan(model.settings, [new], model.observe(["q"]))
    assert found.changes == () and found.refused["q"].code == "conflict"
    assert model.bridges == before.bridges
    # Without ports the option rules again.
    converge(model, [Intent("p", None)])
    assert converge(model, [new]) == set()
    uplinks = model.observe().bridges["br2"].uplinks.values()
    found_devices = [i.options["dpdk-devargs"] for uplink in uplinks for i in uplink.interfaces]
    assert found_devices == list(devices or ())


def test_a_port_that_is_requested_on_another_network_moves() -> None:
    """Whatever the option says of the network that it leaves."""
    for mappings in (SETTINGS.bridge_mappings, {"net1": "br1", "net2": "br9", "net3": "br3"}):
        model = Model()
        converge(model, [Intent("p", plain_spec(physical_network="net2"))])
        model.settings = replace(SETTINGS, bridge_mappings=mappings)
        assert converge(model, [Intent("p", plain_spec(physical_network="net1"))]) == set()
        assert model.observe().rows["p"].bridge == "br1"


def test_on_a_bridge_of_the_operators_a_port_stays_as_long_as_no_other_network_has_it() -> None:
    model = Model()
    model.bridges["br2"] = Bridge(ours=False)
    live = Intent("p", plain_spec(physical_network="net2"))
    converge(model, [live])
    model.settings = replace(SETTINGS, bridge_mappings={"net2": "br9"}, uplinks={})
    found = plan(model.settings, [live], model.observe())
    assert found.changes == () and found.kept["p"].code == "conflict"


@pytest.mark.parametrize("older", [False, True])
def test_ports_stay_when_two_bridges_of_the_operators_are_exchanged(older: bool) -> None:
    """Their own marks name their networks. ``older``: they were plugged when there was no such mark."""
    model = Model(replace(SETTINGS, uplinks={}, bonds={}))
    model.bridges |= {name: Bridge(ours=False) for name in ("br1", "br2")}
    live = [Intent(f"p{n}", plain_spec(physical_network=f"net{n}")) for n in (1, 2)]
    if older:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("drivers.ovs.placing.on_bridge", lambda port, bridges: port)
            converge(model, live)
        assert kinds(plan(model.settings, live, model.observe()).changes) == ["SetPort", "SetPort"]
    converge(model, live)
    before = model.copy()
    exchanged = {"net1": "br2", "net2": "br1"}
    model.settings = replace(model.settings, bridge_mappings=exchanged)
    found = plan(model.settings, live, model.observe())
    assert found.changes == () and found.refused == {}
    assert [found.kept[port_id].code for port_id in ("p1", "p2")] == ["conflict", "conflict"]
    assert model.bridges == before.bridges
    model.settings = replace(model.settings, bridge_mappings={"net1": "br1", "net2": "br2"})
    assert converge(model, [Intent("p1", plain_spec(physical_network="net2")), live[1]]) == set()
    assert model.observe().rows["p1"].bridge == "br2", "a port that is asked for on another network moves"


def test_ports_of_networks_stay_when_the_address_of_tunnels_is_not_configured_any_more() -> None:
    model = Model()
    network = overlay(1)
    spec = plain_spec(type="vxlan", network_id="net-1")
    live = Intent("p1", spec, overlay=network)
    converge(model, [live])
    settings = replace(SETTINGS, local_ip=None)
    model.bridges[TUNNELS].flows.clear()
    found = plan(settings, [live], model.observe())
    assert found.kept["p1"].step == "underlay" and found.refused == {}
    model.apply(found.changes)
    assert _network_flows(model, {"net-1"})
    assert plan(settings, [live], model.observe()).changes == ()


def test_a_nic_of_the_operator_with_too_small_an_mtu_is_refused_before() -> None:
    model = Model()
    model.bridges["br1"] = Bridge(ours=False)
    model.nics = (("dpdk0", 1500),)
    found = plan(SETTINGS, [Intent("p1", plain_spec(mtu=9000))], model.observe())
    assert found.changes == () and found.refused["p1"].code == "unsupported"
    assert "dpdk0 has 1500" in found.refused["p1"].detail and found.refused["p1"].step == "mtu"
    assert plan(SETTINGS, [Intent("p1", plain_spec(mtu=1500))], model.observe()).refused == {}


def test_one_device_becomes_a_bond_and_its_mode_changes() -> None:
    desired = [Intent("p1", plain_spec(physical_network="net2"))]
    model = Model()
    converge(model, desired)
    two = ("0000:03:00.0", "0000:03:00.1")
    model.settings = replace(SETTINGS, uplinks={"net2": two})
    changes = plan(model.settings, desired, model.observe()).changes
    assert kinds(changes) == ["RemovePort uplink", "AddPort uplink", "SetBridgeFlows"]
    converge(model, desired)
    (uplink,) = model.observe().bridges["br2"].uplinks.values()
    assert (uplink.bond_mode, uplink.lacp, len(uplink.interfaces)) == ("active-backup", "off", 2)
    base = [f for f in model.bridges["br2"].flows if f.cookie & 0xFFFF_FFFF_FFFF == 0]
    assert len([f for f in base if f.match.startswith("in_port=")]) == 2
    model.settings = replace(model.settings, bonds={"net2": "lacp"})
    assert kinds(plan(model.settings, desired, model.observe()).changes)[0] == "SetPort uplink"
    converge(model, desired)
    (uplink,) = model.observe().bridges["br2"].uplinks.values()
    assert (uplink.bond_mode, uplink.lacp) == ("balance-tcp", "active")
    assert plan(model.settings, desired, model.observe()).changes == ()


def test_changing_one_direction_leaves_the_other() -> None:
    model = Model()
    converge(model, [Intent("p1", plain_spec({"ingress_kbps": 1000, "egress_kbps": 2000}))])
    less = plain_spec({"ingress_kbps": 500, "egress_kbps": 2000})
    assert kinds(plan(SETTINGS, [Intent("p1", less)], model.observe()).changes) == ["SetQos"]
    other = plain_spec({"ingress_kbps": 1000, "egress_kbps": 3000})
    assert kinds(plan(SETTINGS, [Intent("p1", other)], model.observe()).changes) == ["SetPort"]


def test_no_row_of_qos_is_left_behind() -> None:
    """Somebody deletes the port: its row of QoS stays, without a port."""
    model = Model()
    desired = [Intent("p1", plain_spec({"ingress_kbps": 1000}))]
    converge(model, desired)
    model.bridges["br1"].ports.clear()
    converge(model, desired)
    assert len(model.qos) == 1
    converge(model, [Intent("p1", None)])
    assert model.qos == {} and model.bridges == {}

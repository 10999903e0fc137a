"""The driver on a model of the kernel: single cases that say what it does, and with which words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivers.linuxbridge.commands import AddPeer, RemovePeer, SetRate
from drivers.linuxbridge.filter_commands import AllowPeers
from drivers.linuxbridge.findings import flushing_file
from drivers.linuxbridge.segments import Segment
from netplugin.api.models import Finding
from netplugin.backend import Change, Intent
from netplugin.host.link_values import BondMember, Bridge, Link, LinuxBond, Vlan, Vxlan
from netplugin.host.names import BRIDGE, TAP, device_name, provisional_mac
from netplugin.host.vxlan_filter import VxlanKey
from tests.unit.drivers.linuxbridge.model import INTERFACES, LOCAL_IP, UNDERLAY, Model
from tests.unit.drivers.linuxbridge.strategies import (
    converge,
    drift_of_device,
    drift_of_interface,
    make_intent,
    make_overlay,
    make_spec,
    planned,
    take_name,
)

BLUE = {"type": "vxlan", "network_id": "blue"}
VLAN = {"type": "vlan", "physical_network": "net2", "vlan_id": 7}


def overlay_intent(port_id: str, peers: Sequence[str] = (), **fields: Any) -> Intent:
    spec = make_spec(1450, BLUE)
    return Intent(port_id, spec, overlay=make_overlay("blue", peers, **fields))


def names(changes: Sequence[Change]) -> list[str]:
    return [type(change).__name__ for change in changes]


# -- flat ------------------------------------------------------------------------------------------


def test_a_bridge_has_the_largest_mtu_of_its_taps() -> None:
    model = Model()
    bridge = device_name(BRIDGE, "net1")
    model.links.add(Link(0, "veth0", "veth", mtu=9200))
    converge(model, [Intent("small", make_spec(1500)), Intent("large", make_spec(9000))])
    model.links.set("veth0", master=bridge)
    assert model.links.links[bridge].mtu == 9000
    converge(model, [Intent("large", None)], whole=False)
    assert model.links.links[bridge].mtu == 1500
    converge(model, [Intent("small", None)], whole=False)
    assert bridge in model.links.links, "veth0 is on it"


def test_a_network_of_the_host_alone_has_no_uplink() -> None:
    model = Model()
    vlan = {"type": "vlan", "physical_network": "net1", "vlan_id": 7}
    converge(model, [Intent("p", make_spec()), Intent("q", make_spec(network=vlan))])
    assert model.links.members() == {
        device_name(BRIDGE, "net1"): {device_name(TAP, "p"): 1500},
        device_name(BRIDGE, "net1:7"): {device_name(TAP, "q"): 1500},
    }


def test_ports_leave_by_the_interface_they_have_until_it_is_taken_from_them() -> None:
    for network in ({"type": "flat", "physical_network": "net2"}, VLAN):
        model, live = Model(), Intent("p", make_spec(network=network))
        segment = Segment("net2", network.get("vlan_id"))  # type: ignore[arg-type]
        converge(model, [live])
        before = dict(model.links.links)
        for now in ("missing", "eth9", ""):
            model.configure(physical_interfaces=INTERFACES | {"net2": now})
            result = converge(model, [live])
            assert result.failed == {} and model.links.links == before
            assert "leaves by eth2" in result.kept["p"].detail
            refused = converge(model, [Intent("q", make_spec(network=network))], whole=False)
            assert refused.failed["q"].code == "conflict" and model.links.links == before
        model.configure(physical_interfaces=INTERFACES | {"net2": "eth9"})
        if segment.device:
            model.links.delete(segment.device)
        else:
            model.links.links["eth2"] = replace(model.links.links["eth2"], master=None)
        assert converge(model, [live]).kept == {}
        way = model.links.links[segment.device or "eth9"]
        assert way.master == segment.bridge and way.data in (None, Vlan("eth9", 7))
        assert model.links.links["eth2"].master is None


@pytest.mark.parametrize(
    ("drift", "code", "words"),
    [
        ("gone", "backend_unavailable", "not there"),
        ("down", "backend_unavailable", "ip link set eth2 up"),
        ("addresses", "conflict", "192.0.2.1/24"),
        ("enslaved", "conflict", "theirs"),
        ("small", "conflict", "mtu 1500"),
    ],
)
def test_an_unfit_interface_is_refused_with_its_name(drift: str, code: str, words: str) -> None:
    model = Model()
    drift_of_interface(model, "eth2", drift)
    result = converge(model, [Intent("p", make_spec(network="net2"))])
    error = result.failed["p"]
    assert (error.code, error.step) == (code, "uplink")
    assert "eth2" in error.detail and error.fix and words in str(error)
    assert result.changes == ()


@pytest.mark.parametrize("network", ["net2", VLAN], ids=["flat", "vlan"])
def test_a_port_in_place_is_faulty_when_its_interface_goes(network: Any) -> None:
    model = Model()
    desired = [Intent("p", make_spec(network=network))]
    converge(model, desired)
    drift_of_interface(model, "eth2", "down")
    result = converge(model, desired)
    assert result.changes == () and result.failed == {}
    assert "is down" in str(result.observed["p"].fault)


def test_a_bridge_is_known_by_its_address_before_it_has_its_mark() -> None:
    model = Model()
    name = device_name(BRIDGE, "net1")
    model.links.add(Link(0, name, "bridge", address=provisional_mac(name), data=Bridge()))
    result = converge(model, [Intent("p", make_spec())])
    assert result.failed == {}
    assert model.links.links[name].alias == "netplugin-bridge=net1"


def test_a_bridge_without_mark_and_address_is_in_the_way() -> None:
    model = Model()
    name = device_name(BRIDGE, "net1")
    model.links.add(Link(0, name, "bridge", address="02:00:00:00:00:01"))
    result = converge(model, [Intent("p", make_spec())])
    assert result.failed["p"].code == "conflict" and name in result.failed["p"].detail


# -- VLAN ------------------------------------------------------------------------------------------


def test_flat_and_vlans_share_an_interface() -> None:
    model = Model()
    networks: list[Any] = ["net2", VLAN, {**VLAN, "vlan_id": 8}]
    desired = [Intent(f"p{n}", make_spec(network=each)) for n, each in enumerate(networks)]
    converge(model, desired)
    links = model.links.links
    assert links["eth2"].master == device_name(BRIDGE, "net2")
    for tag in (7, 8):
        segment = Segment("net2", tag)
        device = links[segment.device]
        assert (device.data, device.master) == (Vlan("eth2", tag), segment.bridge)
        assert device.alias == f"netplugin-uplink=net2:{tag}" and device.up


def test_addresses_on_the_interface_do_not_hinder_a_vlan() -> None:
    model = Model()
    drift_of_interface(model, "eth2", "addresses")
    assert converge(model, [Intent("p", make_spec(network=VLAN))]).failed == {}
    assert converge(model, [Intent("q", make_spec(network="net2"))]).failed["q"].step == "uplink"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("drift", ["newborn", "ipv6", "down", "free", "gone"])
def test_a_port_with_too_large_an_mtu_does_not_keep_the_uplink_of_others_from_repair(
    drift: str, whole: bool
) -> None:
    model, segment = Model(), Segment("net2", 7)
    small, large = (Intent(f"{mtu}", make_spec(mtu, VLAN)) for mtu in (1500, 9000))
    converge(model, [small, large])
    model.links.links["eth2"] = replace(model.links.links["eth2"], mtu=1600)
    before = model.links.links[segment.device]
    drift_of_device(model, segment.device, drift)
    desired = [small, large] if whole else [small]
    result = converge(model, desired, whole=whole)
    repaired = model.links.links[segment.device]
    assert repaired == replace(before, mtu=1600, index=repaired.index), "it has no more than its parent"
    assert result.observed["1500"].fault is None and planned(model, desired, whole=whole) == ()
    fault = converge(model, [small, large]).observed["9000"].fault
    assert fault is not None and "MTU 1600" in fault, "the port whose frames do not fit says so"


def test_a_vlan_of_somebody_else_is_in_the_way() -> None:
    model = Model()
    theirs = Link(0, "eth2.7", "vlan", up=True, data=Vlan("eth2", 7))
    model.links.add(theirs)
    result = converge(model, [Intent("p", make_spec(network=VLAN))])
    error = result.failed["p"]
    assert error.code == "conflict" and "eth2.7" in str(error.fix) and result.changes == ()


# -- VXLAN -----------------------------------------------------------------------------------------


def test_a_vxlan_network_has_its_device_and_peers() -> None:
    model = Model()
    converge(model, [overlay_intent("p", ["192.0.2.1", LOCAL_IP], udp_port=8472)])
    device = model.links.links[Segment(network_id="blue").device]
    assert device.data == Vxlan(5001, LOCAL_IP, 8472) and device.mtu == 1450
    assert model.fdb.peers(device.index) == {"192.0.2.1"}, "this host is none of its own peers"


@pytest.mark.parametrize("whole", [True, False])
def test_peers_come_and_go_one_by_one(whole: bool) -> None:
    model = Model()
    converge(model, [overlay_intent("p", ["192.0.2.1", "192.0.2.2"])])
    changes = planned(model, [overlay_intent("p", ["192.0.2.2", "192.0.2.3"])], whole=whole)
    device = Segment(network_id="blue").device
    assert changes == (
        AllowPeers(
            ("p",),
            VxlanKey(4789, 5001),
            frozenset({"192.0.2.2", "192.0.2.3"}),
            frozenset({"192.0.2.1"}),
            base=False,
        ),
        AddPeer(("p",), device, "192.0.2.3"),
        RemovePeer(("p",), device, "192.0.2.1"),
    )


def test_peers_stay_as_they_are_while_their_network_is_not_in_question() -> None:
    model = Model()
    converge(model, [overlay_intent("p", ["192.0.2.1"]), overlay_intent("q", ["192.0.2.1"])])
    converge(model, [Intent("q", None)], whole=False)
    device = model.links.links[Segment(network_id="blue").device]
    assert model.fdb.peers(device.index) == {"192.0.2.1"}
    converge(model, [Intent("p", None)], whole=False)
    assert model.ours() == []


def test_peers_of_the_wrong_family_are_refused() -> None:
    model = Model()
    error = converge(model, [overlay_intent("p", ["2001:db8::1"])]).failed["p"]
    assert (error.code, error.step) == ("conflict", "plan") and "2001:db8::1" in error.detail


@pytest.mark.parametrize(
    ("drift", "code", "words"),
    [
        ("gone", "backend_unavailable", "no interface"),
        ("down", "backend_unavailable", f"ip link set {UNDERLAY} up"),
        ("small", "conflict", f"ip link set {UNDERLAY} mtu 1500"),
    ],
)
def test_an_underlay_that_does_not_carry_the_tunnel_is_refused(drift: str, code: str, words: str) -> None:
    model = Model()
    drift_of_interface(model, UNDERLAY, drift)
    result = converge(model, [overlay_intent("p")])
    error = result.failed["p"]
    assert (error.code, error.step) == (code, "local_ip") and words in str(error)
    assert result.changes == ()


@pytest.mark.parametrize(("local_ip", "overhead"), [(LOCAL_IP, 50), ("2001:db8::8", 70)])
def test_the_underlay_needs_room_for_the_tunnel(local_ip: str, overhead: int) -> None:
    model = Model()
    model.configure(local_ip=local_ip)
    model.links.ips[UNDERLAY] = (f"{local_ip}/64",)
    link = model.links.links[UNDERLAY]
    model.links.links[UNDERLAY] = replace(link, mtu=1450 + overhead - 1)
    assert converge(model, [overlay_intent("p")]).failed["p"].step == "local_ip"
    model.links.links[UNDERLAY] = replace(link, mtu=1450 + overhead)
    assert converge(model, [overlay_intent("p")]).failed == {}


def test_a_vni_of_somebody_else_is_in_the_way() -> None:
    model = Model()
    model.links.add(Link(0, "vx0", "vxlan", up=True, data=Vxlan(5001, "192.0.2.8", 4789)))
    error = converge(model, [overlay_intent("p")]).failed["p"]
    assert error.code == "conflict" and "vx0" in error.detail


def test_a_network_that_is_not_known_is_refused() -> None:
    error = converge(Model(), [Intent("p", make_spec(network=BLUE))]).failed["p"]
    assert error.code == "backend_unavailable" and "/v1/networks/blue" in str(error.fix)


# -- rates -----------------------------------------------------------------------------------------


def test_one_direction_changes_without_the_other() -> None:
    model = Model()
    converge(model, [Intent("p", make_spec(qos={"ingress_kbps": 1000, "egress_kbps": 2000}))])
    desired = [Intent("p", make_spec(qos={"ingress_kbps": 1000, "egress_kbps": 3000}))]
    (change,) = planned(model, desired)
    assert isinstance(change, SetRate) and change.rate.kbps == 3000
    assert change.name.startswith("npi")
    converge(model, desired)
    desired = [Intent("p", make_spec(qos={"ingress_kbps": 1000}))]
    assert names(planned(model, desired)) == ["RemoveRedirect", "RemoveDevice"]
    assert converge(model, desired).observed["p"].details["egress_kbps"] is None


# -- what is reported -----------------------------------------------------------------------------


def findings(model: Model) -> dict[str, Finding]:
    seen = replace(model.driver.observe(None, 1e9), vhost_net=True, flushing="")
    return {each.id: each for each in model.driver.findings((), seen)}


def set_bond(model: Model, mode: str, policy: str, *states: str, partner: str = "") -> None:
    model.links.links["bond0"] = replace(model.links.links["bond0"], data=LinuxBond(mode, policy, partner))
    model.links.bonds["bond0"] = tuple(
        BondMember(f"eth{n}", state, n == 4) for n, state in enumerate(states, 4)
    )


def test_a_bond_with_a_link_down_is_reported_and_works() -> None:
    model = Model()
    desired = [Intent("p", make_spec(network="net4"))]
    set_bond(model, "balance-xor", "layer2", "up", "down")
    result = converge(model, desired)
    assert result.failed == {} and result.observed["p"].fault is None
    members = result.observed["p"].details["uplink"]["bond"]["members"]
    assert [member["link"] for member in members.values()] == ["up", "down"]
    reported = findings(model)["bond-link-down"]
    assert reported.status == "warn" and "eth5 is down" in reported.found
    set_bond(model, "balance-xor", "layer2", "down", "down")
    assert "no link left" in str(converge(model, desired).observed["p"].fault)
    assert findings(model)["bond-link-down"].status == "fail"


def test_a_bond_of_which_one_link_carries_all_by_choice() -> None:
    model = Model()
    set_bond(model, "active-backup", "layer2", "up", "up")
    reported = findings(model)["bond-hash"]
    assert reported.status == "ok" and "one link (eth4) carries all" in reported.found


@pytest.mark.parametrize(
    ("policy", "spreads"),
    [
        ("layer2", False),
        ("layer2+3", False),
        ("encap2+3", False),
        ("vlan+srcmac", False),
        ("layer3+4", True),
        ("encap3+4", True),
    ],
)
def test_whether_a_bond_spreads_tunnels(policy: str, spreads: bool) -> None:
    model = Model()
    set_bond(model, "balance-xor", policy, "up", "up")
    assert findings(model) == {}, "the VMs' own frames have many addresses"
    # The tunnels' interface is a VLAN on the bond.
    model.links.delete(UNDERLAY)
    vlan = Link(0, "bond0.5", "vlan", mtu=9000, up=True, data=Vlan("bond0", 5))
    model.links.add(vlan)
    model.links.ips["bond0.5"] = (f"{LOCAL_IP}/24",)
    reported = findings(model)
    assert ("bond-hash" not in reported) == spreads
    if not spreads:
        found = reported["bond-hash"]
        assert found.status == "warn" and "one link carries all" in found.found
        assert "xmit_hash_policy layer3+4" in str(found.fix)


def test_a_bond_without_an_lacp_partner_is_reported() -> None:
    model = Model()
    set_bond(model, "802.3ad", "layer3+4", "up", "up")
    assert findings(model)["bond-lacp"].status == "warn"
    set_bond(model, "802.3ad", "layer3+4", "up", "up", partner="02:00:00:00:00:aa")
    assert findings(model) == {}


def test_an_uplink_that_became_too_small_is_reported_and_the_fault_of_its_ports() -> None:
    model = Model()
    desired = [Intent("p", make_spec(2000, "net2")), overlay_intent("q")]
    converge(model, desired)
    assert findings(model) == {}
    drift_of_interface(model, "eth2", "small")
    result = converge(model, desired)
    assert "MTU 1450" in str(result.observed["p"].fault) and result.changes == ()
    assert "ip link set eth2 mtu 2000" in str(result.observed["p"].fault)
    reported = findings(model)["mtu"]
    assert reported.status == "fail" and reported.fix == "ip link set eth2 mtu 2000"


def test_a_kernel_without_a_limit_for_what_bridges_learn_is_reported() -> None:
    model = Model()
    desired = [Intent("p", make_spec())]
    converge(model, desired)
    assert findings(model) == {}
    name = device_name(BRIDGE, "net1")
    link = model.links.links[name]
    model.links.links[name] = replace(link, data=Bridge(fdb_max_learned=None))
    assert planned(model, desired) == (), "nothing can be done about it"
    reported = findings(model)["mac-table"]
    assert reported.status == "warn" and "6.8" in reported.expected


def test_a_firewall_that_flushes_the_rules_of_others_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "nftables.conf"
    file.write_text("#!/usr/sbin/nft -f\n\nflush ruleset;  # all of it\ntable inet filter {}\n")
    assert flushing_file(tmp_path) == "", "the service is not enabled"
    wants = tmp_path / "systemd/system/sysinit.target.wants"
    wants.mkdir(parents=True)
    (wants / "nftables.service").touch()
    assert flushing_file(tmp_path) == str(file)
    seen = replace(Model().driver.observe(None, 1e9), vhost_net=True, flushing=str(file))
    (reported,) = Model().driver.findings((), seen)
    assert (reported.id, reported.status) == ("firewall-flush", "warn") and str(file) in str(reported.fix)
    file.write_text("# flush ruleset\ndelete table inet filter\n")
    assert flushing_file(tmp_path) == ""


def test_of_two_ports_with_one_mac_the_first_has_it_until_it_goes() -> None:
    model = Model()
    first, second = (Intent(name, make_spec()) for name in ("p", "q"))
    converge(model, [first])
    converge(model, [second], whole=False)
    taps = {name: model.links.links[device_name(TAP, name)] for name in ("p", "q")}
    mac = make_spec().mac
    assert model.fdb.holder(taps["q"].index, mac) == taps["p"].index
    assert not taps["p"].port.learning and taps["q"].port.learning
    assert planned(model, [first, second]) == planned(model, [second], whole=False) == ()
    converge(model, [Intent("p", None), second])
    assert model.fdb.holder(taps["q"].index, mac) == taps["q"].index


def test_rules_for_vxlan_go_with_the_last_network() -> None:
    model = Model()
    converge(model, [overlay_intent("p", ["192.0.2.1"])])
    assert model.vxlan.found is not None
    result = converge(model, [Intent("p", None)], whole=False)
    assert "RemoveVxlanTable" in names(result.changes) and model.vxlan.found is None


def test_a_missing_vhost_net_is_reported() -> None:
    model = Model()
    seen = replace(model.driver.observe(None, 1e9), vhost_net=False, flushing="")
    (reported,) = model.driver.findings((), seen)
    assert (reported.id, reported.status, reported.fix) == ("vhost-net", "warn", "modprobe vhost_net")


@pytest.mark.parametrize("network", ["net2", VLAN, BLUE], ids=["flat", "vlan", "vxlan"])
def test_a_name_of_ours_that_is_taken_is_a_conflict(network: Any) -> None:
    model = Model()
    intent = make_intent("p", make_spec(1400, network))
    assert intent.spec is not None
    segment = Segment.of(intent.spec.network)
    take_name(model, segment.device or segment.bridge)
    result = converge(model, [intent])
    assert result.failed["p"].code == "conflict" and result.changes == ()

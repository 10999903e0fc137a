"""VXLAN networks: what comes with the first port, changes with the peers, and goes with the last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivers.dpdkvhostuser.plan import make_plan as plan
from drivers.ovs.flow_changes import DropNetwork
from drivers.ovs.overlays import OVERLAY, TUNNELS, vxlan_name
from drivers.ovs.tunnels import network_cookie
from netplugin.backend import Intent
from netplugin.host import rtnetlink
from netplugin.host.ovs_underlay import read_underlay
from netplugin.host.ovs_view import OvsView
from tests.unit.drivers.dpdkvhostuser.columns import LOCAL_IP
from tests.unit.drivers.dpdkvhostuser.model import SETTINGS, UNDERLAY, Bridge, Model
from tests.unit.drivers.dpdkvhostuser.scenes import converge, kinds, on_network, overlay, plain_spec


def test_the_first_port_brings_bridges_and_tunnels_and_the_last_takes_them() -> None:
    model = Model()
    one, other = overlay(1), overlay(2, udp_port=8472)
    converge(model, [on_network(one, "a"), on_network(one, "b"), on_network(other, "c")])
    assert set(model.bridges) == {OVERLAY, TUNNELS}
    assert {vxlan_name(4789), vxlan_name(8472)} < set(model.bridges[TUNNELS].ports)
    host = model.observe(["c"])
    changes = plan(SETTINGS, [Intent("c", None)], host).changes
    assert "RemovePort tunnel" in kinds(changes)
    dropped = [change.cookie for change in changes if isinstance(change, DropNetwork)]
    assert dropped == [network_cookie("net-2")]
    model.apply(changes)
    for port in ("a", "b"):
        model.apply(plan(SETTINGS, [Intent(port, None)], model.observe([port])).changes)
    assert model.bridges == {}


def test_peers_change_the_flows_of_their_network_alone() -> None:
    model = Model()
    one, other = overlay(1), overlay(2)
    converge(model, [on_network(one, "a"), on_network(other, "b")])
    more = overlay(1, peers=("10.9.0.2", "10.9.0.3"))
    changes = plan(SETTINGS, [on_network(more, "a")], model.observe(["a"])).changes
    assert kinds(changes) == ["SetNetwork"]
    model.apply(changes)
    assert plan(SETTINGS, [on_network(more, "a"), on_network(other, "b")], model.observe()).changes == ()


def test_what_is_missing_below_the_tunnels_is_refused_before_the_host_is_touched() -> None:
    wide = overlay(1)
    cases = {
        "is not set": None,
        "no interface": replace(UNDERLAY, device=None),
        "no netdev bridge": replace(UNDERLAY, is_bridge=False),
        "is down": replace(UNDERLAY, up=False),
        "is not known: no netlink": replace(UNDERLAY, unread="no netlink"),
        "needs an MTU of 1500 (1450 and 50 for VXLAN) on every hop, and dpdk0 has 1499": replace(
            UNDERLAY, hops=(("br-underlay", 1500), ("dpdk0", 1499))
        ),
    }
    for words, underlay in cases.items():
        model = Model()
        model.underlay = underlay
        found = plan(SETTINGS, [on_network(wide, "a")], model.observe())
        assert found.changes == () and words in found.refused["a"].detail
        assert found.refused["a"].fix
    unset = replace(SETTINGS, local_ip=None)
    assert plan(unset, [on_network(wide, "a")], Model(unset).observe()).refused["a"].step == "underlay"


def test_addresses_that_cannot_be_read_fail_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on VLANs is planned as ever; networks say that their underlay is not known."""

    def no_netlink(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(rtnetlink.Rtnetlink, "ask", staticmethod(no_netlink))
    model = Model()
    model.underlay = read_underlay(LOCAL_IP, OvsView())
    both = [on_network(overlay(1), "a"), Intent("b", plain_spec(physical_network="net1"))]
    found = plan(SETTINGS, both, model.observe())
    assert found.refused.keys() == {"a"} and found.changes
    assert "Too many open files" in found.refused["a"].detail


def test_a_port_that_is_there_is_not_removed_for_its_underlay() -> None:
    model = Model()
    converge(model, [on_network(overlay(1), "a")])
    model.underlay = replace(UNDERLAY, up=False)
    found = plan(SETTINGS, [on_network(overlay(1), "a")], model.observe())
    assert found.changes == () and found.refused == {}


def test_peers_of_the_other_family_are_refused() -> None:
    found = plan(SETTINGS, [on_network(overlay(1, peers=("fd00::2",)), "a")], Model().observe())
    assert found.refused["a"].code == "invalid_request" and "fd00::2" in found.refused["a"].detail


def test_bridges_and_ports_of_these_names_that_are_not_ours_are_a_conflict() -> None:
    for bridge, port in ((OVERLAY, None), (TUNNELS, None), ("theirs", vxlan_name(4789))):
        model = Model()
        model.bridges[bridge] = Bridge(ours=False)
        if port:
            model.add_port(bridge, port)
        found = plan(SETTINGS, [on_network(overlay(1), "a")], model.observe())
        assert found.changes == () and found.refused["a"].code == "conflict"
        assert (port or bridge) in found.refused["a"].detail

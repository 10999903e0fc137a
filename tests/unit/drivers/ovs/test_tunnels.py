"""The flows of VXLAN networks and what was learned; what tunnels need of their path."""

from __future__ import annotations

from dataclasses import replace

from drivers.ovs import tunnels
from drivers.ovs.tunnels import network_cookie, network_flows, with_learned
from netplugin.api.models import NetworkSpec
from netplugin.backend import Overlay
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.flow_actions import output, resubmit, set_field
from netplugin.host.ovs_underlay import Underlay, problem
from netplugin.host.vxlan import overhead

# -- what was learned -----------------------------------------------------------------------------


def _learned(match: str, *loads: tuple[str, int]) -> Flow:
    """A flow as vswitchd learns it: with NXAST_REG_LOAD of up to 64 bits each (OVS 3.1.0)."""
    load = bytes.fromhex("ffff0018000023200007")
    to = b"".join(load + bytes.fromhex(where) + value.to_bytes(8, "big") for where, value in loads)
    flow = Flow.make(0x6E70000000000003, 100, f"table=10,{match}", to + output(2))
    return replace(flow, options=(0, 300, 0, 0))


LEARNED = (
    _learned("tun_id=0x1389,dl_dst=52:54:00:00:00:09", ("001f00014004", 0x0A090002)),
    _learned("tun_id=0x1389,dl_dst=52:54:00:00:00:0b", ("001f00014004", 0x0A090003)),
    _learned(
        "tun_id=0x138a,dl_dst=52:54:00:00:00:0a",
        ("003f0001dc10", 2),
        ("103f0001dc10", 0xFD00000000000000),
    ),
)


def _overlay(*peers: str) -> Overlay:
    return Overlay("blue", NetworkSpec(type="vxlan", vni=5001, peers=peers), 7)


def test_what_leads_to_a_host_that_is_no_peer_is_stale() -> None:
    first, second, six = LEARNED
    stale = tunnels.stale
    assert stale([first, second], _overlay("10.9.0.2", "10.9.0.3"), "10.9.0.1", 2) == []
    assert stale([first, second], _overlay("10.9.0.2"), "10.9.0.1", 2) == [second]
    assert stale([first], _overlay("10.9.0.2"), "10.9.0.1", 3) == [first], "another tunnel port"
    assert stale([six], _overlay("fd00::2"), "fd00::1", 2) == []
    assert stale([six], _overlay("fd00::3"), "fd00::1", 2) == [six]
    # As a flow is deleted: by its match, without what is none.
    bare = Flow.make(first.cookie, 100, "table=10,tun_id=0x1389,dl_dst=52:54:00:00:00:09")
    assert first.identity == bare.identity and first != bare


def test_a_networks_flows_have_a_cookie_of_their_own_and_what_is_learned_another() -> None:
    own, learned = with_learned(network_cookie("blue"))
    assert own != learned and own >> 48 == learned >> 48 == COOKIE_MARK >> 48
    assert not own & tunnels.LEARNED_BIT and own & ~COOKIE_MARK
    flows = network_flows(_overlay("10.9.0.1", "10.9.0.3", "10.9.0.2"), "10.9.0.1", 2, 1)
    assert {flow.cookie for flow in flows} == {own}
    (flood,) = (flow for flow in flows if "table=20" in flow.match)
    sent = [set_field(f"tun_dst={peer}") + output(2) for peer in ("10.9.0.2", "10.9.0.3")]
    assert flood.actions == b"".join(sent)
    alone = network_flows(_overlay("10.9.0.1"), "10.9.0.1", 2, 1)
    assert len(alone) == 2, "a host without peers sends nothing"
    assert not [f for f in alone if "in_port=2" in f.match and "table=" not in f.match]
    received = {f.match for f in flows if f.actions == resubmit(5)}
    assert received == {f"in_port=2,tun_id=0x1389,tun_src={peer}" for peer in ("10.9.0.2", "10.9.0.3")}
    six = network_flows(_overlay("fd00::2", "fd00::1"), "fd00::1", 2, 1)
    assert [f.match for f in six if f.actions == resubmit(5)] == [
        "in_port=2,tun_id=0x1389,tun_ipv6_src=fd00::2"
    ]
    assert all(isinstance(flow, Flow) for flow in alone)


# -- the underlay ---------------------------------------------------------------------------------


def test_what_vxlan_adds_is_reported_once() -> None:
    assert (overhead("10.0.0.1"), overhead("fd00::1")) == (50, 70)


def test_a_bridge_whose_nics_are_all_broken_is_no_underlay() -> None:
    underlay = Underlay("10.9.0.1", "br", True, True, (("br", 1600),), broken="dpdk0: no")
    error = problem(underlay, 1450)
    assert error and error.code == "backend_unavailable" and "dpdk0: no" in error.detail

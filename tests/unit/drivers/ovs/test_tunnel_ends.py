"""What keeps frames of VMs from the ends of tunnels, and frames that end within a tag, on an Open vSwitch."""

from __future__ import annotations

import pytest

from drivers.ovs import flow_changes as f
from drivers.ovs.filters import foreign_flows, port_cookie, port_flows, relay_flows
from netplugin.host.flow import Flow
from netplugin.host.flow_actions import DROP, NORMAL, output
from tests.lab.processes import wait_for
from tests.unit.drivers.ovs.conftest import BRIDGE, Ports, spec_of, vhost
from tests.unit.ovs import PATIENCE_S, port, soon

MAC, OTHER = "525400000001", "525400000099"
#: Frames that end in their tag, or name its type in a SNAP header.
PARTS = {
    f"{name}, {kind}": OTHER + MAC + head + kind + behind
    for kind in ("8100", "88a8")
    for name, head, behind in (
        ("16 bytes", "", "00c8"),
        ("17 bytes", "", "00c808"),
        ("SNAP", "0032aaaa03000000", "00" * 42),
    )
}


def _udp(dst: str, udp_port: int) -> str:
    to = f"udp6,ipv6_dst={dst}" if ":" in dst else f"udp,nw_dst={dst}"
    return f"dl_src=52:54:00:00:00:01,dl_dst=52:54:00:00:00:99,{to},udp_dst={udp_port}"


@pytest.mark.parametrize("security", [{}, {"enabled": False}])
def test_what_a_tunnel_of_this_ovs_would_take_is_dropped_and_other_tunnels_pass(
    ports: Ports, security: dict[str, bool]
) -> None:
    made = vhost("p1")
    tunnels = {
        "ours": ("vxlan", {"local_ip": "10.9.0.1", "remote_ip": "flow"}),
        "ours6": ("vxlan", {"local_ip": "fd09::1", "remote_ip": "flow", "dst_port": "4790"}),
        "theirs": ("geneve", {"remote_ip": "flow"}),
        "theirs-gre": ("gre", {"remote_ip": "10.9.0.2"}),
    }
    ports.plug(made, vhost("p2"), port_security=security)
    for name, (kind, options) in tunnels.items():
        setting = [f"type={kind}", *(f'options:{key}="{value}"' for key, value in options.items())]
        ports.switch.vsctl("add-port", BRIDGE, name, "--", "set", "Interface", name, *setting)
    wait_for(lambda: len(ports.ovs.view.tunnels()) == len(tunnels), PATIENCE_S, "the tunnels")
    assert ports.apply(f.SetBridgeFlows(("p1",), BRIDGE)).failed == {}
    number = ports.switch.get("Interface", made.name, "ofport")

    def passes(frame: str) -> bool:
        shown = ports.switch.appctl("ofproto/trace", BRIDGE, f"in_port={number},{frame}")
        return "Datapath actions: drop" not in shown

    taken = [_udp("10.9.0.1", 4789), _udp("fd09::1", 4790), _udp("10.0.0.1", 6081), _udp("fd00::1", 6081)]
    taken.append("dl_src=52:54:00:00:00:01,ip,nw_proto=47")
    assert [frame for frame in taken if passes(frame)] == []
    own = [_udp("10.0.0.9", 4789), _udp("10.9.0.1", 8472), _udp("fd00::9", 4790), _udp("10.9.0.1", 53)]
    assert [frame for frame in own if not passes(frame)] == []


def test_nothing_is_forwarded_to_ports_that_may_have_an_address(ports: Ports) -> None:
    """The internal port of the bridge, and what an operator adds without naming it."""
    ports.plug(vhost("p1"))
    ports.ovs.db.write([port(BRIDGE, "service"), port(BRIDGE, "stranger")], soon())
    assert ports.seen().bridges[BRIDGE].forwards_right is False
    assert ports.apply(f.SetBridgeFlows(("p1",), BRIDGE)).failed == {}
    assert ports.seen().bridges[BRIDGE].forwards_right and not ports.seen().shut
    number = ports.switch.get("Interface", vhost("p1").name, "ofport")
    shown = ports.switch.appctl("ofproto/trace", BRIDGE, f"in_port={number},dl_src=52:54:00:00:00:01")
    service = ports.switch.get("Interface", "service", "ofport")
    assert shown.count("skipping output") == 2 and "LOCAL" not in shown.rsplit("Datapath", 1)[-1], shown
    for name, forwarded in ((BRIDGE, True), (service, False)):
        socket = f"unix:{ports.switch.rundir / BRIDGE}.mgmt"
        word = "forward" if forwarded else "no-forward"
        ports.switch.ofctl("-O", "OpenFlow14", "mod-port", socket, name, word)
        assert ports.seen().bridges[BRIDGE].forwards_right is False, name
        assert ports.apply(f.SetBridgeFlows(("p1",), BRIDGE)).failed == {}
        assert ports.seen().bridges[BRIDGE].forwards_right, name


@pytest.mark.parametrize("kind", ["relay", "relay, disabled", "foreign", "foreign, disabled"])
def test_a_frame_that_ends_in_a_tag_is_dropped_where_nothing_else_drops_it(ports: Ports, kind: str) -> None:
    spec = spec_of(port_security={"enabled": "disabled" not in kind})
    made = vhost("p1")
    ports.plug(made, vhost("p2"))
    number, other = (int(ports.switch.get("Interface", vhost(p).name, "ofport")) for p in ("p1", "p2"))
    if kind.startswith("relay"):
        flows = relay_flows("p1", number, other, spec)
    elif spec.port_security.enabled:
        flows = port_flows("p1", number, spec)
    else:
        # The bridge's own flow decides on the rest.
        flows = foreign_flows("p1", number) | {Flow.make(1, 65534, f"in_port={number}", output(other))}
    ports.ovs.flows.replace(BRIDGE, [port_cookie("p1")], flows, soon())
    for name, frame in {**PARTS, "whole": OTHER + MAC + "88b5" + "00" * 46}.items():
        shown = ports.switch.appctl("ofproto/trace", BRIDGE, f"in_port={number}", frame)
        assert ("Datapath actions: drop" in shown) == (name != "whole"), (name, shown)


def test_on_a_bridge_of_the_operator_the_flows_switch_by_themselves() -> None:
    """Its other tables are not ours."""
    change = f.SetFilter(("p1",), BRIDGE, vhost("p1"), foreign=True)
    assert {flow.actions for flow in change.flows(1, None, ())} == {NORMAL, DROP}

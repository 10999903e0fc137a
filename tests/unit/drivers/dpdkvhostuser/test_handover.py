"""Which ports are announced when the host that their VM left asks, on the model of OVS."""

from __future__ import annotations

from typing import Any

import pytest

from drivers.ovs.filters import are_closed
from netplugin.backend import Intent
from netplugin.host.flow import Flow
from tests.unit.drivers.dpdkvhostuser.model import Bridge, Model
from tests.unit.drivers.dpdkvhostuser.scenes import converge, overlay, plain_spec


def flows(model: Model) -> list[Flow]:
    return sorted(model.observe().flows["p1"], key=str)


def asked(model: Model) -> list[str]:
    return [flow.match for flow in flows(model) if "arp_tha" in flow.match]


@pytest.mark.parametrize("vlan_id", [None, 7])
def test_only_the_uplink_can_ask(vlan_id: int | None) -> None:
    model = Model()
    network: dict[str, Any] = {} if vlan_id is None else {"type": "vlan", "vlan_id": vlan_id}
    desired = Intent("p1", plain_spec(physical_network="net2", mtu=1500, **network), follows_guest=True)
    converge(model, [desired, Intent("p2", plain_spec(physical_network="net2", mtu=1500, **network))])
    doors = model.observe().bridges["br2"].doors
    [match] = asked(model)
    assert len(doors) == 1 and f"in_port={doors[0]}" in match.split(",")
    assert ("dl_vlan=7" if vlan_id else "vlan_tci=0x0000/0x1fff") in match
    converge(model, [Intent("p1", desired.spec)])
    assert asked(model) == []
    converge(model, [Intent("p1", desired.spec, closed=True, follows_guest=True)])
    assert asked(model) == [] and are_closed(flows(model))


def test_vxlan_peers_can_ask() -> None:
    model = Model()
    spec = plain_spec(type="vxlan", network_id="net-1")
    converge(model, [Intent("p1", spec, overlay=overlay(1), follows_guest=True)])
    [match] = asked(model)
    assert "dl_vlan=1" in match.split(","), "in the network's local VLAN"


def test_nobody_can_ask_on_a_bridge_of_the_operator() -> None:
    model = Model()
    model.bridges["br1"] = Bridge(ours=False)
    converge(model, [Intent("p1", plain_spec(), follows_guest=True)])
    assert flows(model) and asked(model) == []

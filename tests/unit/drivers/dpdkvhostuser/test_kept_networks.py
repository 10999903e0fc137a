"""Physical networks that the API made, planned on the model of OVS: kept, changed live, left to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from drivers.dpdkvhostuser.plan import LAYOUT
from drivers.dpdkvhostuser.plan import make_plan as plan
from drivers.ovs.model import Layout
from drivers.ovs.networks import network_faults, network_remains
from drivers.ovs.plan import bridge_changes
from drivers.vdpa.model import LAYOUT as OF_VDPA
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Intent
from netplugin.host.names import device_name
from netplugin.host.ovs_rows import OvsInterface
from tests.unit.drivers.dpdkvhostuser.model import SETTINGS, UNDERLAY, Bridge, Model
from tests.unit.drivers.dpdkvhostuser.scenes import converge, kinds, on_network, overlay, plain_spec

NIC = "0000:07:00.0"
UPLINK = device_name("npu", NIC)


def made(**networks: Mapping[str, Any]) -> Model:
    """A host with these networks beside those of the options."""
    model = Model()
    change(model, **networks)
    return model


def change(model: Model, **networks: Mapping[str, Any]) -> None:
    specs = {
        name: PhysicalNetworkSpec.model_validate({"bridge": "br9", "ovs": {"devices": [NIC]}, **fields})
        for name, fields in networks.items()
    }
    model.settings = SETTINGS.with_networks(specs)


def interface(model: Model, bridge: str = "br9") -> OvsInterface:
    [found] = model.bridges[bridge].ports[UPLINK].interfaces
    return found


def test_a_kept_network_is_there_without_ports() -> None:
    model = made(net9={"keep": True})
    found = plan(model.settings, [], model.observe())
    assert kinds(found.changes) == ["CreateBridge", "AddPort uplink", "SetBridgeFlows"]
    assert [change.ports for change in found.changes] == [()] * 3
    converge(model, [])
    assert model.bridges["br9"].mark == "net9" and interface(model).mtu_request == 1500
    assert plan(model.settings, [], model.observe()).changes == ()
    on_it = [Intent("p1", plain_spec(physical_network="net9"))]
    converge(model, on_it)
    assert kinds(plan(model.settings, [Intent("p1", None)], model.observe()).changes)[0] == "RemovePort"
    converge(model, [Intent("p1", None)])
    assert set(model.bridges) == {"br9"}, "it stays when the last port goes"
    change(model, net9={})
    converge(model, [])
    assert model.bridges == {}


@pytest.mark.parametrize("what", ["bridge", "uplink", "fail_mode", "flows"])
def test_what_others_take_from_a_kept_network_comes_back(what: str) -> None:
    model = made(net9={"keep": True})
    converge(model, [])
    before = model.copy()
    if what == "bridge":
        del model.bridges["br9"]
    elif what == "uplink":
        del model.bridges["br9"].ports[UPLINK]
    elif what == "fail_mode":
        model.bridges["br9"].fail_mode = None
    else:
        model.bridges["br9"].flows.clear()
    converge(model, [])
    [bridge], [was] = model.bridges.values(), before.bridges.values()
    assert (bridge.mark, bridge.fail_mode, bridge.ports.keys()) == ("net9", "secure", was.ports.keys())
    assert len(bridge.flows) == len(was.flows), "the uplink may have another number"
    assert plan(model.settings, [], model.observe()).changes == ()


def test_one_backend_keeps_networks_and_all_leave_them() -> None:
    """Two that add an uplink at once would have two."""
    model = made(net9={"keep": True})

    def changes(layout: Layout) -> list[str]:
        before, after = bridge_changes(model.settings, layout, {}, set(), model.observe())
        return kinds([*before, *after])

    assert changes(OF_VDPA) == []
    assert changes(LAYOUT) == ["CreateBridge", "AddPort uplink", "SetBridgeFlows"]
    converge(model, [])
    assert changes(OF_VDPA) == []
    del model.bridges["br9"].ports[UPLINK]
    assert "AddPort uplink" not in changes(OF_VDPA) and "AddPort uplink" in changes(LAYOUT)
    change(model, net9={})
    assert changes(OF_VDPA) == changes(LAYOUT) == ["RemoveBridge"]


def test_the_mtu_of_a_network_that_was_made_changes_live() -> None:
    on_it = [Intent("p1", plain_spec(physical_network="net9"))]
    model = made(net9={})
    converge(model, on_it)
    assert interface(model).mtu_request == 1500
    change(model, net9={"mtu": 9000})
    found = plan(model.settings, on_it, model.observe())
    assert [each.describe() for each in found.changes if each.ports] == [
        f"set uplink {UPLINK}: {NIC}, MTU 9000",
        "set the base flows of br9",
    ]
    converge(model, on_it)
    assert interface(model).mtu_request == 9000
    assert plan(model.settings, on_it, model.observe()).changes == ()
    # Without an mtu it is the operator's, as with a network of the options.
    change(model, net9={})
    assert plan(model.settings, on_it, model.observe()).changes == ()
    large = Intent("p2", plain_spec(physical_network="net9", mtu=9100))
    change(model, net9={"mtu": 9000})
    refused = plan(model.settings, [*on_it, large], model.observe()).refused["p2"]
    assert "PUT /v1/physical-networks/net9 with mtu 9100" in str(refused.fix)


def test_a_kept_network_gets_other_devices_and_another_bridge() -> None:
    model = made(net9={"keep": True})
    converge(model, [])
    two = {"devices": [NIC, "0000:07:00.1"], "bond": "lacp"}
    change(model, net9={"keep": True, "ovs": two})
    converge(model, [])
    [bond] = model.observe().bridges["br9"].uplinks.values()
    assert (bond.bond_mode, len(bond.interfaces)) == ("balance-tcp", 2)
    change(model, net9={"keep": True, "bridge": "br8"})
    converge(model, [])
    assert set(model.bridges) == {"br8"} and interface(model, "br8").mtu_request == 1500
    change(model, net8={"keep": True, "bridge": "br8"})  # another network has the bridge now
    converge(model, [])
    assert {name: bridge.mark for name, bridge in model.bridges.items()} == {"br8": "net8"}
    assert plan(model.settings, [], model.observe()).changes == ()


def test_the_bridge_of_an_operator_is_not_ours_to_keep() -> None:
    model = made(net9={"keep": True, "ovs": {}})
    model.bridges["br9"] = Bridge(ours=False, fail_mode=None)
    assert plan(model.settings, [], model.observe()).changes == ()
    assert network_faults(model.settings, model.observe()) == {}


def test_what_does_not_work_is_reported() -> None:
    model = made(net9={"keep": True, "mtu": 9000})

    def fault() -> str:
        found = network_faults(model.settings, model.observe())
        assert found.keys() <= {"net9"}
        return found["net9"].detail if found else ""

    assert fault() == "bridge br9 is not there"
    converge(model, [])
    assert fault() == ""
    row = model.bridges["br9"].ports.pop(UPLINK)
    assert fault() == f"bridge br9 has no uplink {UPLINK}"
    for columns, words in (
        ({"error": "No such device", "ofport": -1}, "No such device"),
        ({"mtu": 1500, "ofport": 7}, "has MTU 1500: its NIC takes no 9000"),
    ):
        interfaces = tuple(replace(i, **columns) for i in row.interfaces)  # type: ignore[arg-type]
        model.bridges["br9"].ports[UPLINK] = replace(row, interfaces=interfaces)
        assert words in fault()
    change(model, net9={})
    assert fault() == "", "nothing is kept, and no port is on it"


def test_the_bridge_of_live_tunnels_stays_if_its_network_is_lost() -> None:
    """A lost store, or one of another version: who starts knows nothing of net9."""
    model = made(net9={"keep": True})
    model.underlay = replace(UNDERLAY, device="br9", hops=(("br9", 9100),))
    on_it = [on_network(overlay(1), "p1")]
    converge(model, on_it)
    model.settings = SETTINGS
    converge(model, on_it)
    assert UPLINK in model.bridges["br9"].ports
    model.underlay = UNDERLAY
    converge(model, on_it)
    assert "br9" not in model.bridges


def test_a_change_for_no_port_is_that_of_its_network() -> None:
    model = made(net9={"keep": True}, net8={"keep": True, "bridge": "br8", "ovs": {}})
    made_by = {
        change.describe(): change.physical_network
        for change in plan(model.settings, [], model.observe()).changes
    }
    assert made_by["create bridge br9 for net9"] == "net9"
    assert made_by["create bridge br8 for net8"] == "net8"
    assert set(made_by.values()) == {"net8", "net9"}
    converge(model, [])
    change(model, net8={"keep": True, "bridge": "br8", "ovs": {}})
    removed = plan(model.settings, [], model.observe()).changes
    assert {change.physical_network for change in removed} == {"net9"}


def test_what_is_left_of_a_network_is_reported() -> None:
    model = made(net9={"keep": True})
    converge(model, [])
    [left] = network_remains("net9", model.observe())
    assert left == f"bridge br9 with {interface(model).name}"
    assert network_remains("net8", model.observe()) == []
    change(model)
    converge(model, [])
    assert network_remains("net9", model.observe()) == []

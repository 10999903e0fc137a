"""Physical networks that the API made, on the model of the kernel: the flat segment that is kept."""

from __future__ import annotations

from typing import Any

import pytest

from drivers.linuxbridge.segments import Segment
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Intent
from netplugin.host.link_values import Link
from netplugin.host.names import BRIDGE, TAP, device_name
from tests.unit.drivers.linuxbridge.model import Model
from tests.unit.drivers.linuxbridge.strategies import (
    converge,
    drift_of_interface,
    make_spec,
    planned,
    take_name,
)

SEGMENT = device_name(BRIDGE, "net9")


def make(model: Model, **fields: Any) -> None:
    """The network net9, by eth9."""
    spec = {"linuxbridge": {"interface": "eth9"}, "keep": True, **fields}
    model.host.networks.replace_stored({"net9": PhysicalNetworkSpec.model_validate(spec)})


def faults(model: Model) -> dict[str, str]:
    seen = model.driver.observe(None, 1e9)
    return {name: fault.detail for name, fault in model.driver.network_faults(seen).items()}


def test_a_kept_segment_is_there_without_ports() -> None:
    model = Model()
    make(model, mtu=9000)
    assert faults(model) == {"net9": f"bridge {SEGMENT} is not there"}
    converge(model, [])
    assert model.links.members() == {SEGMENT: {"eth9": 9100}}
    assert (model.links.links[SEGMENT].mtu, model.links.links[SEGMENT].up) == (9000, True)
    assert faults(model) == {} and planned(model, []) == ()
    small = [Intent("p", make_spec(1500, "net9"))]
    converge(model, small)
    assert model.links.links[SEGMENT].mtu == 9000 and planned(model, small) == ()
    converge(model, [Intent("p", None)])
    assert model.ours() == [SEGMENT], "it stays when the last port goes"
    make(model, keep=False)
    converge(model, [])
    assert model.ours() == [] and model.links.links["eth9"].master is None


def test_a_vlan_of_a_kept_network_comes_and_goes_with_its_ports() -> None:
    model = Model()
    make(model)
    vlan = {"type": "vlan", "physical_network": "net9", "vlan_id": 7}
    converge(model, [Intent("p", make_spec(network=vlan))])
    there = Segment("net9", 7)
    assert {SEGMENT, there.bridge, there.device, device_name(TAP, "p")} == set(model.ours())
    converge(model, [Intent("p", None)])
    assert model.ours() == [SEGMENT]


@pytest.mark.parametrize("what", ["bridge", "uplink", "down"])
def test_what_others_take_from_a_kept_segment_comes_back(what: str) -> None:
    model = Model()
    make(model)
    converge(model, [])
    if what == "bridge":
        model.links.delete(SEGMENT)
    elif what == "uplink":
        model.links.set("eth9", master="")
    else:
        model.links.set(SEGMENT, up=False)
    converge(model, [])
    assert model.links.members() == {SEGMENT: {"eth9": 9100}} and model.links.links[SEGMENT].up
    assert faults(model) == {}


def test_a_kept_segment_gets_another_interface() -> None:
    model = Model()
    make(model)
    converge(model, [])
    model.links.add(Link(0, "eth17", mtu=9100, up=True, carrier=True, ipv6=True))
    make(model, linuxbridge={"interface": "eth17"})
    converge(model, [])
    assert model.links.links["eth17"].master == SEGMENT and model.links.links["eth9"].master is None
    make(model, linuxbridge={})
    converge(model, [])
    assert model.ours() == [SEGMENT] and model.links.links["eth17"].master is None
    assert planned(model, []) == ()


@pytest.mark.parametrize("drift", ["gone", "down", "addresses", "enslaved", "small"])
def test_an_interface_that_cannot_be_kept_is_reported(drift: str) -> None:
    model = Model()
    make(model, mtu=9000)
    drift_of_interface(model, "eth9", drift)
    converge(model, [])
    assert "eth9" in faults(model)["net9"]
    assert planned(model, []) == (), "what can be done is done"


def test_a_name_of_ours_that_is_taken_is_reported_and_left() -> None:
    model = Model()
    make(model)
    take_name(model, SEGMENT)
    before = dict(model.links.links)
    converge(model, [])
    assert model.links.links == before
    assert faults(model) == {"net9": f"a device named {SEGMENT} exists and is not ours"}


def test_a_change_for_no_port_is_that_of_its_network() -> None:
    model = Model()
    make(model, mtu=9000)
    on_it = [Intent("p", make_spec(network={"type": "vlan", "physical_network": "net9", "vlan_id": 7}))]
    converge(model, on_it)
    model.links.set("eth9", master="")
    model.links.set(SEGMENT, up=False)
    seen = model.driver.observe(None, 1e9)
    repairs = [change for change in model.driver.plan(on_it, seen).changes if not change.ports]
    assert repairs and {change.physical_network for change in repairs} == {"net9"}
    model.host.networks.replace_stored({})
    model.links.delete(device_name(TAP, "p"))
    gone = model.driver.plan([], model.driver.observe(None, 1e9)).changes
    removed = {change.describe(): change.physical_network for change in gone if "npb" in change.describe()}
    assert removed and set(removed.values()) == {"net9"}


def test_what_others_have_on_the_bridge_of_a_network_is_reported() -> None:
    model = Model()
    assert model.driver.network_holders("net9") == []
    make(model)
    on_it = [Intent("p", make_spec(1500, "net9"))]
    converge(model, on_it)
    assert model.driver.network_holders("net9") == []
    model.links.add(Link(0, "extra0", mtu=1500, up=True, master=SEGMENT))
    model.links.ips[SEGMENT] = ("10.9.8.1/24",)
    assert model.driver.network_holders("net9") == ["device extra0", "address 10.9.8.1/24"]


def test_what_is_left_of_a_network_is_reported() -> None:
    model = Model()
    make(model)
    converge(model, [])
    model.links.add(Link(0, "extra0", mtu=1500, up=True, master=SEGMENT))
    model.host.networks.replace_stored({})
    converge(model, [])
    seen = model.driver.observe(None, 1e9)
    assert model.driver.network_remains("net9", seen) == [f"bridge {SEGMENT} with eth9, extra0"]
    model.links.delete("extra0")
    converge(model, [])
    assert model.driver.network_remains("net9", model.driver.observe(None, 1e9)) == []


def refused(model: Model, interface: str, keep: bool = True) -> str:
    """Why the network net9 cannot have an interface; empty if it can."""
    spec = PhysicalNetworkSpec.model_validate({"linuxbridge": {"interface": interface}, "keep": keep})
    try:
        model.driver.check_network("net9", spec)
    except (Conflict, InvalidRequest) as error:
        assert [each.field for each in error.errors] == ["linuxbridge.interface"] and error.fix
        return error.errors[0].message
    return ""


def test_an_interface_that_the_host_needs_is_refused_before_it_is_stored() -> None:
    model = Model()
    model.links.ips["eth9"] = ("192.0.2.1/24",)
    assert "eth9 has addresses (192.0.2.1/24)" in refused(model, "eth9")
    assert refused(model, "eth9", keep=False) == "", "VLANs and the host share a NIC"
    model.links.ips.clear()
    assert refused(model, "eth9") == "" == refused(model, "eth77"), "a NIC may come later"
    drift_of_interface(model, "eth9", "enslaved")
    assert refused(model, "eth9") == refused(model, "eth9", keep=False) == "eth9 is on theirs already"
    assert "theirs is a bridge" in refused(model, "theirs")
    model.links.add(Link(0, "lo", address="00:00:00:00:00:00"))
    assert "lo is the loopback interface" in refused(model, "lo")
    assert "a name of the agent's own devices" in refused(model, device_name(TAP, "p"))


def test_an_interface_that_is_kept_may_get_an_address_of_others() -> None:
    """The same PUT again says the same."""
    model = Model()
    make(model)
    converge(model, [])
    model.links.ips["eth9"] = ("192.0.2.1/24",)
    assert refused(model, "eth9") == ""

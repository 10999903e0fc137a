"""Bridges of flat networks whose names the caller chose, on a model of the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drivers.linuxbridge.bridge_names import NameBridge
from drivers.linuxbridge.segments import Segment
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Intent
from netplugin.host.link_values import Bridge, Link
from netplugin.host.names import TAP, device_name, provisional_mac
from tests.unit.drivers.linuxbridge.model import Model
from tests.unit.drivers.linuxbridge.strategies import converge, make_spec, planned

OWN, NAME = Segment("net9").bridge, "br-flat"
PORT = Intent("p", make_spec(1500, "net9"))
NPT = device_name(TAP, "p")


def network(**fields: Any) -> PhysicalNetworkSpec:
    spec = {"linuxbridge": {"interface": "eth9"}, "bridge": NAME, "keep": True, **fields}
    return PhysicalNetworkSpec.model_validate(spec)


def make(model: Model, **fields: Any) -> None:
    model.host.networks.replace_stored({"net9": network(**fields)})


def made(**fields: Any) -> Model:
    """With a bridge that has one port."""
    model = Model()
    make(model, **fields)
    assert converge(model, [PORT]).failed == {}
    return model


def faults(model: Model) -> dict[str, str]:
    seen = model.driver.observe(None, 1e9)
    return {name: fault.detail for name, fault in model.driver.network_faults(seen).items()}


def settled(model: Model, *intents: Intent) -> bool:
    return planned(model, list(intents)) == planned(model, list(intents), whole=False) == ()


def test_a_kept_bridge_has_the_name() -> None:
    model = Model()
    make(model)
    assert faults(model) == {"net9": f"bridge {NAME} is not there"}
    converge(model, [])
    bridge = model.links.links[NAME]
    assert bridge.altnames == (OWN,) and bridge.up and not bridge.ipv6
    assert model.links.members() == {NAME: {"eth9": 9100}}
    assert faults(model) == {} and planned(model, []) == ()
    make(model, keep=False)
    converge(model, [])
    assert model.ours() == [] and model.links.links["eth9"].master is None


@pytest.mark.parametrize("whole", [True, False])
def test_ports_come_and_go_on_it(whole: bool) -> None:
    model = Model()
    make(model, keep=False)
    result = converge(model, [PORT], whole=whole)
    assert model.links.links[NPT].master == NAME == model.links.links["eth9"].master
    assert result.observed["p"].details["bridge"] == NAME == model.driver.binding(PORT).bridge  # type: ignore[attr-defined]
    assert result.observed["p"].fault is None and settled(model, PORT)
    service = Intent("svc-0", make_spec(1500, "net9", device="dhcp0"))
    converge(model, [PORT, service], whole=whole)
    assert model.links.links["dhcp0"].master == NAME and settled(model, PORT, service)
    converge(model, [Intent("svc-0", None)], whole=whole)
    assert model.links.links["dhcp0"].master is None
    converge(model, [Intent("p", None)], whole=whole)
    assert model.ours() == [] and model.links.links["eth9"].master is None


def test_vlans_have_bridges_of_their_own() -> None:
    model = made()
    vlan = Intent("q", make_spec(network={"type": "vlan", "physical_network": "net9", "vlan_id": 7}))
    converge(model, [PORT, vlan])
    assert model.links.links[device_name(TAP, "q")].master == Segment("net9", 7).bridge


def test_what_others_take_from_it_comes_back() -> None:
    model = made()
    model.links.set("eth9", master="")
    model.links.set(NPT, master="theirs")
    converge(model, [PORT])
    assert model.links.links[NPT].master == NAME == model.links.links["eth9"].master
    model.links.delete(NAME)
    converge(model, [PORT])
    assert model.links.links[NPT].master == NAME == model.links.links["eth9"].master
    assert settled(model, PORT) and faults(model) == {}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("lost", ["name", "second name", "both"])
def test_it_gets_its_names_back(lost: str, whole: bool) -> None:
    model = made()
    index = model.links.links[NAME].index
    if lost != "name":
        model.links.links[NAME] = replace(model.links.links[NAME], altnames=())
    if lost != "second name":
        model.links.links[NAME] = replace(model.links.links[NAME], up=False)
        model.links.rename(NAME, "other0" if lost == "name" else OWN)
    assert NameBridge in map(type, planned(model, [PORT], whole=whole))
    converge(model, [PORT], whole=whole)
    bridge = model.links.links[NAME]
    assert (bridge.index, bridge.altnames, bridge.up) == (index, (OWN,), True)
    assert model.links.links[NPT].master == NAME and settled(model, PORT)


def test_a_renamed_bridge_stays_as_it_is_if_another_device_has_its_name() -> None:
    model = made()
    model.links.set(NAME, up=False)
    model.links.rename(NAME, "other0")
    model.links.add(Link(0, NAME, "veth"))
    assert isinstance(converge(model, [PORT]).failed["p"], Conflict)
    assert model.links.links["other0"].up and model.links.links[NPT].master == "other0"
    assert model.links.links[NAME].kind == "veth"


def test_an_agent_that_died_before_it_marked_the_bridge_goes_on_with_it() -> None:
    model = Model()
    make(model)
    model.links.add(Link(0, NAME, "bridge", address=provisional_mac(OWN), data=Bridge()))
    index = model.links.links[NAME].index
    converge(model, [PORT])
    assert model.links.links[NAME].index == index and model.links.links[NPT].master == NAME
    assert settled(model, PORT)


def test_a_name_of_others_is_refused_and_left_alone() -> None:
    model = Model()
    model.links.add(Link(0, NAME, "bridge", alias="an operator's", up=True, data=Bridge()))
    before = model.foreign()
    for name, kind in ((NAME, Conflict), ("eth9", Conflict), ("npb1", InvalidRequest), (OWN, InvalidRequest)):
        with pytest.raises(kind) as refused:
            model.driver.check_network("net9", network(bridge=name))
        assert [error.field for error in refused.value.errors] == ["bridge"]
    make(model)  # the bridge came after the call
    result = converge(model, [PORT])
    assert isinstance(result.failed["p"], Conflict) and NAME in result.failed["p"].detail
    assert NAME in faults(model)["net9"]
    converge(model, [Intent("p", None)])
    assert model.foreign() == before and model.ours() == []


def test_the_same_call_again_is_not_refused() -> None:
    model = made()
    model.driver.check_network("net9", network())
    model.links.links[NAME] = replace(model.links.links[NAME], altnames=())
    model.driver.check_network("net9", network())
    with pytest.raises(Conflict):
        model.driver.check_network("net8", network())


@pytest.mark.parametrize(("before", "after"), [(None, NAME), (NAME, None), ("br-old", NAME)])
def test_a_kept_bridge_without_ports_is_made_again_with_another_name(
    before: str | None, after: str | None
) -> None:
    model = Model()
    make(model, bridge=before)
    converge(model, [])
    make(model, bridge=after)
    converge(model, [])
    assert model.links.members() == {after or OWN: {"eth9": 9100}}
    assert len(model.ours()) == 1 and planned(model, []) == () and faults(model) == {}


def test_a_kept_bridge_gets_another_interface() -> None:
    model = Model()
    make(model)
    converge(model, [])
    model.links.add(Link(0, "eth17", mtu=9100, up=True, carrier=True, ipv6=True))
    make(model, linuxbridge={"interface": "eth17"})
    converge(model, [])
    assert model.links.members() == {NAME: {"eth17": 9100}} and planned(model, []) == ()


def test_a_bridge_keeps_its_name_under_ports_when_the_network_is_of_the_options() -> None:
    """These have no names for bridges."""
    model = made()
    model.host.networks.replace_stored({})
    model.configure(physical_interfaces={"net9": "eth9"})
    assert settled(model, PORT) and model.links.links[NPT].master == NAME
    converge(model, [Intent("p", None)])
    assert model.ours() == []


def test_what_is_on_a_bridge_is_found_by_either_name() -> None:
    model = made()
    model.driver.check_network("net9", network())  # its interface is on it already
    assert model.driver.network_holders("net9") == []
    model.links.add(Link(0, "extra0", mtu=1500, up=True, master=NAME))
    assert model.driver.network_holders("net9") == ["device extra0"]
    converge(model, [Intent("p", None)])
    model.host.networks.replace_stored({})
    converge(model, [])
    seen = model.driver.observe(None, 1e9)
    assert model.driver.network_remains("net9", seen) == [f"bridge {NAME} with eth9, extra0"]

"""Taps whose names the caller chose, on a model of the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivers.linuxbridge.segments import service_of
from drivers.linuxbridge.tap_commands import CreateTap, RemoveTap, RenameTap
from netplugin.api.errors import Conflict
from netplugin.backend import NAME_CLAIM, Claim, Intent
from netplugin.host.link_values import Link, TapUse
from netplugin.host.names import BRIDGE, TAP, TAP_GROUP, device_name
from netplugin.host.nftables import DeleteTable
from tests.unit.drivers.linuxbridge.model import Model
from tests.unit.drivers.linuxbridge.strategies import converge, make_spec, planned

NPT = device_name(TAP, "p")
DEVICE = "tap7"
NAMED = Intent("p", make_spec(port_name="vnic0"))


def test_the_tap_has_the_name_and_is_found_by_the_id() -> None:
    model = Model()
    result = converge(model, [NAMED, Intent("q", make_spec())], whole=False)
    tap = model.links.links["vnic0"]
    assert tap.altnames == (NPT,) and tap.group == TAP_GROUP and model.nft.filters("vnic0")
    assert result.observed["p"].details["device"] == "vnic0" == model.driver.binding(NAMED).device  # type: ignore[attr-defined]
    assert planned(model, [NAMED], whole=False) == planned(model, [NAMED]) == ()
    converge(model, [Intent("p", None)], whole=False)
    assert model.links.get("vnic0") is None and "vnic0" not in model.nft.maps["ports"]
    assert NPT not in model.nft.chains and device_name(TAP, "q") in model.nft.chains


def test_a_device_of_others_keeps_the_name() -> None:
    model = Model()
    theirs = Link(0, "vnic0", "tun", alias="an operator's", use=TapUse(persistent=True))
    model.links.add(theirs)
    before = model.foreign()
    result = converge(model, [NAMED, Intent("q", make_spec())])
    assert isinstance(result.failed["p"], Conflict) and "vnic0" in result.failed["p"].detail
    assert set(result.failed) == {"p"}
    converge(model, [Intent("p", None)], whole=False)  # as the agent does after a first PUT that failed
    assert model.foreign() == before and NPT not in model.nft.chains


@pytest.mark.parametrize("whole", [True, False])
def test_a_renamed_tap_gets_its_name_back(whole: bool) -> None:
    model = Model()
    converge(model, [NAMED])
    index = model.links.links["vnic0"].index
    model.links.rename("vnic0", "other0")
    assert RenameTap in map(type, planned(model, [NAMED], whole=whole))
    converge(model, [NAMED], whole=whole)
    assert model.links.links["vnic0"].index == index and planned(model, [NAMED]) == ()
    model.links.rename("vnic0", "other0")
    model.links.add(Link(0, "vnic0", "veth"))
    result = converge(model, [NAMED], whole=whole)
    assert isinstance(result.failed["p"], Conflict) and model.links.links["other0"].index == index


@pytest.mark.parametrize("whole", [True, False])
def test_a_tap_that_lost_its_second_name_is_the_same_tap(whole: bool) -> None:
    model = Model()
    converge(model, [NAMED])
    tap = model.links.links["vnic0"]
    model.links.links["vnic0"] = replace(tap, altnames=())
    converge(model, [NAMED], whole=whole)
    assert model.links.links["vnic0"] == tap and planned(model, [NAMED]) == ()
    converge(model, [Intent("q", make_spec(port_name="vnic1"))])
    model.links.links["vnic0"] = replace(tap, altnames=())
    result = converge(model, [Intent("r", make_spec(port_name="vnic0"))], whole=whole)
    assert isinstance(result.failed["r"], Conflict), "it is that of p"


def test_a_port_that_is_requested_again_by_another_name_is_made_again() -> None:
    model = Model()
    for spec, name in ((make_spec(), NPT), (NAMED.spec, "vnic0"), (make_spec(), NPT)):
        kinds = list(map(type, planned(model, [Intent("p", spec)])))
        assert CreateTap in kinds and (RemoveTap in kinds or not model.ours())
        converge(model, [Intent("p", spec)])
        assert [link.name for link in model.links.links.values() if link.kind == "tun"] == [name]
        assert list(model.nft.maps["ports"]) == [name]


def test_a_named_tap_counts_among_its_bridges_members() -> None:
    """Also while only another port is looked at."""
    model, bridge = Model(), device_name(BRIDGE, "net1")
    converge(model, [Intent("large", make_spec(9000, port_name="big0")), Intent("p", make_spec(1500))])
    converge(model, [Intent("p", None)], whole=False)
    assert model.links.links[bridge].mtu == 9000 and model.nft.filters("big0")
    converge(model, [Intent("large", None)], whole=False)
    assert model.ours() == [] and not model.nft.there


def test_the_name_is_claimed() -> None:
    driver, claim = Model().driver, Claim(NAME_CLAIM, "vnic0")
    seen = driver.observe(["p"], 1e12)
    assert driver.claims(NAMED, seen, {}) == (claim,)
    with pytest.raises(Conflict, match="is that of port q"):
        driver.claims(NAMED, seen, {claim: "q"})


def test_a_plug_after_a_flush_of_all_rules_leaves_a_named_tap_on_its_network() -> None:
    """It looks at its own port alone, and no rule names the tap any more."""
    model, bridge = Model(), device_name(BRIDGE, "net1")
    converge(model, [NAMED])
    tap = model.links.links["vnic0"]
    model.nft.do(DeleteTable())
    assert converge(model, [Intent("q", make_spec(mtu=1400))], whole=False).failed == {}
    assert model.links.links["vnic0"] == tap and model.links.links[bridge].mtu == 1500
    assert "vnic0" not in model.nft.maps["ports"], "it is no device of others, whose frames are dropped"


def test_a_look_at_another_port_does_not_read_a_named_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    """One netlink request for each of a thousand VMs would make every plug slow."""
    model = Model()
    converge(model, [NAMED, Intent("q", make_spec())])
    asked: list[str] = []
    get = model.links.get
    monkeypatch.setattr(model.links, "get", lambda name: (asked.append(name), get(name))[1])
    seen = model.driver.observe(["q"], 1e12)
    assert "vnic0" not in asked and seen.named_taps == {"vnic0"} and seen.foreign() == set()
    assert model.driver.observe(["p"], 1e12).names_of("p") == {NPT, "vnic0"}


def test_a_tap_does_not_become_a_service_port_of_the_same_name_nor_the_other_way_round() -> None:
    """As it is when the store was lost, and another program uses the names again."""
    model = Model()
    model.links.add(Link(0, DEVICE, "tun", mtu=2000, up=True, carrier=True, use=TapUse(persistent=True)))
    device = model.links.links[DEVICE]
    converge(model, [Intent("p", make_spec(device=DEVICE, vm_id="p"))])
    assert service_of(model.links.links[DEVICE])
    named = Intent("p", make_spec(port_name=DEVICE))
    assert isinstance(converge(model, [named]).failed["p"], Conflict)
    released = model.links.links[DEVICE]
    assert replace(released, alias=None) == device, "it is its owner's again"
    model.links.delete(DEVICE)
    assert converge(model, [named]).failed == {} and DEVICE not in model.nft.maps["services"]
    result = converge(model, [Intent("p", make_spec(device=DEVICE, vm_id="p"))])
    assert f"{DEVICE} is not on this host" in str(result.observed["p"].fault)
    assert model.links.get(DEVICE) is None, "the tap was the agent's"


def test_rules_of_a_port_that_nobody_knows_go_whatever_the_tap_is_called() -> None:
    """An entry goes before the chain that it leads to."""
    model = Model()
    converge(model, [NAMED, Intent("q", make_spec())])
    model.links.delete("vnic0")
    model.nft.rules[NPT] = []  # without its mark
    converge(model, [Intent("q", make_spec())])
    assert NPT not in model.nft.chains and list(model.nft.maps["ports"]) == [device_name(TAP, "q")]

"""Service ports on Linux bridges: devices of the host that the agent uses and never makes or deletes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drivers.linuxbridge.segments import PORT_MARK, Segment, ServiceMark, service_of
from drivers.linuxbridge.watch import _MOST_PASSED, LOST, LinkNews
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.host.link_values import Link, LinkEvent, PortOptions
from netplugin.host.links import Links
from netplugin.host.names import TAP, device_name
from netplugin.host.nftables import DeleteTable
from tests.unit.drivers.linuxbridge.model import Model
from tests.unit.drivers.linuxbridge.strategies import converge, make_spec, planned

DEVICE = "dhcp0"
BRIDGE = Segment("net1").bridge


def service(device: str = DEVICE, **fields: Any) -> PortSpec:
    return make_spec(**{"device": device, "vm_id": "svc", **fields})


def placed(**fields: Any) -> Model:
    model = Model()
    assert converge(model, [Intent("svc", service(**fields))]).failed == {}
    return model


def test_a_mark_is_of_the_device_that_it_names() -> None:
    mark = ServiceMark("svc", DEVICE, 1500)
    assert service_of(Link(1, DEVICE, alias=mark.alias)) == mark
    assert service_of(Link(1, DEVICE, alias=f"{mark.alias} store=abc/7")) == mark
    for name, alias in (("other0", mark.alias), (DEVICE, "an operator's"), (DEVICE, f"{mark.alias}x")):
        assert service_of(Link(1, name, alias=alias)) is None
    tap = device_name(TAP, "svc")
    assert service_of(Link(1, tap, alias=ServiceMark("svc", tap, 1500).alias)) is None


def test_the_device_keeps_what_is_its_owners() -> None:
    model = Model()
    before = model.links.links[DEVICE]
    converge(model, [Intent("svc", service(), stamp="store/1")])
    link = model.links.links[DEVICE]
    assert link.alias == f"netplugin-service-port=svc device={DEVICE} mtu=1500 store=store/1"
    assert replace(link, master=None, alias=None, port=PortOptions()) == before and link.master == BRIDGE
    binding = model.driver.binding(Intent("svc", service()))
    assert (binding.vif_type, binding.interface_xml) == ("device", "")
    converge(model, [Intent("svc", None)], whole=False)
    assert replace(model.links.links[DEVICE], alias=None) == before
    assert (
        model.tc.found[before.index].guard is None and not model.nft.there and BRIDGE not in model.links.links
    )


def test_a_vm_with_the_id_of_a_service_port_does_not_cost_it_its_device() -> None:
    """As it is when the store was lost, and another program uses the id again; and the other way round."""
    model = placed()
    tap = device_name(TAP, "svc")
    assert converge(model, [Intent("svc", make_spec())]).failed == {}
    assert model.links.links[tap].master == BRIDGE
    assert DEVICE in model.links.links and model.links.links[DEVICE].master is None
    assert DEVICE not in {**model.nft.maps["ports"], **model.nft.maps["services"]}
    assert converge(model, [Intent("svc", service())]).failed == {}
    assert tap not in model.links.links and model.links.links[DEVICE].master == BRIDGE
    assert model.nft.maps["ports"].keys() == {DEVICE}


def test_a_renamed_device_is_no_port_any_more() -> None:
    model = placed()
    renamed = replace(model.links.links.pop(DEVICE), name="other0")
    model.links.links["other0"] = renamed
    result = converge(model, [Intent("svc", service())])
    assert f"{DEVICE} is not on this host" in str(result.observed["svc"].fault)
    assert model.links.links["other0"] == renamed


@pytest.mark.parametrize("whole", [True, False])
def test_a_port_with_a_smaller_mtu_does_not_make_its_bridge_smaller(whole: bool) -> None:
    model = placed()
    small = Intent("p", make_spec(mtu=1400))
    converge(model, [small, Intent("svc", service())] if whole else [small], whole=whole)
    assert model.links.links[BRIDGE].mtu == 1500
    assert planned(model, [small, Intent("svc", service())]) == ()


def test_a_port_whose_device_is_not_there_yet_waits_for_it() -> None:
    model = Model()
    model.links.delete(DEVICE)
    desired = [Intent("svc", service())]
    result = converge(model, desired)
    assert result.failed == {} and f"{DEVICE} is not on this host" in str(result.observed["svc"].fault)
    assert converge(model, desired, whole=False).changes == () and BRIDGE not in model.links.links
    model.links.add(Link(0, DEVICE, "veth", mtu=2000, up=True, carrier=True))
    result = converge(model, desired, whole=False)
    assert result.failed == {} and result.observed["svc"].fault is None
    assert model.links.links[DEVICE].master == BRIDGE


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"up": False}, f"ip link set {DEVICE} up"),
        ({"carrier": False}, "other end"),
        ({"mtu": 1400}, "MTU 1400, and its network 1500"),
    ],
)
def test_what_is_wrong_with_the_device_is_reported_and_left_to_its_owner(
    fields: dict[str, Any], words: str
) -> None:
    model = placed()
    model.links.links[DEVICE] = replace(model.links.links[DEVICE], **fields)
    result = converge(model, [Intent("svc", service())])
    seen = result.observed["svc"]
    assert words in str(seen.fault or seen.impaired) and result.changes == ()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"master": "theirs"}, Conflict, "on bridge theirs"),
        ({"alias": "an operator's"}, Conflict, "an operator's"),
        ({"alias": ServiceMark("other", DEVICE, 1500).alias}, Conflict, "service port other"),
        ({"kind": ""}, InvalidRequest, "no virtual device"),
        ({"mtu": 1400}, InvalidRequest, "1400"),
    ],
)
def test_what_others_use_is_refused_before_anything_is_changed(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Also if it came to be so after the call was accepted: then the device is left as it is."""
    model = Model()
    model.driver.validate(service())
    model.links.links[DEVICE] = replace(model.links.links[DEVICE], **fields)
    before = model.foreign() | {DEVICE: model.links.links[DEVICE]}
    with pytest.raises(error, match=words):
        model.driver.validate(service())
    if error is Conflict:
        assert words in converge(model, [Intent("svc", service())]).failed["svc"].detail
        assert model.foreign() | {DEVICE: model.links.links[DEVICE]} == before
    with pytest.raises(InvalidRequest, match="physical_interfaces"):
        model.driver.validate(service("eth2"))


def test_the_same_device_is_accepted_again_for_its_port() -> None:
    model = placed()
    model.driver.validate(service(port_security={"enabled": False}))
    with pytest.raises(Conflict, match="service port svc"):
        model.driver.validate(service(vm_id="other"))


@pytest.mark.parametrize("whole", [True, False])
def test_a_device_that_others_put_on_a_bridge_sends_nothing(whole: bool) -> None:
    """Until it is a service port, and not where others use it."""
    model, vm = Model(), Intent("p", make_spec())
    converge(model, [vm])
    model.links.links[DEVICE] = replace(model.links.links[DEVICE], master=BRIDGE)
    assert converge(model, [vm], whole=whole).failed == {}
    assert model.nft.maps["ports"][DEVICE] is None and planned(model, [vm], whole=whole) == ()
    assert model.links.links[DEVICE].alias is None
    both = [vm, Intent("svc", service())]
    converge(model, both, whole=whole)
    assert model.nft.maps["ports"][DEVICE] == device_name(TAP, "svc")
    converge(model, [vm, Intent("svc", None)], whole=whole)
    model.links.links[DEVICE] = replace(model.links.links[DEVICE], master=BRIDGE)
    converge(model, [vm], whole=whole)
    model.links.links[DEVICE] = replace(model.links.links[DEVICE], master="theirs")
    converge(model, [vm])
    assert DEVICE not in model.nft.maps["ports"]


def test_a_plug_after_a_flush_of_all_rules_leaves_a_service_on_its_network() -> None:
    """It looks at its own port alone, and no rule names the device any more."""
    model = placed()
    model.nft.do(DeleteTable())
    assert converge(model, [Intent("p", make_spec(mtu=1400))], whole=False).failed == {}
    assert DEVICE not in model.nft.maps["ports"] and model.links.links[BRIDGE].mtu == 1500


def _event(
    name: str = DEVICE, alias: str | None = None, master: str | None = None, gone: bool = False
) -> LinkEvent:
    return LinkEvent(Link(4, name, up=True, alias=alias, master=master), gone)


def test_the_watch_wakes_for_devices_whose_names_the_agent_did_not_choose() -> None:
    def woken(name: str, alias: str | None = None, master: str | None = None) -> list[frozenset[str] | None]:
        news = LinkNews(frozenset, Links())
        assert news.observed(0, frozenset({DEVICE}), frozenset({BRIDGE})) == []
        return [wake.ports for wake in news.wakes_of(_event(name, alias, master), frozenset())]

    assert woken(DEVICE, ServiceMark("svc", DEVICE, 1500).alias + " store=a/1") == [frozenset({"svc"})]
    assert woken(DEVICE) == woken("any0", master=BRIDGE) == [None]
    assert woken("any0") == woken("any0", master="br0") == []


@pytest.mark.parametrize(
    "event", [_event(), _event(gone=True), _event(master="br0"), _event("any0", master=BRIDGE)]
)
def test_an_event_during_an_observation_is_decided_by_what_it_found(event: LinkEvent) -> None:
    """Otherwise a device that leaves a bridge as the agent looks keeps the rules of its place there."""
    news, seen = LinkNews(frozenset, Links()), (frozenset({DEVICE}), frozenset({BRIDGE}))
    before = news.number
    assert news.wakes_of(event, frozenset()) == []
    assert news.wakes_of(_event("other0"), frozenset()) == []
    during = news.number
    (wake,) = news.observed(before, *seen)
    assert event.link.name in wake.reason and wake.ports is None
    assert news.observed(during, *seen) == [], "an event that is older than an observation is in it"


def test_a_carrier_that_changes_during_an_observation_counts_for_what_it_found_alone() -> None:
    """A VM that starts or stops changes the carrier of its tap, and nothing that the agent sets."""
    tap = _event(device_name(TAP, "p"), f"{PORT_MARK}p", BRIDGE)
    news, seen = LinkNews(frozenset, Links()), (frozenset({DEVICE}), frozenset({BRIDGE}))
    for event in (_event(), tap):
        news.wakes_of(event, frozenset())
    before = news.number
    for event in (_event(), tap):
        assert news.wakes_of(LinkEvent(replace(event.link, carrier=True)), frozenset()) == []
    (wake,) = news.observed(before, *seen)
    assert DEVICE in wake.reason
    assert [w.reason for w in news.wakes_of(_event(), frozenset())] == [wake.reason], (
        "and from now on at once"
    )
    assert news.wakes_of(tap, frozenset()) == []


def test_more_events_than_are_kept_wake_a_look_at_everything() -> None:
    news = LinkNews(frozenset, Links())
    for i in range(_MOST_PASSED + 1):
        assert news.wakes_of(_event(f"other{i}"), frozenset()) == []
    assert news.observed(0, frozenset(), frozenset()) == [LOST]
    assert news.observed(1, frozenset(), frozenset()) == []


def test_the_changes_of_the_agent_itself_wake_nobody_later() -> None:
    news = LinkNews(frozenset, Links())
    assert news.wakes_of(_event(), frozenset({DEVICE})) == []
    assert news.observed(0, frozenset({DEVICE}), frozenset()) == []

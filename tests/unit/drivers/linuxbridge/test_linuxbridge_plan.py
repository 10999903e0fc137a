"""The driver on a model of the kernel: properties that hold of any requests on any host."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivers.linuxbridge.commands import SetRate, SetRedirect
from drivers.linuxbridge.guard import NOTHING, port_guard
from drivers.linuxbridge.segments import Segment, bridge_mark, is_ours
from drivers.linuxbridge.tap_commands import SetTap
from netplugin.api.models import PortSpec
from netplugin.backend import Intent, Overlay
from netplugin.host.link_values import Vlan, Vxlan
from netplugin.host.names import SHAPER, TAP, TAP_GROUP, device_name
from netplugin.host.tc import Tbf
from netplugin.host.vxlan_filter import VxlanKey
from tests.unit.drivers.linuxbridge.model import DEVICES, INTERFACES, LOCAL_IP, Model
from tests.unit.drivers.linuxbridge.strategies import (
    converge,
    hosts,
    intent_lists,
    planned,
    queueing,
)

many = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def check(model: Model, port_id: str, spec: PortSpec) -> None:
    """Everything that a spec says is so, looked at without the driver's own eyes."""
    link = model.links.get(spec.device or device_name(TAP, port_id))
    assert link is not None and link.name == (spec.device or spec.port_name or device_name(TAP, port_id))
    assert link.group == TAP_GROUP or spec.port_name is None
    mtu = spec.network.mtu
    bridge = model.links.links[str(link.master)]
    assert is_ours(link) and model.nft.filters(link.name)
    assert bridge.up and bridge.mtu >= mtu
    assert spec.device or (link.up and link.mtu == mtu)
    assert bridge.name == Segment.of(spec.network).bridge and not bridge.ipv6
    assert queueing(model, link.name).guard == port_guard(spec)
    assert queueing(model, bridge.name).guard == NOTHING
    macs = {spec.mac, *(a.mac for a in spec.port_security.allowed_addresses if a.mac)}
    alone = spec.port_security.enabled and macs == {spec.mac}
    at = model.fdb.holder(link.index, spec.mac)
    assert at is not None if alone else at != link.index
    assert link.port.learning == (at != link.index)
    rates = {
        link.name: spec.qos.ingress_kbps,
        device_name(SHAPER, port_id): spec.qos.egress_kbps,
    }
    for name, kbps in rates.items():
        assert queueing(model, name).root == (Tbf.of(kbps, mtu + 18) if kbps else None)
    shaper = model.links.links.get(device_name(SHAPER, port_id))
    turned = queueing(model, link.name).redirect
    assert turned == (shaper.index if shaper and spec.qos.egress_kbps else None)


def check_way_out(model: Model, spec: PortSpec, overlay: Overlay | None) -> None:
    network = spec.network
    members = model.links.members()[Segment.of(network).bridge]
    interface = INTERFACES.get(network.physical_network or "")
    if network.type == "flat":
        assert not interface or interface in members
    elif interface or overlay:
        device = model.links.links[Segment.of(network).device]
        assert device.name in members and device.up and not device.ipv6
        assert is_ours(device) and device.alias
        if overlay is None:
            assert device.data == Vlan(str(interface), network.vlan_id or 0)
        else:
            assert device.data == Vxlan(overlay.spec.vni, LOCAL_IP, 4789)
            peers = set(overlay.spec.peers) - {LOCAL_IP}
            assert model.fdb.peers(device.index) == peers and device.mtu == overlay.spec.mtu
            sources, key = model.vxlan.found, VxlanKey(4789, overlay.spec.vni)
            assert sources is not None and sources.sound and key in sources.networks
            assert sources.peers_of(key) == peers


def check_foreign(model: Model) -> None:
    """What others put on a bridge of ours sends nothing; uplinks do."""
    ports, veth = model.nft.maps.get("ports", {}), model.links.links.get("veth0")
    if model.nft.there and veth and is_ours(model.links.links[str(veth.master)]):
        assert ports.get("veth0", "") is None
    uplinks = [name for name, link in model.links.links.items() if link.kind in ("vlan", "vxlan")]
    assert not ports.keys() & {*filter(None, INTERFACES.values()), *uplinks}


def kept_by_others(model: Model) -> set[str | None]:
    """A bridge that another program's device is on stays, and its uplink with it."""
    links = model.links.links
    # A service port's device without its mark and without rules cannot be told from one of others.
    theirs = {"veth0", *(name for name in DEVICES.values() if name in links and not is_ours(links[name]))}
    kept = {link.master for link in links.values() if link.name in theirs}
    on_them = {link.name for link in links.values() if link.master in kept - {None}}
    marks = [mark for name in kept if name and (mark := bridge_mark(links[name].alias))]
    return {*kept, *on_them, *(segment.device for segment, _ in marks)}


@many
@given(hosts(), intent_lists(), st.booleans())
def test_planning_after_applying_gives_nothing(model: Model, desired: list[Intent], whole: bool) -> None:
    result = converge(model, desired, whole=whole)
    assert planned(model, desired, whole=whole) == ()
    if any(intent.spec and intent.port_id not in result.failed for intent in desired):
        check_foreign(model)
    for intent in desired:
        port_id, spec = intent.port_id, intent.spec
        if port_id in result.failed:
            continue
        if spec is None:
            for name in (device_name(TAP, port_id), device_name(SHAPER, port_id)):
                found = model.links.get(name)
                assert found is None or not is_ours(found)
            assert device_name(TAP, port_id) not in model.nft.chains
            continue
        if spec.device not in (None, *model.links.links):
            assert "not on this host" in str(result.observed[port_id].fault)
            continue
        check(model, port_id, spec)
        if result.observed[port_id].fault is None:
            check_way_out(model, spec, intent.overlay)


@many
@given(hosts(), intent_lists(), st.randoms())
def test_the_order_of_intents_does_not_matter(model: Model, desired: list[Intent], random: Any) -> None:
    shuffled = list(desired)
    random.shuffle(shuffled)
    assert planned(model, desired) == planned(model, shuffled)


@many
@given(hosts(), intent_lists(), st.booleans())
def test_what_is_not_ours_is_never_changed(model: Model, desired: list[Intent], whole: bool) -> None:
    before = model.foreign()
    converge(model, desired, whole=whole)
    assert model.foreign() == before


@many
@given(hosts(), intent_lists())
def test_a_partial_look_leaves_the_other_ports_alone(model: Model, desired: list[Intent]) -> None:
    names = {device_name(prefix, intent.port_id) for intent in desired for prefix in (TAP, SHAPER)}
    names |= {DEVICES[intent.port_id] for intent in desired if intent.port_id in DEVICES}

    def others() -> dict[str, Any]:
        return {
            n: (link, model.nft.rules.get(n), queueing(model, n))
            for n, link in model.links.links.items()
            if (n in DEVICES.values() or n.startswith((TAP, SHAPER)) or link.altnames)
            and not names & {n, *link.altnames}
        }

    before = others()
    converge(model, desired, whole=False)
    assert others() == before


@many
@given(hosts(), intent_lists(), st.booleans(), st.integers(0, 40))
def test_what_was_cut_off_is_finished(model: Model, desired: list[Intent], whole: bool, stage: int) -> None:
    """An agent that dies between any two changes; the next looks at everything."""
    model.driver.apply(planned(model, desired, whole=whole)[:stage], time.monotonic() + 60)
    result = converge(model, desired)
    assert planned(model, desired) == ()
    for intent in desired:
        gone = intent.spec and intent.spec.device not in (None, *model.links.links)
        if intent.spec is not None and intent.port_id not in result.failed and not gone:
            check(model, intent.port_id, intent.spec)


@many
@given(hosts(), intent_lists(), st.integers(0, 40))
def test_what_was_cut_off_can_be_given_up(model: Model, desired: list[Intent], stage: int) -> None:
    """As an agent does that could not make a port: it looks at that port alone."""
    orphans = model.driver.observe(None, time.monotonic() + 60).ports
    converge(model, [Intent(port_id, None) for port_id in orphans])
    model.driver.apply(planned(model, desired)[:stage], time.monotonic() + 60)
    converge(model, [Intent(intent.port_id, None) for intent in desired], whole=False)
    assert set(model.ours()) <= kept_by_others(model)


@many
@given(hosts())
def test_removing_all_leaves_no_trace(model: Model) -> None:
    orphans = model.driver.observe(None, time.monotonic() + 60).ports
    converge(model, [Intent(port_id, None) for port_id in orphans])
    assert set(model.ours()) <= kept_by_others(model)
    taken = {n for n, link in model.links.links.items() if n.startswith(TAP) and link.master}
    assert model.nft.there == bool(taken)


@many
@given(hosts(), intent_lists(), st.booleans())
def test_a_tap_is_put_to_use_after_its_rates_are_set(
    model: Model, desired: list[Intent], whole: bool
) -> None:
    changes = planned(model, desired, whole=whole)
    opened = {ch.tap.port_id: n for n, ch in enumerate(changes) if isinstance(ch, SetTap)}
    for place, change in enumerate(changes):
        if isinstance(change, SetRate | SetRedirect):
            assert place < opened.get(change.ports[0], len(changes))

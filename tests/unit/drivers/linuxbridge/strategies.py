"""Any requests on any host: networks of each type, rates, filters, and drift of every kind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from agents.ports.converge import Converged
from drivers.linuxbridge.guard import NOTHING
from drivers.linuxbridge.segments import PORT_MARK
from netplugin.api.models import NetworkSpec, PortSpec, Qos
from netplugin.backend import Change, Intent, Overlay
from netplugin.host.link_values import Bridge, Link, PortOptions, TapUse, Vlan, Vxlan
from netplugin.host.names import BRIDGE, SHAPER, TAP, UPLINK, VXLAN, device_name
from netplugin.host.nftables import AddElement, Chain, DeleteTable, SetChain, base_chain
from netplugin.host.tc import Queueing, Tbf
from netplugin.host.vxlan_filter import VxlanKey, VxlanSources
from tests.lab.loop import converge_alone
from tests.unit.drivers.linuxbridge.model import (
    DEVICES,
    FIRST_RULE,
    INTERFACES,
    LOCAL_IP,
    UNDERLAY,
    Model,
)

IDS = [*(f"port-{n}" for n in range(6)), *DEVICES]
FLATS = [{"type": "flat", "physical_network": name} for name in INTERFACES]
VLANS = [
    {"type": "vlan", "physical_network": name, "vlan_id": tag}
    for name in ("net1", "net2", "net4")
    for tag in (7, 8)
]
VXLANS = [{"type": "vxlan", "network_id": name, "mtu": 1450} for name in ("blue", "red")]
VNIS = {"blue": 5001, "red": 5002}
PEERS = ["192.0.2.1", "192.0.2.2", "192.0.2.3", LOCAL_IP]
ADDRESSES: list[list[dict[str, str]]] = [
    [],
    [{"ip": "10.0.0.5"}],
    [{"ip": "10.0.0.0/28"}, {"ip": "2001:db8::5"}],
    [{"ip": "10.0.0.7", "mac": "52:54:00:77:77:77"}],
]
#: Options of bridge ports that others have set.
OTHERS = frozenset({"hairpin", "isolated"})
TAP_DRIFT = (
    "none gone mtu down free ipv6 queues kind flushed unlinked extra elsewhere rate norate "
    "unturned turned unguarded otherguard learning released renamed group address opened"
).split()
SERVICE_DRIFT = "none gone anew free elsewhere unmarked down small unguarded otherguard learning".split()
DEVICE_DRIFT = (
    "none gone mtu down ipv6 newborn options rate norate free peers unguarded limitless port address"
).split()
TABLE_DRIFT = "none gone flushed hook stray unmapped unlisted".split()
SOURCES_DRIFT = "none gone unsound stranger stray".split()
INTERFACE_DRIFT = "none none none gone down addresses enslaved small dead port".split()


def make_spec(mtu: int = 1500, network: Any = "net1", queues: int = 1, **fields: Any) -> PortSpec:
    """``network`` is the name of a flat one, or all of it."""
    if isinstance(network, str):
        network = {"type": "flat", "physical_network": network}
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": "52:54:00:00:00:01",
            "backend": "linuxbridge",
            "network": {"mtu": mtu, **network},
            "queues": queues,
            **fields,
        }
    )


def make_overlay(network_id: str, peers: Sequence[str] = (), **fields: Any) -> Overlay:
    spec = {"type": "vxlan", "vni": VNIS[network_id], "peers": peers, **fields}
    return Overlay(network_id, NetworkSpec.model_validate(spec), 1)


def make_intent(port_id: str, spec: PortSpec | None, overlays: dict[str, Overlay] | None = None) -> Intent:
    overlay_id = spec.overlay_id if spec else None
    known = overlays or {name: make_overlay(name) for name in VNIS}
    return Intent(port_id, spec, overlay=known[overlay_id] if overlay_id else None)


qos = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from([100, 100_000]) for name in ("ingress_kbps", "egress_kbps")}
)
security = st.fixed_dictionaries(
    {"enabled": st.booleans(), "allowed_addresses": st.sampled_from(ADDRESSES)},
    optional={"roles": st.sampled_from([["router"], ["router", "dhcp_server"]])},
)
specs = st.builds(
    make_spec,
    mtu=st.sampled_from([1500, 1400, 9000]),
    network=st.sampled_from([*FLATS, *VLANS, *VXLANS]),
    queues=st.sampled_from([1, 4]),
    port_security=security,
    qos=qos,
)


def as_service(port_id: str, spec: PortSpec | None) -> PortSpec | None:
    """The spec of a service port, if the port is one."""
    if spec is None or port_id not in DEVICES:
        return spec
    changes = {"device": DEVICES[port_id], "qos": Qos(), "queues": 1}
    return spec.model_copy(update=changes)


@st.composite
def intent_lists(draw: st.DrawFn) -> list[Intent]:
    desired = draw(st.dictionaries(st.sampled_from(IDS), st.one_of(st.none(), specs)))
    desired = {port_id: as_service(port_id, spec) for port_id, spec in desired.items()}
    peers = st.lists(st.sampled_from(PEERS), unique=True)
    overlays = {name: make_overlay(name, draw(peers)) for name in VNIS}
    named = draw(st.sets(st.sampled_from(IDS)))
    for port_id, spec in desired.items():
        if spec is not None and spec.device is None and port_id in named:
            desired[port_id] = spec.model_copy(update={"port_name": f"nic.{port_id}"})
    return [make_intent(port_id, spec, overlays) for port_id, spec in desired.items()]


@st.composite
def hosts(draw: st.DrawFn) -> Model:
    """A host with ports of ours, with what is not ours, and with drift of every kind."""
    model = Model()
    converge(model, draw(intent_lists()))
    for prefix, names in (
        (TAP, IDS),
        (SHAPER, IDS),
        (BRIDGE, ["net1", "net2:7", "vxlan/blue"]),
        (UPLINK, ["net2:7"]),
        (VXLAN, ["vxlan/blue"]),
    ):
        if draw(st.integers(0, 4)) == 0:
            take_name(model, device_name(prefix, draw(st.sampled_from(names))))
    for name in list(model.links.links):
        if name not in model.links.links:
            continue  # it went with another one
        if (model.links.links[name].alias or "").startswith(PORT_MARK):
            drift_of_tap(model, name, draw(st.sampled_from(TAP_DRIFT)))
        elif name in DEVICES.values():
            drift_of_service(model, name, draw(st.sampled_from(SERVICE_DRIFT)))
        elif name.startswith((BRIDGE, UPLINK, VXLAN, SHAPER)):
            drift_of_device(model, name, draw(st.sampled_from(DEVICE_DRIFT)))
        elif name in ("eth2", "eth3", "bond0", UNDERLAY):
            drift_of_interface(model, name, draw(st.sampled_from(INTERFACE_DRIFT)))
    drift_of_table(model, draw(st.sampled_from(TABLE_DRIFT)))
    drift_of_sources(model, draw(st.sampled_from(SOURCES_DRIFT)))
    bridges = [n for n, link in model.links.links.items() if link.kind == "bridge"]
    if draw(st.booleans()):
        veth = Link(0, "veth0", "veth", up=True, master=draw(st.sampled_from(bridges)))
        model.links.add(veth)
    foreign = Vlan("eth2", 8)
    if draw(st.integers(0, 4)) == 0 and foreign not in [d.data for d in model.links.links.values()]:
        model.links.add(Link(0, "eth2.8", "vlan", up=True, data=foreign))
    return model


def take_name(model: Model, name: str) -> None:
    if model.links.get(name) is None:
        alias, address = "an operator's", "02:00:00:00:00:01"
        model.links.add(Link(0, name, "bridge", alias=alias, address=address, data=Bridge()))


def drift_of_tap(model: Model, name: str, what: str) -> None:
    link, nft = model.links.links[name], model.nft
    chain = next(each for each in (name, *link.altnames) if each.startswith(TAP))
    changed: dict[str, dict[str, Any]] = {
        "mtu": {"mtu": 576},
        "down": {"up": False},
        "free": {"master": None},
        "ipv6": {"ipv6": True},
        "group": {"group": 7},
        "queues": {"multi_queue": not link.multi_queue},
        "kind": {"kind": "dummy"},
        "learning": {"port": PortOptions(True, None, OTHERS)},
        "address": {"address": "52:54:00:00:00:02"},
        "opened": {"use": TapUse(1000, None, False)},
    }
    if what == "gone":
        model.links.delete(name)
    elif what in changed:
        if what == "free":
            model.fdb.unplugged(link)
        model.links.links[name] = replace(link, **changed[what])
    elif what in ("rate", "norate"):
        model.tc.set_root(link.index, Tbf.of(77, 1518) if what == "rate" else None)
    elif what == "unguarded":
        model.tc.set_guard(link.index, None)
    elif what == "otherguard":
        model.tc.set_guard(link.index, NOTHING)
    elif what == "released":
        model.fdb.unplugged(link)
    elif what in ("turned", "unturned"):
        model.tc.set_redirect(link.index, 999 if what == "turned" else None)
    elif what == "renamed" and link.altnames:
        model.links.rename(name, name.replace("nic", "other"))
    elif chain not in nft.rules or what == "renamed":
        return
    elif what == "flushed":
        nft.rules[chain].clear()
    elif what == "unlinked":
        del nft.maps["ports"][name]
    elif what == "extra":
        nft.rules[chain].insert(0, FIRST_RULE)
    elif what == "elsewhere":
        nft.maps["ports"][name] = None


def drift_of_service(model: Model, name: str, what: str) -> None:
    """Of the device of a service port, which its owner may change."""
    link = model.links.links[name]
    changed: dict[str, dict[str, Any]] = {
        "free": {"master": None},
        "elsewhere": {"master": "theirs"},
        "unmarked": {"alias": None},
        "down": {"up": False},
        "small": {"mtu": 1450},
        "learning": {"port": PortOptions(True, None, OTHERS)},
    }
    if what == "elsewhere" and link.master is None:
        return  # it was put there before it was a port: such a device is refused
    if what in ("gone", "anew"):
        model.links.delete(name)
        if what == "anew":
            model.links.add(Link(0, name, "veth", mtu=2000, up=True, carrier=True, ipv6=True))
    elif what in changed:
        if what in ("free", "elsewhere"):
            model.fdb.unplugged(link)
        model.links.links[name] = replace(link, **changed[what])
    elif what in ("unguarded", "otherguard"):
        model.tc.set_guard(link.index, NOTHING if what == "otherguard" else None)


def drift_of_device(model: Model, name: str, what: str) -> None:
    """Of a bridge, an uplink or a shaper."""
    link = model.links.links[name]
    if not (link.alias or "").startswith("netplugin-"):
        return
    changed: dict[str, dict[str, Any]] = {
        "mtu": {"mtu": 576},
        "down": {"up": False},
        "ipv6": {"ipv6": True},
        "newborn": {"alias": None},
        "options": {"data": _other(link)},
        "free": {"master": None},
        "port": {"port": PortOptions(False, None, OTHERS)},
        "address": {"address": "52:54:00:00:00:02"},
    }
    if isinstance(link.data, Bridge):
        changed["limitless"] = {"data": replace(link.data, fdb_max_learned=None)}
    if what == "gone":
        model.links.delete(name)
    elif what in changed:
        model.links.links[name] = replace(link, **changed[what])
    elif what == "unguarded" and link.kind == "bridge":
        model.tc.set_guard(link.index, None)
    elif what in ("rate", "norate") and link.kind == "ifb":
        model.tc.set_root(link.index, Tbf.of(77, 1518) if what == "rate" else None)
    elif what == "peers" and link.kind == "vxlan":
        model.fdb.entries[link.index] = {"192.0.2.2", "192.0.2.99"}


def _other(link: Link) -> Any:
    match link.data:
        case Bridge():
            return Bridge(stp_state=1, forward_delay=1500, group_fwd_mask=0xFFF8, ageing_time=0)
        case Vlan():
            return replace(link.data, id=4000)
        case Vxlan():
            return replace(link.data, vni=4000, learning=False)
    return link.data


def drift_of_interface(model: Model, name: str, what: str) -> None:
    link = model.links.links[name]
    changed: dict[str, dict[str, Any]] = {
        "down": {"up": False},
        "enslaved": {"master": "theirs"},
        "small": {"mtu": 1450},
        "port": {"port": PortOptions(False, None, OTHERS)},
    }
    if what == "gone":
        model.links.delete(name)
    elif what == "addresses":
        model.links.ips[name] = ("192.0.2.1/24", *model.links.ips.get(name, ()))
    elif what == "dead" and name in model.links.bonds:
        members = model.links.bonds[name]
        model.links.bonds[name] = tuple(replace(m, state="down") for m in members)
    elif what in changed:
        model.links.links[name] = replace(link, **changed[what])


def drift_of_sources(model: Model, what: str) -> None:
    found = model.vxlan.found
    if found is None or what == "none":
        return
    stray = VxlanKey(4789, 4000)
    model.vxlan.found = {
        "gone": None,
        "unsound": replace(found, sound=False),
        "stranger": replace(found, peers=found.peers | {(key, "192.0.2.99") for key in found.networks}),
        "stray": VxlanSources(True, found.networks | {stray}, found.peers | {(stray, "192.0.2.99")}),
    }[what]


def drift_of_table(model: Model, what: str) -> None:
    nft = model.nft
    if not nft.there:
        return
    if what == "gone":
        nft.do(DeleteTable())
    elif what == "flushed":
        nft.rules["prerouting"].clear()
    elif what == "hook":
        nft.chains["input"] = replace(nft.chains["input"], base=base_chain("input", 300).base)
    elif what == "stray":
        name = "npt0123456789a"
        nft.commit([SetChain(name, Chain()), AddElement("ports", name, name)], deadline=0)
    elif what == "unmapped":
        nft.maps["ports"].clear()
    elif what == "unlisted":
        nft.maps.get("services", {}).clear()


def converge(model: Model, desired: Sequence[Intent], *, whole: bool = True) -> Converged:
    """The agent's own loop; nothing may fail but what the plan refuses."""
    result = converge_alone(model.driver, desired, whole=whole)
    for error in result.failed.values():
        assert error.code in ("conflict", "backend_unavailable"), str(error)
    return result


def planned(model: Model, desired: Sequence[Intent], *, whole: bool = True) -> tuple[Change, ...]:
    ids = None if whole else [intent.port_id for intent in desired]
    return model.driver.plan(desired, model.driver.observe(ids, time.monotonic() + 60)).changes


def queueing(model: Model, name: str) -> Queueing:
    link = model.links.links.get(name)
    return model.tc.found.get(link.index, Queueing()) if link else Queueing()

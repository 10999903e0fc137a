"""The driver on a model of the kernel: properties that hold of any wishes on any host."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.converge import Converged, Stopwatch
from agents.converge import converge as converge_with
from drivers.linuxbridge.changes import Bridge
from netplugin.backend import Change, Intent
from netplugin.host.links import Link
from netplugin.host.names import BRIDGE, TAP, device_name
from netplugin.models import PortSpec
from tests.unit.linuxbridge.model import FIRST_RULE, MARKS, Model

IDS = [f"port-{n}" for n in range(6)]
NETWORKS = ["net1", "net2", "net3"]
ADDRESSES: list[list[dict[str, str]]] = [
    [],
    [{"ip": "10.0.0.5"}],
    [{"ip": "10.0.0.0/28"}, {"ip": "2001:db8::5"}],
    [{"ip": "10.0.0.7", "mac": "52:54:00:77:77:77"}],
]
TAP_DRIFT = "none gone mtu down free ipv6 queues kind flushed unlinked extra elsewhere".split()
BRIDGE_DRIFT = "none gone mtu down ipv6 options newborn unplugged".split()
TABLE_DRIFT = "none gone flushed hook stray unmapped".split()
INTERFACE_DRIFT = "none none none gone down addresses enslaved small".split()

many = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def make_spec(mtu: int = 1500, network: str = "net1", queues: int = 1, **security: Any) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": "52:54:00:00:00:01",
            "backend": "linuxbridge",
            "network": {"type": "flat", "physical_network": network, "mtu": mtu},
            "queues": queues,
            "port_security": security,
        }
    )


specs = st.builds(
    make_spec,
    mtu=st.sampled_from([1500, 1400, 9000]),
    network=st.sampled_from(NETWORKS),
    queues=st.sampled_from([1, 4]),
    enabled=st.booleans(),
    allowed_addresses=st.sampled_from(ADDRESSES),
)
wishes = st.dictionaries(st.sampled_from(IDS), st.one_of(st.none(), specs)).map(
    lambda wanted: [Intent(port_id, spec) for port_id, spec in wanted.items()]
)


@st.composite
def hosts(draw: st.DrawFn) -> Model:
    """A host with ports of ours, with what is not ours, and with drift of every kind."""
    model = Model()
    converge(model, draw(wishes))
    if draw(st.booleans()):
        _take_name(model, device_name(TAP, draw(st.sampled_from(IDS))))
    if draw(st.booleans()):
        _take_name(model, device_name(BRIDGE, draw(st.sampled_from(NETWORKS))))
    for name in list(model.links.links):
        if name.startswith(TAP):
            _drift_of_tap(model, name, draw(st.sampled_from(TAP_DRIFT)))
        elif name.startswith(BRIDGE):
            _drift_of_bridge(model, name, draw(st.sampled_from(BRIDGE_DRIFT)))
        elif name in ("eth2", "eth3"):
            _drift_of_interface(model, name, draw(st.sampled_from(INTERFACE_DRIFT)))
    _drift_of_table(model, draw(st.sampled_from(TABLE_DRIFT)))
    bridges = [n for n, link in model.links.links.items() if link.kind == "bridge"]
    if draw(st.booleans()):
        veth = Link(0, "veth0", "veth", up=True, master=draw(st.sampled_from(bridges)))
        model.links.add(veth)
    return model


def _take_name(model: Model, name: str) -> None:
    if name not in model.links.links:
        model.links.add(Link(0, name, "bridge", alias="an operator's", address="02:00:00:00:00:01"))


def _drift_of_tap(model: Model, name: str, what: str) -> None:
    link, nft = model.links.links[name], model.nft
    changed = {
        "mtu": {"mtu": 576},
        "down": {"up": False},
        "free": {"master": None},
        "ipv6": {"ipv6": True},
        "queues": {"multi_queue": not link.multi_queue},
        "kind": {"kind": "dummy"},
    }
    if what == "gone":
        model.links.delete(name)
    elif what in changed:
        fields: dict[str, Any] = changed[what]
        model.links.links[name] = replace(link, **fields)
    elif name not in nft.rules:
        return
    elif what == "flushed":
        nft.rules[name].clear()
    elif what == "unlinked":
        del nft.maps["ports"][name]
    elif what == "extra":
        nft.rules[name].insert(0, {"expr": [FIRST_RULE, {"accept": None}]})
    elif what == "elsewhere":
        nft.maps["ports"][name] = {"accept": None}


def _drift_of_bridge(model: Model, name: str, what: str) -> None:
    link = model.links.links[name]
    changed: dict[str, dict[str, Any]] = {
        "mtu": {"mtu": 576},
        "down": {"up": False},
        "ipv6": {"ipv6": True},
        "options": {"options": {**link.options, "br_stp_state": 1}},
        "newborn": {"alias": None} if (link.alias or "").startswith(MARKS) else {},
    }
    if what == "gone":
        model.links.delete(name)
    elif what == "unplugged":
        for member in model.links.members(link):
            model.links.set(member.name, master="")
    elif what in changed:
        model.links.links[name] = replace(link, **changed[what])


def _drift_of_interface(model: Model, name: str, what: str) -> None:
    link = model.links.links[name]
    changed: dict[str, dict[str, Any]] = {
        "down": {"up": False},
        "enslaved": {"master": "theirs"},
        "small": {"mtu": 1450},
    }
    if what == "gone":
        model.links.delete(name)
    elif what == "addresses":
        model.links.ips[name] = ("192.0.2.1/24",)
    elif what in changed:
        model.links.links[name] = replace(link, **changed[what])


def _drift_of_table(model: Model, what: str) -> None:
    nft = model.nft
    if not nft.there:
        return
    if what == "gone":
        nft._delete("table", {})
    elif what == "flushed":
        nft.rules["prerouting"].clear()
    elif what == "hook":
        nft.chains["input"] = {**nft.chains["input"], "prio": 300}
    elif what == "stray":
        name = "npt0123456789a"
        nft._add("chain", {"name": name, "table": "netplugin"})
        nft._add("element", {"name": "ports", "elem": [[name, {"jump": {"target": name}}]]})
    elif what == "unmapped":
        nft.maps["ports"].clear()


def converge(model: Model, wanted: list[Intent], *, whole: bool = True) -> Converged:
    """The agent's own loop; nothing may fail but what the plan refuses."""
    result = converge_with(model.driver, wanted, time.monotonic() + 60, Stopwatch(), whole=whole)
    for error in result.failed.values():
        assert error.code in ("conflict", "backend_unavailable"), str(error)
    return result


def planned(model: Model, wanted: list[Intent], *, whole: bool = True) -> tuple[Change, ...]:
    ids = None if whole else [intent.port_id for intent in wanted]
    return model.driver.plan(wanted, model.driver.observe(ids, time.monotonic() + 60)).changes


@many
@given(hosts(), wishes, st.booleans())
def test_planning_after_applying_gives_nothing(
    model: Model, wanted: list[Intent], whole: bool
) -> None:
    result = converge(model, wanted, whole=whole)
    assert planned(model, wanted, whole=whole) == ()
    for intent in wanted:
        if intent.port_id in result.failed:
            continue
        name = device_name(TAP, intent.port_id)
        link = model.links.links.get(name)
        ours = link is not None and (link.alias or "").startswith(MARKS)
        assert ours == (intent.spec is not None)
        assert model.nft.filters(name) == (intent.spec is not None)
        if intent.spec is not None:
            assert link is not None and link.up and link.master is not None
            assert link.mtu == intent.spec.network.mtu
            assert model.links.links[link.master].mtu >= link.mtu


@many
@given(hosts(), wishes, st.randoms())
def test_the_order_of_intents_does_not_matter(
    model: Model, wanted: list[Intent], random: Any
) -> None:
    shuffled = list(wanted)
    random.shuffle(shuffled)
    assert planned(model, wanted) == planned(model, shuffled)


@many
@given(hosts(), wishes, st.booleans())
def test_what_is_not_ours_is_never_changed(model: Model, wanted: list[Intent], whole: bool) -> None:
    before = model.foreign()
    converge(model, wanted, whole=whole)
    after = model.foreign()
    # A bridge known as ours by its address alone gets its mark, or goes.
    newborn = {n for n, link in before.items() if link.kind == "bridge" and link.alias is None}
    for name in set(before) - (newborn - {"theirs"}):
        assert after[name] == before[name]


@many
@given(hosts(), wishes)
def test_a_partial_look_leaves_the_other_ports_alone(model: Model, wanted: list[Intent]) -> None:
    names = {device_name(TAP, intent.port_id) for intent in wanted}

    def others() -> dict[str, Any]:
        return {
            n: (link, model.nft.rules.get(n))
            for n, link in model.links.links.items()
            if n.startswith(TAP) and n not in names
        }

    before = others()
    converge(model, wanted, whole=False)
    assert others() == before


@many
@given(hosts())
def test_removing_all_leaves_no_trace(model: Model) -> None:
    orphans = model.driver.observe(None, time.monotonic() + 60).ports
    converge(model, [Intent(port_id, None) for port_id in orphans])
    kept = {link.master for link in model.links.links.values() if link.name == "veth0"}
    assert set(model.ours()) <= kept
    taken = {n for n, link in model.links.links.items() if n.startswith(TAP) and link.master}
    assert model.nft.there == bool(taken)


def test_a_bridge_has_the_largest_mtu_of_its_taps() -> None:
    model = Model()
    bridge = device_name(BRIDGE, "net1")
    model.links.add(Link(0, "veth0", "veth", mtu=9200))
    converge(model, [Intent("small", make_spec(1500)), Intent("large", make_spec(9000))])
    model.links.set("veth0", master=bridge)
    assert model.links.links[bridge].mtu == 9000
    converge(model, [Intent("large", None)], whole=False)
    assert model.links.links[bridge].mtu == 1500
    converge(model, [Intent("small", None)], whole=False)
    assert bridge in model.links.links, "veth0 is on it"


def test_a_network_of_the_host_alone_has_no_uplink() -> None:
    model = Model()
    converge(model, [Intent("p", make_spec())])
    assert {
        m.name for m in model.links.members(model.links.links[device_name(BRIDGE, "net1")])
    } == {device_name(TAP, "p")}


def test_an_interface_that_was_replaced_comes_off_the_bridge() -> None:
    model = Model()
    wanted = [Intent("p", make_spec(network="net2"))]
    converge(model, wanted)
    bridge = device_name(BRIDGE, "net2")
    assert model.links.links["eth2"].master == bridge
    known = model.driver._settings.physical_interfaces
    assert isinstance(known, dict)
    known["net2"] = "missing"
    converge(model, wanted)
    assert model.links.links["eth2"].master == bridge, "the old one serves until the new one can"
    known["net2"] = "eth9"
    converge(model, wanted)
    assert (model.links.links["eth2"].master, model.links.links["eth9"].master) == (None, bridge)
    known["net2"] = ""
    converge(model, wanted)
    assert model.links.links["eth9"].master is None


@pytest.mark.parametrize(
    ("drift", "code", "words"),
    [
        ("gone", "backend_unavailable", "not there"),
        ("down", "backend_unavailable", "ip link set eth2 up"),
        ("addresses", "conflict", "192.0.2.1/24"),
        ("enslaved", "conflict", "theirs"),
        ("small", "conflict", "mtu 1500"),
    ],
)
def test_an_unfit_interface_is_refused_with_its_name(drift: str, code: str, words: str) -> None:
    model = Model()
    _drift_of_interface(model, "eth2", drift)
    result = converge(model, [Intent("p", make_spec(network="net2"))])
    error = result.failed["p"]
    assert (error.code, error.step) == (code, "uplink")
    assert "eth2" in error.detail and error.fix and words in str(error)
    assert result.changes == ()


def test_a_port_in_place_is_faulty_when_its_interface_goes() -> None:
    model = Model()
    wanted = [Intent("p", make_spec(network="net2"))]
    converge(model, wanted)
    _drift_of_interface(model, "eth2", "down")
    result = converge(model, wanted)
    assert result.changes == () and result.failed == {}
    assert "is down" in str(result.observed["p"].fault)


def test_a_bridge_is_known_by_its_address_before_it_has_its_mark() -> None:
    model = Model()
    name = device_name(BRIDGE, "net1")
    address = Bridge(name, "net1", "", 1500).address
    model.links.add(Link(0, name, "bridge", address=address))
    result = converge(model, [Intent("p", make_spec())])
    assert result.failed == {}
    assert model.links.links[name].alias == "netplugin-bridge=net1"


def test_a_bridge_without_mark_and_address_is_in_the_way() -> None:
    model = Model()
    name = device_name(BRIDGE, "net1")
    model.links.add(Link(0, name, "bridge", address="02:00:00:00:00:01"))
    result = converge(model, [Intent("p", make_spec())])
    assert result.failed["p"].code == "conflict" and name in result.failed["p"].detail

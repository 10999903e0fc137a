"""Planning is pure: properties that hold of any wishes on any host."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from drivers.dpdkvhostuser import changes as c
from drivers.dpdkvhostuser.plan import MAX_VHOST_SOCKETS
from drivers.dpdkvhostuser.plan import make_plan as plan
from netplugin.backend import Intent
from netplugin.host.names import VHOST, device_name
from netplugin.host.openflow import Flow
from netplugin.models import PortSpec
from tests.unit.dpdkvhostuser.model import SETTINGS, Bridge, Model

IDS = [f"port-{n}" for n in range(6)]
ADDRESSES: list[list[dict[str, str]]] = [
    [],
    [{"ip": "10.0.0.5"}],
    [{"ip": "10.0.0.0/28"}, {"ip": "2001:db8::5"}],
    [{"ip": "10.0.0.7", "mac": "52:54:00:77:77:77"}],
]


@st.composite
def specs(draw: st.DrawFn) -> PortSpec:
    vlan = draw(st.sampled_from([None, 1, 100, 4094]))
    network: dict[str, Any] = {
        "type": "flat" if vlan is None else "vlan",
        "physical_network": draw(st.sampled_from(["net1", "net2"])),
        "vlan_id": vlan,
        "mtu": draw(st.sampled_from([1500, 9000])),
    }
    security = {
        "enabled": draw(st.booleans()),
        "allowed_addresses": draw(st.sampled_from(ADDRESSES)),
    }
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": draw(st.sampled_from(["52:54:00:00:00:01", "52:54:00:00:00:02"])),
            "backend": "dpdkvhostuser",
            "network": network,
            "port_security": security,
        }
    )


intents = st.dictionaries(st.sampled_from(IDS), st.one_of(st.none(), specs())).map(
    lambda wanted: [Intent(port_id, spec) for port_id, spec in wanted.items()]
)


@st.composite
def hosts(draw: st.DrawFn) -> Model:
    """An OVS with ports of ours, foreign bridges, ports and flows, and drift of every kind."""
    model = Model()
    if draw(st.booleans()):
        fail_mode = draw(st.sampled_from([None, "secure"]))
        model.bridges["br2"] = Bridge(ours=False, fail_mode=fail_mode)
    converge(model, draw(intents))
    model.bridges["theirs"] = Bridge(ours=False, fail_mode=None)
    model.add_row("theirs", "eth9", {}, {})
    if draw(st.booleans()):
        model.add_row("theirs", device_name(VHOST, IDS[0]), {}, {}) if not model.observe(
            [IDS[0]]
        ).rows else None
    for name, bridge in sorted(model.bridges.items()):
        bridge.flows.add(Flow.make(0x1234, 7, "in_port=77", "drop"))
        if draw(st.booleans()):
            model.add_row(name, f"foreign-{name}", {"tag": [5]}, {})
        if bridge.ours:
            _drift(draw, bridge)
    return model


def _drift(draw: st.DrawFn, bridge: Bridge) -> None:
    if draw(st.booleans()):
        bridge.fail_mode = None
    if draw(st.booleans()):
        bridge.flows.add(Flow.make((0x6E70 << 48) | 0xABC, 9, "in_port=3"))
    for name, row in sorted(bridge.ports.items()):
        if not row.owner or row.interface is None:
            continue
        what = draw(st.sampled_from(["none", "gone", "tag", "mode", "mtu", "path", "flows", "ids"]))
        interface = row.interface
        if what == "gone":
            del bridge.ports[name]
        elif what == "tag":
            bridge.ports[name] = replace(row, tag=None)
        elif what == "mode":
            bridge.ports[name] = replace(row, vlan_mode="trunk")
        elif what == "mtu":
            bridge.ports[name] = replace(row, interface=replace(interface, mtu_request=68))
        elif what == "path":
            bridge.ports[name] = replace(row, interface=replace(interface, options={}))
        elif what == "ids":
            bridge.ports[name] = replace(row, interface=replace(interface, external_ids={}))
        elif what == "flows":
            bridge.flows = {f for f in bridge.flows if f"in_port={interface.ofport}" not in f.match}


def converge(model: Model, wanted: list[Intent], rounds: int = 3) -> set[str]:
    """The loop of the agent, on the model; the answer is the ports that were refused."""
    refused: set[str] = set()
    for _ in range(rounds):
        found = plan(SETTINGS, wanted, model.observe())
        refused |= set(found.refused)
        model.apply(found.changes)
    return refused


@given(hosts(), intents)
def test_planning_after_applying_gives_nothing(host: Model, wanted: list[Intent]) -> None:
    refused = converge(host, wanted, rounds=2)
    left = plan(SETTINGS, wanted, host.observe())
    assert left.changes == ()
    seen = host.observe()
    for intent in wanted:
        if intent.port_id not in refused:
            assert (intent.port_id in seen.rows) == (intent.spec is not None)


@given(hosts(), intents, st.randoms())
def test_the_order_of_intents_does_not_matter(
    host: Model, wanted: list[Intent], random: Any
) -> None:
    shuffled = list(wanted)
    random.shuffle(shuffled)
    seen = host.observe()
    assert plan(SETTINGS, wanted, seen).changes == plan(SETTINGS, shuffled, seen).changes


@given(hosts(), intents)
def test_what_is_not_ours_is_never_changed(host: Model, wanted: list[Intent]) -> None:
    before = copy.deepcopy(host.foreign())
    converge(host, wanted)
    after = host.foreign()
    for name, (kind, ports, flows) in before.items():
        assert name in after, f"bridge {name} has gone"
        assert after[name][0] == kind and after[name][1] == ports
        assert flows <= after[name][2]


@given(hosts(), intents)
def test_a_partial_look_does_no_harm(host: Model, wanted: list[Intent]) -> None:
    """Converging some ports leaves all others as they are."""
    ids = [intent.port_id for intent in wanted]
    others = {i: row for i, row in host.observe().rows.items() if i not in ids}
    for _ in range(2):
        host.apply(plan(SETTINGS, wanted, host.observe(ids)).changes)
    after = host.observe().rows
    assert {i: after.get(i) for i in others} == others
    assert plan(SETTINGS, wanted, host.observe(ids)).changes == ()


@given(hosts())
def test_removing_all_leaves_no_trace(host: Model) -> None:
    everything = [Intent(port_id, None) for port_id in host.observe().rows]
    converge(host, everything)
    for name, bridge in host.bridges.items():
        if bridge.ours:
            others = [p for p in bridge.ports.values() if not p.owner]
            assert any("netplugin-uplink" not in p.external_ids for p in others)
        assert not any(p.owner for p in bridge.ports.values()), name


def _spec(**network: Any) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm", "mac": "52:54:00:00:00:01", "backend": "dpdkvhostuser",
            "network": {"type": "flat", "physical_network": "net1", **network},
        }
    )  # fmt: skip


def test_the_last_vhost_sockets_go_to_the_first_ports() -> None:
    model = Model()
    seen = replace(model.observe(), vhost_sockets=MAX_VHOST_SOCKETS - 2)
    wanted = [Intent(f"p{n}", _spec()) for n in range(4)]
    found = plan(SETTINGS, wanted, seen)
    assert {i: e.code for i, e in found.refused.items()} == {
        "p2": "capacity_exhausted",
        "p3": "capacity_exhausted",
    }


def test_a_kernel_bridge_in_the_way_is_a_conflict() -> None:
    model = Model()
    model.bridges["br1"] = Bridge(ours=False, datapath_type="")
    found = plan(SETTINGS, [Intent("p1", _spec())], model.observe())
    assert found.changes == () and found.refused["p1"].code == "conflict"


def test_the_uplink_takes_the_largest_mtu_of_its_ports() -> None:
    model = Model()
    wanted = [
        Intent("p1", _spec(physical_network="net2", mtu=1500)),
        Intent("p2", _spec(physical_network="net2", mtu=9000)),
    ]
    converge(model, wanted)
    uplink = next(iter(model.observe().bridges["br2"].uplinks.values()))
    assert uplink.interface and uplink.interface.mtu_request == 9000
    found = plan(SETTINGS, [Intent("p2", None)], model.observe(["p2"]))
    assert any(isinstance(ch, c.SetUplink) and ch.uplink.mtu == 1500 for ch in found.changes)

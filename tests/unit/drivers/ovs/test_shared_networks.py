"""Two backends on the same VXLAN networks of a real Open vSwitch, each with a plan from before the other's.

The plans of both are made of the same observation and then carried out in every order: the rows of the one,
its flows with what it reads back, and those of the other. A call that is refused with ``TryAgain`` is made
again, as workers do. Who has read back comes no more: what the other does later must not cut it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest

from drivers.dpdkvhostuser.plan import LAYOUT as OF_VHOST
from drivers.ovs import row_changes as c
from drivers.ovs.apply import Applier
from drivers.ovs.flow_changes import DropNetwork, FlowChange, FlowEdit
from drivers.ovs.model import Layout, OvsObservation
from drivers.ovs.observe import OvsReader
from drivers.ovs.overlay_plan import tunnel_address
from drivers.ovs.overlays import OVERLAY, PATCHES, TO_OVERLAY, TUNNELS, vxlan_name
from drivers.ovs.plan import ovs_changes
from drivers.ovs.ports import VhostPort, access_vlan
from drivers.ovs.tunnels import LEARNED_BIT, network_cookie, network_flows
from drivers.ovs.uplinks import OvsUplink
from drivers.vdpa.model import LAYOUT as OF_VDPA
from netplugin.api.errors import TryAgain
from netplugin.backend import Change, Overlay
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsHost, OvsSettings
from tests.lab.ovs import PrivateOvs
from tests.unit.drivers.dpdkvhostuser.columns import LOCAL_IP
from tests.unit.drivers.dpdkvhostuser.scenes import kinds, on_network, overlay
from tests.unit.drivers.ovs.conftest import BRIDGE, Ports, vhost
from tests.unit.ovs import PATIENCE_S, settings_of, soon

#: Two on the same UDP port, and one on another.
NET, NEAR, FAR = overlay(1), overlay(2), overlay(3, udp_port=8472)
_ROUNDS = 3
#: For what must not happen meanwhile.
WHILE_S = 1.0


def port_on(layout: Layout, network: Overlay, port_id: str) -> VhostPort:
    """With a dummy device for the socket, which needs DPDK."""
    intent = on_network(network, port_id)
    made = VhostPort.of(layout.backend, intent, OVERLAY, access_vlan(intent), socket="", tso=False)
    return replace(made, type="dummy", options={})


@dataclass
class Side:
    """A backend with the ports that it is asked for."""

    ovs: OvsHost
    settings: OvsSettings
    layout: Layout
    desired: dict[str, VhostPort] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader, self.applier = OvsReader(self.ovs, self.layout), Applier(self.ovs)
        self.leaving: set[str] = set()

    def ask(self, **networks: Overlay | None) -> None:
        """For ports on networks, or (None) that they go."""
        for port_id, network in networks.items():
            self.desired.pop(port_id, None)
            if network is not None:
                self.desired[port_id] = port_on(self.layout, network, port_id)
        self.leaving = {port_id for port_id, network in networks.items() if network is None}

    def seen(self, *, whole: bool = False) -> OvsObservation:
        scope = self.reader.scope(None if whole else [*self.desired, *self.leaving], soon())
        return self.reader.seen(scope, self.reader.bridges(scope))

    def plan(self, *, whole: bool = False) -> list[Change]:
        seen = self.seen(whole=whole)
        return ovs_changes(self.settings, self.layout, self.desired, self.leaving, seen)

    def apply(self, changes: Sequence[Change]) -> bool:
        """Whether nothing is to be tried again."""
        failed = self.applier.apply(changes, soon()).failed
        assert all(isinstance(error, TryAgain) for error in failed.values()), failed
        return not failed

    def go_on(self) -> None:
        """Read back and put right, as a call does."""
        for _ in range(_ROUNDS):
            if not (changes := self.plan()):
                return
            self.apply(changes)
        assert self.plan() == []


@pytest.fixture
def sides(switch: PrivateOvs, ovs: OvsHost, ports: Ports) -> Iterator[tuple[Side, Side]]:
    settings = replace(settings_of(switch), local_ip=LOCAL_IP)
    yield Side(ovs, settings, OF_VHOST), Side(ovs, settings, OF_VDPA)


def assert_right(ovs: OvsHost, *sides: Side) -> None:
    """Bridges, tunnels and flows are those of the networks that have ports, and no others."""
    networks = {o.network_id: o for s in sides for p in s.desired.values() if (o := p.overlay)}
    bridges = {bridge.name for bridge in ovs.view.bridges()}
    assert bridges == ({OVERLAY, TUNNELS} if networks else set())
    if not networks:
        return
    there = {port.name for port in ovs.view.ports()} - bridges
    vms = {port.name for side in sides for port in side.desired.values()}
    assert there == vms | {*PATCHES} | {vxlan_name(o.spec.udp_port) for o in networks.values()}
    assert flows_of_networks(ovs) == {f for o in networks.values() for f in flows_desired(ovs, o)}
    for side in sides:
        assert all(side.seen().flows[port_id] for port_id in side.desired), "each has its filter"
        assert side.plan(whole=True) == []


def flows_of_networks(ovs: OvsHost) -> set[Flow]:
    found = ovs.flows.dump(TUNNELS, None, soon(), LEARNED_BIT)
    return {flow for flow in found if flow.cookie != COOKIE_MARK}


def flows_desired(ovs: OvsHost, network: Overlay) -> frozenset[Flow]:
    rows = [ovs.view.port(name) for name in (vxlan_name(network.spec.udp_port), TO_OVERLAY)]
    tunnel, patch = (row.interface.ofport if row and row.interface else None for row in rows)
    assert tunnel and patch
    return network_flows(network, LOCAL_IP, tunnel, patch)


# -- in every order ------------------------------------------------------------------------------


_Asked = Mapping[str, Overlay | None]
#: What there is, what both are asked for at once, by side.
RACES: Mapping[str, tuple[tuple[_Asked, _Asked], tuple[_Asked, _Asked]]] = {
    "the last port goes, the first of the other comes": (({"a": NET}, {}), ({"a": None}, {"b": NET})),
    "and that is on another network": (({"a": NET}, {}), ({"a": None}, {"b": NEAR})),
    "and on another UDP port": (({"a": NET}, {}), ({"a": None}, {"b": FAR})),
    "the last on a UDP port": (({"a": FAR, "c": NET}, {}), ({"a": None}, {"b": FAR})),
    "the first ports of both": (({}, {}), ({"a": NET}, {"b": NET})),
    "the last ports of both": (({"a": NET}, {"b": NET}), ({"a": None}, {"b": None})),
    "the last of one of two networks": (({"a": NET, "c": NEAR}, {"b": NET}), ({"a": None}, {"b": None})),
    "the last of both on a UDP port": (({"a": FAR, "c": NET}, {"b": FAR}), ({"a": None}, {"b": None})),
    "one of each network": (({"a": NET}, {"b": FAR}), ({"a": None, "d": FAR}, {"b": None, "e": NET})),
}
#: Rows (0) and flows (1) of each side (0, 1), in their order.
ORDERS = sorted(
    order
    for order in itertools.permutations([(0, 0), (0, 1), (1, 0), (1, 1)])
    if all(order.index((side, 0)) < order.index((side, 1)) for side in (0, 1))
)


@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join("abAB"[2 * f + s] for s, f in order))
def test_neither_cuts_the_other_and_nothing_is_left(
    ovs: OvsHost, sides: tuple[Side, Side], race: str, order: Sequence[tuple[int, int]]
) -> None:
    before, asked = RACES[race]
    for side, networks in zip(sides, before, strict=True):
        side.ask(**networks)
        side.go_on()
    for side, networks in zip(sides, asked, strict=True):
        side.ask(**networks)
    plans = [side.plan() for side in sides]
    done = [True, True]
    for number, of_flows in order:
        changes = [change for change in plans[number] if isinstance(change, FlowChange) == bool(of_flows)]
        done[number] = done[number] and sides[number].apply(changes)
        if of_flows and done[number]:
            sides[number].go_on()  # its call is answered then
    for side, is_done in zip(sides, done, strict=True):
        if not is_done:
            side.go_on()
    assert_right(ovs, *sides)
    for side in sides:
        side.ask(**dict.fromkeys(side.desired))
        side.go_on()
    assert_right(ovs)


def test_a_look_of_before_takes_no_flows_of_a_port_that_has_come(
    ovs: OvsHost, sides: tuple[Side, Side]
) -> None:
    """Those of a network without ports are dropped, and those of no port, unless it has come since."""
    one, other = sides
    one.ask(a=NET, c=NEAR)
    one.go_on()
    name = one.desired["c"].name
    ovs.db.write([c.RemovePort((), OVERLAY, name, "")], soon())
    del one.desired["c"]
    stale = one.plan(whole=True)
    assert DropNetwork((), TUNNELS, network_cookie(NEAR.network_id)) in stale
    assert "DropFlows" in [type(change).__name__ for change in stale]
    other.ask(c=NEAR)
    other.go_on()
    assert one.apply(stale)
    assert_right(ovs, one, other)


def test_no_edit_of_flows_comes_into_another(
    ovs: OvsHost, sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network has no port when it is looked at, and has got one with its flows before they are dropped."""
    one, other = sides
    one.ask(a=NET, c=NEAR)
    one.go_on()
    one.ask(c=None)
    other.ask(b=NEAR)
    real, begun, ended = DropNetwork.edit, threading.Event(), threading.Event()

    def slowly(self: DropNetwork, ovs: OvsHost, deadline: float) -> FlowEdit:
        edit = real(self, ovs, deadline)
        begun.set()
        ended.wait(WHILE_S)  # in vain: the other has to wait
        return edit

    def plug() -> None:
        assert begun.wait(PATIENCE_S)
        other.go_on()
        ended.set()

    monkeypatch.setattr(DropNetwork, "edit", slowly)
    with ThreadPoolExecutor() as thread:
        plugged = thread.submit(plug)
        one.go_on()
        plugged.result(PATIENCE_S)
    one.ask(a=NET)
    assert_right(ovs, one, other)


def test_both_repair_what_another_program_takes_away(ovs: OvsHost, sides: tuple[Side, Side]) -> None:
    """Both are told at once, and both add the same ports."""
    for side, port_id in zip(sides, "ab", strict=True):
        side.ask(**{port_id: NET})
        side.go_on()
    ovs.db.write([c.RemovePort((), TUNNELS, name, "") for name in (vxlan_name(4789), TO_OVERLAY)], soon())
    plans = [side.plan(whole=True) for side in sides]
    for side, changes in zip(sides, plans, strict=True):
        assert "AddPort tunnel" in kinds(changes)
        assert side.apply(changes)
    for side in sides:
        side.go_on()
    assert_right(ovs, *sides)


def test_without_the_address_of_tunnels_those_that_are_there_stay(
    ovs: OvsHost, sides: tuple[Side, Side]
) -> None:
    one, other = sides
    one.ask(a=NET)
    one.go_on()
    other.settings = replace(other.settings, local_ip=None)
    assert tunnel_address(other.settings, other.seen(whole=True)) == LOCAL_IP
    other.ask(b=NET)
    other.go_on()
    one.ask(a=None)
    one.go_on()
    assert_right(ovs, other)


# -- bridges of physical networks ----------------------------------------------------------------


def test_a_bridge_with_a_port_of_another_backend_is_not_removed(ports: Ports) -> None:
    mine, theirs = vhost("mine"), replace(vhost("theirs"), backend="vdpa")
    ports.plug(mine)
    assert ports.apply(c.AddPort(("theirs",), theirs)).failed == {}
    gone = [c.RemovePort(("mine",), BRIDGE, mine.name, mine.backend), c.RemoveBridge(("mine",), BRIDGE)]
    assert isinstance(ports.apply(*gone).failed["mine"], TryAgain)
    assert ports.ovs.view.port(mine.name) and ports.ovs.view.port(theirs.name)
    assert ports.apply(gone[0]).failed == {}
    last = c.RemovePort(("theirs",), BRIDGE, theirs.name, theirs.backend)
    assert ports.apply(last, c.RemoveBridge(("theirs",), BRIDGE)).failed == {}
    assert ports.ovs.view.bridges() == []


def test_a_port_whose_bridge_has_gone_is_tried_again(ports: Ports) -> None:
    failed = ports.apply(c.AddPort(("p1",), vhost("p1"))).failed["p1"]
    assert isinstance(failed, TryAgain) and BRIDGE in failed.detail


def test_an_uplink_that_another_backend_has_added_is_that_of_both(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    uplink = OvsUplink("npu-1", BRIDGE, "net1", ("net_null0",), None, 1500)
    for _ in range(2):
        assert ports.apply(c.AddPort(("p1",), uplink)).failed == {}
    row = ports.ovs.view.port(uplink.name)
    assert row and not uplink.differs(row)

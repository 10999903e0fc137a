"""VXLAN networks in mode vduse: on their own, and with ports of dpdkvhostuser on the same networks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from agents.ports.call import Call
from agents.ports.reconciler import Reconciler
from agents.telemetry.metrics import Metrics
from drivers.dpdkvhostuser.driver import DpdkVhostUser
from drivers.dpdkvhostuser.plan import make_plan
from drivers.ovs.model import OvsObservation
from drivers.ovs.overlays import OVERLAY, TUNNELS
from netplugin.api.errors import BackendUnavailable, Unsupported
from netplugin.api.models import Binding, Features, PortSpec
from netplugin.backend import Applied, Backend, Change, Intent, ObservedPort, Plan
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.usability import Usability
from netplugin.optional import HasLocalVlans
from tests.unit.drivers.dpdkvhostuser.model import UNDERLAY
from tests.unit.drivers.sriov.crash_points import crash_at_every_step
from tests.unit.drivers.sriov.world import CrashMachine, crash_settings, serve_all
from tests.unit.drivers.vdpa.vduse_world import (
    NETWORKS,
    VDUSE_SETTINGS,
    VduseSwitch,
    VduseWorld,
    network_spec,
    overlay_spec,
    vduse_spec,
)
from tests.unit.drivers.vdpa.world import NATIVE_ROOT, vdpa_spec


@contextmanager
def world_at(kind: Callable[..., VduseWorld] = VduseWorld, **how: Any) -> Iterator[VduseWorld]:
    with tempfile.TemporaryDirectory() as directory:
        world = kind(Path(directory), **how)
        yield world
        world.close()


@pytest.fixture
def world() -> Iterator[VduseWorld]:
    with world_at() as made:
        yield made


def row_of(world: VduseWorld, port_id: str = "a") -> OvsPort:
    row = world.switch.row(port_id)
    assert row is not None
    return row


# -- a port --------------------------------------------------------------------------------------


def test_a_port_brings_its_network_and_the_last_takes_it(world: VduseWorld) -> None:
    assert world.plug("a", overlay_spec()) is None
    row = row_of(world)
    assert (row.bridge, row.tag, row.network) == (OVERLAY, 1, ("blue", 4789))
    assert row.interface is not None and row.interface.mtu_request == 1450, "that of the network"
    assert world.plug("b", overlay_spec(2, "red", attachment="netdev")) is None
    assert row_of(world, "b").tag == 2
    world.assert_settled()
    record = world.store.get("a")
    assert record is not None
    intent = Intent("a", record.spec, record.claims, world.store.network("blue"))
    assert world.driver.binding(intent).model_dump()["bridge"] == OVERLAY
    observed = world.driver.observed_ports([intent], world.driver.observe(["a"], time.monotonic() + 9))
    assert observed["a"].details["network_id"] == "blue"
    for port_id in ("a", "b"):
        assert world.unplug(port_id) is None
        world.assert_settled()
    assert world.switch.ovs.bridges == {} and world.vduse.look() == {}


def test_peers_change_the_flows_alone(world: VduseWorld) -> None:
    assert world.plug("a", overlay_spec()) is None
    world.store.save_network("blue", network_spec(0, "10.9.0.2", "10.9.0.3"))
    changes = world.reconciler.check(dry_run=True).changes
    assert [change.change for change in changes] == ["SetNetwork"]
    outcome = world.reconciler.converge_network("blue", time.monotonic() + 9)
    assert outcome.reached and outcome.failures == ()
    world.assert_settled()


def test_a_port_moves_between_a_vlan_and_a_network(world: VduseWorld) -> None:
    for spec in (vduse_spec(), overlay_spec(), overlay_spec(1, "red"), vduse_spec()):
        assert world.plug("a", spec) is None
        world.assert_settled()


def test_a_path_that_is_too_narrow_is_refused_and_then_reported(world: VduseWorld) -> None:
    narrow = replace(UNDERLAY, hops=(("br-underlay", 1499),))
    world.switch.ovs.underlay = narrow
    refused = world.plug("a", overlay_spec())
    assert isinstance(refused, Unsupported) and "br-underlay has 1499" in refused.detail
    world.switch.ovs.underlay = UNDERLAY
    assert world.plug("a", overlay_spec()) is None
    world.switch.ovs.underlay = narrow
    assert world.check()
    record = world.store.get("a")
    assert record is not None and record.error is not None and "1499" in record.error.detail
    (found,) = (finding for finding in world.reconciler.findings() if finding.id == "underlay")
    assert found.status == "fail" and "1499" in found.found


def test_without_the_address_of_tunnels_a_new_port_is_refused(world: VduseWorld) -> None:
    assert world.plug("a", overlay_spec()) is None
    world.switch.ovs.settings = replace(VDUSE_SETTINGS, local_ip=None)
    with pytest.raises(BackendUnavailable, match="local_ip"):
        world.driver.validate(overlay_spec(2))
    assert isinstance(world.plug("b", overlay_spec(2)), BackendUnavailable)
    assert world.check()
    record = world.store.get("a")
    assert record is not None and record.error is not None, "it keeps its tunnels, and says so"
    world.assert_networks()


def test_a_lost_store_keeps_the_local_vlans(world: VduseWorld) -> None:
    assert world.plug("a", overlay_spec(1, "red")) is None
    tag = row_of(world).tag
    world.store.close()
    world.path.unlink()
    world.start()
    red = world.store.network("red")
    assert red is not None and red.local_vlan == tag == 2
    assert world.plug("a", overlay_spec(1, "red")) is None
    world.assert_settled()


# -- modes that have no VXLAN --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["relay", "native"])
@pytest.mark.parametrize("others", [False, True])
def test_ports_on_vfs_have_no_vxlan(mode: str, others: bool) -> None:
    """Whether or not there are ports in mode ``vduse``."""
    with world_at(vfs=True) as world:
        if others:
            assert world.plug("b", overlay_spec(2)) is None
        world.switch.reported = replace(NATIVE_ROOT, ovs_version="4.0.0")
        world.mode = mode
        world.restart()
        assert world.driver.offered().networks == ("flat", "vlan")
        refused = world.plug("a", overlay_spec())
        assert isinstance(refused, Unsupported) and "no VXLAN networks" in refused.detail
        assert "dpdkvhostuser" in str(refused.fix) and "[vdpa] mode = vduse" in str(refused.fix)
        if others:
            assert world.plug("b", overlay_spec(2, qos={"ingress_kbps": 7000})) is None, "it keeps its mode"


def test_a_port_on_a_vf_cannot_move_to_a_network() -> None:
    with world_at(vfs=True, mode="relay") as world:
        assert world.plug("a", vdpa_spec()) is None
        world.mode = "vduse"
        world.restart()
        assert world.driver.offered().networks == ("flat", "vlan", "vxlan")
        network = overlay_spec().network
        refused = world.plug("a", vdpa_spec().model_copy(update={"network": network}))
        assert isinstance(refused, Unsupported) and "no VXLAN networks" in refused.detail


# -- with ports of another backend on the same networks ------------------------------------------


class ModelVhostUser(Backend[OvsObservation], HasLocalVlans):
    """dpdkvhostuser over the model of OVS: its plan is the real one."""

    name: ClassVar[str] = "dpdkvhostuser"
    features: ClassVar[Features] = DpdkVhostUser.features

    def __init__(self, switch: VduseSwitch) -> None:
        self._switch = switch

    def probe(self) -> Usability:
        return Usability(True)

    def held_vlans(self) -> Mapping[int, str]:
        return self._switch.held_vlans()

    def observe(self, ports: Collection[str] | None, deadline: float) -> OvsObservation:
        self._switch.kernel.tick()
        seen = self._switch.ovs.observe(ports)
        return replace(seen, ports={i: ObservedPort(stamp=row.stamp) for i, row in seen.rows.items()})

    def plan(self, intents: Sequence[Intent], observed: OvsObservation) -> Plan:
        return make_plan(self._switch.settings, intents, observed)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        return self._switch.apply(changes, deadline)

    def binding(self, intent: Intent) -> Binding:
        raise NotImplementedError


class SharedWorld(VduseWorld):
    """The backends vdpa and dpdkvhostuser in one agent: two workers, one store, one OVS."""

    def start(self) -> None:
        super().start()
        vhost = Reconciler(ModelVhostUser(self.switch), self.store, Metrics(self.store))
        self.reconcilers = {"dpdkvhostuser": vhost, "vdpa": self.reconciler}

    def serve(self, *operations: Call, crash_at: int | None = None) -> bool:
        """Each backend's share in its worker, the one after the other."""
        shares = {
            name: [op for op in operations if self._backend_of(op) == name] for name in self.reconcilers
        }

        def all_of_them() -> None:
            for name, reconciler in self.reconcilers.items():
                serve_all(reconciler, shares[name], patient=self.patient)

        return self.clock.completes(all_of_them, crash_at)

    def _backend_of(self, operation: Call) -> str:
        record = self.store.get(operation.port_id)
        if operation.port.spec is not None:
            return operation.port.spec.backend
        return record.spec.backend if record else "vdpa"

    def check(self, crash_at: int | None = None) -> bool:
        return self.clock.completes(lambda: [r.check() for r in self.reconcilers.values()], crash_at)

    def assert_settled(self) -> None:
        super().assert_settled()
        assert self.reconcilers["dpdkvhostuser"].check(dry_run=True).changes == []


def vhost_spec(number: int, network_id: str = "blue") -> PortSpec:
    return overlay_spec(number, network_id, backend="dpdkvhostuser")


def both(world: VduseWorld) -> None:
    assert world.plug("a", overlay_spec(1)) is None
    assert world.plug("v", vhost_spec(9)) is None


SHARED: Mapping[str, tuple[Callable[[VduseWorld], None], Mapping[str, PortSpec | None]]] = {
    "a first PUT": (lambda world: None, {"a": overlay_spec()}),
    "first PUTs on both": (lambda world: None, {"a": overlay_spec(), "v": vhost_spec(9)}),
    "a DELETE beside the other": (both, {"a": None}),
    "the other's DELETE": (both, {"v": None}),
    "both DELETEs": (both, {"a": None, "v": None}),
    "a move": (both, {"a": overlay_spec(1, "red")}),
    "a move from a VLAN": (lambda world: world.plug("a", vduse_spec()), {"a": overlay_spec()}),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_crash_at_every_step(name: str) -> None:
    made = crash_at_every_step(lambda: world_at(SharedWorld), *SHARED[name])
    assert made > 4, "so many steps there are at least"


def test_the_last_port_takes_the_network_whichever_backend_has_it() -> None:
    for first, last in (("a", "v"), ("v", "a")):
        with world_at(SharedWorld) as world:
            both(world)
            flows = set(world.switch.ovs.bridges[TUNNELS].flows)
            assert world.unplug(first) is None
            assert world.switch.ovs.bridges[TUNNELS].flows == flows
            world.assert_settled()
            assert world.unplug(last) is None
            world.assert_settled()
            assert world.switch.ovs.bridges == {}


PORTS = {"a": "vdpa", "b": "vdpa", "v": "dpdkvhostuser", "w": "dpdkvhostuser"}
_ASKED = st.dictionaries(st.sampled_from([*PORTS]), st.none() | st.sampled_from(NETWORKS), min_size=1)
_CRASH = st.none() | st.integers(0, 40)


class Machine(CrashMachine):
    """Plugs, unplugs, peers that change, crashes and drift, of both backends in any order."""

    world: SharedWorld

    def make_world(self, directory: Path) -> SharedWorld:
        return SharedWorld(directory)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            super().teardown()
            self.world.close()

    @rule(asked=_ASKED, crash_at=_CRASH)
    def ask(self, asked: Mapping[str, str | None], crash_at: int | None) -> None:
        numbers = {port_id: number for number, port_id in enumerate(PORTS, 1)}
        self.asked(
            {
                i: None if name is None else overlay_spec(numbers[i], name, backend=PORTS[i])
                for i, name in asked.items()
            },
            crash_at,
        )

    @rule(crash_at=_CRASH)
    def look(self, crash_at: int | None) -> None:
        self.looked(crash_at)

    @rule(
        name=st.sampled_from(NETWORKS),
        peers=st.sets(st.sampled_from(["10.9.0.2", "10.9.0.3"])),
        by=st.permutations(["dpdkvhostuser", "vdpa"]),
    )
    def peers_change(self, name: str, peers: Collection[str], by: Sequence[str]) -> None:
        spec = network_spec(NETWORKS.index(name)).model_copy(update={"peers": tuple(sorted(peers))})
        self.world.store.save_network(name, spec)
        for backend in by:
            self.world.reconcilers[backend].converge_network(name, time.monotonic() + 30)

    @rule()
    def vswitchd_restarts(self) -> None:
        self.world.switch.restart()

    @rule(data=st.data())
    def drift(self, data: st.DataObject) -> None:
        """Another program takes away a port or the flows of a bridge."""
        bridges = self.world.switch.ovs.bridges
        there = sorted(name for name in bridges if bridges[name].ports)
        if not there:
            return
        bridge = bridges[data.draw(st.sampled_from(there))]
        if data.draw(st.booleans()):
            del bridge.ports[data.draw(st.sampled_from(sorted(bridge.ports)))]
        else:
            bridge.flows.clear()
        self.world.switch.reconfigure()

    @rule()
    def recover(self) -> None:
        self.world.vduse.stuck = None
        for _ in range(4):
            assert self.world.check()
            self.world.vduse.stuck = None
        self.world.assert_settled()


class TestSharing(Machine.TestCase):
    settings = crash_settings(25, 25)

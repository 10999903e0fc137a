"""The agent may be killed at any instruction while networks change: the host ends as the store says."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from netplugin.api.errors import NetpluginError
from netplugin.api.models import NetworkSpec, PortSpec, PortState
from netplugin.backend import Applied, Change
from tests.unit.agents.networks.test_networks import network, port
from tests.unit.agents.test_reconciler_crash import LONG, Clock, World, make_spec
from tests.unit.fakes import FakeBackend, FakeHost, Seen


class Networked(FakeBackend):
    """The fake backend with a boundary around each read and each change."""

    def __init__(self, host: FakeHost, clock: Clock) -> None:
        super().__init__("fake", host)
        self._clock = clock

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        self._clock.tick()
        return super().observe(ports, deadline)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        for change in changes:
            self._clock.tick()
            super().apply([change], deadline)
        self._clock.tick()
        return Applied()


def new_world(directory: str) -> World:
    return World(Path(directory), Networked)  # type: ignore[arg-type]


def assert_settled(world: World) -> None:
    """Every network that has a port is on the host as the store has it, and no other."""
    records = world.store.records()
    assert {r.port_id: r.spec for r in records} == world.host.ports
    assert {r.state for r in records} <= {PortState.ACTIVE}
    used = {r.spec.overlay_id for r in records} - {None}
    assert world.host.networks == {n.network_id: n for n in world.store.networks() if n.network_id in used}
    assert len({n.local_vlan for n in world.store.networks()}) == len(world.store.networks())
    assert world.reconciler.check(dry_run=True).changes == []


A, B = "net-a", "net-b"
OTHER_PEERS = network(5001, "10.0.0.2", "10.0.0.3")


def change_peers(world: World) -> None:
    world.store.save_network(A, OTHER_PEERS)
    world.reconciler.converge_network(A, time.monotonic() + 30)


STEPS: dict[str, Callable[[World], Any]] = {
    "the first port": lambda w: w.reconciler.plug.serve([w.put("p3", port(B))]),
    "another port": lambda w: w.reconciler.plug.serve([w.put("p3", port(A))]),
    "the last port goes": lambda w: w.reconciler.plug.serve([w.delete("p1")]),
    "a port moves": lambda w: w.reconciler.plug.serve([w.put("p1", port(B))]),
    "a port leaves for a VLAN": lambda w: w.reconciler.plug.serve([w.put("p1", make_spec())]),
    "peers change": change_peers,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_crash_at_every_boundary(name: str) -> None:
    boundary, through = 0, False
    while not through:
        with tempfile.TemporaryDirectory() as directory:
            world = new_world(directory)
            world.store.save_network(A, network(5001, "10.0.0.2"))
            world.store.save_network(B, network(5002, "10.0.0.2"))
            assert world.serve([world.put("p1", port(A)), world.put("p2", make_spec())])
            through = world.clock.completes(lambda world=world: STEPS[name](world), boundary)
            world.restart()
            assert world.check()
            assert_settled(world)
            if name == "peers change" and boundary:
                assert world.host.networks[A].spec == OTHER_PEERS
            world.store.close()
        boundary += 1
    assert boundary > 3, "no boundary was met"


_NETWORKS = st.sampled_from(["a", "b", "c"])
_PORTS = st.sampled_from(["p1", "p2", "p3", "p4"])
_PEERS = st.lists(st.sampled_from(["10.0.0.2", "10.0.0.3", "10.0.0.4"]), unique=True)
_CRASH = st.none() | st.integers(0, 12)


class Machine(RuleBasedStateMachine):
    """Networks and ports come, change and go, the host drifts, and the agent dies in between."""

    @initialize()
    def begin(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.world = new_world(self._directory.name)

    @rule(network_id=_NETWORKS, vni=st.integers(1, 4), peers=_PEERS, crash_at=_CRASH)
    def put_network(self, network_id: str, vni: int, peers: list[str], crash_at: int | None) -> None:
        before = self.world.store.network(network_id)
        in_use = before is not None and self.world.store.ports_on(network_id)
        spec = NetworkSpec(type="vxlan", vni=before.spec.vni if in_use and before else vni, peers=peers)

        def step() -> None:
            self.world.store.save_network(network_id, spec, self.world.backend.held_vlans())
            self.world.reconciler.converge_network(network_id, time.monotonic() + 30)

        self._go(step, crash_at)

    @rule(network_id=_NETWORKS)
    def delete_network(self, network_id: str) -> None:
        self._go(lambda: self.world.store.forget_network(network_id), None)

    @rule(port_id=_PORTS, network_id=st.none() | _NETWORKS, crash_at=_CRASH)
    def put_port(self, port_id: str, network_id: str | None, crash_at: int | None) -> None:
        spec: PortSpec = port(network_id) if network_id else make_spec()
        self._go(lambda: self.world.reconciler.plug.serve([self.world.put(port_id, spec)]), crash_at)

    @rule(port_id=_PORTS, crash_at=_CRASH)
    def delete_port(self, port_id: str, crash_at: int | None) -> None:
        self._go(lambda: self.world.reconciler.plug.serve([self.world.delete(port_id)]), crash_at)

    @rule(network_id=_NETWORKS)
    def drift(self, network_id: str) -> None:
        self.world.host.networks.pop(network_id, None)

    @rule(crash_at=_CRASH)
    def look(self, crash_at: int | None) -> None:
        if self.world.check(crash_at):
            assert_settled(self.world)
        else:
            self.world.restart()

    def _go(self, step: Callable[[], Any], crash_at: int | None) -> None:
        try:
            through = self.world.clock.completes(step, crash_at)
        except NetpluginError:
            return  # refused, before anything was touched
        if not through:
            self.world.restart()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.restart()
            assert self.world.check()
            assert_settled(self.world)
        finally:
            self.world.store.close()
            self._directory.cleanup()


TestInterleavings = Machine.TestCase
TestInterleavings.settings = settings(
    max_examples=2000 if LONG else 60,
    stateful_step_count=60 if LONG else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

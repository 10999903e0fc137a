"""The agent may be killed at any instruction of a PUT or DELETE of a physical network.

After the next start the host has what is stored: what was there before, or what was requested; the
second if that was answered, the first if a failure was answered.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.networks.physical import PhysicalNetworkService
from agents.ports.backend_ports import BackendPorts
from agents.ports.call import Call
from agents.ports.reconciler import Reconciler
from agents.store.physical_networks import StoredPhysicalNetworks
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin.api.errors import HostError, NetpluginError
from netplugin.api.models import PortSpec, PortState
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Applied, Change
from netplugin.host.physical_networks import PhysicalNetworks
from tests.unit.agents.networks.keeper import Keep, Keeper, KeeperHost, SeenNetworks
from tests.unit.agents.networks.test_physical_networks import kept, network, port
from tests.unit.agents.test_reconciler_crash import Clock, TickingStore

NAME = "net-1"


class Ticking(Keeper):
    """A boundary around each read and each change."""

    clock: Clock

    def observe(self, ports: Collection[str] | None, deadline: float) -> SeenNetworks:
        self.clock.tick()
        return super().observe(ports, deadline)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        refused: dict[str, NetpluginError] = {}
        for change in changes:
            self.clock.tick()
            refused.update(super().apply([change], deadline).of_networks)
        self.clock.tick()
        return Applied(of_networks=refused)


class TickingNetworks(StoredPhysicalNetworks):
    """A boundary before and after each commit."""

    clock: Clock

    def save(self, name: str, spec: PhysicalNetworkSpec) -> None:
        self.clock.tick()
        super().save(name, spec)
        self.clock.tick()

    def forget(self, name: str, *, stays: bool = False) -> None:
        self.clock.tick()
        super().forget(name, stays=stays)
        self.clock.tick()


@dataclass
class Worker:
    """Does a job when it gets it."""

    reconciler: Reconciler

    @property
    def ports(self) -> BackendPorts:
        return self.reconciler.ports

    def job(self, work: Callable[[], Any], deadline: float) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except NetpluginError as error:
            future.set_exception(error)
        return future


class World:
    """A host, a store's file, and the process that may end at any time."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "agent.db"
        self.clock = Clock()
        self.host = KeeperHost()
        self.start()
        self.reconciler.check()

    def start(self) -> None:
        self.store: Store = TickingStore(self.path, self.clock)
        networks = TickingNetworks(self.store.database, self.store.set_aside, self.store.events)
        networks.clock = self.clock
        self.store.physical_networks = networks
        registry = PhysicalNetworks()
        backend = Ticking(registry, self.host)
        backend.clock = self.clock
        self.reconciler = Reconciler(backend, self.store, Metrics(self.store))
        workers: Any = {"fake": Worker(self.reconciler)}
        self.service = PhysicalNetworkService(self.store, registry, workers, 30.0)

    def restart(self) -> None:
        self.store.close()
        self.start()

    def put(self, spec: PhysicalNetworkSpec) -> None:
        asyncio.run(self.service.put(NAME, spec))

    def delete(self) -> None:
        asyncio.run(self.service.delete(NAME))

    def plug(self, spec: PortSpec) -> None:
        call = Call(Record("p1", spec), time.monotonic() + 30)
        self.reconciler.plug.serve([call])
        assert call.future.result().state is PortState.ACTIVE

    def stored(self) -> PhysicalNetworkSpec | None:
        return self.store.physical_networks.all().get(NAME)

    def assert_settled(self) -> None:
        spec = self.stored()
        assert self.host.kept == ({NAME: spec} if spec and spec.keep else {})
        assert {r.port_id: r.spec for r in self.store.records()} == self.host.ports
        assert {r.state for r in self.store.records()} <= {PortState.ACTIVE}
        assert self.reconciler.check(dry_run=True).changes == []
        assert self.reconciler.network_faults == {}


@dataclass(frozen=True)
class Scenario:
    """The network that is there (and whether a port is on it), what is requested, and the host's faults."""

    name: str
    before: PhysicalNetworkSpec | None
    after: PhysicalNetworkSpec | None
    plugged: bool = False
    #: The host refuses to make the network so, or to remove it.
    refuses: bool = False
    lost: bool = False
    boundaries: int = 4

    def prepare(self, world: World) -> None:
        if self.before is not None:
            world.put(self.before)
        if self.plugged:
            world.plug(port(NAME))

        def refuse(change: Change) -> None:
            if isinstance(change, Keep) and change.spec == self.after:
                raise HostError("the host refuses", step="plan")

        if self.refuses:
            world.host.on_apply = refuse
        world.host.lost = {NAME} if self.lost else set()

    def request(self, world: World) -> None:
        if self.after is None:
            world.delete()
        else:
            world.put(self.after)


SCENARIOS = [
    Scenario("a first PUT", None, kept()),
    Scenario("a first PUT without keep", None, network(), boundaries=2),
    Scenario("the same PUT", kept(), kept(), boundaries=1),
    Scenario("a change", kept(), kept(mtu=9000)),
    Scenario("other devices", kept(), kept(ovs={"devices": ["0000:04:00.0"]}, bridge="br-other")),
    Scenario("a change under a port", kept(), kept(mtu=9000), plugged=True),
    Scenario("keep goes", kept(), network()),
    Scenario("keep comes under a port", network(), kept(), plugged=True),
    Scenario("a DELETE", kept(), None),
    Scenario("a DELETE of what is not kept", network(), None, boundaries=2),
    Scenario("a first PUT that is refused", None, kept(), refuses=True),
    Scenario("a first PUT that is not made", None, kept(), lost=True),
    Scenario("a change that is refused", kept(), kept(mtu=9000), refuses=True),
    Scenario("a change that is refused under a port", kept(), kept(mtu=9000), plugged=True, refuses=True),
    Scenario("a DELETE that is refused", kept(), None, refuses=True),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_a_crash_at_every_boundary(scenario: Scenario) -> None:
    boundary, through = 0, False
    while not through:
        with tempfile.TemporaryDirectory() as directory:
            world = World(Path(directory))
            scenario.prepare(world)
            answered: list[str] = []

            def step(world: World = world, answered: list[str] = answered) -> None:
                try:
                    scenario.request(world)
                    answered.append("done")
                except NetpluginError:
                    answered.append("failed")

            through = world.clock.completes(step, boundary)
            if through:
                fails = scenario.refuses or scenario.lost
                assert answered == ["failed" if fails else "done"]
                assert world.stored() == (scenario.before if fails else scenario.after)
            world.host.on_apply, world.host.lost = KeeperHost().on_apply, set()
            world.restart()
            world.reconciler.check()
            assert world.stored() in (scenario.before, scenario.after)
            world.assert_settled()
            # The caller, who has no answer, calls again.
            scenario.request(world)
            assert world.stored() == scenario.after
            world.assert_settled()
            world.store.close()
        boundary += 1
    assert boundary > scenario.boundaries, "no boundary was met"

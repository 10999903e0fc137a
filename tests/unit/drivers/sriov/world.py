"""The real driver and reconciler over model NICs and a real store, which may end at any step."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize

from agents.ports.call import Call
from agents.ports.reconciler import Reconciler
from agents.store.port_table import Record
from agents.telemetry.metrics import Metrics
from drivers.sriov.driver import Sriov
from drivers.sriov.plan import desired_attributes
from drivers.vf.commands import KIND
from netplugin import options
from netplugin.api.models import PortSpec, PortState
from netplugin.backend import NOBODY, Intent
from netplugin.host.vf_messages import GROUPS, VfAttributes, differing
from netplugin.host.vfs import VFIO
from tests.unit.agents.test_reconciler_crash import Clock, TickingStore
from tests.unit.drivers.sriov.model import Model, ModelPf, ModelVf


def make_spec(number: int = 1, vlan_id: int | None = 100, **fields: Any) -> PortSpec:
    kind = "flat" if vlan_id is None else "vlan"
    network = {"type": kind, "physical_network": "net1", "vlan_id": vlan_id}
    network.update(fields.pop("network", {}))
    return PortSpec.model_validate(
        {
            "vm_id": f"vm{number}",
            "mac": f"52:54:00:00:00:{number:02x}",
            "backend": "sriov",
            "network": network,
            **fields,
        }
    )


def two_nics() -> list[ModelPf]:
    """Seven VFs: four that igbvf has, and three that mlx5_core keeps."""
    return [
        ModelPf("0000:03:00.0", "eth3", total=4),
        ModelPf("0000:04:00.0", "eth4", total=3, numa_node=1, vf_driver="mlx5_core"),
    ]


def serve_all(reconciler: Reconciler, operations: Sequence[Call], *, patient: bool = True) -> None:
    """As the worker does: what is to be tried again is; just once more, if not ``patient``."""
    again = reconciler.plug.serve(operations)
    while again:
        time.sleep(0.01 if patient else 0)
        again = reconciler.plug.resume(again, last=not patient)


class World:
    """NICs, a store's file, and the process that may end at any time."""

    #: Whether calls wait for a NIC that is being reset.
    patient = True

    def __init__(self, directory: Path, *pfs: ModelPf) -> None:
        self.path = directory / "agent.db"
        self.clock = Clock()
        self.model = Model(*(pfs or two_nics()), tick=self.clock.tick)
        #: How every VF was before anything of ours had it.
        self.before = {address: asdict(self.model.vf(address)) for address in self.model.addresses()}
        self.start()
        self.reconciler.check()

    def start(self) -> None:
        self.driver = self.make_driver()
        self.store = TickingStore(self.path, self.clock)
        self.reconciler = Reconciler(self.driver, self.store, Metrics(self.store))  # type: ignore[arg-type]

    def make_driver(self) -> Any:
        return Sriov(options.load([]), None, kernel=self.model)

    def wants(self, spec: PortSpec) -> VfAttributes:
        """What a VF has of a port."""
        return desired_attributes(spec)

    def binds(self, spec: PortSpec, driver: str | None) -> bool:
        """Whether a VF that had this driver goes to vfio-pci for such a port."""
        return True

    def restart(self) -> None:
        self.clock.wind_up(None)
        self.store.close()
        self.start()

    def put(self, port_id: str, spec: PortSpec) -> Call:
        return Call(Record(port_id, spec), time.monotonic() + 30)

    def delete(self, port_id: str) -> Call:
        return Call(Intent(port_id, None), time.monotonic() + 30)

    def serve(self, *operations: Call, crash_at: int | None = None) -> bool:
        """Whether it came to the end."""
        return self.clock.completes(
            lambda: serve_all(self.reconciler, operations, patient=self.patient), crash_at
        )

    def check(self, crash_at: int | None = None) -> bool:
        return self.clock.completes(self.reconciler.check, crash_at)

    def plug(self, port_id: str, spec: PortSpec) -> BaseException | None:
        operation = self.put(port_id, spec)
        assert self.serve(operation)
        return operation.future.exception()

    def unplug(self, port_id: str) -> BaseException | None:
        operation = self.delete(port_id)
        assert self.serve(operation)
        return operation.future.exception()

    def state(self, port_id: str) -> PortState:
        record = self.store.get(port_id)
        assert record is not None
        return record.state

    def vf_of(self, port_id: str) -> ModelVf:
        return self.model.vf(self.address_of(port_id))

    def address_of(self, port_id: str) -> str:
        record = self.store.get(port_id)
        assert record is not None
        [claim] = [claim for claim in record.claims if claim.kind == KIND]
        return claim.key

    def holders(self) -> dict[str, str]:
        claims = self.store.claims().items()
        return {c.key: i for c, i in claims if i != NOBODY and c.kind == KIND}

    # -- what must hold --------------------------------------------------------------------------

    def assert_one_each(self) -> None:
        """In the file: no VF is two ports', and no port has two."""
        db = sqlite3.connect(self.path)
        rows = db.execute("SELECT key, port_id FROM claims WHERE kind = 'vf'").fetchall()
        db.close()
        assert len({key for key, _ in rows}) == len(rows) == len({port for _, port in rows})

    def assert_as_before(self, addresses: Sequence[str] | None = None) -> None:
        """VFs that nobody has are as they were before anybody had them."""
        taken = self.holders()
        for address in self.model.addresses() if addresses is None else addresses:
            if address not in taken:
                found, before = asdict(self.model.vf(address)), self.before[address]
                for group in (g for a, g in self.model.not_supported if a == address):
                    for name in GROUPS[group]:
                        found["attributes"][name] = before["attributes"][name]
                assert found == before, address

    def assert_settled(self) -> None:
        """Every port is active and has its VF as it wants it; the rest of the VFs are untouched."""
        self.assert_one_each()
        self.assert_as_before()
        for record in self.store.records():
            assert (record.state, record.error) == (PortState.ACTIVE, None), record
            vf = self.vf_of(record.port_id)
            assert not differing(vf.attributes, self.wants(record.spec))
            if self.binds(record.spec, self.before[self.address_of(record.port_id)]["driver"]):
                assert (vf.driver, vf.override) == (VFIO, VFIO)
        assert self.reconciler.check(dry_run=True).changes == []


class CrashMachine(RuleBasedStateMachine):
    """The base of machines that crash a world. In the end it settles, and each port can be deleted."""

    def make_world(self, directory: Path) -> World:
        return World(directory)

    def recover(self) -> None:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.world = self.make_world(Path(self._directory.name))
        self.world.patient = False

    def asked(self, specs: Mapping[str, PortSpec | None], crash_at: int | None) -> None:
        """Make calls at the same time, None being a DELETE; after a crash the agent starts again."""
        world = self.world
        ops: list[Call] = [world.delete(i) if s is None else world.put(i, s) for i, s in specs.items()]
        if world.serve(*ops, crash_at=crash_at):
            assert all(op.future.done() for op in ops)
        else:
            world.restart()

    def looked(self, crash_at: int | None) -> None:
        """Look at the whole host; after a crash the agent starts again."""
        if not self.world.check(crash_at):
            self.world.restart()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.recover()
            for record in self.world.store.records():
                assert self.world.unplug(record.port_id) is None
            self.world.assert_settled()
            self.world.store.close()
            self._directory.cleanup()


def crash_settings(examples: int, steps: int) -> settings:
    return settings(
        deadline=None,
        stateful_step_count=steps,
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
    )

"""The loop: changes that belong to no port and do not hold, and one plan for each observation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agents.ports.backend_ports import BackendPorts
from agents.ports.call import Call
from agents.ports.converge import Stopwatch, converge
from agents.ports.reconciler import Reconciler
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.host_events import HostEvents
from agents.telemetry.metrics import Metrics
from netplugin.api.models import PortSpec
from netplugin.backend import Applied, Change, Intent, Plan
from tests.unit.agent import SPEC
from tests.unit.fakes import FakeBackend, FakeHost, Seen, Write


@dataclass(frozen=True)
class RemoveRest(Change):
    """Something of ours that no port needs."""


class Stubborn(FakeBackend):
    """A host that has a rest of ours, and keeps it unless a call says otherwise."""

    rest = True
    lets_go = False

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        return Plan((RemoveRest(()),) if self.rest else ())

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        self.rest = not self.lets_go
        return Applied()


def test_what_belongs_to_no_port_and_stays_is_reported(tmp_path: Path) -> None:
    backend = Stubborn("fake", FakeHost())
    store = Store(tmp_path / "agent.db")
    ports = BackendPorts(backend, store, Metrics(store), HostEvents(store.events, backend.name))
    result = converge(ports, [], time.monotonic() + 5, Stopwatch(), "drift", whole=True)
    assert result.left == (RemoveRest(()),) and result.failed == {}
    reconciler = Reconciler(backend, store, Metrics(store))
    errors = reconciler.check().errors
    assert [error.step for error in errors] == ["verify"] and "RemoveRest" in errors[0].detail
    backend.lets_go = True
    assert reconciler.check().errors == []
    assert reconciler.check().changes == []
    store.close()


class Recorded(FakeBackend):
    """Notes what each plan is made for."""

    def __init__(self) -> None:
        super().__init__("fake", FakeHost())
        self.planned: list[Seen] = []

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        assert all(observed is not before for before in self.planned), "planned twice"
        self.planned.append(observed)
        return super().plan(intents, observed)

    def plans(self) -> int:
        """The number of plans since the last call."""
        self.planned, before = [], self.planned
        return len(before)


def test_an_observation_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, store = Recorded(), Store(tmp_path / "agent.db")
    reconciler = Reconciler(backend, store, Metrics(store))
    for port_id in ("a", "b", "c"):
        put = Call(Record(port_id, PortSpec.model_validate(SPEC)), time.monotonic() + 30)
        reconciler.plug.serve([put])
        assert put.future.result().state == "active"
        assert backend.plans() == 2  # to change and to read back
    assert reconciler.check().changes == [] and backend.plans() == 1
    del backend.host.ports["a"]
    assert len(reconciler.check(dry_run=True).changes) == 1 and backend.plans() == 1
    assert len(reconciler.check().changes) == 1 and backend.plans() == 2
    del backend.host.ports["b"]
    assert len(reconciler.check({"b"}).changes) == 1 and backend.plans() == 2
    backend.host.ports.clear()
    assert len(reconciler.check(batch_size=2).changes) == 3
    # The check's own, two for each of the two chunks, and one of the whole at the end.
    assert backend.plans() == 6
    backend.host.ports.clear()
    monkeypatch.setattr(Write, "is_light", True)
    assert len(reconciler.check(batch_size=2).changes) == 3
    assert backend.plans() == 2, "light changes are made at once"
    assert reconciler.check().changes == []
    store.close()

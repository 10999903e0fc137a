"""The loop: what it does about a change that belongs to no port and does not hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.metrics import Metrics
from agents.ports.converge import Stopwatch, converge
from agents.ports.reconciler import Reconciler
from agents.store.store import Store
from netplugin.backend import Applied, Change, Intent, Plan
from tests.unit.fakes import FakeBackend, FakeHost, Seen


@dataclass(frozen=True)
class RemoveRest(Change):
    """Something of ours that no port needs."""


class Stubborn(FakeBackend):
    """A host that has a rest of ours, and keeps it unless told otherwise."""

    rest = True
    lets_go = False

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        return Plan((RemoveRest(()),) if self.rest else ())

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        self.rest = not self.lets_go
        return Applied()


def test_what_belongs_to_no_port_and_stays_is_said(tmp_path: Path) -> None:
    backend = Stubborn("fake", FakeHost())
    result = converge(backend, [], time.monotonic() + 5, Stopwatch(), whole=True)
    assert result.left == (RemoveRest(()),) and result.failed == {}
    store = Store(tmp_path / "agent.db")
    reconciler = Reconciler(backend, store, Metrics(store))
    errors = reconciler.check().errors
    assert [error.step for error in errors] == ["verify"] and "RemoveRest" in errors[0].detail
    backend.lets_go = True
    assert reconciler.check().errors == []
    assert reconciler.check().changes == []
    store.close()

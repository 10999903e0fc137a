"""When an object in quarantine is tried again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from agents.ports.claims import FIRST_S, LONGEST_S, Quarantines
from agents.ports.reconciler import Reconciler
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin.backend import Claim
from tests.unit.agent import agent
from tests.unit.fakes import FakeBackend, FakeHost

VF = Claim("vf", "0000:03:10.1")
FINE = ({VF.key}, ())
OUT_OF_ORDER = ({VF.key}, {VF.key})


def test_each_is_longer_than_the_last_up_to_a_limit() -> None:
    quarantines, now, term = Quarantines(), 1000.0, FIRST_S
    for _ in range(10):
        assert quarantines.ended([VF], *FINE, now) == {}
        assert quarantines.ended([VF], *FINE, now + term - 1) == {}
        now += term
        assert quarantines.ended([VF], *FINE, now) == {VF: "it is tried again"}
        term = min(2 * term, LONGEST_S)
    assert term == LONGEST_S


def test_what_was_out_of_order_is_tried_when_it_is_in_order() -> None:
    quarantines = Quarantines()
    assert quarantines.ended([VF], *OUT_OF_ORDER, 1000.0) == {}
    assert quarantines.ended([VF], *OUT_OF_ORDER, 1000.0 + 2 * LONGEST_S) == {}
    assert quarantines.ended([VF], *FINE, 1001.0 + 2 * LONGEST_S) == {VF: "it is tried again"}


def test_what_has_gone_begins_again() -> None:
    quarantines, now = Quarantines(), 1000.0
    assert quarantines.ended([VF], *FINE, now) == {}
    assert quarantines.ended([VF], *FINE, now + FIRST_S)
    assert "gone" in quarantines.ended([VF], (), (), now + FIRST_S)[VF]
    now += 2 * FIRST_S
    assert quarantines.ended([VF], *FINE, now) == {}
    assert quarantines.ended([VF], *FINE, now + FIRST_S), "the first term again"


def test_backends_share_the_terms(tmp_path: Path) -> None:
    """Each backend looks at the pool that they share: the first to end a quarantine is not the only
    one that makes the next one longer."""
    host = FakeHost()
    backends = {name: FakeBackend(name, host) for name in ("one", "other")}
    with agent(tmp_path, backends=backends) as running:
        workers = running.service._workers.values()
        one, other = (worker.reconciler.claims.quarantines for worker in workers)
        assert one.ended([VF], *FINE, 0.0) == {} and one.ended([VF], *FINE, FIRST_S)
        assert other.ended([VF], *FINE, FIRST_S) == {}
        assert other.ended([VF], *FINE, 2 * FIRST_S) == {}, "the second term is twice as long"
        assert other.ended([VF], *FINE, 3 * FIRST_S)


def test_a_backend_without_vfs_leaves_the_terms_alone(tmp_path: Path) -> None:
    quarantines = Quarantines()
    with contextlib.closing(Store(tmp_path / "agent.db")) as store:
        store.quarantine({VF: "it refused a setting"})
        assert quarantines.ended([VF], *FINE, 0.0) == {}
        Reconciler(FakeBackend(), store, Metrics(store), quarantines=quarantines).check()
        assert quarantines.ended([VF], *FINE, FIRST_S)

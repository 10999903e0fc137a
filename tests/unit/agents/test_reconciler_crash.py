"""A crash between any two steps, and how a new process recovers: the store is a real file.

What must hold after a new agent has looked at the host once: a port is as it was or as somebody
asked, as asked if that was answered, as it was if a failure was answered; the host has these ports
and nothing else of ours; and each claimed object belongs to one of them.
"""

from __future__ import annotations

import errno
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from agents.ports.call import Call
from agents.ports.reconciler import Reconciler
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin.api.errors import BackendUnavailable, CapacityExhausted, HostError, NetpluginError
from netplugin.api.models import PortSpec, PortState
from netplugin.backend import Applied, Change, Claim, Intent, Observation, Plan
from netplugin.host.usability import Usability
from tests.unit.agent import SPEC
from tests.unit.fakes import FakeBackend, FakeHost, Seen

LONG = settings.get_current_profile_name() == "long"


def make_spec(vlan_id: int = 100, claims: int = 1, **fields: Any) -> PortSpec:
    """``claims``: how many claims the port needs, which can change while it is live."""
    network = {"type": "vlan", "physical_network": "physnet1", "vlan_id": vlan_id}
    return PortSpec.model_validate({**SPEC, "network": network, "qos": {"ingress_kbps": claims}, **fields})


def needed(spec: PortSpec) -> int:
    return spec.qos.ingress_kbps or 1


class Crash(BaseException):
    """The process ends here: nothing of ours may catch it."""


class Clock:
    """Counts the boundaries between steps, and ends the process at one of them."""

    def __init__(self) -> None:
        self.passed = 0
        self.crash_at: int | None = None

    def tick(self) -> None:
        self.passed += 1
        if self.crash_at is not None and self.passed > self.crash_at:
            raise Crash

    def wind_up(self, crash_at: int | None) -> None:
        self.passed, self.crash_at = 0, crash_at

    def completes(self, step: Callable[[], Any], crash_at: int | None) -> bool:
        """Whether the step comes to its end, or ends with the process at this boundary."""
        self.wind_up(crash_at)
        try:
            step()
        except Crash:
            return False
        finally:
            self.wind_up(None)
        return True


class TickingStore(Store):
    """A boundary before and after each commit (within one, SQLite sees to it: see test_store)."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path)
        self._clock = clock

    def save(self, records: Any, forget: Collection[str] = ()) -> None:
        self._clock.tick()
        super().save(records, forget)
        self._clock.tick()


@dataclass(frozen=True)
class Take(Change):
    """The port becomes this, with these claims, or (None) goes and gives them back."""

    spec: PortSpec | None
    claims: tuple[Claim, ...]
    stamp: str = ""


@dataclass
class Host(FakeHost):
    """A host on which each port also takes a VF for each queue."""

    vfs: dict[str, tuple[Claim, ...]] = field(default_factory=dict)
    refuses: Callable[[str, PortSpec | None], bool] = lambda port_id, spec: False


class Unclaiming(FakeBackend):
    """The fake one with a boundary around each of its steps; its ports need nothing scarce."""

    def __init__(self, host: Host, clock: Clock) -> None:
        super().__init__("fake", host)
        self.there = host
        self._clock = clock

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        self._clock.tick()
        seen = super().observe(ports, deadline)
        self._clock.tick()
        return seen

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        self._clock.tick()
        changes = [
            Take((i.port_id,), i.spec, i.claims if i.spec else (), i.stamp)
            for i in intents
            if observed.specs.get(i.port_id) != i.spec
            or (i.spec is not None and self.there.vfs.get(i.port_id, ()) != i.claims)
            or (i.spec is not None and self.there.stamps.get(i.port_id, "") != i.stamp)
        ]
        # A VF that one returns may be what another takes.
        changes.sort(key=lambda change: (len(change.claims), change.ports))
        return Plan(tuple(changes))

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        failed: dict[str, NetpluginError] = {}
        for change in changes:
            assert isinstance(change, Take)
            [port_id] = change.ports
            self._clock.tick()
            if self.there.refuses(port_id, change.spec):
                failed[port_id] = HostError("the host refuses", step="apply", port_id=port_id)
            elif port_id not in self.there.forgetful:
                self._take(port_id, change)
            self._clock.tick()
        return Applied(failed)

    def _take(self, port_id: str, change: Take) -> None:
        others = {c for i, claims in self.there.vfs.items() if i != port_id for c in claims}
        assert not others & set(change.claims), "two ports have the same VF"
        if change.spec is None:
            self.there.ports.pop(port_id, None)
            self.there.vfs.pop(port_id, None)
            self.there.stamps.pop(port_id, None)
        else:
            self.there.ports[port_id] = change.spec
            self.there.vfs[port_id] = change.claims
            self.there.stamps[port_id] = change.stamp


class Backend(Unclaiming):
    """As ``Unclaiming``, and each port needs VFs."""

    pool: ClassVar[int] = 6

    def claims(self, intent: Intent, observed: Observation, taken: Mapping[Claim, str]) -> tuple[Claim, ...]:
        """Nothing that another port has, in the store or still on the host."""
        self._clock.tick()
        assert intent.spec is not None
        used = {c: i for i, claims in self.there.vfs.items() for c in claims} | dict(taken)
        had = self.there.vfs.get(intent.port_id, ())
        pool = [Claim("vf", str(n)) for n in range(self.pool)]
        usable = [c for c in (*had, *pool) if used.get(c, intent.port_id) == intent.port_id]
        mine = list(dict.fromkeys([*intent.claims, *usable]))[: needed(intent.spec)]
        if len(mine) < needed(intent.spec):
            raise CapacityExhausted("no VF is free", step="claim")
        return tuple(mine)


class World:
    """A host, a store's file, and the process that may end at any time."""

    def __init__(self, directory: Path, kind: type[Unclaiming] = Backend) -> None:
        self.path = directory / "agent.db"
        self.clock = Clock()
        self.host = Host()
        self.backend: Any = kind(self.host, self.clock)
        self.start()
        self.reconciler.check()

    def start(self) -> None:
        self.store = TickingStore(self.path, self.clock)
        self.reconciler = Reconciler(self.backend, self.store, Metrics(self.store))

    def restart(self) -> None:
        self.clock.wind_up(None)
        self.store.close()
        self.start()

    def put(self, port_id: str, spec: PortSpec | None = None) -> Call:
        return Call(Record(port_id, spec or make_spec()), time.monotonic() + 30)

    def delete(self, port_id: str) -> Call:
        return Call(Intent(port_id, None), time.monotonic() + 30)

    def serve(self, operations: Sequence[Call], crash_at: int | None = None) -> bool:
        """Whether it came to the end. If so, everyone has an answer."""
        return self.clock.completes(lambda: self.reconciler.plug.serve(operations), crash_at)

    def check(self, crash_at: int | None = None) -> bool:
        return self.clock.completes(self.reconciler.check, crash_at)

    def specs(self) -> dict[str, PortSpec]:
        return {r.port_id: r.spec for r in self.store.records()}

    # -- what must hold --------------------------------------------------------------------------

    def assert_claims_are_unique(self) -> None:
        """In the file, each object once, and only objects of ports that are there."""
        db = sqlite3.connect(self.path)
        rows = db.execute("SELECT key, port_id FROM claims").fetchall()
        ids = {port_id for (port_id,) in db.execute("SELECT port_id FROM ports")}
        db.close()
        assert len({key for key, _ in rows}) == len(rows)
        assert {port_id for _, port_id in rows} <= ids
        assert {Claim("vf", key): port_id for key, port_id in rows} == self.store.claims()

    def assert_settled(self, unmanaged: Collection[str] = ()) -> None:
        """The host has what the store has; nothing is under way, too much, or left to do.

        ``unmanaged`` are ports that somebody may have made there: without a record they stay.
        """
        records = self.store.records()
        kept = self.reconciler.ports.kept()
        assert set(kept) <= set(unmanaged)
        mine = {i: spec for i, spec in self.host.ports.items() if i not in kept}
        assert {r.port_id: r.spec for r in records} == mine
        for record in records:
            assert (record.state, record.previous, record.error) == (PortState.ACTIVE, None, None)
            if type(self.backend) is Backend:
                assert self.host.vfs[record.port_id] == record.claims
                assert len(record.claims) == needed(record.spec), "it has more than it needs"
        self.assert_claims_are_unique()
        assert set(self.reconciler.ports.observed) == set(self.host.ports)
        assert self.reconciler.check(dry_run=True).changes == []


def answer(op: Call) -> str:
    if not op.future.done():
        return "none"
    return "error" if op.future.exception() else "ok"


def may_be(op: Call, before: PortSpec | None) -> set[PortSpec | None]:
    """What the port may be in the end, by the answer to its caller."""
    if op.kind == "delete":
        return {before, None} if answer(op) == "none" else {None}  # a failed one is gone later
    spec = op.record.spec if op.record else op.port.spec  # as it was accepted: with the MTU of its network
    outcomes: dict[str, set[PortSpec | None]] = {
        "ok": {spec},
        "error": {before},
        "none": {before, spec},
    }
    return outcomes[answer(op)]


# -- every boundary of every kind of call --------------------------------------------------------

OLD, NEW = make_spec(100), make_spec(200)
WIDE = make_spec(100, claims=3)


@dataclass(frozen=True)
class Scenario:
    """Ports that are there, what is requested then in one batch, and the faults of the host."""

    name: str
    there: Mapping[str, PortSpec]
    asked: Mapping[str, PortSpec | None]
    refuses: Mapping[str, PortSpec | None] = field(default_factory=dict)
    faulty: str = ""
    forgetful: str = ""
    drifted: str = ""

    def prepare(self, world: World) -> list[Call]:
        assert world.serve([world.put(i, spec) for i, spec in self.there.items()])
        if self.drifted:
            del world.host.ports[self.drifted]
        if self.faulty:
            world.host.faults[self.faulty] = "no memory"
        world.host.forgetful = {self.forgetful}
        world.host.refuses = lambda i, spec: i in self.refuses and self.refuses[i] == spec
        return [world.delete(i) if spec is None else world.put(i, spec) for i, spec in self.asked.items()]


SCENARIOS = [
    Scenario("a first PUT", {"o": OLD}, {"a": NEW}),
    Scenario("the same PUT", {"o": OLD, "a": OLD}, {"a": OLD}),
    Scenario("the same PUT after drift", {"o": OLD, "a": OLD}, {"a": OLD}, drifted="a"),
    Scenario("a change", {"o": OLD, "a": OLD}, {"a": NEW}),
    Scenario("a change that takes more", {"o": OLD, "a": OLD}, {"a": WIDE}),
    Scenario("a change that takes less", {"o": OLD, "a": WIDE}, {"a": OLD}),
    Scenario("a DELETE", {"o": OLD, "a": OLD}, {"a": None}),
    Scenario("a DELETE of what is gone", {"o": OLD, "a": OLD}, {"a": None}, drifted="a"),
    Scenario("a DELETE of what never was", {"o": OLD}, {"a": None}),
    Scenario("a batch", {"o": OLD, "a": OLD, "b": OLD}, {"a": NEW, "b": None, "c": OLD, "d": OLD}),
    Scenario("a first PUT that is refused", {"o": OLD}, {"a": NEW}, {"a": NEW}),
    Scenario("a first PUT that is not kept", {"o": OLD}, {"a": NEW}, forgetful="a"),
    Scenario("a first PUT that does not work", {"o": OLD}, {"a": NEW}, faulty="a"),
    Scenario("a change that is refused", {"o": OLD, "a": OLD}, {"a": WIDE}, {"a": WIDE}),
    Scenario("a change that does not work", {"o": OLD, "a": OLD}, {"a": NEW}, faulty="a"),
    Scenario("a DELETE that is refused", {"o": OLD, "a": OLD}, {"a": None}, {"a": None}),
    Scenario("more than there is", {"o": WIDE}, {"a": WIDE, "b": OLD}),
    Scenario(
        "a batch in which all goes wrong that can",
        {"o": OLD, "a": OLD, "b": OLD},
        {"a": NEW, "b": None, "c": OLD, "d": NEW},
        {"a": NEW, "b": None, "d": NEW},
    ),
]
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
each_kind = pytest.mark.parametrize("kind", [Backend, Unclaiming], ids=["claims", "nothing"])


@contextmanager
def world_at(kind: type[Backend] = Backend) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), kind)
        yield world
        world.store.close()


def heal(world: World) -> None:
    """The host is well again."""
    world.host.refuses = lambda port_id, spec: False
    world.host.forgetful, world.host.faults = set(), {}


def verify(world: World, before: Mapping[str, PortSpec], asked: Sequence[Call]) -> None:
    world.assert_settled()
    found = world.specs()
    of_asked = {op.port_id: may_be(op, before.get(op.port_id)) for op in asked}
    for port_id in {*before, *found, *of_asked}:
        allowed = of_asked.get(port_id, {before.get(port_id)})
        assert found.get(port_id) in allowed, f"{port_id}: {found.get(port_id)} not of {allowed}"


def ask_again(world: World, asked: Sequence[Call]) -> None:
    """A platform without an answer repeats its request, which is carried out."""
    again: list[Call] = [
        world.put(op.port_id, op.port.spec) if op.kind == "put" else world.delete(op.port_id)
        for op in asked
        if answer(op) == "none"
    ]
    world.serve(again)
    for op in again:
        exhausted = op.future.done() and isinstance(op.future.exception(), CapacityExhausted)
        assert answer(op) == "ok" or exhausted
    world.assert_settled()


@each_kind
@each_scenario
def test_without_a_crash(scenario: Scenario, kind: type[Backend]) -> None:
    with world_at(kind) as world:
        asked = scenario.prepare(world)
        assert world.serve(asked)
        assert all(op.future.done() for op in asked)
        for op in asked:
            wrong = op.port_id in {*scenario.refuses, scenario.faulty, scenario.forgetful}
            exhausted = kind is Backend and op.port_id == "b" and scenario.name == "more than there is"
            assert answer(op) == ("error" if wrong or exhausted else "ok"), op
        heal(world)
        assert world.check()
        verify(world, scenario.there, asked)


@each_kind
@each_scenario
@pytest.mark.parametrize("healed", [True, False], ids=["healed", "still-ill"])
def test_a_crash_at_every_boundary(scenario: Scenario, kind: type[Backend], healed: bool) -> None:
    """``still-ill``: the new process first finds the host as the old one left it."""
    boundary = 0
    while True:
        with world_at(kind) as world:
            asked = scenario.prepare(world)
            through = world.serve(asked, crash_at=boundary)
            world.restart()
            if not healed:
                world.check()
                world.assert_claims_are_unique()
            heal(world)
            assert world.check()
            verify(world, scenario.there, asked)
            ask_again(world, asked)
        if through:
            break
        boundary += 1


@pytest.mark.long
@each_kind
@each_scenario
def test_a_crash_at_every_boundary_and_one_more_when_coming_back(
    scenario: Scenario, kind: type[Backend]
) -> None:
    first, through = 0, False
    while not through:
        second, back = 0, False
        while not back:
            with world_at(kind) as world:
                asked = scenario.prepare(world)
                through = world.serve(asked, crash_at=first)
                heal(world)
                world.restart()
                back = world.check(crash_at=second)
                world.restart()
                assert world.check()
                verify(world, scenario.there, asked)
            second += 1
        first += 1


# -- the cases that have names -------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    with world_at() as made:
        yield made


def test_a_first_put_that_fails_is_undone(world: World) -> None:
    world.host.faults["a"] = "no memory"  # it comes onto the host, and does not work
    op = world.put("a", WIDE)
    world.serve([op])
    assert isinstance(op.future.exception(), HostError)
    assert world.host.ports == {} and world.store.records() == []
    world.assert_settled()


def test_a_change_that_fails_goes_back(world: World) -> None:
    world.serve([world.put("a", OLD)])
    world.host.refuses = lambda port_id, spec: spec == WIDE
    op = world.put("a", WIDE)
    world.serve([op])
    assert isinstance(op.future.exception(), HostError)
    assert world.specs() == world.host.ports == {"a": OLD}
    world.assert_settled()


def test_what_a_failed_change_took_is_free_again(world: World) -> None:
    world.serve([world.put("a", OLD)])
    world.host.refuses = lambda port_id, spec: spec == WIDE
    world.serve([world.put("a", WIDE)])
    heal(world)
    others = [world.put(f"o{n}") for n in range(Backend.pool - 1)]
    world.serve(others)
    assert [answer(op) for op in others] == ["ok"] * len(others)
    world.assert_settled()


def test_an_undo_that_fails_too_is_done_later(world: World) -> None:
    world.serve([world.put("a", OLD)])
    world.host.refuses = lambda port_id, spec: True
    del world.host.ports["a"]
    change, first = world.put("a", NEW), world.put("b", NEW)
    world.serve([change, first])
    assert (answer(change), answer(first)) == ("error", "error")
    record = world.store.get("a")
    assert record is not None and (record.state, record.spec) == (PortState.FAILED, OLD)
    assert world.reconciler.unsettled()
    heal(world)
    world.check()
    assert world.specs() == {"a": OLD}
    world.assert_settled()


def test_an_error_of_the_system_is_undone_like_one_of_the_host(world: World) -> None:
    """EMFILE, EAGAIN and the like are no NetpluginErrors."""
    world.serve([world.put("a", OLD)])

    def refuse(port_id: str, spec: PortSpec | None) -> bool:
        if spec == NEW:
            raise OSError(errno.EMFILE, "Too many open files")
        return False

    world.host.refuses = refuse
    change, first = world.put("a", NEW), world.put("b", NEW)
    world.serve([change, first])
    for op in (change, first):
        error = op.future.exception()
        assert isinstance(error, HostError) and "Too many open files" in error.detail
        assert error.port_id == op.port_id
    assert world.specs() == world.host.ports == {"a": OLD}
    world.assert_settled()


def test_an_undo_that_the_store_does_not_take_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the intent, which was stored before the disk was full, would bring the port back."""
    save, full = world.store.save, False

    def refuse(*args: Any, **fields: Any) -> None:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        save(*args, **fields)

    monkeypatch.setattr(world.store, "save", refuse)

    def fill(port_id: str, spec: PortSpec | None) -> bool:
        nonlocal full
        full = True
        return spec is not None

    world.host.refuses = fill
    op = world.put("a", NEW)
    world.serve([op])
    error = op.future.exception()
    assert isinstance(error, HostError) and error.step == "apply"
    assert world.host.ports == {} and world.reconciler.unsettled()
    with pytest.raises(HostError):
        world.check()
    later = world.put("b", NEW)
    with pytest.raises(HostError):
        world.serve([later])
    assert world.host.ports == {}, "nothing is done while it is owed"
    full, world.host.refuses = False, lambda port_id, spec: False
    world.check()
    assert world.specs() == {} and not world.reconciler.unsettled()
    world.assert_settled()


@each_kind
def test_a_port_that_is_ready_is_answered_before_its_state_is_committed(
    kind: type[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intent is committed, and a start finds the state again. Until the store takes it, it is owed."""
    with world_at(kind) as world:
        save, seen = world.store.save, []
        refused = sqlite3.OperationalError("database or disk is full")
        op = world.put("a", NEW)

        def note(records: Any, forget: Collection[str] = ()) -> None:
            records = list(records)
            seen.append(([r.state for r in records], answer(op), world.store.get("a")))
            if records[0].state is PortState.ACTIVE and len(seen) < 4:
                raise refused
            save(records, forget)

        monkeypatch.setattr(world.store, "save", note)
        assert world.serve([op])
        assert [(states, answered) for states, answered, _ in seen] == [
            ([PortState.PENDING], "none"),
            ([PortState.ACTIVE], "ok"),
        ]
        assert seen[1][2] == op.future.result(0) == world.store.get("a"), "who asks next is told the same"
        assert world.reconciler.unsettled()
        with pytest.raises(HostError):
            world.check()
        assert world.check() and len(seen) == 4
        assert not world.reconciler.unsettled()
        reported = [event.state for event in world.store.events.page(0, 10).events]
        assert reported == ["pending", "active"], "its event is that of the commit"
        world.restart()
        world.assert_claims_are_unique()
        assert world.check()
        world.assert_settled()


@each_kind
def test_what_was_answered_stays_if_the_host_refuses_after_a_crash(kind: type[Backend]) -> None:
    """Killed after the answer and before the commit of the state; the next process finds the host ill."""
    boundary, found = 0, 0
    while True:
        with world_at(kind) as world:
            op = world.put("a", NEW)
            through = world.serve([op], crash_at=boundary)
            if answer(op) == "ok" and not through:
                found += 1
                world.host.ports.clear()
                world.host.vfs.clear()
                world.host.refuses = lambda port_id, spec: True
                world.restart()
                world.check()
                record = world.store.get("a")
                assert record is not None and (record.spec, record.state) == (NEW, PortState.FAILED)
                again = world.put("a", NEW)
                world.serve([again])
                assert answer(again) == "error" and world.specs() == {"a": NEW}
                heal(world)
                assert world.check()
                world.assert_settled()
        if through:
            break
        boundary += 1
    assert found == 2, "around the second commit"


@each_kind
def test_a_refused_first_plug_that_the_store_does_not_forget_is_not_plugged_later(
    kind: type[Backend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock is lost once the intent is stored, and then the disk is full."""
    with world_at(kind) as world:
        _refuse_and_fill(world, monkeypatch)


def _refuse_and_fill(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    save, full = world.store.save, False

    def refuse(*args: Any, **fields: Any) -> None:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        save(*args, **fields)

    def held() -> Usability:
        nonlocal full
        full = bool(world.store.records())
        return Usability(not full)

    monkeypatch.setattr(world.store, "save", refuse)
    monkeypatch.setattr(world.backend, "hold", held)
    op = world.put("a", NEW)
    world.serve([op])
    assert isinstance(op.future.exception(), NetpluginError)
    assert world.host.ports == {}, "without the lock nothing is written, not by an undo either"
    full = False
    monkeypatch.setattr(world.backend, "hold", lambda: Usability(True))
    world.check()
    assert world.specs() == world.host.ports == {}
    world.assert_settled()


def test_a_port_that_is_requested_again_before_it_is_gone(world: World) -> None:
    world.serve([world.put("a", WIDE)])
    world.host.refuses = lambda port_id, spec: spec is None
    world.serve([world.delete("a")])
    assert [r.state for r in world.store.records()] == [PortState.REMOVING]
    other = make_spec(mac="52:54:00:00:00:99")
    op = world.put("a", other)
    world.serve([op])
    assert answer(op) == "ok"
    heal(world)
    world.check()
    assert world.host.ports == {"a": other}
    world.assert_settled()


def test_claims_that_run_out_fail_their_port_alone(world: World) -> None:
    ops = [world.put(f"p{n}", make_spec(claims=2)) for n in range(5)]
    world.serve(ops)
    assert [answer(op) for op in ops] == ["ok", "ok", "ok", "error", "error"]
    refused = ops[4].future.exception()
    assert isinstance(refused, CapacityExhausted) and refused.port_id == "p4"
    world.assert_settled()


@each_kind
def test_a_host_that_cannot_be_read_changes_nothing(kind: type[Backend]) -> None:
    with world_at(kind) as world:
        _serve_unread(world)


def _serve_unread(world: World) -> None:
    world.serve([world.put("a", OLD)])
    world.host.on_observe = _unreadable
    ops: list[Call] = [world.put("a", NEW), world.put("b", NEW), world.delete("a")]
    for op in ops[:2]:
        world.serve([op])
        assert isinstance(op.future.exception(), BackendUnavailable)
    assert world.specs()["a"] == OLD
    world.host.on_observe = lambda _: None
    world.check()
    assert world.specs() == {"a": OLD}
    world.assert_settled()


def _unreadable(_: Any) -> None:
    raise BackendUnavailable("not connected", step="observe")


# -- orphans, and a store that was lost ----------------------------------------------------------


def lose_store(world: World) -> None:
    world.store.close()
    for file in world.path.parent.glob("agent.db*"):
        file.unlink()
    world.start()


def test_a_port_that_was_forgotten_and_is_there_again_goes(world: World) -> None:
    """A write that landed late, or a database of OVS that was put back."""
    world.serve([world.put("a"), world.put("b")])
    port, stamp = world.host.ports["a"], world.host.stamps["a"]
    world.serve([world.delete("a")])
    world.restart()
    world.host.ports["a"], world.host.stamps["a"] = port, stamp
    assert world.reconciler.check().orphans_kept == [] and set(world.host.ports) == {"b"}
    world.assert_settled()


def test_a_port_of_a_later_plug_stays_though_an_earlier_one_was_forgotten(world: World) -> None:
    world.serve([world.put("a")])
    world.serve([world.delete("a")])
    copy = world.path.read_bytes(), world.path.with_name("agent.db-wal").read_bytes()
    world.serve([world.put("a")])
    world.store.close()
    world.path.write_bytes(copy[0])
    world.path.with_name("agent.db-wal").write_bytes(copy[1])
    world.start()
    assert world.reconciler.check().orphans_kept == ["a"]
    assert "older copy" in world.reconciler.ports.kept()["a"]
    assert set(world.host.ports) == {"a"}


@pytest.mark.parametrize("stamp", ["", "11111111-2222-3333-4444-555555555555/1", "nonsense"])
def test_a_port_that_the_store_never_had_stays_and_is_reported(world: World, stamp: str) -> None:
    world.host.ports["stranger"], world.host.stamps["stranger"] = OLD, stamp
    for _ in range(2):
        assert world.reconciler.check().orphans_kept == ["stranger"]
    [finding] = world.reconciler.findings()
    assert finding.status == "warn" and finding.found.endswith(": stranger")
    world.serve([world.put("stranger", OLD)])
    assert world.reconciler.findings() == []
    assert world.host.stamps["stranger"] == world.store.stamp("stranger")
    world.assert_settled()


def test_a_known_port_without_a_mark_of_a_store_gets_one(world: World) -> None:
    world.serve([world.put("a")])
    world.host.stamps.clear()
    world.check()
    assert world.host.stamps == {"a": world.store.stamp("a")}
    world.assert_settled()


def test_an_adoption_that_fails_leaves_the_port(world: World) -> None:
    world.serve([world.put("a", OLD)])
    lose_store(world)
    world.host.refuses = lambda port_id, spec: spec in (None, NEW)
    [op] = ops = [world.put("a", NEW)]
    assert world.serve(ops) and isinstance(op.future.exception(), HostError)
    record = world.store.get("a")
    assert record is not None and (record.state, record.spec) == (PortState.FAILED, NEW)
    assert world.host.ports == {"a": OLD}
    heal(world)
    world.check()
    world.assert_settled()
    assert world.host.ports == {"a": NEW}


def test_a_first_plug_at_a_host_that_cannot_be_read_leaves_nothing(world: World) -> None:
    world.serve([world.put("a", OLD)])
    lose_store(world)
    world.host.on_observe = _unreadable
    op = world.put("a", OLD)
    world.serve([op])
    assert isinstance(op.future.exception(), BackendUnavailable) and world.specs() == {}
    world.host.on_observe = lambda _: None
    assert world.reconciler.check().orphans_kept == ["a"] and set(world.host.ports) == {"a"}


def test_after_a_lost_store_they_stay_until_they_may_go(world: World) -> None:
    world.serve([world.put("a"), world.put("b")])
    lose_store(world)
    for _ in range(2):
        assert world.reconciler.check().orphans_kept == ["a", "b"]
    world.serve([world.put("a")])
    assert world.reconciler.check().orphans_kept == ["b"]
    assert world.reconciler.check(remove_orphans=True).orphans_kept == []
    assert set(world.host.ports) == {"a"}
    world.assert_settled()


def test_after_a_lost_store_they_stay_across_a_restart(world: World) -> None:
    """The store is old by then, but nobody has allowed yet to remove what it does not know."""
    world.serve([world.put("a"), world.put("b")])
    lose_store(world)
    world.restart()
    assert world.reconciler.check().orphans_kept == ["a", "b"]
    world.serve([world.put("a"), world.put("b")])
    assert world.reconciler.check().orphans_kept == []
    world.assert_settled()


def test_another_store_is_accepted_by_who_could_know_of_it(world: World) -> None:
    world.host.store_mark = "00000000-0000-4000-8000-000000000000/7"
    world.reconciler.check(remove_orphans=True)
    [finding] = world.reconciler.findings()
    assert finding.id == "store-older-fake", "only this check has found it out"
    world.restart()
    world.host.on_observe = _unreadable
    with pytest.raises(BackendUnavailable):
        world.reconciler.check(remove_orphans=True)
    world.host.on_observe = lambda _: None
    assert world.reconciler.findings() == [finding], "that check came to nothing"
    world.reconciler.check(remove_orphans=True)
    assert world.reconciler.findings() == []
    world.restart()
    world.reconciler.check()
    assert world.reconciler.findings() == [], "accepted is accepted"


def test_a_dry_run_decides_nothing(world: World) -> None:
    world.serve([world.put("a")])
    lose_store(world)
    dry = world.reconciler.check(dry_run=True, remove_orphans=True)
    assert [change.ports for change in dry.changes] == [("a",)] and dry.orphans_kept == []
    assert world.reconciler.check().orphans_kept == ["a"]
    assert set(world.host.ports) == {"a"}


# -- any order of anything -----------------------------------------------------------------------

_PORTS = st.sampled_from(["a", "b", "c", "d"])
_SPECS = st.sampled_from([OLD, NEW, WIDE, make_spec(300, claims=2)])
_ASKED = st.dictionaries(_PORTS, st.none() | _SPECS, min_size=1, max_size=3)
_CRASH = st.none() | st.integers(0, 30)


class Machine(RuleBasedStateMachine):
    """``allowed`` is what each port may be, by the answers to callers; None is: not there."""

    @initialize()
    def begin(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.world = World(Path(self._directory.name))
        self.allowed: dict[str, set[PortSpec | None]] = {}
        self.unmanaged: set[str] = set()
        self.down = False

    @rule(asked=_ASKED, refused=st.sets(_PORTS), crash_at=_CRASH)
    def ask(self, asked: Mapping[str, PortSpec | None], refused: set[str], crash_at: int | None) -> None:
        world = self.world
        if not self.down:
            world.host.refuses = lambda i, spec: i in refused and asked.get(i, ...) == spec
        ops: list[Call] = [
            world.delete(i) if spec is None else world.put(i, spec) for i, spec in asked.items()
        ]
        known = {r.port_id for r in world.store.records()}
        adopted = {
            i
            for i in asked.keys() & world.host.ports.keys()
            if (r := world.store.get(i)) is None or (r.state is PortState.PENDING and not r.previous)
        }
        through = world.serve(ops, crash_at)
        assert not through or all(op.future.done() for op in ops)
        if not self.down:
            heal(world)
        for op in ops:
            self._reported(op, op.port_id in known, op.port_id in adopted)
        if not through:
            world.restart()

    def _reported(self, op: Call, known: bool, adopted: bool) -> None:
        before = self.allowed.get(op.port_id, {None})
        if op.kind == "delete":
            accepted = answer(op) != "none"
            self.allowed[op.port_id] = {None} if accepted else before | {None}
        elif answer(op) == "ok":
            self.allowed[op.port_id] = {op.port.spec}
        elif answer(op) == "none" or adopted:  # what was there stays, and is tried again
            self.allowed[op.port_id] = before | {op.port.spec}

    @rule(crash_at=_CRASH)
    def look(self, crash_at: int | None) -> None:
        if self.down:
            with pytest.raises(BackendUnavailable):
                self.world.check()
            return
        if self.world.check(crash_at):
            self._verify()
        else:
            self.world.restart()

    @rule(port_id=_PORTS, to=st.none() | _SPECS)
    def drift(self, port_id: str, to: PortSpec | None) -> None:
        """Somebody with root changed a port, removed it, or made one with our mark."""
        ports = self.world.host.ports
        if to is None:
            ports.pop(port_id, None)
            self.world.host.vfs.pop(port_id, None)
        else:
            ports[port_id] = to
            self.unmanaged.add(port_id)

    @precondition(lambda self: not self.down)
    @rule()
    def host_goes_down(self) -> None:
        self.down = True
        self.world.host.on_observe = _unreadable
        self.world.host.usability = Usability(False, "not connected")

    @precondition(lambda self: self.down)
    @rule(loses_ports=st.booleans())
    def host_comes_back(self, loses_ports: bool) -> None:
        self.down = False
        self.world.host.on_observe = lambda _: None
        self.world.host.usability = Usability(True)
        if loses_ports:
            self.world.host.ports.clear()
            self.world.host.vfs.clear()

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def claims_are_unique(self) -> None:
        self.world.assert_claims_are_unique()

    @invariant()
    def no_acknowledged_port_is_lost(self) -> None:
        kept = {
            i: r.previous or r.spec
            for i in self.allowed
            if (r := self.world.store.get(i)) and r.state is not PortState.REMOVING
        }
        for port_id, allowed in self.allowed.items():
            assert port_id in kept or None in allowed

    def _verify(self) -> None:
        self.world.assert_settled(self.unmanaged)
        found = self.world.specs()
        assert set(found) <= set(self.allowed)
        for port_id, allowed in self.allowed.items():
            assert found.get(port_id) in allowed
            self.allowed[port_id] = {found.get(port_id)}

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self.down:
                self.host_comes_back(loses_ports=False)
            self.world.restart()
            assert self.world.check()
            self._verify()
        finally:
            self.world.store.close()
            self._directory.cleanup()


TestInterleavings = Machine.TestCase
TestInterleavings.settings = settings(
    max_examples=2000 if LONG else 50,
    stateful_step_count=60 if LONG else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

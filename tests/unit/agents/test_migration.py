"""The phases of a migrating port: what may follow what, crashes at every step, guests that are followed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from agents.operations.migrations import compared
from agents.ports import guests
from agents.ports.call import Call
from agents.ports.migration import followed, is_news, opens, outcome
from agents.ports.reconciler import Reconciler
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin.api.client import Client
from netplugin.api.domain_models import DomainPolicy, RenderRequest
from netplugin.api.errors import (
    CapacityExhausted,
    Conflict,
    HostError,
    NetpluginError,
    NotFound,
    OperationTimeout,
    Unsupported,
)
from netplugin.api.migration import Activation, Migration, MigrationPhase
from netplugin.api.migration_models import MigrateCheck, MigrateRequest, MigrationStep
from netplugin.api.models import BackendInfo, Features, PortSpec, PortState
from netplugin.backend import Intent
from tests.lab.processes import wait_for
from tests.unit.agent import DEADLINE_S, SPEC, Agent, agent, caller, served_agent
from tests.unit.fakes import FakeBackend, FakeHost

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(seconds=1)
PORT = PortSpec.model_validate(SPEC)
OTHER = PORT.model_copy(update={"mac": "52:54:00:12:34:99"})
STEPS: tuple[MigrationStep, ...] = ("prepare", "activate", "leave", "commit", "abort")
#: docs/reference-api.md: by phase ("gone": no port, "none": never migrated), for each of the steps.
TABLE = {
    "gone": "prepared 404 404 gone gone",
    "none": "409 409 left 409 409",
    "prepared": "prepared activated 409 committed gone",
    "activated": "409 activated 409 committed gone",
    "committed": "409 409 left committed 409",
    "leaving": "409 409 left gone returned",
    "left": "409 409 left gone returned",
    "returned": "409 409 left 409 returned",
}


def state(name: str, activation: Activation = "manual") -> tuple[PortSpec, Migration | None] | None:
    if name == "gone":
        return None
    if name == "none":
        return PORT, None
    return PORT, Migration(phase=MigrationPhase(name), activation=activation, since=NOW)


@pytest.mark.parametrize(("name", "step"), [*product(TABLE, STEPS)])
def test_what_may_follow_a_phase(name: str, step: MigrationStep) -> None:
    expected = TABLE[name].split()[STEPS.index(step)]
    there = state(name)
    spec = PORT if step == "prepare" else None
    if expected in ("404", "409"):
        with pytest.raises(NotFound if expected == "404" else Conflict) as refused:
            outcome(step, None, spec, there, LATER)
        if name not in ("gone", "none"):
            assert name in refused.value.detail, "the error names the phase"
        return
    found = outcome(step, None, spec, there, LATER)
    assert found.removes == (expected == "gone")
    if not found.removes:
        assert found.migration is not None and found.migration.phase.value == expected
        again = outcome(step, None, spec, (PORT, found.migration), LATER + timedelta(hours=1))
        assert again == found, "a step that is sent again changes nothing"


def test_a_prepared_port_is_prepared_again_as_it_is_alone() -> None:
    assert outcome("prepare", None, PORT, state("prepared"), LATER).migration == state("prepared")[1]  # type: ignore[index]
    for spec, activation in ((OTHER, None), (PORT, "auto")):
        with pytest.raises(Conflict):
            outcome("prepare", activation, spec, state("prepared"), LATER)  # type: ignore[arg-type]


def test_auto_leaves_open_and_manual_closes_it() -> None:
    leaving = outcome("leave", "auto", None, state("none"), LATER).migration
    assert leaving is not None and (leaving.phase, leaving.is_closed) == (MigrationPhase.LEAVING, False)
    assert outcome("leave", "auto", None, (PORT, leaving), LATER).migration == leaving
    left = outcome("leave", None, None, (PORT, leaving), LATER).migration
    assert left is not None and (left.phase, left.activation) == (MigrationPhase.LEFT, "manual")
    assert outcome("leave", "auto", None, (PORT, left), LATER).migration == left


@pytest.mark.parametrize("activation", ["manual", "auto"])
@pytest.mark.parametrize("guest", [True, False, None])
@pytest.mark.parametrize("name", [name for name in TABLE if name != "gone"])
def test_a_guest_is_followed_with_auto_alone(name: str, guest: bool | None, activation: Activation) -> None:
    there = state(name, activation)
    assert there is not None
    found = followed(there[1], guest, LATER)
    moves = {("prepared", True): "activated", ("leaving", False): "left", ("left", True): "leaving"}
    to = moves.get((name, guest)) if activation == "auto" and guest is not None else None
    if to is None:
        assert found == there[1]
    else:
        assert found is not None and (found.phase.value, found.since) == (to, LATER)


def test_what_is_announced() -> None:
    def phase(name: str) -> Migration | None:
        there = state(name)
        return there[1] if there else None

    opened = {
        (one, other)
        for one, other in product(TABLE, TABLE)
        if opens(phase(one), phase(other)) and "gone" not in (one, other)
    }
    ends = ("activated", "committed", "leaving", "returned")
    assert opened == {(one, other) for one in ("prepared", "left") for other in ends} | {
        ("leaving", "returned")
    }
    assert is_news(phase("activated"), LATER) and not is_news(phase("prepared"), LATER)
    assert not is_news(phase("activated"), NOW + timedelta(hours=1)) and not is_news(None, NOW)


# -- with the store and a host in memory ---------------------------------------------------------------


class Killed(BaseException):
    """The agent ends here."""


class World:
    """One agent after the other, on one store and one host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.host = FakeHost()
        self._left: int | None = None
        self.host.on_apply = lambda change: self._step()
        self.host.on_observe = lambda ports: self._step()
        self.start()

    def start(self) -> None:
        self.store = Store(self._path)
        save = self.store.save

        def saved(*args: Any, **kwargs: Any) -> None:
            self._step()
            save(*args, **kwargs)
            self._step()

        self.store.save = saved  # type: ignore[method-assign]
        self.reconciler = Reconciler(FakeBackend("fake", self.host), self.store, Metrics(self.store))

    def restart(self) -> None:
        self._left = None
        self.store.close()
        self.start()
        self.reconciler.check()

    def _step(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Killed

    def ask(self, *operations: Call, crash_at: int | None = None) -> bool:
        """False if the agent was killed before it was through."""
        self._left = crash_at
        try:
            assert self.reconciler.plug.serve(operations) == []
        except Killed:
            return False
        finally:
            self._left = None
        return True

    def step(self, step: MigrationStep, activation: Activation | None = None) -> Call:
        spec = PORT if step == "prepare" else None
        return Call(
            Record("p", spec) if spec else Intent("p", None),
            time.monotonic() + 60,
            step=step,
            activation=activation,
        )

    def done(self, step: MigrationStep, activation: Activation | None = None) -> Any:
        op = self.step(step, activation)
        self.ask(op)
        return op.future.result(0)

    def put(self, spec: PortSpec = PORT) -> Any:
        op = Call(Record("p", spec), time.monotonic() + 60)
        self.ask(op)
        return op.future.result(0)

    @property
    def phase(self) -> str | None:
        record = self.store.get("p")
        return record.migration.phase.value if record and record.migration else None

    def look(self) -> str:
        """What there is of the port, on the host and in the store, which are the same."""
        record = self.store.get("p")
        if record is None:
            assert not self.host.ports and not self.host.shut
            return "gone"
        closed = record.migration is not None and record.migration.is_closed
        assert record.state is PortState.ACTIVE and self.host.ports == {"p": PORT}
        assert closed == ("p" in self.host.shut)
        return "closed" if closed else "open"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "agent.db")
    yield made
    made.store.close()


def prepared(world: World) -> None:
    world.done("prepare")


def activated(world: World) -> None:
    world.done("prepare")
    world.done("activate")


def plugged(world: World) -> None:
    world.put()


def left(world: World) -> None:
    world.put()
    world.done("leave")


#: What was before, the step, and what is looked at before it and after it.
CASES: list[tuple[Callable[[World], None], MigrationStep, str, str]] = [
    (lambda world: None, "prepare", "gone", "closed"),
    (prepared, "activate", "closed", "open"),
    (prepared, "abort", "closed", "gone"),
    (prepared, "commit", "closed", "open"),
    (activated, "commit", "open", "open"),
    (activated, "abort", "open", "gone"),
    (plugged, "leave", "open", "closed"),
    (left, "abort", "closed", "open"),
    (left, "commit", "closed", "gone"),
]


@pytest.mark.parametrize(("before", "step", "was", "becomes"), CASES)
def test_a_crash_at_every_step(
    tmp_path: Path, before: Callable[[World], None], step: MigrationStep, was: str, becomes: str
) -> None:
    through, crash_at = False, 0
    while not through:
        world = World(tmp_path / f"{crash_at}.db")
        before(world)
        assert world.look() == was
        world.host.announced.clear()
        through = world.ask(world.step(step), crash_at=crash_at)
        world.restart()
        assert world.look() in (was, becomes), crash_at
        # The caller has no answer, and sends it again.
        world.done(step)
        assert world.look() == becomes, crash_at
        if becomes == "open" and was == "closed":
            assert "p" in world.host.announced, crash_at
        else:
            assert was == "open" or "p" not in world.host.announced
        world.store.close()
        crash_at += 1
    assert crash_at >= 4


def test_only_steps_and_a_delete_change_a_port_that_migrates(world: World) -> None:
    prepared(world)
    for spec in (PORT, OTHER.model_copy(update={"mac": PORT.mac, "queues": 1})):
        with pytest.raises(Conflict, match="it is prepared"):
            world.put(spec)
    assert world.look() == "closed"
    world.done("commit")
    world.put()
    op = Call(Intent("p", None), time.monotonic() + 60)
    world.done("leave")
    world.ask(op)
    op.future.result(0)
    assert world.look() == "gone"


def test_drift_repair_keeps_a_closed_port_closed(world: World) -> None:
    prepared(world)
    world.host.shut.clear()
    world.reconciler.check()
    assert world.look() == "closed" and world.host.announced == []
    world.host.ports.clear()
    world.host.shut.clear()
    world.reconciler.check()
    assert world.look() == "closed"


def test_a_step_that_the_host_refuses_is_kept_and_done_later(world: World) -> None:
    prepared(world)

    def refuse(change: object) -> None:
        raise HostError("no", step="apply")

    world.host.on_apply = refuse
    with pytest.raises(NetpluginError):
        world.done("activate")
    record = world.store.get("p")
    assert record is not None and (record.state, world.phase) == (PortState.FAILED, "activated")
    assert "p" in world.host.shut and world.host.announced == []
    world.host.on_apply = lambda change: None
    world.reconciler.check()
    assert world.look() == "open" and world.host.announced == ["p"]


def test_a_port_that_the_backend_does_not_migrate_stays_as_it_is(world: World) -> None:
    world.host.unmovable.add("p")
    with pytest.raises(Unsupported, match="this port stays"):
        world.done("prepare")
    assert world.look() == "gone"
    world.done("commit")
    world.put()
    for step in ("leave", "activate"):
        with pytest.raises(Unsupported, match="this port stays"):
            world.done(step)
    assert (world.phase, world.look()) == (None, "open")


def test_a_prepare_that_the_host_refuses_leaves_nothing(world: World) -> None:
    def refuse(change: Any) -> None:
        if change.spec is not None:
            raise HostError("no", step="apply")

    world.host.on_apply = refuse
    with pytest.raises(NetpluginError):
        world.done("prepare")
    assert world.look() == "gone"


def test_the_agent_follows_guests(world: World) -> None:
    world.host.guests["p"] = False
    world.done("prepare", "auto")
    world.reconciler.check(["p"])
    assert (world.phase, world.look()) == ("prepared", "closed")
    world.host.guests["p"] = True
    world.reconciler.check(["p"])
    assert (world.phase, world.look(), world.host.announced) == ("activated", "open", ["p"])
    world.done("commit")
    world.done("leave", "auto")
    assert (world.phase, world.look()) == ("leaving", "open")
    world.host.guests["p"] = False
    assert world.host.handed_over == []
    world.restart()
    assert (world.phase, world.look(), world.host.handed_over) == ("left", "closed", ["p"])
    world.host.guests["p"] = True
    world.reconciler.check(["p"])
    assert (world.phase, world.look()) == ("leaving", "open")
    world.done("abort")
    assert (world.phase, world.look()) == ("returned", "open")


def test_a_guest_that_has_stopped_already_is_looked_at_again(world: World) -> None:
    world.put()
    world.host.guests["p"] = False
    world.done("leave", "auto")
    assert world.reconciler.unsettled(), "nothing else would wake the agent"
    world.reconciler.check()
    assert world.phase == "left" and not world.reconciler.unsettled()


# -- over HTTP -----------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Agent, str]]:
    with agent(tmp_path) as made, served_agent(made) as url:
        yield made, url


def test_over_http(running: tuple[Agent, str]) -> None:
    _, url = running
    with caller(url) as client:

        def step(status: int, **body: Any) -> Any:
            answer = client.post("/v1/ports/p:migrate", json=body)
            assert answer.status_code == status, answer.text
            return answer.json() if answer.content else None

        assert step(404, phase="activate")["code"] == "not_found"
        step(204, phase="abort")
        step(422, phase="prepare")
        step(422, phase="activate", port=SPEC)
        step(422, phase="commit", activation="auto")
        shown = step(200, phase="prepare", port=SPEC)["migration"]
        assert (shown["phase"], shown["activation"]) == ("prepared", "manual")
        assert client.get("/v1/ports/p").json()["migration"] == shown
        assert client.put("/v1/ports/p", json=SPEC).json()["code"] == "conflict"
        retag = {"ports": ["p"], "to_vlan": 7}
        assert client.post("/v1/ports:retag", json=retag).json()["results"][0]["status"] == 409
        assert step(200, phase="activate")["migration"]["phase"] == "activated"
        assert step(200, phase="commit")["migration"] is None
        assert client.get("/v1/ports/p").json()["migration"] is None
        step(200, phase="leave", activation="auto")
        step(204, phase="commit")
        assert client.get("/v1/ports/p").status_code == 404
        events = client.get("/v1/events?follow=false&after=0&kind=migration").text
        for phase in ("prepared", "activated", "committed", "leaving"):
            assert f'"state": "{phase}"' in events


def test_a_port_is_announced_five_times_unless_it_goes(
    running: tuple[Agent, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two it is the first that goes: its fifth would come before the other's."""
    made, url = running
    # Time enough to let one go before its last, and for a turn.
    monkeypatch.setattr(guests, "_GAPS_S", (0.05, 0.15, 0.25, 3.0))
    monkeypatch.setattr(guests, "_TURN_S", DEADLINE_S)
    with Client(url) as client:
        for port_id in ("q", "p"):
            assert client.migrate_port(port_id, MigrateRequest(phase="prepare", port=PORT)) is not None
            assert client.migrate_port(port_id, MigrateRequest(phase="activate")) is not None
        client.migrate_port("p", MigrateRequest(phase="commit"))
        assert client.migrate_port("q", MigrateRequest(phase="abort")) is None
        wait_for(lambda: made.host.announced.count("p") == 5, DEADLINE_S, "all are sent")
    assert made.host.announced.count("p") == 5 and 1 <= made.host.announced.count("q") < 5


def test_an_announcement_that_fails_is_sent_again(
    running: tuple[Agent, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when vswitchd is away: the network would not learn where the VM is before it sends something."""
    made, url = running
    monkeypatch.setattr(guests, "_AGAIN_S", 0.01)
    left, announce = [3], FakeBackend.announce

    def fails(self: FakeBackend, intents: Sequence[Intent], deadline: float) -> None:
        if left[0]:
            left[0] -= 1
            raise OperationTimeout("vswitchd does not answer", step="announce")
        announce(self, intents, deadline)

    monkeypatch.setattr(FakeBackend, "announce", fails)
    with Client(url) as client:
        client.migrate_port("p", MigrateRequest(phase="prepare", port=PORT))
        client.migrate_port("p", MigrateRequest(phase="activate"))
        wait_for(lambda: made.host.announced.count("p") == 5, DEADLINE_S, "all are sent")
        # While it fails for longer than that, the rest is left to the guest.
        left[0] = 1 << 30
        monkeypatch.setattr(guests, "_TRIED_S", 0.05)
        client.migrate_port("q", MigrateRequest(phase="prepare", port=PORT))
        client.migrate_port("q", MigrateRequest(phase="activate"))
        going = made.service._workers["fake"].reconciler.guests._going
        wait_for(lambda: not going and left[0] < 1 << 30, DEADLINE_S, "it is given up")
    assert made.host.announced.count("q") == 0


# -- before a migration --------------------------------------------------------------------------------


def failed(check: MigrateCheck, info: BackendInfo | None, refused: str | None = None) -> set[str]:
    found = compared(check, info, refused)
    assert all(bool(finding.fix) == (finding.status == "fail") for finding in found)
    return {finding.id for finding in found if finding.status == "fail"}


def test_what_does_not_fit_is_found_before() -> None:
    facts = {"userspace_tso": False, "vhost_postcopy": False}
    info = BackendInfo(name="fake", usable=True, features=Features(live_migration=True), facts=facts)
    same = MigrateCheck(port_id="p", port=PORT, source=PORT, source_facts=facts)
    assert failed(same, info) == set()
    assert failed(same, None) == {"migrate-backend", "migrate-steps"}
    assert failed(same, info, "no such network") == {"migrate-port"}
    assert failed(same, info.model_copy(update={"usable": False, "reason": "gone"})) == {"migrate-backend"}
    for other in (OTHER, PORT.model_copy(update={"queues": 2})):
        assert failed(same.model_copy(update={"source": other}), info) == {"migrate-device"}
    tso = same.model_copy(update={"source_facts": {"userspace_tso": True}})
    assert failed(tso, info) == {"migrate-userspace-tso"}
    assert failed(same.model_copy(update={"postcopy": True}), info) == {"migrate-postcopy"}
    both = {"userspace_tso": False, "vhost_postcopy": True}
    here = info.model_copy(update={"facts": both})
    assert failed(same.model_copy(update={"postcopy": True}), here) == {"migrate-postcopy"}
    teamed = PORT.model_copy(update={"vf": PORT.vf.model_copy(update={"teaming": True})})
    fixed = info.model_copy(update={"features": Features()})
    team = same.model_copy(update={"port": teamed, "source": teamed})
    assert failed(team, fixed) == {"migrate-steps"}
    assert not any(f.status == "fail" for f in compared(team, fixed, None, moves=info))
    moded = fixed.model_copy(update={"facts": {"mode": "vduse"}})
    [steps] = [f for f in compared(same, moded, None) if f.fix]
    assert steps.found == "backend fake in vduse mode does not migrate ports"
    placed = same.model_copy(update={"domain": RenderRequest(xml="<domain/>")})
    assert failed(placed, info) == set()
    full = CapacityExhausted("no CPUs are left", step="render")
    assert [f.found for f in compared(placed, info, None, unplaced=full) if f.status == "fail"] == [
        "no CPUs are left"
    ]
    ready = same.model_copy(update={"postcopy": True, "source_facts": both})
    assert failed(ready, here) == set()


def test_the_destination_answers_what_does_not_fit(running: tuple[Agent, str]) -> None:
    made, url = running
    other = PORT.model_copy(update={"backend": "elsewhere"})
    with Client(url) as client:
        fits = client.check_migration(MigrateCheck(port_id="p", port=PORT, source=PORT))
        assert {finding.status for finding in fits} == {"ok"}
        found = client.check_migration(MigrateCheck(port_id="p", port=other, source=PORT))
        pinned = RenderRequest(xml="<domain/>", policy=DomainPolicy(pin=True))
        asked = MigrateCheck(port_id="p", port=PORT, source=PORT, domain=pinned)
        unplaced = client.check_migration(asked)
    assert {f.id for f in found if f.status == "fail"} >= {"migrate-backend", "migrate-port"}
    [finding] = [f for f in unplaced if f.status == "fail"]
    assert finding.id == "migrate-placement" and finding.found.endswith("and it has none")
    assert made.host.written == [] and made.store.placements.all() == {}

"""Events: written with what they tell of, numbered, bounded, and followed across interruptions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agents.store.event_log import EventLog, NewEvent
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.event_streams import EventStreams
from agents.telemetry.host_events import HostEvents
from netplugin.api import errors
from netplugin.api.client import Client
from netplugin.api.event_models import Event, EventFilter, EventKind
from netplugin.api.models import Finding, PlannedChange, PortSpec, PortState, ReconcileRequest
from netplugin.backend import Claim
from netplugin.cli.main import main
from netplugin.host.usability import Usability
from tests.unit.agent import DEADLINE_S, SPEC, Agent, agent, served_agent

SPEC_MODEL = PortSpec.model_validate(SPEC)
STORED = EventFilter(follow=False)
FINDING = Finding(id="one-link", status="warn", found="one link", expected="two links")


def states(events: Iterator[Event] | list[Event], port_id: str = "p1") -> list[str]:
    return [event.state for event in events if event.port_id == port_id]


def events_of(store: Store, after: int = 0) -> list[Event]:
    return list(store.events.page(after, 1000).events)


def plug(client: Client) -> None:
    """Plug p1, and wait for its events: the call is answered before the port's state is committed."""
    client.put_port("p1", SPEC_MODEL)
    client.put_port("p1", SPEC_MODEL)  # its turn comes after that


# -- the store ---------------------------------------------------------------------------------------


def test_each_state_of_a_port_is_an_event(client: Client) -> None:
    plug(client)
    client.delete_port("p1")
    events = list(client.events(STORED))
    assert states(events) == ["pending", "active", "removing", "removed"]
    assert [event.id for event in events] == sorted({event.id for event in events})
    assert {event.backend for event in events if event.port_id} == {"fake"}


def test_what_is_not_committed_is_no_event(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    claim = Claim("vf", "0000:03:10.1")
    store.save([Record("p1", SPEC_MODEL, state=PortState.PENDING, claims=(claim,))])
    before = events_of(store)
    with pytest.raises(Exception, match="belongs to another port"):
        store.save([Record("p2", SPEC_MODEL, state=PortState.PENDING, claims=(claim,))])
    assert events_of(store) == before
    store.close()


def test_a_quarantine_begins_once_and_ends(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    claim = Claim("vf", "0000:03:10.1")
    for _ in range(2):
        store.quarantine({claim: "its spoof check cannot be set"})
    store.release([claim, Claim("vf", "0000:03:10.2")])
    found = [(event.state, event.subject, event.detail) for event in events_of(store)]
    assert found == [
        ("begun", "0000:03:10.1", "its spoof check cannot be set"),
        ("ended", "0000:03:10.1", ""),
    ]
    store.close()


def test_only_the_newest_are_kept_and_no_number_is_used_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db", max_events=3)
    for number in range(5):
        store.events.note(NewEvent(EventKind.DRIFT, "found", str(number)))
    assert [(e.id, e.detail) for e in events_of(store)] == [(3, "2"), (4, "3"), (5, "4")]
    page = store.events.page(1, 1000)
    assert (page.lost, page.first) == (True, 3)
    assert not store.events.page(2, 1000).lost
    with store.database.transaction():
        store.database.sql.execute("DELETE FROM events")
    store.close()
    store = Store(tmp_path / "agent.db", max_events=3)
    assert store.events.newest() == 5
    store.events.note(NewEvent(EventKind.DRIFT, "found"))
    assert [event.id for event in events_of(store)] == [6]
    store.close()


def test_a_number_of_another_store_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """An older copy of the store was put back: the client has seen numbers that are to come."""
    store = Store(tmp_path / "agent.db")
    store.events.note(NewEvent(EventKind.DRIFT, "found"))
    page = store.events.page(1000, 10)
    assert (page.lost, page.first, page.last) == (True, 1, 1)
    store.close()


def test_the_last_state_outlives_its_event(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db", max_events=2)
    HostEvents(store.events, "fake").connection("p1", True)
    store.close()
    store = Store(tmp_path / "agent.db", max_events=2)
    for _ in range(3):
        store.events.note(NewEvent(EventKind.DRIFT, "found"))
    HostEvents(store.events, "fake").connection("p1", False)
    store.close()
    store = Store(tmp_path / "agent.db", max_events=2)
    assert (events_of(store)[-1].kind, events_of(store)[-1].state) == (EventKind.CONNECTION, "disconnected")
    store.close()


def test_a_port_of_a_used_id_begins_without_a_vm(tmp_path: Path) -> None:
    """It was removed while no agent followed its VM."""
    store = Store(tmp_path / "agent.db")
    store.save([Record("p1", SPEC_MODEL, state=PortState.ACTIVE)])
    HostEvents(store.events, "fake").connection("p1", True)
    store.close()
    store = Store(tmp_path / "agent.db")
    store.save([], forget=["p1"])
    HostEvents(store.events, "fake").connection("p1", True)
    store.close()
    store = Store(tmp_path / "agent.db")
    assert [e.state for e in events_of(store) if e.kind is EventKind.CONNECTION] == ["connected"] * 2
    store.close()


def test_what_could_not_be_stored_is_an_event_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "agent.db")
    events = HostEvents(store.events, "fake")
    store.database.sql.execute("PRAGMA query_only=ON")
    events.usability(Usability(False, "no OVS"))
    events.findings([FINDING])
    assert "fake unusable no OVS" in caplog.text and "one-link" in caplog.text
    store.database.sql.execute("PRAGMA query_only=OFF")
    events.usability(Usability(False, "no OVS"))
    events.findings([FINDING])
    assert [e.state for e in events_of(store)] == ["unusable", "warn"]
    store.close()


def test_an_older_copy_uses_no_number_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    store.events.note(NewEvent(EventKind.DRIFT, "found", "first"))
    store.marks.compare("fake", "the mark of another store", [])
    store.events.note(NewEvent(EventKind.DRIFT, "found", "second"))
    page = store.events.page(2, 10)  # a number that the newer copy has used
    assert page.lost and [event.detail for event in page.events] == ["second"]
    store.close()


def test_a_slow_disk_does_not_keep_a_stream_from_subscribing(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    ended = threading.Event()

    def subscribe() -> None:
        store.events.subscribe(lambda: None)()
        ended.set()

    with store.database.lock:
        threading.Thread(target=subscribe).start()
        assert ended.wait(DEADLINE_S)
    store.close()


def test_a_full_disk_loses_events_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "agent.db")
    store.database.sql.execute("PRAGMA query_only=ON")
    store.events.note(NewEvent(EventKind.DRIFT, "found", "a flow is missing"))
    assert "events are lost" in caplog.text and "a flow is missing" in caplog.text
    store.database.sql.execute("PRAGMA query_only=OFF")
    assert events_of(store) == []
    store.close()


# -- streams -----------------------------------------------------------------------------------------


class Follower:
    """Follows in a thread of its own."""

    def __init__(self, url: str, criteria: EventFilter) -> None:
        self._client = Client(url)
        self.reader = self._client.events(criteria)
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self.reader:
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
        except errors.NetpluginError as error:
            self.error = error

    def wait_for(self, count: int) -> list[Event]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, DEADLINE_S), self.events
            return list(self.events)

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._client.close()


def test_stored_events_come_first_and_then_each_as_it_happens(running: Agent) -> None:
    with served_agent(running) as url, Client(url) as client:
        client.put_port("p1", SPEC_MODEL)
        follower = Follower(url, EventFilter(after=0, port_id="p1"))
        assert states(follower.wait_for(2)) == ["pending", "active"]
        client.put_port("p2", SPEC_MODEL.model_copy(update={"mac": "52:54:00:12:34:57"}))
        client.delete_port("p1")
        assert states(follower.wait_for(4)) == ["pending", "active", "removing", "removed"]
        running.service.events.end()
        follower.join()
    assert {event.port_id for event in follower.events} == {"p1"}


def test_who_comes_back_misses_nothing_and_has_nothing_twice(tmp_path: Path) -> None:
    seen: list[Event] = []
    last: int | None = 0
    for round_ in range(3):
        with agent(tmp_path) as running, served_agent(running) as url, Client(url) as client:
            client.put_port(f"p{round_}", SPEC_MODEL)
            follower = Follower(url, EventFilter(after=last, kind=EventKind.PORT))
            seen += follower.wait_for(2)
            running.service.events.end()
            follower.join()
            last = follower.reader.last
            client.delete_port(f"p{round_}")  # while nobody follows
    assert [event.id for event in seen] == sorted({event.id for event in seen})
    assert states(seen, "p0") == ["pending", "active", "removing", "removed"]


def test_without_a_number_it_begins_with_what_happens_from_now_on(client: Client) -> None:
    plug(client)
    reader = client.events(EventFilter(seconds=0.05))
    assert list(reader) == []
    assert reader.last is not None
    client.delete_port("p1")
    assert states(list(client.events(EventFilter(after=reader.last, follow=False)))) == [
        "removing",
        "removed",
    ]


def test_events_that_are_gone_are_reported(client: Client, running: Agent) -> None:
    running.store.events.most = 1
    client.put_port("p1", SPEC_MODEL)
    client.delete_port("p1")
    assert states(list(client.events(EventFilter(after=0, follow=False)))) == ["removed"]
    with pytest.raises(errors.NotFound, match="not stored any more"):
        list(client.events(EventFilter(after=1, follow=False)))


def test_a_filtered_stream_tells_how_far_it_has_come(running: Agent, client: Client) -> None:
    plug(client)
    reader = client.events(EventFilter(after=0, port_id="p2", follow=False))
    assert list(reader) == [] and reader.last == running.store.events.newest()

    async def stream() -> bytes:
        streams = EventStreams(running.store.events, 1, idle_s=0.01)
        read = streams.follow(EventFilter(after=0, port_id="p2"), None)
        assert await anext(read) == b"id: 0\n\nid: 2\n\n"
        with pytest.raises(errors.Overloaded):
            streams.require_room()
        again = await asyncio.wait_for(anext(read), DEADLINE_S)
        await read.aclose()
        streams.require_room()
        return again

    assert asyncio.run(stream()) == b"id: 2\n\n"


def test_one_event_after_the_other_is_taken_once(client: Client) -> None:
    plug(client)
    last: int | None = 0
    found = []
    for _ in range(2):
        reader = client.events(EventFilter(after=last, follow=False))
        found.append(next(iter(reader)).state)
        last = reader.last
    assert found == ["pending", "active"]


def test_a_detail_may_have_any_character(client: Client, running: Agent) -> None:
    detail = "a\u0085b\u2028c\nd\r\ne"
    running.store.events.note(NewEvent(EventKind.DRIFT, "found", detail))
    assert [event.detail for event in client.events(STORED)] == [detail]


def test_a_backend_that_is_not_loaded_any_more_is_unusable(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    gone = HostEvents(store.events, "gone")
    gone.usability(Usability(True))
    gone.findings([FINDING])
    store.close()
    with agent(tmp_path, broken={"broken": "no such module"}) as running:
        events = events_of(running.store, 2)
    assert {(e.backend, e.state) for e in events} == {
        ("broken", "unusable"),
        ("gone", "unusable"),
        ("gone", "gone"),
    }


def test_the_header_of_browsers_and_the_format(client: Client, running: Agent) -> None:
    plug(client)
    with served_agent(running) as url:
        answer = httpx.get(
            f"{url}/v1/events?follow=false", headers={"Last-Event-ID": "1"}, timeout=DEADLINE_S
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        first, second, *rest = answer.text.split("\n\n")
        assert first == "id: 1"
        lines = second.split("\n")
        assert lines[:2] == ["id: 2", "event: port"]
        assert json.loads(lines[2].removeprefix("data: "))["state"] == "active"
        assert rest == [""]


@pytest.mark.parametrize("query", ["after=-1", "kind=nothing", "seconds=0", "port=p1", "after=x"])
def test_a_query_that_cannot_be_is_refused_by_name(running: Agent, query: str) -> None:
    with served_agent(running) as url:
        answer = httpx.get(f"{url}/v1/events?{query}", timeout=DEADLINE_S)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == query.partition("=")[0]


def test_a_subscriber_that_has_gone_is_forgotten(client: Client, running: Agent) -> None:
    list(client.events(EventFilter(seconds=0.01)))
    log: EventLog = running.store.events
    assert not log._subscribers


# -- the command -------------------------------------------------------------------------------------


def test_the_command_waits_for_a_state(
    running: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_agent(running) as url, Client(url) as client:
        monkeypatch.setenv("NETPLUGIN_URL", url)
        client.put_port("p1", SPEC_MODEL)
        command = ["events", "--after", "0", "--port", "p1", "--timeout"]
        assert main([*command, "20", "--until", "active", "-f", "json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [event["state"] for event in found] == ["pending", "active"]
        assert main([*command, "0.1", "--until", "connected"]) == 1
        assert " port fake p1 active" in capsys.readouterr().out
        assert main(["events", "--after", "0", "--no-follow"]) == 0


def test_the_command_says_that_no_agent_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NETPLUGIN_URL", f"unix:{tmp_path}/none.sock")
    assert main(["events"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


# -- what the host does by itself ---------------------------------------------------------------------


def log_at(directory: Path) -> Store:
    return Store(directory / "agent.db")


def change(detail: str, *ports: str) -> PlannedChange:
    return PlannedChange(backend="fake", change="Write", ports=ports, detail=detail)


def test_drift_is_found_and_then_repaired_or_not(tmp_path: Path) -> None:
    store = log_at(tmp_path)
    events = HostEvents(store.events, "fake")
    planned = [change("set p1", "p1"), change("set p2", "p2"), change("remove bridge", "p1", "p3")]
    events.drift_found(planned)
    events.drift_handled(planned, {"p2", "remove bridge"})
    found = [("found", "p1", "set p1"), ("found", "p2", "set p2"), ("found", None, "remove bridge")]
    handled = [("repaired", "p1", "set p1"), ("failed", "p2", "set p2"), ("failed", None, "remove bridge")]
    assert [(e.state, e.port_id, e.detail) for e in events_of(store)] == found + handled
    lasting = planned[1:]
    for failed in ({"p2", "remove bridge"}, {"p2"}):
        last = store.events.newest()
        events.drift_found(lasting)
        events.drift_handled(lasting, failed)
    new = [(e.state, e.detail) for e in events_of(store, last)]
    assert last == 6 and new == [("repaired", "remove bridge")], "what lasts is told once"
    store.close()


def test_of_thousands_of_changes_some_are_events(tmp_path: Path) -> None:
    store = log_at(tmp_path)
    events = HostEvents(store.events, "fake")
    planned = [change(f"set {n}", f"p{n}") for n in range(5000)]
    events.drift_found(planned)
    assert len(events_of(store)) == 100 + 1
    assert "4900 more" in events_of(store)[-1].detail
    events.drift_handled(planned, set())
    assert len(events_of(store)) == 2 * 100 + 1
    store.close()


def test_a_state_is_an_event_once_also_across_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        store = log_at(tmp_path)
        events = HostEvents(store.events, "fake")
        for _ in range(2):
            events.usability(Usability(False, "no OVS", "start it", "ovs"))
            events.findings([FINDING, FINDING.model_copy(update={"id": "fine", "status": "ok"})])
            events.connection("p1", False)
            events.connection("p2", True)
        HostEvents(store.events, "other").usability(Usability(True))
        store.close()
    store = log_at(tmp_path)
    events = HostEvents(store.events, "fake")
    events.findings([])
    events.connection("p2", False)
    events.usability(Usability(True))
    store.close()  # waits for what its thread has to write
    store = log_at(tmp_path)
    of_fake = [event for event in events_of(store) if event.backend == "fake"]
    found = [(e.kind.value, e.state, e.port_id or e.subject, e.detail) for e in of_fake]
    assert sorted(found[:3], key=str) == [
        ("backend", "unusable", None, "no OVS"),
        ("connection", "connected", "p2", ""),
        ("finding", "warn", "one-link", "one link"),
    ]
    assert sorted(found[3:], key=str) == [
        ("backend", "usable", None, ""),
        ("connection", "disconnected", "p2", ""),
        ("finding", "gone", "one-link", ""),
    ]
    store.close()


def test_drift_on_the_host_is_an_event_of_the_agent(running: Agent, client: Client) -> None:
    plug(client)
    last = client.events(EventFilter(seconds=0.05))
    assert list(last) == []
    running.host.ports.clear()
    client.reconcile(ReconcileRequest())
    found = list(client.events(EventFilter(after=last.last, follow=False, kind=EventKind.DRIFT)))
    assert [(e.state, e.port_id) for e in found] == [("found", "p1"), ("repaired", "p1")]


def test_what_is_found_while_the_host_is_repaired_is_an_event_too(running: Agent, client: Client) -> None:
    ports = running.host.ports
    for port_id in ("p1", "p2"):
        spec = SPEC_MODEL.model_copy(update={"mac": f"52:54:00:00:00:0{port_id[1]}"})
        for _ in range(2):  # see above
            client.put_port(port_id, spec)
    last = client.events(EventFilter(seconds=0.05))
    list(last)
    ports.pop("p1")
    running.host.on_apply = lambda change: ports.pop("p2", None) if "p1" in change.ports else None
    report = client.reconcile(ReconcileRequest())
    assert ports.keys() == {"p1", "p2"} and [each.ports for each in report.changes] == [("p1",), ("p2",)]
    found = list(client.events(EventFilter(after=last.last, follow=False, kind=EventKind.DRIFT)))
    reported = [(e.state, e.port_id) for e in found]
    assert reported == [("found", "p1"), ("found", "p2"), ("repaired", "p1"), ("repaired", "p2")]

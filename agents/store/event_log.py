"""The events of this host in the store: numbered, in order, and limited in number."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from agents.store.database import Database
from netplugin.api.errors import HostError
from netplugin.api.event_models import Event, EventKind

LOG = logging.getLogger(__name__)
#: The kinds whose last state is kept, so that a restarted agent tells what it missed.
COMPARED = frozenset({EventKind.BACKEND, EventKind.CONNECTION, EventKind.FINDING, EventKind.PHYSICAL_NETWORK})
REMOVED, DELETED = "removed", "deleted"
_COLUMNS = tuple(Event.model_fields)
#: States that are not kept: what comes after one of them is an event again.
_PASSING = ("gone", "disconnected", "recovered", "created", "changed", DELETED)
#: The events that end something, each with the kind of the states that end with it.
_ENDS = {
    (EventKind.PORT, REMOVED): EventKind.CONNECTION,
    (EventKind.PHYSICAL_NETWORK, DELETED): EventKind.PHYSICAL_NETWORK,
}


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event without its number and time."""

    kind: EventKind
    state: str
    detail: str = ""
    backend: str | None = None
    port_id: str | None = None
    subject: str | None = None

    def __str__(self) -> str:
        about = (self.kind.value, self.backend, self.port_id, self.subject, self.state, self.detail)
        return " ".join(filter(None, about))


@dataclass(frozen=True, slots=True)
class EventPage:
    """Some stored events in order.

    ``first`` is the number of the first of them, or of the next one to come; ``last`` the number to
    continue after. ``lost``: events before ``first`` were requested and are not stored (any more).
    """

    events: tuple[Event, ...]
    first: int
    last: int
    lost: bool = False


class EventLog:
    """The newest ``most`` events. Any thread may write, read and subscribe."""

    def __init__(self, database: Database, most: int) -> None:
        self.database = database
        self.most = most
        #: Changed and copied at once, without a lock: the event loop must not wait for a disk.
        self._subscribers: set[Callable[[], None]] = set()

    def write(self, events: Sequence[NewEvent]) -> None:
        """Store events within a transaction of the caller, who calls ``announce`` after its commit.

        Raises: sqlite3.Error.
        """
        if not events:
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        sql = self.database.sql
        sql.executemany(
            "INSERT INTO events (at, kind, state, backend, port_id, subject, detail) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(at, e.kind.value, e.state, e.backend, e.port_id, e.subject, e.detail) for e in events],
        )
        sql.execute("DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?", (self.most,))
        # Kept apart from the events, of which the oldest are dropped.
        compared = [e for e in events if e.kind in COMPARED]
        if not compared and not any((e.kind, e.state) in _ENDS for e in events):
            return
        states = [(e.kind.value, e.backend or "", e.port_id or e.subject or "", e.state) for e in compared]
        sql.executemany("INSERT OR REPLACE INTO event_states VALUES (?, ?, ?, ?)", states)
        ended = [(kind, e.port_id or e.subject) for e in events if (kind := _ENDS.get((e.kind, e.state)))]
        sql.executemany("DELETE FROM event_states WHERE kind = ? AND name = ?", ended)
        # Only of what was just written: a table of a thousand connections is not searched at each plug.
        passed = [key for *key, state in states if state in _PASSING]
        sql.executemany("DELETE FROM event_states WHERE kind = ? AND backend = ? AND name = ?", passed)

    def note(self, *events: NewEvent) -> bool:
        """Store events of their own; false if the store cannot be written, which the log tells."""
        if not events:
            return True
        try:
            with self.database.transaction():
                self.write(events)
        except (HostError, sqlite3.Error) as failed:
            LOG.warning("events are lost: %s: %s", failed, "; ".join(map(str, events)))
            return False
        self.announce()
        return True

    def states(self, kind: EventKind, backend: str) -> dict[str, str]:
        """The last lasting state by port or subject; none for a finding that is gone, for example."""
        with self.database.lock:
            rows = self.database.sql.execute(
                "SELECT name, state FROM event_states WHERE kind = ? AND backend = ?", (kind.value, backend)
            ).fetchall()
        return dict(rows)

    def backends(self) -> set[str]:
        """The backends that had a state."""
        with self.database.lock:
            rows = self.database.sql.execute("SELECT DISTINCT backend FROM event_states").fetchall()
        return {backend for (backend,) in rows}

    def skip_numbers(self) -> None:
        """Go on with numbers that no newer copy of this store has used; within a transaction of the caller.

        Milliseconds since 1970 are more than the events of any store.
        """
        number, sql = int(time.time() * 1e3), self.database.sql
        change = "UPDATE sqlite_sequence SET seq = MAX(seq, ?) WHERE name = 'events'"
        if not sql.execute(change, (number,)).rowcount:
            sql.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('events', ?)", (number,))

    def announce(self) -> None:
        """Wake the subscribers, because events were committed."""
        for wake in tuple(self._subscribers):
            wake()

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` after each commit of events, from any thread. Returns how to end it."""
        self._subscribers.add(wake)
        return partial(self._subscribers.discard, wake)

    def newest(self) -> int:
        """The number of the last event; 0 before the first."""
        with self.database.lock:
            row = self.database.sql.execute(
                "SELECT seq FROM sqlite_sequence WHERE name = 'events'"
            ).fetchone()
        return int(row[0]) if row else 0

    def page(self, after: int, limit: int) -> EventPage:
        """Up to ``limit`` events with a greater number; from 0 on, all that are stored.

        A number that this store has not reached is one of another store, or of a newer copy of this
        one: all stored events are returned, and ``lost`` is set.
        """
        with self.database.lock:
            newest = self.newest()
            lost = after > newest
            after = 0 if lost else after
            rows = self.database.sql.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM events WHERE id > ? ORDER BY id LIMIT ?", (after, limit)
            ).fetchall()
        events = tuple(Event.model_validate(dict(zip(_COLUMNS, row, strict=True))) for row in rows)
        first = events[0].id if events else newest + 1
        last = events[-1].id if events else newest
        return EventPage(events, first, last, lost or 0 < after < first - 1)

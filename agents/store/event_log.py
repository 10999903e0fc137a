"""The events of this host in the store: numbered, in order, and limited in number."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from agents.store.database import Database
from netplugin.api.errors import HostError
from netplugin.api.event_models import Event, EventKind

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event without its number and time."""

    kind: EventKind
    state: str
    detail: str = ""
    backend: str | None = None
    port_id: str | None = None
    subject: str | None = None


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
        self._database = database
        self.most = most
        self._subscribers: tuple[Callable[[], None], ...] = ()

    def write(self, events: Sequence[NewEvent]) -> None:
        """Store events within a transaction of the caller, who calls ``announce`` after its commit.

        Raises: sqlite3.Error.
        """
        if not events:
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._database.sql.executemany(
            "INSERT INTO events (at, kind, state, backend, port_id, subject, detail) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(at, e.kind.value, e.state, e.backend, e.port_id, e.subject, e.detail) for e in events],
        )
        self._database.sql.execute(
            "DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?", (self.most,)
        )

    def note(self, *events: NewEvent) -> None:
        """Store events of their own. A full disk loses them, which the log tells, and nothing else fails."""
        if not events:
            return
        try:
            with self._database.transaction():
                self.write(events)
        except (HostError, sqlite3.Error) as failed:
            LOG.warning("events are lost: %s: %s", failed, "; ".join(e.detail for e in events))
            return
        self.announce()

    def later(self, *events: NewEvent) -> None:
        """``note`` in the database thread, for threads that must not wait for a disk."""
        self._database.later(lambda: self.note(*events))

    def states(self, kind: EventKind) -> dict[tuple[str, str], str]:
        """The last stored state of each backend and port (or subject), of this kind of events."""
        with self._database.lock:
            rows = self._database.sql.execute(
                "SELECT COALESCE(backend, ''), COALESCE(port_id, subject, ''), state, MAX(id) FROM events "
                "WHERE kind = ? GROUP BY 1, 2",
                (kind.value,),
            ).fetchall()
        return {(backend, name): state for backend, name, state, _ in rows}

    def announce(self) -> None:
        """Wake the subscribers, because events were committed."""
        for wake in self._subscribers:
            wake()

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` after each commit of events, from any thread. Returns how to end it."""
        with self._database.lock:
            self._subscribers = (*self._subscribers, wake)

        def end() -> None:
            with self._database.lock:
                self._subscribers = tuple(each for each in self._subscribers if each is not wake)

        return end

    @property
    def subscribers(self) -> int:
        """The number of subscribers."""
        return len(self._subscribers)

    def newest(self) -> int:
        """The number of the last event; 0 before the first."""
        with self._database.lock:
            row = self._database.sql.execute(
                "SELECT seq FROM sqlite_sequence WHERE name = 'events'"
            ).fetchone()
        return int(row[0]) if row else 0

    def page(self, after: int, limit: int) -> EventPage:
        """Up to ``limit`` events with a greater number.

        A number that this store has not reached is one of another store, or of a newer copy of this
        one: all stored events are returned, and ``lost`` is set.
        """
        with self._database.lock:
            newest = self.newest()
            lost = after > newest
            after = 0 if lost else after
            rows = self._database.sql.execute(
                "SELECT id, at, kind, state, backend, port_id, subject, detail FROM events WHERE id > ? "
                "ORDER BY id LIMIT ?",
                (after, limit),
            ).fetchall()
        events = tuple(map(_event, rows))
        first = events[0].id if events else newest + 1
        last = events[-1].id if events else newest
        return EventPage(events, first, last, lost or first > after + 1)


def _event(row: tuple[int, str, str, str, str | None, str | None, str | None, str]) -> Event:
    number, at, kind, state, backend, port_id, subject, detail = row
    return Event(
        id=number,
        at=datetime.fromisoformat(at),
        kind=EventKind(kind),
        state=state,
        backend=backend,
        port_id=port_id,
        subject=subject,
        detail=detail,
    )

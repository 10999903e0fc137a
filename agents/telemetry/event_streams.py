"""Server-sent events: the stored events first, then those to come, until the client or the agent ends it.

The format is that of https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from functools import partial

from agents.store.event_log import EventLog, EventPage
from netplugin.api.errors import Overloaded
from netplugin.api.event_models import Event, EventFilter

#: Seconds without an event after which the number of the last one is sent: it shows that the agent is
#: alive, and finds clients that have gone.
_IDLE_S = 15.0
_PAGE = 256
#: Seconds after which a stream ends. Clients go on by its last number, and their credential is checked again.
_LONGEST_S = 3600.0
MEDIA_TYPE = "text/event-stream"


class EventStreams:
    """The open streams of events. Used on the event loop only."""

    def __init__(self, log: EventLog, most: int, idle_s: float = _IDLE_S) -> None:
        """``most``: maximum number of streams at a time."""
        self._log = log
        self._most = most
        self._in_thread = log.database.in_thread
        self._idle_s = idle_s
        self._ended = False
        self._wakes: set[asyncio.Event] = set()

    def end(self) -> None:
        """End all streams, because the agent stops."""
        self._ended = True
        for wake in self._wakes:
            wake.set()

    def require_room(self) -> None:
        """Raises: Overloaded if there are too many streams."""
        if len(self._wakes) >= self._most:
            raise Overloaded(
                f"{len(self._wakes)} streams of events are open",
                step="events",
                fix="end some of them, or raise [api] max_connections: a quarter of these may be streams",
            )

    async def follow(self, criteria: EventFilter, after: int | None) -> AsyncIterator[bytes]:
        """The body of a response. ``after``: the number of the last event that the client has."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(criteria.seconds or _LONGEST_S, _LONGEST_S)
        wake = asyncio.Event()
        unsubscribe = self._log.subscribe(partial(_wake, loop, wake))
        self._wakes.add(wake)
        try:
            after = criteria.after if after is None else after
            if after is None:
                # From now on; without ``follow`` all that is stored.
                after = await self._in_thread(self._log.newest) if criteria.follow else 0
            sent, sent_at = -1, -math.inf
            while not self._ended:
                wake.clear()
                page = await self._in_thread(self._log.page, after, _PAGE)
                parts = [_lost(after, page)] if page.lost else [_reached(after)] if sent < 0 else []
                sent = max(sent, after)
                for event in filter(criteria.matches, page.events):
                    parts.append(_encoded(event))
                    sent = event.id
                after, whole = page.last, len(page.events) < _PAGE
                over = not criteria.follow or loop.time() >= until
                if whole and (over or loop.time() - sent_at >= self._idle_s) and (sent != after or not parts):
                    parts.append(_reached(after))
                    sent = after
                if parts:
                    yield b"".join(parts)
                    sent_at = loop.time()
                if whole and over:
                    return
                if whole:
                    left = min(until, sent_at + self._idle_s) - loop.time()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(wake.wait(), max(0.0, left))
        finally:
            self._wakes.discard(wake)
            unsubscribe()


def _wake(loop: asyncio.AbstractEventLoop, wake: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(wake.set)


def _encoded(event: Event) -> bytes:
    # ASCII: some clients take U+0085 and U+2028 for the end of a line.
    data = json.dumps(event.model_dump(mode="json"))
    return f"id: {event.id}\nevent: {event.kind.value}\ndata: {data}\n\n".encode()


def _reached(number: int) -> bytes:
    """An id without data: the client has all events up to this one."""
    return f"id: {number}\n\n".encode()


def _lost(after: int, page: EventPage) -> bytes:
    """Events between the client's last one and ``first`` are not stored any more."""
    return f'event: lost\ndata: {{"after": {after}, "first": {page.first}}}\n\n'.encode()

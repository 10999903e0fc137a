"""Server-sent events: the stored events first, then those to come, until the client or the agent ends it.

The format is that of https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from functools import partial

from agents.store.database import Database
from agents.store.event_log import EventLog, EventPage
from netplugin.api.event_models import Event, EventFilter

#: Seconds without an event after which the number of the last one is sent: it shows that the agent is
#: alive, and finds clients that have gone.
_IDLE_S = 15.0
_PAGE = 256
MEDIA_TYPE = "text/event-stream"


class EventStreams:
    """The open streams of events. Used on the event loop only."""

    def __init__(self, log: EventLog, database: Database, idle_s: float = _IDLE_S) -> None:
        self._log = log
        self._in_thread = database.in_thread
        self._idle_s = idle_s
        self._ended = False
        self._wakes: set[asyncio.Event] = set()

    def end(self) -> None:
        """End all streams, because the agent stops."""
        self._ended = True
        for wake in self._wakes:
            wake.set()

    async def follow(self, wanted: EventFilter, after: int | None) -> AsyncIterator[bytes]:
        """The body of a response. ``after``: the number of the last event that the client has."""
        loop = asyncio.get_running_loop()
        until = math.inf if wanted.seconds is None else loop.time() + wanted.seconds
        wake = asyncio.Event()
        unsubscribe = self._log.subscribe(partial(_wake, loop, wake))
        self._wakes.add(wake)
        try:
            after = wanted.after if after is None else after
            if after is None:
                # From now on; without ``follow`` all that is stored.
                oldest = (await self._in_thread(self._log.page, 0, 1)).first - 1
                after = await self._in_thread(self._log.newest) if wanted.follow else oldest
            begun = False
            while not self._ended:
                wake.clear()
                page = await self._in_thread(self._log.page, after, _PAGE)
                if page.lost:
                    yield _lost(after, page)
                elif not begun:
                    yield _reached(after)
                begun, after = True, page.last
                found = b"".join(_encoded(event) for event in page.events if wanted.matches(event))
                if found:
                    yield found
                if len(page.events) == _PAGE:
                    continue
                left = until - loop.time()
                if not wanted.follow or left <= 0:
                    return
                try:
                    await asyncio.wait_for(wake.wait(), min(left, self._idle_s))
                except TimeoutError:
                    yield _reached(after)
        finally:
            self._wakes.discard(wake)
            unsubscribe()


def _wake(loop: asyncio.AbstractEventLoop, wake: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(wake.set)


def _encoded(event: Event) -> bytes:
    return f"id: {event.id}\nevent: {event.kind.value}\ndata: {event.model_dump_json()}\n\n".encode()


def _reached(number: int) -> bytes:
    """An id without data: the client has all events up to this one."""
    return f"id: {number}\n\n".encode()


def _lost(after: int, page: EventPage) -> bytes:
    """Events between the client's last one and ``first`` are not stored any more."""
    return f'event: lost\ndata: {{"after": {after}, "first": {page.first}}}\n\n'.encode()

"""The client's side of ``GET /v1/events``: a stream of server-sent events as models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx

from netplugin.api.errors import NetpluginError, NotFound
from netplugin.api.event_models import Event, EventFilter


class EventReader:
    """Iterates over the events of one response; ``last`` is the number to continue after.

    Iterating raises what any call raises, BackendUnavailable if the agent ends, and NotFound if events
    after ``last`` are not stored any more.
    """

    def __init__(
        self,
        http: httpx.Client,
        event_filter: EventFilter,
        refused: Callable[[httpx.Response], NetpluginError],
        unreached: Callable[[httpx.HTTPError], NetpluginError],
    ) -> None:
        self._http = http
        self._filter = event_filter
        self._refused = refused
        self._unreached = unreached
        self.last = event_filter.after

    def __iter__(self) -> Iterator[Event]:
        query = self._filter.model_dump(mode="json", exclude_none=True)
        try:
            with self._http.stream("GET", "/v1/events", params=query) as answer:
                if not answer.is_success:
                    answer.read()
                    raise self._refused(answer)
                yield from self._read(_lines(answer))
        except httpx.HTTPError as failed:
            raise self._unreached(failed) from failed

    def _read(self, lines: Iterator[str]) -> Iterator[Event]:
        number, kind = self.last, ""
        for line in lines:
            name, _, value = line.partition(": ")
            if not line:
                self.last, kind = number, ""
            elif name == "id":
                number = int(value)
            elif name == "event":
                kind = value
            elif name == "data" and kind == "lost":
                raise NotFound(
                    f"events are not stored any more: {value}",
                    step="events",
                    fix="read the ports again, then follow the events from now on",
                )
            elif name == "data":
                self.last = number
                yield Event.model_validate_json(value)


def _lines(answer: httpx.Response) -> Iterator[str]:
    """The lines of a response as they come; only a newline ends one."""
    rest = b""
    for part in answer.iter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode() for line in whole)

"""The client's side of ``GET /v1/events``: a stream of server-sent events as models."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.connection import Connection
from netplugin.api.errors import NotFound
from netplugin.api.event_models import Event, EventFilter


class EventReader:
    """Iterates over the events of one response; ``last`` is the number to continue after.

    Iterating raises what any call raises, BackendUnavailable if the agent ends, and NotFound if events
    after ``last`` are not stored any more.
    """

    def __init__(self, connection: Connection, event_filter: EventFilter) -> None:
        self._connection = connection
        self._filter = event_filter
        self.last = event_filter.after

    def __iter__(self) -> Iterator[Event]:
        """The agent tells at once after which event it begins: then ``last`` is no longer None."""
        query = self._filter.model_dump(mode="json", exclude_none=True)
        number, kind = self.last, ""
        for line in self._connection.stream("/v1/events", query):
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

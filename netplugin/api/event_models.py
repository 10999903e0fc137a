"""The events of a host, as ``GET /v1/events`` sends them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from netplugin.api.fields import Name, PortId, Value


class EventKind(StrEnum):
    """What an event is about; ``state`` then has the new state.

    ``port``: the state of a port (see ``PortState``), or ``removed``. ``connection``: a VM has
    ``connected`` to the vhost-user socket of its port, or ``disconnected``. ``drift``: the host
    differs from the intents (``found``), and what became of it (``repaired`` or ``failed``).
    ``migration``: the phase of a port that is migrated (see ``MigrationPhase``).
    ``backend``: ``usable`` or ``unusable``. ``quarantine``: ``begun`` or ``ended``. ``finding``:
    ``warn`` or ``fail``, or ``gone``. ``physical_network``: the API has ``created``, ``changed`` or
    ``deleted`` it; what it keeps on the host is ``degraded``, or has ``recovered``.
    """

    PORT = "port"
    CONNECTION = "connection"
    MIGRATION = "migration"
    DRIFT = "drift"
    BACKEND = "backend"
    QUARANTINE = "quarantine"
    FINDING = "finding"
    PHYSICAL_NETWORK = "physical_network"


class Event(Value):
    """One change on this host. ``id`` grows with each event and is never used again."""

    id: int
    #: The time of day, UTC. It may step; the order of events is that of ``id``.
    at: datetime
    kind: EventKind
    state: str
    backend: str | None = None
    port_id: str | None = None
    #: The id of a finding, the name of a physical network, or the key of a resource in quarantine (a PCI
    #: address).
    subject: str | None = None
    #: One sentence for people.
    detail: str = ""


class EventFilter(BaseModel):
    """The query of ``GET /v1/events``; an event must match all given parameters."""

    model_config = ConfigDict(extra="forbid")

    #: Events with a greater ``id``; without it, those from now on. The header ``Last-Event-ID`` goes before.
    after: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    kind: EventKind | None = None
    port_id: PortId | None = None
    backend: Name | None = None
    #: Whether to keep the response open for events to come; otherwise it ends with the last stored one.
    follow: bool = True
    #: Seconds after which the response ends; without it, it ends with the agent.
    seconds: Annotated[float, Field(gt=0, le=86_400)] | None = None

    def matches(self, event: Event) -> bool:
        """Whether the event is requested, apart from its ``id``."""
        return (
            self.kind in (None, event.kind)
            and self.port_id in (None, event.port_id)
            and self.backend in (None, event.backend)
        )

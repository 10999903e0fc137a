"""What platforms ask of ports, as the agent carries it out: plug or remove one, within a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from agents.ports.migration import Outcome
from agents.store.port_table import Record
from netplugin.api.conditions import NO_CONDITION, Condition
from netplugin.api.migration import Activation
from netplugin.api.migration_models import MigrationStep
from netplugin.api.models import (
    PortSpec,
)

# Seconds for cleaning up after a failure; later reconciles remove what is left.
UNDO_S = 5.0


LOOK_S = 10.0


#: Maximum delay of a retry that the host requested, in seconds.
NEXT_TRY_S = 1.0


@dataclass
class Put:
    """A request to create or change a port. ``future`` gets the record or the error."""

    port_id: str
    spec: PortSpec
    deadline: float
    future: Future[Record]
    #: The port whose VF this one is the standby of, if any.
    standby_of: str | None = None
    #: Makes the spec from the one that is stored when its turn comes: a call before it may change
    #: other fields. Raises: NetpluginError.
    amend: Callable[[PortSpec], PortSpec] | None = None
    #: The operations of one group are carried out in one batch, however large it is.
    group: object = None
    #: Checked when the call is accepted, in the thread that alone changes ports of its backend.
    condition: Condition = NO_CONDITION
    queued_at: float = field(default_factory=time.monotonic)


@dataclass
class Delete:
    """A request to delete a port. ``future`` gets None or the error."""

    port_id: str
    deadline: float
    future: Future[None]
    group: object = None
    condition: Condition = NO_CONDITION
    queued_at: float = field(default_factory=time.monotonic)


@dataclass
class Migrate:
    """A step of a migration. ``future`` gets the record, None for a port that was removed, or the error."""

    port_id: str
    step: MigrationStep
    activation: Activation | None
    deadline: float
    future: Future[Record | None]
    #: The spec of ``prepare``; later the spec of the port, from the store.
    spec: PortSpec | None = None
    #: What the step makes of the port, once it is accepted.
    outcome: Outcome | None = None
    standby_of: str | None = None
    group: object = None
    condition: Condition = NO_CONDITION
    queued_at: float = field(default_factory=time.monotonic)


Operation = Put | Delete | Migrate


@dataclass(frozen=True)
class Begun:
    """A call that is being retried: the state of its port before the call."""

    before: Record | None
    #: Whether the port existed on the host.
    was_there: bool

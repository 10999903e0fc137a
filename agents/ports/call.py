"""What platforms ask of ports: to create, change, remove or migrate one, within a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agents.store.port_table import Record
from netplugin.api.conditions import NO_CONDITION, Condition
from netplugin.api.errors import NetpluginError
from netplugin.api.migration import Activation
from netplugin.api.migration_models import MigrationStep
from netplugin.api.models import PortSpec, PortState
from netplugin.backend import Intent

#: Seconds for cleaning up after a failure; later reconciles remove what is left.
UNDO_S = 5.0
#: Seconds that reading the host may take.
LOOK_S = 10.0
#: Maximum delay of a retry that the host requested, in seconds.
NEXT_TRY_S = 1.0

#: Makes the spec from the one that is stored. Raises: NetpluginError.
Amend: TypeAlias = Callable[[PortSpec], PortSpec]


@dataclass(eq=False)
class Call:
    """One request, and what has become of it. ``future`` gets the record, None for a removal, or the error.

    ``port`` is the port as requested: a ``Record``, or an ``Intent`` without a spec for a call that names the
    port alone (a removal, or a step of a migration).
    """

    port: Intent
    #: A time of ``time.monotonic``.
    deadline: float
    future: Future[Record | None] = field(default_factory=Future)
    #: For a step of a migration.
    step: MigrationStep | None = None
    activation: Activation | None = None
    #: The spec is made when the call's turn comes: a call before it may change other fields.
    amend: Amend | None = None
    #: The calls of one group are carried out in one batch, however large it is.
    group: object = None
    #: Checked when the call is accepted, in the thread that alone changes ports of its backend.
    condition: Condition = NO_CONDITION
    queued_at: float = field(default_factory=time.monotonic)

    #: The port before the call, None if there was none; known once the call is accepted, as is ``record``.
    before: Record | None = None
    #: The port as it is kept now; None for the removal of a port that the store does not have.
    record: Record | None = None
    #: Whether the port was on the host before the first try, so that it is not removed by an undo.
    was_there: bool = False
    is_retried: bool = False
    error: NetpluginError | None = None
    #: Milliseconds of each part.
    timings_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def port_id(self) -> str:
        return self.port.port_id

    @property
    def kind(self) -> Literal["put", "delete", "migrate"]:
        if self.step is not None:
            return "migrate"
        return "delete" if self.port.spec is None else "put"

    @property
    def removes(self) -> bool:
        """Whether the call, once it is accepted, removes its port."""
        return self.record is None or self.record.state is PortState.REMOVING

    def refuse(self, error: NetpluginError) -> None:
        """Answer with this error."""
        self.error = error.for_port(self.port_id)
        self.future.set_exception(self.error)

    def has_time(self) -> bool:
        """Whether enough time is left for a retry and an undo."""
        return time.monotonic() + NEXT_TRY_S < self.deadline - UNDO_S / 2

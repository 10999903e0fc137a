"""The phase that a port has in a live migration, as the store keeps it and the API shows it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from netplugin.api.fields import Value

Activation = Literal["manual", "auto"]


class MigrationPhase(StrEnum):
    """The phase of a port; see "Live migration" in docs/reference-api.md.

    On the destination ``prepared`` (closed), ``activated`` (open), then ``committed``. On the source
    ``leaving`` (open until the guest stops), ``left`` (closed), and after an abort ``returned``.
    """

    PREPARED = "prepared"
    ACTIVATED = "activated"
    COMMITTED = "committed"
    LEAVING = "leaving"
    LEFT = "left"
    RETURNED = "returned"


#: After these the port is an ordinary one; they are kept so that a phase may be sent again.
ENDED = frozenset({MigrationPhase.COMMITTED, MigrationPhase.RETURNED})
#: Nothing is forwarded from or to the port.
CLOSED = frozenset({MigrationPhase.PREPARED, MigrationPhase.LEFT})


class Migration(Value):
    """The phase of a port, since when (UTC), and whether the agent follows the guest by itself."""

    phase: MigrationPhase
    activation: Activation = "manual"
    since: datetime

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED

    @property
    def is_closed(self) -> bool:
        return self.phase in CLOSED

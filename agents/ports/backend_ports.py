"""The ports of one backend: what the store and the host have of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from agents.ports.announcer import Announcer
from agents.ports.operations import Begun
from agents.ports.team_vfs import TeamVfs
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.host_events import HostEvents
from agents.telemetry.metrics import Metrics
from netplugin.api.errors import (
    Conflict,
    NetpluginError,
    as_host_error,
)
from netplugin.api.migration import MigrationPhase
from netplugin.api.models import (
    PortState,
)
from netplugin.backend import Backend, Intent, Observation, ObservedPort, TeamVf
from netplugin.host.usability import Usability
from netplugin.optional import Extras

LOG = logging.getLogger(__name__)
_SEND_S = 2.0


class BackendPorts:
    """What plug, undo and drift share. Not thread-safe, but ``usable``, ``may_keep`` and ``observed``."""

    def __init__(
        self,
        backend: Backend[Observation],
        store: Store,
        metrics: Metrics,
        events: HostEvents,
        team_vfs: TeamVfs | None = None,
    ) -> None:
        self.backend = backend
        self._team_vfs = team_vfs or TeamVfs()
        self.extras = Extras.of(backend)
        self.store = store
        self.metrics = metrics
        self.events = events
        self.observed: dict[str, ObservedPort] = {}
        #: The last answer of ``usable``, for those who must not wait for the host.
        self.was_usable = Usability(True)
        #: Marked ports without an intent that the last look at the whole host left where they are,
        #: each with the reason; None before that look.
        self.orphans: Mapping[str, str] | None = None
        #: Records that the store refused; they are saved before anything else is done.
        self.unsaved: dict[str, Record] = {}
        #: Calls that are tried again, by port.
        self.begun: dict[str, Begun] = {}
        self.announcer = Announcer(self)
        #: Whether a guest may have stopped or started while its port began to follow it.
        self.follow_again = False

    def usable(self) -> Usability:
        """Whether the backend is usable and its locks are held by this agent (callable from any thread)."""
        held = self.backend.hold()
        self.was_usable = self.backend.probe() if held.usable else held
        return self.was_usable

    def may_keep(self, port_id: str) -> bool:
        """Whether the host may have this port without an intent (callable from any thread)."""
        if self.orphans is None:
            return self.was_usable.usable
        return port_id in self.orphans

    def intent(self, record: Record) -> Intent:
        if record.state is PortState.REMOVING:
            return Intent(record.port_id, None, record.claims)
        overlay = self.store.network(record.spec.overlay_id)
        stamp = self.store.stamp(record.port_id)
        return Intent(
            record.port_id,
            record.spec,
            record.claims,
            overlay,
            stamp,
            closed=self.is_closed(record),
            follows_guest=_follows_guest(record),
            team_vf=self._team_vfs.of(record.standby_of) if record.standby_of else TeamVf.NONE,
        )

    def see(self, observed: Mapping[str, ObservedPort], *, whole: bool = False) -> None:
        """Use what the host has of these ports. ``whole``: it has no others."""
        self.observed = dict(observed) if whole else {**self.observed, **observed}
        self._team_vfs.see(self.store, observed)

    def is_closed(self, record: Record) -> bool:
        """Whether nothing may be forwarded from or to the port, because of its migration.

        With ``auto`` a port that the host shuts while no guest runs is not closed before the guest runs:
        no frame waits for the agent then.
        """
        migration, migrates = record.migration, self.extras.migrates
        if migration is None or not migration.is_closed:
            return False
        waits = migration.activation == "auto" and migration.phase is MigrationPhase.PREPARED
        return not (waits and migrates is not None and migrates.shut_without_guest)

    def intents(self, records: Iterable[Record]) -> list[Intent]:
        return [self.intent(record) for record in records]

    def follow(self, records: Iterable[Record]) -> None:
        """Have the backend tell of the guests of those ports that wait for them."""
        for record in records:
            if self.extras.migrates is None or record.migration is None:
                continue
            try:
                self.extras.migrates.follow_guest(self.intent(record))
            except Exception as error:  # the next look at the whole host tries it again
                logged(error, "follow")

    def hand_over(self, records: Sequence[Record]) -> None:
        """Ask the destinations of ports whose guests have stopped here to announce them."""
        if not records or self.extras.migrates is None:
            return
        try:
            self.extras.migrates.hand_over(self.intents(records), time.monotonic() + _SEND_S)
        except Exception as error:  # they announce themselves when the guests run there
            logged(error, "hand-over")

    def save_or_keep(self, records: Sequence[Record], forget: Collection[str] = ()) -> None:
        """Save the records. If the store fails (a full disk), save them before any other work.

        A port that cannot be forgotten is kept as removing; otherwise the next reconcile would plug
        it again.
        """
        unsaved = self.store.save_each(records, forget=forget)
        for error in unsaved.values():
            logged(error, "store")
        self.unsaved.update({r.port_id: r for r in records if r.port_id in unsaved})
        for port_id in forget:
            if port_id in unsaved and (left := self.store.get(port_id)) is not None:
                self.unsaved[port_id] = replace(left, state=PortState.REMOVING, previous=None)

    def save_unsaved(self) -> None:
        """Save the records that could not be saved before.

        Otherwise an undone port would be plugged again.

        Raises: HostError.
        """
        if not self.unsaved:
            return
        failed = self.store.save_each(self.unsaved.values())
        self.unsaved = {i: record for i, record in self.unsaved.items() if i in failed}
        for error in failed.values():
            if not isinstance(error, Conflict):  # which is of this port alone
                raise as_host_error(error, "store") from error


def _follows_guest(record: Record) -> bool:
    """Whether the agent waits for the guest of the port to run here, or to stop."""
    migration = record.migration
    return migration is not None and migration.activation == "auto" and not migration.has_ended


def logged(error: Exception, step: str) -> NetpluginError:
    """Convert an exception to a NetpluginError; unexpected ones are logged with their traceback."""
    if not isinstance(error, NetpluginError):
        LOG.error("unexpected at %s", step, exc_info=error)
    return as_host_error(error, step)


def for_each(port_ids: Iterable[str], error: Exception, step: str) -> dict[str, NetpluginError]:
    """The error as an error of each of these ports."""
    wrong = logged(error, step)
    return {port_id: wrong.for_port(port_id) for port_id in port_ids}

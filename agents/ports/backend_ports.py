"""The ports of one backend: what the store and the host have of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from agents.ports.migration import follows_guest, is_closed
from agents.ports.teams import TeamVfs
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.host_events import HostEvents
from agents.telemetry.metrics import Metrics
from netplugin.api.errors import Conflict, NetpluginError, as_host_error
from netplugin.api.models import PortState
from netplugin.backend import Backend, Intent, Observation, ObservedPort, TeamVf, chosen_name, claim_name
from netplugin.host.usability import Usability
from netplugin.optional import Extras

LOG = logging.getLogger(__name__)


class BackendPorts:
    """What calls and looks share.

    Not thread-safe, except ``usable``, ``may_keep``, ``kept`` and ``observed``.
    """

    def __init__(
        self,
        backend: Backend[Observation],
        store: Store,
        metrics: Metrics,
        events: HostEvents,
        team_vfs: TeamVfs | None = None,
    ) -> None:
        self.backend = backend
        self.name = backend.name
        self._team_vfs = team_vfs or TeamVfs()
        #: What the backend has beyond the contract.
        self.extras = Extras.of(backend)
        self.store = store
        self.metrics = metrics
        self.events = events
        #: What the host had of each port when it was looked at last.
        self.observed: dict[str, ObservedPort] = {}
        #: The last answer of ``usable``, for those who must not wait for the host.
        self.was_usable = Usability(True)
        #: Those that the last look at the whole host left where they are, each with the reason; None before
        #: that look.
        self.orphans: Mapping[str, str] | None = None
        #: Records that the store refused; they are saved before anything else is done.
        self.unsaved: dict[str, Record] = {}
        #: The ports of calls that are tried again.
        self.retried: set[str] = set()

    def usable(self) -> Usability:
        """Whether the backend is usable and its locks are held by this agent (callable from any thread)."""
        held = self.backend.hold()
        self.was_usable = self.backend.probe() if held.usable else held
        return self.was_usable

    def require_lock(self) -> None:
        """Raises: BackendUnavailable if another agent works on this part of the host."""
        self.backend.hold().require()

    # -- ports -----------------------------------------------------------------------------------

    def get(self, port_id: str) -> Record | None:
        """The port, if it is one of this backend."""
        record = self.store.get(port_id)
        return record if record is not None and record.spec.backend == self.name else None

    def records(self) -> list[Record]:
        return self.store.records(backend=self.name)

    def intent(self, record: Record) -> Intent:
        """The port as it is given to the backend."""
        if record.state is PortState.REMOVING:
            return Intent(record.port_id, None, record.claims)
        migrates = self.extras.migrates
        return replace(
            record,
            overlay=self.store.network(record.spec.overlay_id),
            stamp=self.store.stamp(record.port_id),
            closed=is_closed(record.migration, migrates is not None and migrates.shut_without_guest),
            follows_guest=follows_guest(record.migration),
            team_vf=self._team_vfs.of(record.standby_of) if record.standby_of else TeamVf.NONE,
        )

    def intents(self, records: Iterable[Record]) -> list[Intent]:
        return [self.intent(record) for record in records]

    def observed_ports(
        self, intents: Sequence[Intent], observation: Observation
    ) -> Mapping[str, ObservedPort]:
        """What the host has of these ports."""
        by_claims = self.extras.by_claims
        return by_claims.observed_ports(intents, observation) if by_claims else observation.ports

    def see(self, observed: Mapping[str, ObservedPort], *, whole: bool = False) -> None:
        """Use what the host has of these ports. ``whole``: it has no others."""
        self.observed = dict(observed) if whole else {**self.observed, **observed}
        self._team_vfs.see(self.store, observed)

    # -- orphans: ports on the host with our mark but without a record ----------------------------
    # A missing record alone is no reason to remove the NIC of a VM: the store may be new, an older copy,
    # or another one. Each port therefore carries the stamp of its record (``Store.stamp``). The store
    # remembers the stamps of ports that it deleted after the host was clean. If such a port reappears (a
    # late write, a restored OVS database), it is removed. All other orphans stay until the platform PUTs
    # them or an operator permits their removal.

    def orphans_in(self, observed: Mapping[str, ObservedPort]) -> tuple[list[str], dict[str, str]]:
        """The orphans among these ports: those that may be removed, and the others with the reasons."""
        forgotten: list[str] = []
        others: dict[str, str] = {}
        for port_id, port in sorted(observed.items()):
            if self.get(port_id) is not None:
                continue
            if self.store.has_forgotten(port_id, port.stamp):
                forgotten.append(port_id)
            else:
                others[port_id] = self._why_unknown(port_id, port.stamp)
        return forgotten, others

    def _why_unknown(self, port_id: str, stamp: str) -> str:
        """Why the store has no record of a port that it did not delete."""
        made_by, _, _ = stamp.partition("/")
        if self.store.set_aside.get("ports", port_id) is not None:
            return "their records could not be read and are set aside"
        if not stamp:
            return "they carry no store's mark"
        if made_by != self.store.identity:
            return f"another store made them, {made_by}"
        return "this store made them and has no record of them: it is an older copy"

    def may_keep(self, port_id: str) -> bool:
        """Whether the host may have this port without an intent (callable from any thread)."""
        if self.orphans is None:
            return self.was_usable.usable
        return port_id in self.orphans

    def kept(self) -> dict[str, str]:
        """The orphans that no call has adopted since, with the reasons (callable from any thread)."""
        return {i: why for i, why in (self.orphans or {}).items() if self.get(i) is None}

    def note_gone(self, port_ids: Collection[str]) -> None:
        """Forget what the host had of these ports, which it does not have any more."""
        self.observed = {i: port for i, port in self.observed.items() if i not in port_ids}
        if self.orphans is not None:
            self.orphans = {i: why for i, why in self.orphans.items() if i not in port_ids}

    # -- the store -------------------------------------------------------------------------------

    def save_with_claims(
        self, records: Mapping[str, Record], observation: Observation | None, commit_sequence: int
    ) -> tuple[dict[str, Record], dict[str, NetpluginError]]:
        """Commit these ports with the claims that their specs need, where that is a change.

        ``commit_sequence`` is that of the store before the observation. Returns the ports with their claims,
        and the errors of those that get none or that the store refuses, which stay as they were.
        """
        needs = self.extras.claims
        if needs is None and not any(chosen_name(record.spec) for record in records.values()):
            return self._save_changed(records, {})  # without the lock, which a slow disk may hold
        failed: dict[str, NetpluginError] = {}
        with self.store.claiming(commit_sequence) as taken:
            claimed: dict[str, Record] = {}
            for port_id, record in records.items():
                intent = self.intent(record)
                try:
                    if needs is not None and observation is not None:
                        claims = needs.claims(intent, observation, taken)
                    else:
                        claims = claim_name(intent, taken)
                except NetpluginError as error:
                    failed[port_id] = error
                    continue
                taken.update(dict.fromkeys(claims, port_id))
                claimed[port_id] = replace(record, claims=claims)
            return self._save_changed(claimed, failed)

    def _save_changed(
        self, records: Mapping[str, Record], failed: Mapping[str, NetpluginError]
    ) -> tuple[dict[str, Record], dict[str, NetpluginError]]:
        unsaved = self.store.save_each([r for r in records.values() if r != self.store.get(r.port_id)])
        refused = {port_id: logged(error, "store") for port_id, error in unsaved.items()}
        return {i: record for i, record in records.items() if i not in refused}, {**failed, **refused}

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


def logged(error: Exception, step: str) -> NetpluginError:
    """Convert an exception to a NetpluginError; unexpected ones are logged with their traceback."""
    if not isinstance(error, NetpluginError):
        LOG.error("unexpected at %s", step, exc_info=error)
    return as_host_error(error, step)


def for_each(port_ids: Iterable[str], error: Exception, step: str) -> dict[str, NetpluginError]:
    """The error as an error of each of these ports."""
    wrong = logged(error, step)
    return {port_id: wrong.for_port(port_id) for port_id in port_ids}

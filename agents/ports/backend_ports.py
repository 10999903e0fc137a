"""The ports of one backend: what the store and the host have of them, and the loop over both."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from agents.metrics import Metrics
from agents.ports.converge import Converged, Stopwatch, converge
from agents.ports.operations import Begun
from agents.store.store import Record, Store
from netplugin.api.errors import (
    HostError,
    NetpluginError,
    as_host_error,
)
from netplugin.api.models import (
    PortState,
)
from netplugin.backend import Backend, Intent, Observation, ObservedPort
from netplugin.host.usability import Usability
from netplugin.optional import Extras

LOG = logging.getLogger(__name__)


class BackendPorts:
    """What plug, undo and drift share. Not thread-safe, but ``usable``, ``may_keep`` and ``observed``."""

    def __init__(self, backend: Backend[Observation], store: Store, metrics: Metrics) -> None:
        self.backend = backend
        self.extras = Extras.of(backend)
        self.store = store
        self.metrics = metrics
        self.observed: dict[str, ObservedPort] = {}
        #: Marked ports without an intent that the last look at the whole host left where they are,
        #: each with the reason; None before that look.
        self.orphans: Mapping[str, str] | None = None
        #: Records that the store refused; they are saved before anything else is done.
        self.unsaved: dict[str, Record] = {}
        #: Calls that are tried again, by port.
        self.begun: dict[str, Begun] = {}

    def usable(self) -> Usability:
        """Whether the backend is usable and its locks are held by this agent (callable from any thread)."""
        held = self.backend.hold()
        return self.backend.probe() if held.usable else held

    def may_keep(self, port_id: str) -> bool:
        """Whether the host may have this port without an intent (callable from any thread)."""
        if self.orphans is None:
            return self.usable().usable
        return port_id in self.orphans

    def intent(self, record: Record) -> Intent:
        if record.state is PortState.REMOVING:
            return Intent(record.port_id, None, record.claims)
        overlay = self.store.network(record.spec.overlay_id)
        stamp = self.store.stamp(record.port_id)
        return Intent(record.port_id, record.spec, record.claims, overlay, stamp)

    def converge(
        self,
        records: Iterable[Record],
        deadline: float,
        watch: Stopwatch,
        why: str,
        seen: Observation | None = None,
    ) -> Converged:
        """Converge the ports of these records, and keep what was observed of them.

        Raises: as ``converge_intents``.
        """
        intents = [self.intent(record) for record in records]
        result = self.converge_intents(intents, deadline, watch, why, seen=seen)
        self.observed = {**self.observed, **result.observed}
        return result

    def converge_intents(
        self,
        intents: Sequence[Intent],
        deadline: float,
        watch: Stopwatch,
        why: str,
        *,
        whole: bool = False,
        seen: Observation | None = None,
    ) -> Converged:
        """As ``agents.ports.converge.converge``; counts the changes as ``why``, quarantines what is unfit."""
        by_claims = self.extras.by_claims
        result = converge(self.backend, intents, deadline, watch, whole=whole, seen=seen, by_claims=by_claims)
        for change in result.changes:
            self.metrics.changed(self.backend.name, type(change).__name__, why)
        for claim, reason in result.unfit.items():
            LOG.warning("%s %s goes into quarantine: %s", claim.kind, claim.key, reason)
        self.store.quarantine(result.unfit)
        return result

    def save_or_keep(self, records: Sequence[Record], forget: Collection[str] = ()) -> None:
        """Save the records. If the store fails (a full disk), save them before any other work.

        A port that cannot be forgotten is kept as removing; otherwise the next reconcile would plug
        it again.
        """
        try:
            self.store.save(records, forget=forget)
        except Exception as error:
            logged(error, "store")
            self.unsaved.update({record.port_id: record for record in records})
            for port_id in forget:
                if (left := self.store.get(port_id)) is not None:
                    self.unsaved[port_id] = replace(left, state=PortState.REMOVING, previous=None)

    def save_unsaved(self) -> None:
        """Save the records that could not be saved before.

        Otherwise an undone port would be plugged again.

        Raises: HostError.
        """
        if not self.unsaved:
            return
        try:
            self.store.save(self.unsaved.values())
        except Exception as error:
            raise as_host_error(error, "store") from error
        self.unsaved = {}


def faults_of(records: Mapping[str, Record], result: Converged) -> dict[str, NetpluginError]:
    """The faults of ports that are configured correctly but do not work."""
    faults: dict[str, NetpluginError] = {}
    for port_id in records:
        seen, kept = result.observed.get(port_id), result.kept.get(port_id)
        if kept is not None:
            faults[port_id] = kept.for_port(port_id)
        elif seen is not None and (fault := seen.fault or seen.impaired):
            faults[port_id] = HostError(fault, step="verify", port_id=port_id)
    return faults


def logged(error: Exception, step: str) -> NetpluginError:
    """Convert an exception to a NetpluginError; unexpected ones are logged with their traceback."""
    if not isinstance(error, NetpluginError):
        LOG.error("unexpected at %s", step, exc_info=error)
    return as_host_error(error, step)


def for_each(port_ids: Iterable[str], error: Exception, step: str) -> dict[str, NetpluginError]:
    """The error as an error of each of these ports."""
    wrong = logged(error, step)
    return {port_id: wrong.for_port(port_id) for port_id in port_ids}

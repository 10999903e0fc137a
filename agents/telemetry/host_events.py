"""Events about what the host does by itself: drift, backends, VMs, findings, what physical networks keep."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

from agents.store.event_log import COMPARED, EventLog, NewEvent
from netplugin.api.errors import NetpluginError
from netplugin.api.event_models import EventKind
from netplugin.api.models import Finding, PlannedChange
from netplugin.host.usability import Usability

#: Maximum number of changes of one check that are events: a restart of OVS causes thousands.
_MOST_CHANGES = 100


class HostEvents:
    """The events of one backend. Any thread may call it.

    A state is an event if it differs from the last stored one, so a restart of the agent repeats none.
    What could not be stored is compared again the next time.
    """

    def __init__(self, log: EventLog, backend: str) -> None:
        self._log = log
        self._backend = backend
        self._lock = threading.Lock()
        self._states = {kind: log.states(kind, backend) for kind in COMPARED}
        #: Changes that were not effective, of which there is an event already.
        self._failing: frozenset[str] = frozenset()

    def drift_found(self, planned: Sequence[PlannedChange]) -> None:
        """What a check found different on the host."""
        events = self._of_changes("found", [c for c in planned if c.detail not in self._failing])
        if len(planned) > _MOST_CHANGES:
            more = f"{len(planned) - _MOST_CHANGES} more changes: see the agent's log"
            events.append(NewEvent(EventKind.DRIFT, "found", more, self._backend))
        self._log.note(*events)

    def drift_handled(self, planned: Sequence[PlannedChange], failed: Collection[str]) -> None:
        """Which of these differences are repaired.

        ``failed``: the ports that were not repaired, and the changes that had no effect.
        """
        lasting = [c for c in planned if not {c.detail, *c.ports}.isdisjoint(failed)]
        repaired = [c for c in planned if c not in lasting]
        new = [c for c in lasting if c.detail not in self._failing]
        self._log.note(*self._of_changes("repaired", repaired), *self._of_changes("failed", new))
        self._failing = frozenset(c.detail for c in lasting)

    def _of_changes(self, state: str, changes: Sequence[PlannedChange]) -> list[NewEvent]:
        return [
            NewEvent(
                EventKind.DRIFT,
                state,
                change.detail,
                self._backend,
                change.ports[0] if len(change.ports) == 1 else None,
            )
            for change in changes[:_MOST_CHANGES]
        ]

    def usability(self, usability: Usability) -> None:
        """Compare whether the backend is usable."""
        state = "usable" if usability.usable else "unusable"
        with self._lock:
            self._compare(EventKind.BACKEND, {"": (state, usability.reason or "")})

    def connection(self, port_id: str, connected: bool) -> None:
        """Compare whether a VM is connected to a port. Returns at once."""
        self._log.database.later(lambda: self._note_connection(port_id, connected))

    def _note_connection(self, port_id: str, connected: bool) -> None:
        with self._lock:
            known = self._states[EventKind.CONNECTION]
            if (port_id in known) == connected:
                return
            state = "connected" if connected else "disconnected"
            if not self._log.note(NewEvent(EventKind.CONNECTION, state, "", self._backend, port_id)):
                return
            if connected:
                known[port_id] = state
            else:
                del known[port_id]

    def findings(self, found: Iterable[Finding]) -> None:
        """Compare the findings: those that warn or fail, and those that are gone."""
        now = {each.id: (each.status, each.found) for each in found if each.status != "ok"}
        with self._lock:
            self._compare(EventKind.FINDING, now, gone="gone")

    def networks(self, faults: Mapping[str, NetpluginError]) -> None:
        """Compare which physical networks are not as they should be, with the reasons."""
        kind = EventKind.PHYSICAL_NETWORK
        with self._lock:
            if faults or self._states[kind]:
                self._states[kind] = self._log.states(kind, self._backend)  # without those deleted meanwhile
                now = {name: ("degraded", fault.detail) for name, fault in sorted(faults.items())}
                self._compare(kind, now, gone="recovered")

    def _compare(self, kind: EventKind, now: Mapping[str, tuple[str, str]], gone: str | None = None) -> None:
        """Store an event for each subject whose state has changed, and for those that are there no more.

        ``now``: state and detail by subject; empty: the backend itself.
        """
        known = self._states[kind]
        events = [
            NewEvent(kind, state, detail, self._backend, subject=subject or None)
            for subject, (state, detail) in now.items()
            if known.get(subject) != state
        ]
        states = {subject: state for subject, (state, _) in now.items()}
        if gone is not None:
            left = sorted(known.keys() - states.keys())
            events += [NewEvent(kind, gone, "", self._backend, subject=subject) for subject in left]
        if not events or self._log.note(*events):
            self._states[kind] = states

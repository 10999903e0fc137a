"""Events about what the host does by itself: drift, a backend that comes and goes, VMs, findings."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

from agents.store.event_log import EventLog, NewEvent
from netplugin.api.event_models import EventKind
from netplugin.api.models import Finding, PlannedChange
from netplugin.host.usability import Usability

#: Maximum number of changes of one check that are events: a restart of OVS causes thousands.
_MOST_CHANGES = 100
_COMPARED = (EventKind.BACKEND, EventKind.CONNECTION, EventKind.FINDING)
_GONE = "gone"


class HostEvents:
    """The events of one backend. Any thread may call it.

    A state is an event if it differs from the last stored one, so a restart of the agent repeats none.
    """

    def __init__(self, log: EventLog, backend: str) -> None:
        self._log = log
        self._backend = backend
        self._lock = threading.Lock()
        self._states = {
            kind: {name: state for (owner, name), state in log.states(kind).items() if owner == backend}
            for kind in _COMPARED
        }

    def drift(self, planned: Sequence[PlannedChange], failed: Collection[str]) -> None:
        """What a check found different on the host, and whether it was repaired.

        ``failed``: the ports that it was not repaired for, and the changes that had no effect.
        """
        events: list[NewEvent] = []
        for change in planned[:_MOST_CHANGES]:
            port_id = change.ports[0] if len(change.ports) == 1 else None
            lasts = not {change.detail, *change.ports}.isdisjoint(failed)
            for state in ("found", "failed" if lasts else "repaired"):
                events.append(NewEvent(EventKind.DRIFT, state, change.detail, self._backend, port_id))
        if len(planned) > _MOST_CHANGES:
            more = f"{len(planned) - _MOST_CHANGES} more changes: see the agent's log"
            events.append(NewEvent(EventKind.DRIFT, "found", more, self._backend))
        self._log.note(*events)

    def usability(self, usability: Usability) -> None:
        """Compare whether the backend is usable."""
        state = "usable" if usability.usable else "unusable"
        if self._differs(EventKind.BACKEND, "", state):
            self._log.note(NewEvent(EventKind.BACKEND, state, usability.reason or "", self._backend))

    def connection(self, port_id: str, connected: bool) -> None:
        """Compare whether a VM is connected to a port. Returns at once."""
        if not connected and port_id not in self._states[EventKind.CONNECTION]:
            return  # no VM has been connected yet
        state = "connected" if connected else "disconnected"
        if self._differs(EventKind.CONNECTION, port_id, state):
            self._log.later(NewEvent(EventKind.CONNECTION, state, "", self._backend, port_id))

    def findings(self, found: Iterable[Finding]) -> None:
        """Compare the findings: those that warn or fail, and those that are gone."""
        now = {finding.id: finding for finding in found if finding.status != "ok"}
        events = [
            NewEvent(EventKind.FINDING, finding.status, finding.found, self._backend, subject=finding.id)
            for finding in now.values()
            if self._differs(EventKind.FINDING, finding.id, finding.status)
        ]
        events += [
            NewEvent(EventKind.FINDING, _GONE, "", self._backend, subject=name)
            for name in sorted(self._states[EventKind.FINDING].keys() - now.keys())
            if self._differs(EventKind.FINDING, name, _GONE)
        ]
        self._log.note(*events)

    def _differs(self, kind: EventKind, name: str, state: str) -> bool:
        """Whether the state is a new one; it is the known one from now on."""
        with self._lock:
            known = self._states[kind].get(name)
            self._states[kind] = {**self._states[kind], name: state}
            return known != state

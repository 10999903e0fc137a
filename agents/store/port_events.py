"""What a commit changes about ports: events of states and migrations, and VMs that lose a port (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agents.store.event_log import REMOVED, NewEvent
from agents.store.port_table import Record
from netplugin.api.event_models import EventKind


def leaves_vm(before: Mapping[str, Record | None], records: Iterable[Record]) -> bool:
    """Whether a VM loses a port: one that is forgotten, or that becomes another VM's."""
    new = {record.port_id: record.spec.vm_id for record in records}
    return any(old is not None and new.get(i) != old.spec.vm_id for i, old in before.items())


def port_events(before: Mapping[str, Record | None], records: Iterable[Record]) -> list[NewEvent]:
    """What these commits change about the states of ports; a port in ``before`` alone is forgotten."""
    new = {record.port_id: record for record in records}
    events: list[NewEvent] = []
    for port_id, old in before.items():
        record = new.get(port_id)
        if record is None:
            if old is not None:
                events.append(NewEvent(EventKind.PORT, REMOVED, "", old.spec.backend, port_id))
            continue
        if old is None or (old.state, old.error) != (record.state, record.error):
            detail = record.error.detail if record.error else ""
            events.append(NewEvent(EventKind.PORT, record.state.value, detail, record.spec.backend, port_id))
        migration = record.migration
        if migration is not None and (old is None or old.migration != migration):
            phase, backend = migration.phase.value, record.spec.backend
            events.append(NewEvent(EventKind.MIGRATION, phase, migration.activation, backend, port_id))
    return events

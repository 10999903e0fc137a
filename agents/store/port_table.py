"""The ports in memory, with what is looked up of them at every plug: no lookup grows with their number."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agents.store.event_log import REMOVED, NewEvent
from agents.store.set_aside import Row
from netplugin.api.event_models import EventKind
from netplugin.api.migration import Migration
from netplugin.api.models import PortSpec, PortState
from netplugin.api.problem import Problem
from netplugin.backend import Claim, Intent
from netplugin.host.names import name_digits

T = TypeVar("T")
#: The parts of a spec that most ports have alike.
_SHARED = ("network", "vf", "qos", "port_security")
# Seconds after which no observation is used any more: a check of the whole host takes 120 s at most.
_FORGET_MOVE_S = 600.0


@dataclass(frozen=True, slots=True)
class Record(Intent):
    """A port as the agent keeps it: its intent, with the state that it is in.

    ``previous`` is the spec to restore if a change fails, of a pending port alone. A port that is being
    removed keeps its spec, and its backend gets an intent without one. What an intent has of others (its
    network, its stamp, its guest) is not stored: it is set when the port is given to a backend.
    """

    spec: PortSpec
    state: PortState = PortState.PENDING
    previous: PortSpec | None = None
    error: Problem | None = field(default=None, hash=False)
    timings_ms: Mapping[str, float] | None = field(default=None, hash=False)
    #: The port that this one is the standby of (teaming); both are created and deleted together.
    standby_of: str | None = None
    migration: Migration | None = None


class Parts:
    """What specs that are read have in common, once each: 3 KB less for each port."""

    def __init__(self) -> None:
        self._values: dict[object, object] = {}
        #: The names of the fields that are given, which are all of them in a stored spec.
        self._given: dict[frozenset[str], set[str]] = {}

    def record_of(self, row: Row, claims: tuple[Claim, ...]) -> Record:
        """The record of a row. Raises: ValueError, TypeError, KeyError."""
        previous, error, migration = row["previous_spec"], row["error"], row["migration"]
        return Record(
            port_id=row["port_id"],
            spec=self._sharing(PortSpec.model_validate_json(row["spec"])),
            state=PortState(row["state"]),
            previous=PortSpec.model_validate_json(previous) if previous else None,
            error=Problem.model_validate_json(error) if error else None,
            claims=claims,
            timings_ms={sys.intern(part): ms for part, ms in json.loads(row["timings"]).items()},
            standby_of=row["standby_of"],
            migration=Migration.model_validate_json(migration) if migration else None,
        )

    def _sharing(self, spec: PortSpec) -> PortSpec:
        """The same spec, with the parts that it has in common with others."""
        values = ((name, getattr(spec, name)) for name in _SHARED)
        same = {name: self._values.setdefault(part, part) for name, part in values if part}
        given = self._given.setdefault(frozenset(spec.model_fields_set), spec.model_fields_set)
        return PortSpec.model_construct(_fields_set=given, **{**dict(spec), **same})


class PortTable:
    """The records of all ports. Any thread reads it without a lock.

    A change copies what it changes and replaces it (a copy of 1,000 entries takes some 10 us), under a
    lock that is held for nothing else: never while the disk is waited for.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._changing = threading.Lock()
        self._records: dict[str, Record] = {}
        #: The owner of each claim. The keys are the owner's own claims: equal ones may differ in memory.
        self.owners: Mapping[Claim, str] = {}
        self._states: Counter[tuple[str, PortState]] = Counter()
        self._by_digits: dict[str, str] = {}
        #: What the disk has of ports that are shown already as they will be (``show``).
        self._committed: dict[str, Record | None] = {}
        self.replace(records)

    def __contains__(self, port_id: str) -> bool:
        return port_id in self._records

    def get(self, port_id: str) -> Record | None:
        return self._records.get(port_id)

    def namesake(self, port_id: str) -> str | None:
        """The port whose devices have the names that those of ``port_id`` would get; None for itself."""
        holder = self._by_digits.get(name_digits(port_id))
        return None if holder == port_id else holder

    def all(self) -> list[Record]:
        """Ordered by port id."""
        return [record for _, record in sorted(self._records.items())]

    def claimed(self, kind: str) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
        """Key and memory of the claim of this kind that each port has."""
        return _Claimed(self._records, kind)

    def any_in(self, backend: str, states: Iterable[PortState]) -> bool:
        """Whether a port of this backend is in one of these states."""
        return any(self._states[backend, state] > 0 for state in states)

    def committed(self, port_id: str) -> Record | None:
        """The record that the disk has."""
        return self._committed[port_id] if port_id in self._committed else self._records.get(port_id)

    def show(self, records: Collection[Record]) -> None:
        """Give these records to readers before they are committed: for a state that a crash rebuilds.

        Their specs and claims are committed; ``replace`` follows when the rest is.
        """
        with self._changing:
            for record in records:
                self._committed.setdefault(record.port_id, self._records.get(record.port_id))
            self._put(records, ())

    def replace(self, records: Iterable[Record], gone: Collection[str] = ()) -> None:
        """Take over what was committed."""
        with self._changing:
            records = list(records)
            self._put(records, gone)
            for port_id in (*gone, *(record.port_id for record in records)):
                self._committed.pop(port_id, None)

    def _put(self, records: Collection[Record], gone: Collection[str]) -> None:
        new = {record.port_id: record for record in records}
        before = [r for i in {*gone, *new} if (r := self._records.get(i)) is not None]
        self._move_claims(before, new)
        self._states.subtract((r.spec.backend, r.state) for r in before)
        self._states.update((r.spec.backend, r.state) for r in new.values())
        came = {name_digits(i): i for i in new if i not in self._records}
        if came or gone:
            self._by_digits = without(self._by_digits, [*map(name_digits, gone)]) | came
        self._records = without(self._records, gone) | new

    def _move_claims(self, before: Iterable[Record], new: Mapping[str, Record]) -> None:
        left = [r for r in before if r.port_id not in new or new[r.port_id].claims is not r.claims]
        old = {r.port_id: r.claims for r in before}
        come = [r for i, r in new.items() if old.get(i, ()) is not r.claims]
        if not left and not come:
            return
        owners = dict(self.owners)
        for record in left:
            for claim in record.claims:
                owners.pop(claim, None)
        for record in come:
            owners.update(dict.fromkeys(record.claims, record.port_id))
        self.owners = owners


class _Claimed(Mapping[str, tuple[str, Mapping[str, Any]]]):
    """The claims of a kind, each looked up when it is read: mostly it is that of one port."""

    def __init__(self, ports: Mapping[str, Record], kind: str) -> None:
        self._ports, self._kind = ports, kind

    def __getitem__(self, port_id: str) -> tuple[str, Mapping[str, Any]]:
        for claim in self._ports[port_id].claims:
            if claim.kind == self._kind:
                return claim.key, claim.memory
        raise KeyError(port_id)

    def __iter__(self) -> Iterator[str]:
        return (port_id for port_id in self._ports if port_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ClaimMoves:
    """Which claims changed their owner since an observation. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The number of changes so far.
        self.count = 0
        #: By claim, the oldest first: the number and the time of its last change.
        self._moved: dict[Claim, tuple[int, float]] = {}

    def note(self, before: Mapping[str, Record | None], after: Callable[[str], Record | None]) -> None:
        """Note a commit that changed these ports."""
        self.count += 1
        now = self._clock()
        for port_id, old in before.items():
            new = after(port_id)
            mine, others = (old.claims if old else ()), (new.claims if new else ())
            for claim in () if mine is others else set(mine) ^ set(others):
                self._moved.pop(claim, None)
                self._moved[claim] = (self.count, now)
        while self._moved:
            claim, (_, at) = next(iter(self._moved.items()))
            if now - at < _FORGET_MOVE_S:
                break
            del self._moved[claim]

    def since(self, count: int) -> list[Claim]:
        """The claims that changed their owner after that number of changes."""
        found = []
        for claim, (number, _) in reversed(self._moved.items()):
            if number <= count:
                break
            found.append(claim)
        return found


def without(table: dict[str, T], keys: Collection[str]) -> dict[str, T]:
    """The table without these keys; a copy only if one of them is in it."""
    gone = table.keys() & keys
    if not gone:
        return table
    left = dict(table)
    for key in gone:
        del left[key]
    return left


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

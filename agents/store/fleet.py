"""What this host remembers of its fleet: the etcd that it has seen, and what it has carried out."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from agents.store.database import BOOT_ID, Database
from agents.store.set_aside import Row, SetAside
from netplugin.api.conditions import Condition, digest
from netplugin.api.errors import Conflict, HostError
from netplugin.fleet.names import PORTS, Kind, Ref

LOG = logging.getLogger(__name__)
_TABLE = "fleet"


@dataclass(frozen=True, slots=True)
class Memory:
    """The etcd as it was last seen: its cluster (empty: none yet) and the highest revision.

    ``accepted``: the highest number of an operator's acceptance that was read, whether it was needed or not;
    ``accepted_revision``: up to where that one lets removals pass. ``reported``: the revision of the host's
    own last summary. ``went_back``: an older copy was seen, and no operator has accepted it. ``host``: the
    name whose range was read. ``was_off``: the agent has run without a fleet since.
    """

    cluster: str = ""
    revision: int = 0
    accepted: int = 0
    accepted_revision: int = 0
    reported: int = 0
    went_back: bool = False
    host: str = ""
    was_off: bool = False


# Of a row that cannot be read: no etcd is that cluster, so that none counts until an operator accepts one.
_UNREADABLE = Memory("unreadable")


@dataclass(frozen=True, slots=True)
class Known:
    """What was last carried out for an object: the generation of its value and a digest of the spec.

    ``value`` is empty after a removal. ``tag``: the digest of the spec as the host then had it.
    """

    generation: int
    value: str
    tag: str = ""

    @property
    def is_owned(self) -> bool:
        return self.value != ""

    @property
    def is_made(self) -> bool:
        """Whether it is owned, and was carried out to the end."""
        return self.is_owned and self != CLAIM


#: Of an object that is about to be made: whatever becomes of it, the fleet may remove it.
CLAIM = Known(0, "claimed")


class FleetStore:
    """Any thread reads it from memory. Without a fleet in the options it refuses nobody."""

    def __init__(self, database: Database, set_aside: SetAside) -> None:
        self._database = database
        self._set_aside = set_aside
        file = database.path.stat()
        #: Of this file since the host was booted: a copy of the store has another one, a new process has not.
        self.instance = digest(BOOT_ID.read_text(), f"{file.st_dev} {file.st_ino}")
        #: Whether the fleet of the options owns what it has made here.
        self.is_on = False
        row = database.sql.execute("SELECT value FROM meta WHERE key = 'fleet'").fetchone()
        self.memory = _memory(row[0]) if row is not None else Memory()
        self.known: Mapping[Ref, Known] = dict(set_aside.sift(_TABLE, _known))

    def save(
        self,
        memory: Memory | None = None,
        known: Mapping[Ref, Known] | None = None,
        *,
        gone: frozenset[Ref] = frozenset(),
        forget_generations: bool = False,
    ) -> None:
        """Commit what was seen and carried out. ``gone``: objects of which nothing is known any more.

        ``forget_generations``: of all that was known, after an acceptance. Raises: HostError; then nothing is
        changed.
        """
        with self._database.lock:
            after = dict(self.known)
            if forget_generations:
                after = {ref: replace(each, generation=0) for ref, each in after.items()}
            after = {ref: each for ref, each in (after | dict(known or {})).items() if ref not in gone}
            changed = {ref: each for ref, each in after.items() if self.known.get(ref) != each}
            now = memory or self.memory
            with self._database.transaction():
                sql = self._database.sql
                sql.execute("INSERT OR REPLACE INTO meta VALUES ('fleet', ?)", (json.dumps(asdict(now)),))
                rows = [(ref.kind, ref.id, k.generation, k.value, k.tag) for ref, k in changed.items()]
                sql.executemany("INSERT OR REPLACE INTO fleet VALUES (?, ?, ?, ?, ?)", rows)
                removed = [(ref.kind, ref.id) for ref in gone]
                sql.executemany("DELETE FROM fleet WHERE kind = ? AND id = ?", removed)
                for ref in changed:
                    self._set_aside.forget(_TABLE, ref.id)
            self._set_aside.forgotten(_TABLE, [ref.id for ref in changed])
            self.known = after
            if memory is not None:  # the event loop sets it too
                self.memory = memory

    def turn_off(self) -> None:
        """Note that the options have no fleet: what changes from now on is not the fleet's any more."""
        if self.known and not self.memory.was_off:
            try:
                self.save(replace(self.memory, was_off=True))
            except HostError as refused:
                LOG.warning("fleet: %s", refused)

    def require_free(self, kind: Kind, id: str, condition: Condition) -> None:
        """Refuse a local change of what the fleet has made, unless its caller overrides that.

        Raises: Conflict.
        """
        known = self.known.get(Ref(kind, id)) if self.is_on and not condition.override else None
        if known is not None and known.is_owned:
            text = f"{kind.value} {id} is the fleet's (generation {known.generation})"
            fix = "change it in the fleet; or, until its next change there, locally with --override"
            port_id = id if kind in PORTS else None
            fix = f"{fix} (the header Netplugin-Override: true)"
            raise Conflict(text, step="validate", port_id=port_id, fix=fix)


def _known(row: Row) -> tuple[Ref, Known]:
    return Ref(Kind(row["kind"]), row["id"]), Known(int(row["generation"]), row["value"], row["tag"])


def _memory(text: str) -> Memory:
    try:
        return Memory(**json.loads(text))
    except (ValueError, TypeError) as wrong:
        LOG.error("what the host has seen of its fleet's etcd cannot be read: %s", wrong)
        return _UNREADABLE

"""Marks of the store on the host: another or an older store is detected, and reported in findings.

The state that ports share on the host (the OVS database, the rules of Linux bridges) carries the identity
of the store and its last commit, written together with each change. A store that does not have this commit
is an older copy: the ports that it lists may have been deleted since, which nothing on the host can show.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Mapping

from agents.store.database import Database
from agents.store.event_log import EventLog
from netplugin.api.errors import HostError, some
from netplugin.api.models import Finding

LOG = logging.getLogger(__name__)
_NAMED = 20  # ports listed by name
# Anyone who can write to the host can write the mark: it is cut to this length, and a number with
# more digits is ignored (SQLite's largest integer has 19).
_LENGTH, _DIGITS = 100, 18
_LAST, _RUN, _OLDER, _COMPARED = "commit", "run/", "older/", "compared/"
#: So many runs are kept, those with the highest numbers; of the commits of others the number alone counts.
_KEPT = 1000


class Commits:
    """The commits of one store. One thread writes at a time; any thread reads.

    A copy of the store goes on with the numbers that the original uses too. So each run of the agent has a
    random name. It is stored with the number of the run's last commit, in the transaction of that commit,
    and the mark of the store on the host has both. A commit of a run that the store does not know, or beyond
    the run's last one, is not of this store, however many it has made since.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._name = uuid.uuid4().hex[:16]
        find = "SELECT key, value FROM meta WHERE key = ? OR key GLOB ?"
        rows = dict(database.sql.execute(find, (_LAST, f"{_RUN}*")))
        #: The last commit: its number and, after a slash, the name of its run.
        self.mark: str = rows.pop(_LAST, "0")
        runs = sorted((int(value), key.removeprefix(_RUN)) for key, value in rows.items())
        self._dropped = [name for _, name in runs[:-_KEPT]]
        self._runs = {name: number for number, name in runs[-_KEPT:]}
        self._known = runs[-_KEPT][0] if len(runs) >= _KEPT else 0

    def has(self, number: int, name: str) -> bool:
        """Whether the store has the commit of this number and run; ``name`` is empty if there is none."""
        return number <= max(self._runs.get(name, 0), self._known)

    def write_next(self) -> int:
        """Write the number of this commit, and return it: within its transaction, before ``made``."""
        number = int(self.mark.partition("/")[0]) + 1
        rows = [(_LAST, f"{number}/{self._name}"), (f"{_RUN}{self._name}", str(number))]
        self._database.sql.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        dropped = [(f"{_RUN}{name}",) for name in self._dropped]
        self._database.sql.executemany("DELETE FROM meta WHERE key = ?", dropped)
        return number

    def made(self, number: int) -> None:
        """The transaction of ``write_next`` has ended."""
        self._runs[self._name] = number
        self._dropped = []
        self.mark = f"{number}/{self._name}"


class StoreMarks:
    """The marks of one store, and by backend what was found of newer copies and of others. Thread-safe."""

    def __init__(self, database: Database, events: EventLog) -> None:
        self._database = database
        self._events = events
        self.commits = Commits(database)
        self._reports = self._stored(_OLDER)
        #: The last mark of another store that was compared.
        self._compared = self._stored(_COMPARED)

    @property
    def own(self) -> str:
        """The mark of the host as a whole: the identity of this store and its last commit."""
        return f"{self._database.identity}/{self.commits.mark}"

    def after(self, found: str) -> str:
        """The mark to write over ``found``, which this process did not write.

        A mark of a commit that this store does not have is kept until it was compared; overwriting it
        would lose the information.
        """
        compared = found[:_LENGTH] in self._compared.values()
        return self.own if not found or compared or self._is_known(found) else found

    def compare(self, backend: str, found: str, plugged_again: Collection[str]) -> None:
        """Save a report if another store, or a newer copy, changed the host last.

        ``found`` is the mark found when the whole host was observed (empty: none).
        ``plugged_again`` are the ports that the store has and the host lacks. Each mark is reported
        once per backend, also across restarts.
        """
        compared = self._compared.get(backend) == found[:_LENGTH]
        if not found or compared or self._is_known(found):
            return
        identity, number, _ = _split(found)
        if identity == self._database.identity:
            report = f"the store is an older copy: it lacks commit {number}, which changed the host last"
        else:
            report = f"another store changed the host last: {identity}"
        ports = sorted(plugged_again)
        if ports:
            report += f". It lists {len(ports)} ports that were not on the host, which are plugged again: "
            report += some(ports, _NAMED)
        LOG.warning("%s: %s", backend, report)
        rows = {_OLDER + backend: report, _COMPARED + backend: found[:_LENGTH]}
        with self._database.lock:
            self._reports = {**self._reports, backend: report}
            self._compared = {**self._compared, backend: found[:_LENGTH]}
            try:
                with self._database.transaction():
                    self._database.sql.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows.items())
                    self._events.skip_numbers()
            except HostError as refused:
                LOG.error("this is not remembered: %s", refused)

    def accept(self, backend: str) -> None:
        """Delete the report, because an operator has compared the host with the platform; its mark stays
        noted.

        Raises: HostError; then nothing is changed.
        """
        if not self.reported(backend):
            return
        with self._database.lock:
            with self._database.transaction():
                self._database.sql.execute("DELETE FROM meta WHERE key = ?", (_OLDER + backend,))
            self._reports = {b: report for b, report in self._reports.items() if b != backend}

    def findings(self, backend: str) -> list[Finding]:
        if not self.reported(backend):
            return []
        return [
            Finding(
                id=f"store-older-{backend}",
                status="warn",
                found=self._reports[backend],
                expected="the store that changed the host last",
                fix="PUT every port that the platform has and DELETE those that it no longer has; "
                'then: POST /v1/reconcile {"remove_orphans": true}',
            )
        ]

    def reported(self, backend: str) -> bool:
        """Whether there is a report that an operator has to compare."""
        return backend in self._reports

    def _is_known(self, found: str) -> bool:
        """Whether a mark is of a commit that this store has."""
        identity, number, run = _split(found)
        return identity == self._database.identity and self.commits.has(number, run)

    def _stored(self, prefix: str) -> Mapping[str, str]:
        rows = self._database.sql.execute("SELECT key, value FROM meta WHERE key LIKE ?", (f"{prefix}%",))
        return {key.removeprefix(prefix): value for key, value in rows}


def _split(mark: str) -> tuple[str, int, str]:
    """Parse a mark; anything else counts as the mark of another store."""
    identity, _, commit = mark.partition("/")
    number, _, run = commit.partition("/")
    whole = number.isascii() and number.isdecimal() and len(number) <= _DIGITS
    return (identity[:_LENGTH], int(number), run) if whole else (mark[:_LENGTH], 0, "")

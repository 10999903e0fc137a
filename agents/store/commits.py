"""Which commits a store has: the runs of the agent that made them, with the number of each run's last one."""

from __future__ import annotations

import uuid

from agents.store.database import Database

# A copy of the store goes on with the numbers that the original uses too. So each run of the agent has a
# random name. It is stored with the number of the run's last commit, in the transaction of that commit, and
# the mark of the store on the host has both. A commit of a run that the store does not know, or beyond the
# run's last one, is not of this store, however many it has made since.

_LAST, _RUN = "commit", "run/"
#: So many runs are kept, those with the highest numbers; of the commits of others the number alone counts.
_KEPT = 1000


class Commits:
    """The commits of one store. One thread writes at a time; any thread reads."""

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

    @property
    def last(self) -> int:
        """The number of the last commit."""
        return int(self.mark.partition("/")[0])

    def has(self, number: int, name: str) -> bool:
        """Whether the store has the commit of this number and run; ``name`` is empty if there is none."""
        return number <= max(self._runs.get(name, 0), self._known)

    def write_next(self) -> int:
        """Write the number of this commit, and return it: within its transaction, before ``made``."""
        number = self.last + 1
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

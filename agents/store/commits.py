"""Which commits a store has: their numbers, and the runs of the agent that made them."""

from __future__ import annotations

import uuid
from bisect import bisect_right

from agents.store.database import Database

# A copy of the store goes on with the numbers that the original uses too. So each run of the agent has a
# random name. It is stored with the number of the run's first commit, in the transaction of that commit, and
# the mark of the store on the host has it with the number. A commit with the same number and another name is
# not of this store, however many it has made since.

_LAST, _RUN = "commit", "run/"
_DIGITS = 19  # SQLite's largest integer has as many
#: The name for numbers that another copy of the store has used.
_OTHERS = "-"
#: Older runs are dropped; of their commits, and of those from before runs had names, the number alone counts.
_KEPT = 1000


class Commits:
    """The commits of one store. One thread writes at a time; any thread reads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._name = uuid.uuid4().hex[:16]
        find = "SELECT key, value FROM meta WHERE key = ? OR key GLOB ? ORDER BY key"
        rows = dict(database.sql.execute(find, (_LAST, f"{_RUN}*")))
        #: The number of the last commit.
        self.last = int(rows.pop(_LAST, "0"))
        #: The first number of each run with its name, in ascending order.
        self._runs = tuple((int(key.removeprefix(_RUN)), name) for key, name in rows.items())[-_KEPT:]
        self._stored = len(self._runs)

    @property
    def mark(self) -> str:
        """The last commit: its number and, if it is known, the name of its run."""
        name = self._run_of(self.last)
        return f"{self.last}/{name}" if name else str(self.last)

    def has(self, number: int, name: str) -> bool:
        """Whether the store has the commit of this number and run; ``name`` is empty if there is none."""
        return number <= self.last and self._run_of(number) in (None, name)

    def write_next(self) -> int:
        """Write the number of this commit, and return it: within its transaction, before ``made``."""
        number = self.last + 1
        self._write(number, self._runs_with(number))
        return number

    def made(self, number: int) -> None:
        """The transaction of ``write_next`` has ended."""
        self._runs = self._runs_with(number)
        self._stored = len(self._runs)
        self.last = number

    def skip_to(self, number: int) -> None:
        """Count on from a commit of another copy, so that no two commits have the same number.

        In memory; ``write_last`` or the next commit writes it.
        """
        if number > self.last:
            self._runs = (*self._runs, (self.last + 1, _OTHERS))
            self.last = number

    def write_last(self) -> None:
        """Write the number of the last commit; within a transaction."""
        self._write(self.last, self._runs)

    def _runs_with(self, number: int) -> tuple[tuple[int, str], ...]:
        runs = self._runs
        return runs if runs and runs[-1][1] == self._name else (*runs, (number, self._name))

    def _run_of(self, number: int) -> str | None:
        runs = self._runs
        at = bisect_right(runs, number, key=lambda run: run[0])
        return runs[at - 1][1] if at else None

    def _write(self, last: int, runs: tuple[tuple[int, str], ...]) -> None:
        rows = [(f"{_RUN}{first:0{_DIGITS}}", name) for first, name in runs[self._stored :]]
        if rows:
            dropped = (f"{_RUN}*", f"{_RUN}{runs[0][0]:0{_DIGITS}}")
            self._database.sql.execute("DELETE FROM meta WHERE key GLOB ? AND key < ?", dropped)
        self._database.sql.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [(_LAST, str(last)), *rows]
        )

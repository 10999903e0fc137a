"""The journal of asynchronous calls: each is stored before it is answered, until its result is delivered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from agents.store.database import Database, StoredClock
from netplugin.api.errors import Overloaded
from netplugin.api.task_models import Task, TaskState
from netplugin.host.supervisor import Supervisor

_RETRY_FIRST_S, _RETRY_MOST_S = 1.0, 60.0
_CLOCK = "clock"
_FINISHED = "state IN ('delivered', 'expired')"


@dataclass(frozen=True)
class JournalledTask:
    """An asynchronous call and its state, in the order of the columns of its table."""

    taskuuid: str
    fingerprint: str
    method: str
    target: str
    body: bytes
    callback_url: str
    state: TaskState
    attempts: int = 0
    created_at: float = 0.0
    result: dict[str, Any] | None = None

    def public(self) -> Task:
        return Task(taskuuid=self.taskuuid, state=self.state, attempts=self.attempts, result=self.result)


_COLUMNS = tuple(each.name for each in fields(JournalledTask))


class TaskJournal:
    """Limited in size: new tasks replace the oldest finished ones."""

    def __init__(self, database: Database, max_tasks: int = 100_000, max_bytes: int = 256 << 20) -> None:
        self.database = database
        self._max_tasks, self._max_bytes = max_tasks, max_bytes
        with database.lock:
            row = database.sql.execute("SELECT value FROM meta WHERE key = ?", (_CLOCK,)).fetchone()
        self._clock = StoredClock(row[0] if row else None)

    def now(self) -> float:
        """The time of the clock that ages tasks."""
        return self._clock.now()

    def write(self, task: JournalledTask) -> tuple[JournalledTask, bool]:
        """Store the task unless its uuid is known. Returns the stored task, and whether it is new.

        Raises: Overloaded if too many tasks are unfinished.
        """
        known = self.get(task.taskuuid)  # one thread writes: nobody else adds it meanwhile
        if known is not None:
            return known, False
        with self.database.transaction():
            self._make_room(len(task.body))
            self._stamp()
            self.database.sql.execute(
                "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                astuple(replace(task, created_at=self.now(), result=None)),
            )
        found = self.get(task.taskuuid)
        assert found is not None
        return found, True

    def get(self, taskuuid: str) -> JournalledTask | None:
        return next(self._read("WHERE taskuuid = ?", (taskuuid,)), None)

    def open(self) -> list[JournalledTask]:
        """Tasks that are not executed or delivered yet, in the order of their arrival."""
        return list(self._read("WHERE state IN ('accepted', 'done') ORDER BY rowid", ()))

    def update(self, task: JournalledTask) -> None:
        """Save the state of a task; the body is dropped once the task was executed."""
        with self.database.transaction():
            self.database.sql.execute(
                "UPDATE tasks SET state = ?, attempts = ?, result = ?, "
                "body = CASE WHEN ? = 'accepted' THEN body ELSE x'' END WHERE taskuuid = ?",
                (
                    task.state.value,
                    task.attempts,
                    None if task.result is None else json.dumps(task.result),
                    task.state.value,
                    task.taskuuid,
                ),
            )

    async def keep(self, task: JournalledTask, supervisor: Supervisor) -> None:
        """``update`` on the event loop, retried until the store accepts it."""
        wait_s = _RETRY_FIRST_S
        while True:
            try:
                await self.database.in_thread(self.update, task)
                return
            except Exception as error:
                supervisor.failed("tasks", error)
                await asyncio.sleep(wait_s)
                wait_s = min(_RETRY_MOST_S, wait_s * 2)

    def forget(self, before: float) -> None:
        """Delete delivered and expired tasks that are older than ``before`` (see ``now``)."""
        with self.database.transaction():
            self._stamp()
            self.database.sql.execute(f"DELETE FROM tasks WHERE created_at < ? AND {_FINISHED}", (before,))

    def _stamp(self) -> None:
        self.database.sql.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_CLOCK, self._clock.state()))

    def _make_room(self, size: int) -> None:
        """Delete finished tasks until there is room for a body of ``size`` bytes."""
        sql = self.database.sql
        while True:
            rows, stored = sql.execute(
                "SELECT count(*), coalesce(sum(length(body) + length(coalesce(result, ''))), 0) FROM tasks"
            ).fetchone()
            if rows < self._max_tasks and stored + size <= self._max_bytes:
                return
            gone = sql.execute(
                f"DELETE FROM tasks WHERE rowid IN (SELECT rowid FROM tasks WHERE {_FINISHED} "
                "ORDER BY rowid LIMIT 100)"
            ).rowcount
            if not gone:
                raise Overloaded(
                    f"{rows} asynchronous calls of {stored} bytes are not finished",
                    step="journal",
                    fix="try again later, or raise [tasks] max_tasks or max_bytes",
                )

    def _read(self, where: str, parameters: tuple[str, ...]) -> Iterator[JournalledTask]:
        with self.database.lock:
            rows = self.database.sql.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM tasks {where}",
                parameters,
            ).fetchall()
        for row in rows:
            values = dict(zip(_COLUMNS, row, strict=True))
            result = json.loads(values["result"]) if values["result"] else None
            yield JournalledTask(**values | {"state": TaskState(values["state"]), "result": result})

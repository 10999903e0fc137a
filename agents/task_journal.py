"""Asynchronous calls, each written down before it is answered, until its result is delivered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agents.database import Database
from netplugin.models import Task, TaskState


@dataclass(frozen=True)
class JournalledTask:
    """An asynchronous call as it came, and how far it got."""

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
        return Task(
            taskuuid=self.taskuuid, state=self.state, attempts=self.attempts, result=self.result
        )


class TaskJournal:
    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, task: JournalledTask) -> JournalledTask:
        """Write the task down unless its uuid is known; the answer is the task that stands."""
        with self._database.transaction():
            self._database.sql.execute(
                "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    task.taskuuid, task.fingerprint, task.method, task.target, task.body,
                    task.callback_url, task.state.value, task.attempts, time.time(), None,
                ),
            )  # fmt: skip
        found = self.get(task.taskuuid)
        assert found is not None
        return found

    def get(self, taskuuid: str) -> JournalledTask | None:
        return next(self._read("WHERE taskuuid = ?", (taskuuid,)), None)

    def open(self) -> list[JournalledTask]:
        """Tasks not yet carried out or delivered, oldest first."""
        return list(
            self._read("WHERE state IN ('accepted', 'done') ORDER BY created_at, taskuuid", ())
        )

    def update(self, task: JournalledTask) -> None:
        with self._database.transaction():
            self._database.sql.execute(
                "UPDATE tasks SET state = ?, attempts = ?, result = ? WHERE taskuuid = ?",
                (
                    task.state.value,
                    task.attempts,
                    None if task.result is None else json.dumps(task.result),
                    task.taskuuid,
                ),
            )

    def forget(self, before: float) -> None:
        """Forget what was delivered or given up and is older than ``before`` (Unix time)."""
        with self._database.transaction():
            self._database.sql.execute(
                "DELETE FROM tasks WHERE created_at < ? AND state IN ('delivered', 'expired')",
                (before,),
            )

    def _read(self, where: str, parameters: tuple[str, ...]) -> Iterator[JournalledTask]:
        with self._database.lock:
            rows = self._database.sql.execute(
                "SELECT taskuuid, fingerprint, method, target, body, callback_url, state, attempts, "
                f"created_at, result FROM tasks {where}",
                parameters,
            ).fetchall()
        for row in rows:
            yield JournalledTask(
                taskuuid=row[0],
                fingerprint=row[1],
                method=row[2],
                target=row[3],
                body=row[4],
                callback_url=row[5],
                state=TaskState(row[6]),
                attempts=row[7],
                created_at=row[8],
                result=json.loads(row[9]) if row[9] else None,
            )

"""Asynchronous calls: journalled before they are answered, then executed once.

A call is stored as its HTTP request and executed by the application that serves synchronous calls.
All mutating calls converge, so a call that was interrupted by a crash is executed again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import httpx

from agents.api.callbacks import Callbacks, TaskSettings, callback_allowed
from agents.api.problems import unexpected
from agents.off_loop import OffLoop
from agents.store.task_journal import JournalledTask, TaskJournal
from netplugin.api.errors import Conflict, Forbidden, InvalidRequest, NotFound, Overloaded
from netplugin.api.task_models import Task, TaskState
from netplugin.host.supervisor import Supervisor

LOG = logging.getLogger(__name__)
_RETRY_FIRST_S, _RETRY_MOST_S = 0.1, 2.0
#: The clock of the journal is saved at the same interval.
_FORGET_EVERY_S = 60.0


class TaskRunner:
    """Executes tasks on the event loop; ``start`` resumes those that a crash interrupted."""

    def __init__(
        self,
        settings: TaskSettings,
        journal: TaskJournal,
        carried_out: Callable[[str, str, str, int], Awaitable[None]] | None = None,
        supervisor: Supervisor | None = None,
        off_loop: OffLoop | None = None,
    ) -> None:
        """``carried_out`` is called with uuid, method, target and status of each task, for the audit log."""
        self._settings = settings
        self._carried_out = carried_out
        self._journal = journal
        self._supervisor = supervisor or Supervisor()
        # In the order of arrival, and never on the event loop.
        self._in_thread = journal.database.in_thread
        self._off_loop = off_loop or OffLoop()
        self._callbacks = Callbacks(settings, journal, self._supervisor, self._off_loop)
        self._app: Any = None
        self._running: set[asyncio.Task[Any]] = set()
        self._executions: set[asyncio.Task[None]] = set()
        self._parked = False
        # Calls on the same object are executed in the order of arrival: a lock is taken in that order.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self, app: Any) -> None:
        """Resume unfinished tasks; call it before new calls are accepted."""
        self._app = app
        for task in await self._in_thread(self._journal.open):
            self._spawn(task)
        forget = self._supervisor.every("tasks-forget", _FORGET_EVERY_S, self._forget)
        self._keep(asyncio.create_task(forget))

    def park(self) -> None:
        """Leave accepted tasks, present and future, to the next start. Results are still delivered.
        For the event loop.
        """
        self._parked = True
        for execution in self._executions:
            execution.cancel()

    async def stop(self) -> None:
        for running in list(self._running):
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._callbacks.stop()

    async def get(self, taskuuid: str) -> Task:
        """Raises: NotFound."""
        task = await self._in_thread(self._journal.get, taskuuid)
        if task is None:
            raise NotFound(f"there is no task {taskuuid}", step="lookup")
        return task.public()

    async def accept(self, taskuuid: str, callback_url: str, method: str, target: str, body: bytes) -> None:
        """Journal the call once, even if it is sent repeatedly; then it may be answered.

        Raises: InvalidRequest without a callback URL, Forbidden for a URL that is not allowed,
        Conflict if the uuid belongs to another call, Overloaded, sqlite3.Error.
        """
        if not callback_url:
            raise InvalidRequest.of_field("callbackurl", "is required with taskuuid", step="journal")
        if not callback_allowed(callback_url, self._settings.callback_allow):
            raise Forbidden(
                "callbackurl is not below an allowed prefix",
                step="journal",
                fix="add its scheme, host, port and path to [tasks] callback_allow",
            )
        fingerprint = await self._off_loop.compute(_fingerprint, method, target, callback_url, body)
        task = JournalledTask(taskuuid, fingerprint, method, target, body, callback_url, TaskState.ACCEPTED)
        found, is_new = await self._in_thread(self._journal.write, task)
        if found.fingerprint != fingerprint:
            raise Conflict(f"taskuuid {taskuuid} was used for another call", step="journal")
        if is_new:
            self._spawn(found)

    # -- on the loop -----------------------------------------------------------------------------

    def _spawn(self, task: JournalledTask) -> None:
        if task.state is not TaskState.ACCEPTED:
            self._callbacks.add(task.target, task.taskuuid, task.callback_url)
            return
        if self._parked:
            return
        # The next call on the object waits for this execution, not for its delivery.
        lock = self._locks.setdefault(task.target, asyncio.Lock())
        executed = asyncio.create_task(self._execute(task, lock))
        self._executions.add(executed)
        executed.add_done_callback(self._executions.discard)
        self._keep(executed)

    def _keep(self, running: asyncio.Task[Any]) -> None:
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _execute(self, task: JournalledTask, lock: asyncio.Lock) -> None:
        try:
            async with lock:
                status, result = await self._call(task)
                done = replace(task, state=TaskState.DONE, result=_posted(status, result))
                await self._journal.keep(done, self._supervisor)
                if self._carried_out is not None:
                    await self._carried_out(task.taskuuid, task.method, task.target, status)
        except Exception as failed:
            LOG.error("task %s is left until the next start", task.taskuuid)
            self._supervisor.failed("tasks", failed)
        else:
            self._callbacks.add(task.target, task.taskuuid, task.callback_url)

    async def _call(self, task: JournalledTask) -> tuple[int, Any]:
        """Execute the call and return status and body.

        An accepted call is retried while the agent is overloaded.
        """
        wait_s = _RETRY_FIRST_S
        while True:
            status, body = await call_app(self._app, task.method, task.target, task.body)
            result = await self._off_loop.compute(_result, body)
            if not overloaded(result) or self._callbacks.is_over(task):
                return status, result
            await asyncio.sleep(wait_s)
            wait_s = min(_RETRY_MOST_S, wait_s * 2)

    async def _forget(self) -> None:
        before = self._journal.now() - self._settings.expire_after_s
        await self._in_thread(self._journal.forget, before)


def _fingerprint(method: str, target: str, callback_url: str, body: bytes) -> str:
    call = json.dumps([method, target, callback_url]).encode() + b"\n" + body
    return hashlib.sha256(call).hexdigest()


def _result(body: bytes) -> Any:
    """The body of an answer; None if it is no JSON."""
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None


def _posted(status: int, result: Any) -> dict[str, Any]:
    """What is posted to the callback URL."""
    success = 200 <= status < 300
    error = "" if success else str((result or {}).get("detail", f"status {status}"))
    return {"success": success, "error": error, "status": status, "result": result}


def overloaded(result: Any) -> bool:
    """Whether a response, or the result of a port of a batch, is the error ``overloaded``."""
    if not isinstance(result, dict):
        return False
    errors = [result, *(part.get("error") or {} for part in result.get("results") or ())]
    return any(error.get("code") == Overloaded.code for error in errors)


async def call_app(app: Any, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    """Call an ASGI application in this process. Returns the status and the body."""
    transport = httpx.ASGITransport(app)
    headers = {"content-type": "application/json"}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", trust_env=False) as client:
            answer = await client.request(method, target, content=body, headers=headers)
    except Exception:  # perhaps after its response; executing it again would fail again
        LOG.exception("%s %s failed unexpectedly", method, target)
        unknown = unexpected()
        return unknown.status_code, bytes(unknown.body)
    return answer.status_code, answer.content

"""Asynchronous calls: journalled before they are answered, carried out once, delivered until done.

A call is kept as the HTTP request it was, and carried out by handing it to the same application
that serves the synchronous ones. Every mutating call converges, so one that was cut off by a crash
is simply carried out again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import ssl
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from agents.task_journal import JournalledTask, TaskJournal
from netplugin.errors import (
    Conflict,
    FieldError,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from netplugin.host.supervisor import Supervisor
from netplugin.models import Task, TaskState

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 1.0, 60.0
_RETRY_FIRST_S, _RETRY_MOST_S = 0.1, 2.0
#: The clock of the journal is stored as often.
_FORGET_EVERY_S = 60.0
# RFC 2104 section 3: shorter keys than the hash are weaker; 16 bytes are what 128 bits need.
_SHORTEST_SECRET = 16
#: Header of a delivery that is signed.
SIGNATURE = "X-Netplugin-Signature"


@dataclass(frozen=True)
class TaskSettings:
    """The ``[tasks]`` options as a value."""

    callback_allow: tuple[str, ...]
    expire_after_s: float
    callback_timeout_s: float
    callback_ca: str | None = None
    callback_cert: str | None = None
    callback_key: str | None = None
    #: Results are signed with it.
    secret: bytes | None = field(default=None, repr=False)

    @staticmethod
    def read(conf: Any) -> TaskSettings:
        """Raises: ValueError, OSError for a file that cannot be used."""
        tasks = conf.tasks
        insecure = [url for url in tasks.callback_allow if not url.lower().startswith("https:")]
        if insecure and not tasks.callback_insecure_http:
            raise ValueError(
                f"[tasks] callback_allow {insecure[0]}: results would go there in the clear; use "
                "https, or set callback_insecure_http"
            )
        settings = TaskSettings(
            callback_allow=tuple(tasks.callback_allow),
            expire_after_s=float(tasks.expire_after),
            callback_timeout_s=float(tasks.callback_timeout),
            callback_ca=tasks.callback_ca,
            callback_cert=tasks.callback_cert,
            callback_key=tasks.callback_key,
            secret=read_secret(Path(tasks.callback_secret)) if tasks.callback_secret else None,
        )
        if bool(settings.callback_cert) != bool(settings.callback_key):
            raise ValueError("[tasks] callback_cert and callback_key go together")
        if settings.callback_cert or settings.callback_ca:
            settings.tls_context()
        return settings

    def tls_context(self) -> ssl.SSLContext:
        """For deliveries. Raises: ValueError."""
        try:
            context = ssl.create_default_context(cafile=self.callback_ca)
            if self.callback_cert:
                context.load_cert_chain(self.callback_cert, self.callback_key, password="")
        except OSError as wrong:
            raise ValueError(
                f"[tasks] callback_ca, callback_cert or callback_key cannot be used: {wrong}"
            ) from None
        return context


def read_secret(path: Path) -> bytes:
    """The key in a file that nobody else can read. Raises: ValueError, OSError."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(f"{path} can be read by others: chmod 600 {path}")
    secret = path.read_bytes().strip()
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"{path} has a key of fewer than {_SHORTEST_SECRET} bytes")
    return secret


def signature(secret: bytes, taskuuid: str, body: bytes) -> str:
    """Value of the header that shows a receiver who sent a result: HMAC-SHA256 (RFC 2104)."""
    return "sha256=" + hmac.new(secret, taskuuid.encode() + b"\n" + body, "sha256").hexdigest()


def callback_allowed(url: str, allow: Sequence[str]) -> bool:
    """Whether the URL has the scheme, host and port of an allowed prefix and a path below its path."""
    wanted = _split(url)
    if wanted is None or wanted.username is not None or ".." in wanted.path.split("/"):
        return False
    for prefix in allow:
        allowed = _split(prefix)
        if allowed is None or _origin(allowed) != _origin(wanted):
            continue
        path = allowed.path or "/"
        below = path if path.endswith("/") else path + "/"
        if wanted.path == path or (wanted.path or "/").startswith(below):
            return True
    return False


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    unprintable = any(ord(c) <= 32 or ord(c) > 126 or c == "\\" for c in url)
    if unprintable or "%" in parts.path or parts.scheme not in ("http", "https"):
        return None
    return parts if parts.hostname else None


def _origin(url: SplitResult) -> tuple[str, str | None, int]:
    default = 443 if url.scheme == "https" else 80
    return url.scheme, url.hostname, default if url.port is None else url.port


class TaskRunner:
    """Carries out and delivers tasks on the event loop; ``start`` takes up what a crash left."""

    def __init__(
        self,
        settings: TaskSettings,
        journal: TaskJournal,
        carried_out: Callable[[str, str, str, int], None] = lambda *_: None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """``carried_out`` is told the uuid, method, target and status of each, for the audit log."""
        self._settings = settings
        self._carried_out = carried_out
        self._journal = journal
        self._supervisor = supervisor or Supervisor()
        # One: tasks are journalled in the order they came, and never on the event loop.
        self._thread = ThreadPoolExecutor(1, "journal")
        self._app: Any = None
        self._client: Any = None
        self._running: set[asyncio.Task[Any]] = set()
        # Calls on the same object are carried out in the order they came.
        self._last_on: dict[str, asyncio.Task[JournalledTask]] = {}

    def start(self, app: Any) -> None:
        self._app = app
        for task in self._journal.open():
            self._spawn(task)
        forget = self._supervisor.every("tasks-forget", _FORGET_EVERY_S, self._forget)
        self._keep(asyncio.create_task(forget))

    async def stop(self) -> None:
        for running in list(self._running):
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    def get(self, taskuuid: str) -> Task:
        task = self._journal.get(taskuuid)
        if task is None:
            raise NotFound(f"there is no task {taskuuid}", step="lookup")
        return task.public()

    async def accept(
        self, taskuuid: str, callback_url: str, method: str, target: str, body: bytes
    ) -> None:
        """Journal the call, once, however often it is sent; then it may be answered.

        Raises: Forbidden for a URL off the list, Conflict if the uuid names another call,
        Overloaded, sqlite3.Error.
        """
        if not callback_url:
            message = "is required with taskuuid"
            raise InvalidRequest(
                f"callbackurl: {message}", step="journal",
                errors=[FieldError(field="callbackurl", message=message)],
            )  # fmt: skip
        if not callback_allowed(callback_url, self._settings.callback_allow):
            raise Forbidden(
                "callbackurl is not below an allowed prefix", step="journal",
                fix="add its scheme, host, port and path to [tasks] callback_allow",
            )  # fmt: skip
        call = json.dumps([method, target, callback_url]).encode() + b"\n" + body
        fingerprint = hashlib.sha256(call).hexdigest()
        task = JournalledTask(
            taskuuid, fingerprint, method, target, body, callback_url, TaskState.ACCEPTED
        )
        found, is_new = await self._in_thread(self._journal.write, task)
        if found.fingerprint != fingerprint:
            raise Conflict(f"taskuuid {taskuuid} was used for another call", step="journal")
        if is_new:
            self._spawn(found)

    # -- on the loop -----------------------------------------------------------------------------

    def _spawn(self, task: JournalledTask) -> None:
        # The next call on the object waits for this one's execution, never for its delivery.
        executed = asyncio.create_task(self._execute(task, self._last_on.get(task.target)))
        self._last_on[task.target] = executed
        executed.add_done_callback(lambda _: self._clear(task.target, executed))
        self._keep(executed)
        self._keep(asyncio.create_task(self._finish(task.taskuuid, executed)))

    def _keep(self, running: asyncio.Task[Any]) -> None:
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _finish(self, taskuuid: str, executed: asyncio.Task[JournalledTask]) -> None:
        try:
            await self._deliver(await executed)
        except Exception as error:
            LOG.error("task %s is left until the next start", taskuuid)
            self._supervisor.failed("tasks", error)

    def _clear(self, target: str, executed: Any) -> None:
        if self._last_on.get(target) is executed:
            del self._last_on[target]

    async def _execute(self, task: JournalledTask, before: Any) -> JournalledTask:
        if before is not None:
            await asyncio.wait([before])
        if task.state is not TaskState.ACCEPTED:
            return task
        status, result = await self._call(task)
        success = 200 <= status < 300
        error = "" if success else str((result or {}).get("detail", f"status {status}"))
        answer = {"success": success, "error": error, "status": status, "result": result}
        done = replace(task, state=TaskState.DONE, result=answer)
        await self._written(done)
        self._carried_out(task.taskuuid, task.method, task.target, status)
        return done

    async def _call(self, task: JournalledTask) -> tuple[int, Any]:
        """The status and the answer. The call was accepted: while the agent is overloaded it waits."""
        wait_s = _RETRY_FIRST_S
        while True:
            status, body = await call_app(self._app, task.method, task.target, task.body)
            try:
                result = json.loads(body) if body else None
            except ValueError:
                result = None
            if not overloaded(result) or self._is_over(task):
                return status, result
            await asyncio.sleep(wait_s)
            wait_s = min(_RETRY_MOST_S, wait_s * 2)

    async def _written(self, task: JournalledTask) -> None:
        """Journal how far the task got; what the store does not take now is written later."""
        wait_s = _BACKOFF_FIRST_S
        while True:
            try:
                await self._in_thread(self._journal.update, task)
                return
            except Exception as error:
                self._supervisor.failed("tasks", error)
                await asyncio.sleep(wait_s)
                wait_s = min(_BACKOFF_MOST_S, wait_s * 2)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(work, *args, **kwargs))

    def _is_over(self, task: JournalledTask) -> bool:
        return self._journal.now() - task.created_at > self._settings.expire_after_s

    async def _deliver(self, task: JournalledTask) -> None:
        wait_s = _BACKOFF_FIRST_S
        while True:
            if self._is_over(task):
                LOG.error("task %s: its result was never taken, given up", task.taskuuid)
                await self._written(replace(task, state=TaskState.EXPIRED))
                return
            task = replace(task, attempts=task.attempts + 1)
            if await self._post(task):
                await self._written(replace(task, state=TaskState.DELIVERED))
                return
            await self._written(task)
            await asyncio.sleep(wait_s)
            wait_s = min(_BACKOFF_MOST_S, wait_s * 2)

    async def _post(self, task: JournalledTask) -> bool:
        """Whether the result was taken, by the status alone: the body of the answer is not read."""
        import httpx  # four megabytes that an agent without asynchronous calls does not need

        body = json.dumps(task.result, ensure_ascii=False, separators=(",", ":")).encode()
        try:
            if self._client is None:
                self._client = httpx.AsyncClient(
                    timeout=self._settings.callback_timeout_s,
                    follow_redirects=False,  # a redirect would lead off the allow-list
                    trust_env=False,
                    verify=self._settings.tls_context(),
                    limits=httpx.Limits(max_connections=None),
                )
            headers = self._headers(task.taskuuid, body)
            async with (
                asyncio.timeout(self._settings.callback_timeout_s),
                self._client.stream(
                    "POST", task.callback_url, content=body, headers=headers
                ) as answer,
            ):
                status, taken = answer.status_code, bool(answer.is_success)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as failed:
            LOG.info("task %s: callback not reached: %r", task.taskuuid, failed)
            return False
        if not taken:
            LOG.info("task %s: callback answered %d", task.taskuuid, status)
        return taken

    def _headers(self, taskuuid: str, body: bytes) -> dict[str, str]:
        headers = {"taskuuid": taskuuid, "Content-Type": "application/json"}
        if self._settings.secret is not None:
            headers[SIGNATURE] = signature(self._settings.secret, taskuuid, body)
        return headers

    async def _forget(self) -> None:
        before = self._journal.now() - self._settings.expire_after_s
        await self._in_thread(self._journal.forget, before)


def overloaded(result: Any) -> bool:
    """Whether an answer, or that of a port of a batch, is that too much waits already."""
    if not isinstance(result, dict):
        return False
    errors = [result, *(part.get("error") or {} for part in result.get("results") or ())]
    return any(error.get("code") == Overloaded.code for error in errors)


async def call_app(app: Any, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    """Hand a request to an ASGI application in this process; the answer is its status and body."""
    path, _, query = target.partition("?")  # the path is quoted: this ? begins the query
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": unquote(path), "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": None, "server": None,
    }  # fmt: skip
    status = 500
    parts: list[bytes] = []
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # nobody goes away: the task waits for the answer
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # perhaps after its answer; carried out again it would only fail again
        LOG.exception("%s %s failed unexpectedly", method, target)
        status = max(status, 500)
    return status, b"".join(parts)

"""Delivers the results of asynchronous calls: POST to the callback URL, with retries."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import ssl
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from agents.off_loop import OffLoop
from agents.store.task_journal import JournalledTask, TaskJournal
from netplugin.api.task_models import TaskState
from netplugin.host.safe_files import OF_GROUP, PRIVATE, path_of_own, read_own
from netplugin.host.supervisor import Supervisor

LOG = logging.getLogger(__name__)
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 1.0, 60.0
#: Maximum number of concurrent deliveries.
_IN_FLIGHT = 64
#: Maximum number of concurrent deliveries to one scheme, host and port.
_OF_ONE_ORIGIN = 16
# RFC 2104, section 3: keys shorter than the hash reduce the strength; 16 bytes are 128 bits.
_SHORTEST_SECRET = 16
#: Header with the signature of a delivery.
SIGNATURE = "X-Netplugin-Signature"


@dataclass(frozen=True)
class TaskSettings:
    """The ``[tasks]`` options."""

    callback_allow: tuple[str, ...]
    expire_after_s: float
    callback_timeout_s: float
    callback_ca: str | None = None
    callback_cert: str | None = None
    callback_key: str | None = None
    #: The key that results are signed with.
    secret: bytes | None = field(default=None, repr=False)

    @staticmethod
    def read(conf: Any) -> TaskSettings:
        """Raises: ValueError; OSError for a file that cannot be read."""
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
        """The TLS context of deliveries. Raises: ValueError."""
        try:
            with ExitStack() as files:
                ca = self.callback_ca and files.enter_context(path_of_own(self.callback_ca))
                context = ssl.create_default_context(cafile=ca)
                if self.callback_cert and self.callback_key:
                    cert = files.enter_context(path_of_own(self.callback_cert))
                    key = files.enter_context(path_of_own(self.callback_key, deny=OF_GROUP))
                    context.load_cert_chain(cert, key, password="")
        except OSError as wrong:
            raise ValueError(
                f"[tasks] callback_ca, callback_cert or callback_key cannot be used: {wrong}"
            ) from None
        return context


def read_secret(path: Path) -> bytes:
    """Read the key from a private file. Raises: ValueError."""
    try:
        secret = read_own(path, deny=PRIVATE).strip()
    except OSError as wrong:
        raise ValueError(f"[tasks] callback_secret: {wrong}") from None
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"{path} has a key of fewer than {_SHORTEST_SECRET} bytes")
    return secret


def signature(secret: bytes, taskuuid: str, body: bytes) -> str:
    """The value of the signature header (HMAC-SHA256, RFC 2104), which authenticates a result."""
    return "sha256=" + hmac.new(secret, taskuuid.encode() + b"\n" + body, "sha256").hexdigest()


def callback_allowed(url: str, allow: Sequence[str]) -> bool:
    """Whether the URL has the scheme, host and port of an allowed prefix and a path below its path."""
    requested = _split(url)
    if requested is None or requested.username is not None or ".." in requested.path.split("/"):
        return False
    for prefix in allow:
        allowed = _split(prefix)
        if allowed is None or _origin(allowed) != _origin(requested):
            continue
        path = allowed.path or "/"
        below = path if path.endswith("/") else path + "/"
        if requested.path == path or (requested.path or "/").startswith(below):
            return True
    return False


def _encoded(result: Any) -> bytes:
    return json.dumps(result, ensure_ascii=False, separators=(",", ":")).encode()


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


_Origin = tuple[str, str | None, int]


def _origin(url: SplitResult) -> _Origin:
    default = 443 if url.scheme == "https" else 80
    return url.scheme, url.hostname, default if url.port is None else url.port


class _Outcome(Enum):
    #: There is nothing left to deliver.
    OVER = auto()
    TAKEN = auto()
    REFUSED = auto()
    UNANSWERED = auto()


class _Receiver:
    """The server at one origin, and the results queued for it."""

    def __init__(self) -> None:
        #: The queue of each target: uuid, URL, and seconds until the next attempt if this one fails.
        self.waiting: dict[str, deque[tuple[str, str, float]]] = {}
        #: The targets in ``waiting`` without a delivery in progress.
        self.free: asyncio.Queue[str] = asyncio.Queue()
        #: While the receiver does not answer: seconds of the last pause, and its end (``loop.time``).
        self.rest_s = self.rests_until = 0.0
        self.answered = asyncio.Event()
        #: Held by the one delivery that is tried after a pause.
        self.trial = asyncio.Lock()


class Callbacks:
    """Delivers the results that the journal has as ``done``, on the event loop.

    The number of concurrent deliveries is limited. Results of calls on one object are first sent to
    a receiver (scheme, host and port) one at a time, in the order of the calls. A refused result is
    retried later and does not block those after it. If a receiver does not answer, deliveries to it
    pause for 1 s, 2 s and so on up to 60 s, and then go one at a time until it answers. Queued
    results are in the journal; memory holds only their uuid and URL.
    """

    def __init__(
        self, settings: TaskSettings, journal: TaskJournal, supervisor: Supervisor, off_loop: OffLoop
    ) -> None:
        """Raises: ValueError for certificates that cannot be read."""
        self._settings = settings
        self._off_loop = off_loop
        self._journal = journal
        self._supervisor = supervisor
        self._client = httpx.AsyncClient(
            timeout=settings.callback_timeout_s,
            follow_redirects=False,  # a redirect could leave the allow-list
            trust_env=False,
            verify=settings.tls_context(),
            limits=httpx.Limits(max_connections=None),
        )
        #: At most one per origin in callback_allow, now and in the past.
        self._receivers: dict[_Origin | None, _Receiver] = {}
        self._in_flight = asyncio.Semaphore(_IN_FLIGHT)
        self._turns: list[asyncio.Task[None]] = []

    async def stop(self) -> None:
        for turn in self._turns:
            turn.cancel()
        await asyncio.gather(*self._turns, return_exceptions=True)
        await self._client.aclose()

    def add(self, target: str, taskuuid: str, url: str, wait_s: float | None = None) -> None:
        """Queue the result of a journalled task for delivery to its callback URL."""
        parts = _split(url)
        origin = _origin(parts) if parts else None
        receiver = self._receivers.get(origin)
        if receiver is None:
            receiver = self._receivers[origin] = _Receiver()
            for _ in range(_OF_ONE_ORIGIN):
                turns = self._supervisor.every("callbacks", 0, partial(self._turn, receiver))
                self._turns.append(asyncio.create_task(turns))
        if target not in receiver.waiting:
            receiver.waiting[target] = deque()
            receiver.free.put_nowait(target)
        receiver.waiting[target].append((taskuuid, url, _BACKOFF_FIRST_S if wait_s is None else wait_s))

    def is_over(self, task: JournalledTask) -> bool:
        """Whether the result has expired."""
        return self._journal.now() - task.created_at > self._settings.expire_after_s

    async def _turn(self, receiver: _Receiver) -> None:
        target = await receiver.free.get()
        if receiver.rest_s:
            async with receiver.trial:
                if receiver.rest_s:
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(receiver.rests_until):
                            await receiver.answered.wait()
                    await self._deliver_next(receiver, target, is_trial=True)
                    return
        await self._deliver_next(receiver, target)

    async def _deliver_next(self, receiver: _Receiver, target: str, is_trial: bool = False) -> None:
        taskuuid, url, wait_s = receiver.waiting[target].popleft()
        loop = asyncio.get_running_loop()
        outcome = None
        try:
            async with self._in_flight:
                outcome = await self._deliver(taskuuid)
        finally:
            if outcome not in (_Outcome.OVER, _Outcome.TAKEN):
                later = min(_BACKOFF_MOST_S, wait_s * 2)
                loop.call_later(wait_s, self.add, target, taskuuid, url, later)
            if receiver.waiting[target]:
                receiver.free.put_nowait(target)
            else:
                del receiver.waiting[target]
        if outcome in (_Outcome.TAKEN, _Outcome.REFUSED):
            receiver.rest_s = 0.0
            receiver.answered.set()
        elif outcome is _Outcome.UNANSWERED and (is_trial or not receiver.rest_s):
            receiver.rest_s = min(_BACKOFF_MOST_S, receiver.rest_s * 2 or _BACKOFF_FIRST_S)
            receiver.rests_until = loop.time() + receiver.rest_s
            receiver.answered.clear()

    async def _deliver(self, taskuuid: str) -> _Outcome:
        """Try to deliver once."""
        task = await self._journal.database.in_thread(self._journal.get, taskuuid)
        if task is None or task.state is not TaskState.DONE:
            return _Outcome.OVER
        if self.is_over(task):
            LOG.error("task %s: its result was never taken, given up", taskuuid)
            await self._journal.keep(replace(task, state=TaskState.EXPIRED), self._supervisor)
            return _Outcome.OVER
        outcome = await self._post(task)
        state = TaskState.DELIVERED if outcome is _Outcome.TAKEN else TaskState.DONE
        attempted = replace(task, state=state, attempts=task.attempts + 1)
        await self._journal.keep(attempted, self._supervisor)
        return outcome

    async def _post(self, task: JournalledTask) -> _Outcome:
        """Send a result. Only the status of the response is used; its body is not read."""
        body = await self._off_loop.compute(_encoded, task.result)
        try:
            headers = self._headers(task.taskuuid, body)
            async with (
                asyncio.timeout(self._settings.callback_timeout_s),
                self._client.stream("POST", task.callback_url, content=body, headers=headers) as answer,
            ):
                status, taken = answer.status_code, bool(answer.is_success)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as failed:
            LOG.info("task %s: callback not reached: %r", task.taskuuid, failed)
            return _Outcome.UNANSWERED
        if taken:
            return _Outcome.TAKEN
        LOG.info("task %s: callback answered %d", task.taskuuid, status)
        return _Outcome.REFUSED

    def _headers(self, taskuuid: str, body: bytes) -> dict[str, str]:
        headers = {"taskuuid": taskuuid, "Content-Type": "application/json"}
        if self._settings.secret is not None:
            headers[SIGNATURE] = signature(self._settings.secret, taskuuid, body)
        return headers

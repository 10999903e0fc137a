"""Results of asynchronous calls: POSTed to the URL of the caller until they are taken."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import ssl
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from agents.task_journal import JournalledTask, TaskJournal
from netplugin.host.supervisor import Supervisor
from netplugin.models import TaskState

LOG = logging.getLogger(__name__)
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 1.0, 60.0
#: Results that are on their way at a time.
_IN_FLIGHT = 64
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


class Callbacks:
    """Delivers what the journal has as ``done``, a bounded number at a time, on the event loop.

    Results of calls on one object go out one after the other, first in the order of the calls; one
    that is not taken is tried again later and holds up none after it. What waits is in the journal, and
    only its name in memory.
    """

    def __init__(
        self, settings: TaskSettings, journal: TaskJournal, supervisor: Supervisor
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._supervisor = supervisor
        self._client: Any = None
        #: By target, what waits: uuid, and the seconds to the next attempt if this one fails.
        self._waiting: dict[str, deque[tuple[str, float]]] = {}
        #: The targets of ``_waiting`` of which no result is on its way.
        self._free: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        """Deliver until cancelled."""
        turns = [
            self._supervisor.every("callbacks", 0, self._deliver_next) for _ in range(_IN_FLIGHT)
        ]
        try:
            await asyncio.gather(*turns)
        finally:
            if self._client is not None:
                await self._client.aclose()

    def add(self, target: str, taskuuid: str, wait_s: float | None = None) -> None:
        """Deliver the result of this task, which the journal has."""
        waiting = self._waiting.get(target)
        if waiting is None:
            waiting = self._waiting[target] = deque()
            self._free.put_nowait(target)
        waiting.append((taskuuid, _BACKOFF_FIRST_S if wait_s is None else wait_s))

    def is_over(self, task: JournalledTask) -> bool:
        """Whether nobody waits for its result any more."""
        return self._journal.now() - task.created_at > self._settings.expire_after_s

    async def _deliver_next(self) -> None:
        target = await self._free.get()
        taskuuid, wait_s = self._waiting[target].popleft()
        over = False
        try:
            over = await self._deliver(taskuuid)
        finally:
            if not over:
                later = min(_BACKOFF_MOST_S, wait_s * 2)
                asyncio.get_running_loop().call_later(wait_s, self.add, target, taskuuid, later)
            if self._waiting[target]:
                self._free.put_nowait(target)
            else:
                del self._waiting[target]

    async def _deliver(self, taskuuid: str) -> bool:
        """One attempt; whether there is no other to make."""
        task = await self._journal.database.in_thread(self._journal.get, taskuuid)
        if task is None or task.state is not TaskState.DONE:
            return True
        if self.is_over(task):
            LOG.error("task %s: its result was never taken, given up", taskuuid)
            await self._journal.keep(replace(task, state=TaskState.EXPIRED), self._supervisor)
            return True
        taken = await self._post(task)
        state = TaskState.DELIVERED if taken else TaskState.DONE
        attempted = replace(task, state=state, attempts=task.attempts + 1)
        await self._journal.keep(attempted, self._supervisor)
        return taken

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

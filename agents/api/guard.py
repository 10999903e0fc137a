"""The checks of every call before the application: authentication, role, limits, size, journal, audit log."""

from __future__ import annotations

import ipaddress
import logging
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect

from agents.api import roles
from agents.api.access import STATE, UNKNOWN, Access, Peer, require
from agents.api.audit import AuditedCall, AuditLog
from agents.api.bodies import SMALL, refuse_conditions
from agents.api.listen import Credentials
from agents.api.problems import problem_response
from agents.api.roles import BodyRules, Right, Role
from agents.api.tasks import TaskRunner
from agents.off_loop import OffLoop
from netplugin.api.errors import Forbidden, HostError, InvalidRequest, NetpluginError, Overloaded
from netplugin.api.fields import NAME_PATTERN, PATTERN_WORDS

LOG = logging.getLogger(__name__)
#: Maximum size of a request body in bytes; a batch of 4,096 ports with addresses fits.
MAX_BODY = 8 * 1024 * 1024
_MUTATING = ("PUT", "POST", "DELETE", "PATCH")
_NAME = re.compile(NAME_PATTERN.replace("$", r"\Z"))


@dataclass
class RequestGuard:
    """An ASGI application that wraps the agent's application, whose routes say what a call requires."""

    _app: Any
    _tasks: TaskRunner
    #: Asked at each call, because tokens and certificates are reloaded at runtime.
    _credentials: Credentials
    _audit: AuditLog
    _limits: Limits
    _off_loop: OffLoop
    _rules: BodyRules

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = AuditedCall(scope.get("state", {}).get(STATE, UNKNOWN), scope["method"], scope["path"])
        try:
            await self._pass(call, scope, receive, send)
            return
        except ClientDisconnect:
            return  # drop the incomplete request
        except NetpluginError as refused:
            error = refused
        except sqlite3.Error as failed:
            LOG.exception("a task could not be journalled")
            error = HostError(f"the task journal cannot be written: {failed}", step="journal")
        await self._audit.called(call, error.status, error.code)
        await problem_response(error)(scope, receive, send)

    async def _pass(self, call: AuditedCall, scope: Any, receive: Any, send: Any) -> None:
        """Raises: NetpluginError or sqlite3.Error if the call must not reach the application."""
        headers = Headers(scope=scope)
        access = self._credentials.access
        _refuse_browsers(headers, call.peer, access)
        right = roles.of_call(self._app.routes, scope)
        if right is not None and right.role is None:
            await self._app(scope, receive, send)
            return
        call.caller = caller = access.identify(call.peer, headers.get("authorization", "").encode("latin-1"))
        if right is None or right.role is None:
            # The error does not repeat the path, which may have control characters.
            message = "is not in normal form: names, separated by single slashes, without percent-encoding"
            raise InvalidRequest.of_field("path", message, step="route")
        require(caller, right.role, f"{call.method} {call.path[:200]}")
        changes = call.method in _MUTATING
        with self._limits.call(caller.name, changes=changes):
            if not changes:
                await self._app(scope, receive, send)
                return
            call.body = await _read(Request(scope, receive))
            if caller.role < Role.OPERATE:
                more = await self._more_of_body(right, call.body)
                if more is not None:
                    require(caller, Role.OPERATE, more)
            if "taskuuid" in headers:
                await self._journal(call, scope, headers)
                await self._audit.called(call, 200)
                await Response()(scope, receive, send)
                return
            # The only content type of the API, also for clients that send another (curl -d).
            MutableHeaders(scope=scope)["content-type"] = "application/json"
            await self._app(scope, _replay(call.body, receive), self._audited(call, send))

    async def _more_of_body(self, right: Right, body: bytes) -> str | None:
        if len(body) <= SMALL:
            return right.more(body, self._rules)
        return await self._off_loop.compute(right.more, body, self._rules)

    async def _journal(self, call: AuditedCall, scope: Any, headers: Headers) -> None:
        """The journal keeps no headers, and a condition must not get lost."""
        fix = "send the call without taskuuid, or without the condition"
        refuse_conditions(headers, "is not for asynchronous calls", step="journal", fix=fix)
        taskuuid, callback = headers["taskuuid"], headers.get("callbackurl", "")
        if not _NAME.match(taskuuid):
            raise InvalidRequest.of_field("taskuuid", PATTERN_WORDS[NAME_PATTERN], step="journal")
        query = scope["query_string"].decode("latin-1")
        # The path is in normal form, so a ? in it can only start the query.
        target = call.path + (f"?{query}" if query else "")
        call.taskuuid, call.callback = taskuuid, callback
        await self._tasks.accept(taskuuid, callback, call.method, target, call.body)

    def _audited(self, call: AuditedCall, send: Any) -> Any:
        """Write the audit entry when the response starts, before the caller receives it."""

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                await self._audit.called(call, message["status"])
            await send(message)

        return sent


def _refuse_browsers(headers: Headers, peer: Peer, access: Access) -> None:
    """Refuse calls that a web page makes through a browser on this host.

    A browser sends the ``Origin`` of the page. If no credential is required, the ``Host`` header
    reveals a name that was made to resolve to a loopback address (DNS rebinding). A browser cannot
    open a UNIX socket.
    """
    if "origin" in headers:
        raise Forbidden("calls from a page in a browser are not taken", step="authenticate")
    host = headers.get("host", "")
    open_to_all = not access.has_credential and not peer.is_local_socket
    if open_to_all and host and not _is_loopback(host):
        raise Forbidden(
            "the Host header names no loopback address",
            step="authenticate",
            fix="call the agent by its address, as in http://127.0.0.1:7071",
        )


def _is_loopback(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _read(request: Request) -> bytes:
    """Read the whole body. Raises: InvalidRequest; ClientDisconnect."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
            raise InvalidRequest.of_field("body", f"is larger than {MAX_BODY} bytes", step="read")
    return b"".join(parts)


def _replay(body: bytes, receive: Any) -> Any:
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Any:
        return next(messages, None) or await receive()

    return replayed


# -- Limits per caller: the rate of changes, and the number of concurrent calls. ------------------


#: Maximum number of remembered callers (names of tokens, certificates and local users).
_MOST_CALLERS = 4096


@dataclass
class _Use:
    """A token bucket that holds the tokens of two seconds, and the number of calls in progress."""

    left: float
    at: float
    calls: int = 0


class Limits:
    """The limits of all callers; used only on the event loop."""

    def __init__(
        self, changes_per_second: int, calls_at_once: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._changes_per_second = changes_per_second
        self._calls_at_once = calls_at_once
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def call(self, caller: str, *, changes: bool) -> Iterator[None]:
        """Count a call while the context is open. Raises: Overloaded."""
        use = self._use(caller)
        if use.calls >= self._calls_at_once:
            raise _too_much(caller, f"{self._calls_at_once} calls at once", "calls_at_once")
        if changes:
            if use.left < 1:
                rate = f"{self._changes_per_second} changing calls a second"
                raise _too_much(caller, rate, "changes_per_second")
            use.left -= 1
        use.calls += 1
        try:
            yield
        finally:
            use.calls -= 1

    def _use(self, caller: str) -> _Use:
        now = self._clock()
        most = 2.0 * self._changes_per_second
        use = self._uses.get(caller)
        if use is None:
            if len(self._uses) >= _MOST_CALLERS:
                # Callers without calls and with a full bucket need no entry.
                self._uses = {name: u for name, u in self._uses.items() if u.calls or now - u.at < 2}
            use = self._uses[caller] = _Use(most, now)
        use.left = min(most, use.left + (now - use.at) * self._changes_per_second)
        use.at = now
        return use


def _too_much(caller: str, what: str, option: str) -> Overloaded:
    return Overloaded(
        f"{caller} sends more than {what}",
        step="limit",
        fix=f"send it again later; the operator may raise [api] {option}",
    )

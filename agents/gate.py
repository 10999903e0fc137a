"""What every call passes before the application: the credential, the size, the journal."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import sqlite3
import stat
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agents.http import problem_response
from agents.peer import STATE, UNKNOWN, Peer
from agents.tasks import TaskRunner
from netplugin.errors import (
    FieldError,
    Forbidden,
    HostError,
    InvalidRequest,
    NetpluginError,
    Unauthorized,
)
from netplugin.models import NAME_PATTERN

LOG = logging.getLogger(__name__)
#: Bytes a request's body may have; a batch of 4,096 ports with addresses fits.
MAX_BODY = 8 * 1024 * 1024
_OPEN = ("/healthz", "/readyz")
_MUTATING = ("PUT", "POST", "DELETE", "PATCH")
_NAME = re.compile(NAME_PATTERN.replace("$", r"\Z"))


def read_tokens(path: Path) -> tuple[bytes, ...]:
    """The bearer tokens in a file that nobody else can read. Raises: ValueError, OSError."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(f"{path} can be read by others: chmod 600 {path}")
    lines = (line.strip() for line in path.read_text().splitlines())
    tokens = tuple(line.encode() for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ValueError(f"{path} has no token in it")
    return tokens


class Gate:
    """An ASGI application around the agent's own."""

    def __init__(
        self, app: Any, tasks: TaskRunner, tokens: tuple[bytes, ...], *, mutual_tls: bool = False
    ) -> None:
        self._app = app
        self._tasks = tasks
        self._tokens = tokens
        self._has_credential = bool(tokens) or mutual_tls

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        peer: Peer = scope.get("state", {}).get(STATE, UNKNOWN)
        try:
            self._refuse_browsers(headers, peer)
            if not peer.is_local_socket:  # the kernel has said who that is, and let it connect
                self._check_token(scope["path"], headers.get(b"authorization", b""))
            if scope["method"] not in _MUTATING:
                await self._app(scope, receive, send)
                return
            body = await _read(receive)
            if body is None:
                return  # who called has gone: half a call is no call, and nobody waits for an answer
            if b"taskuuid" in headers:
                self._journal(scope, headers, body)
                await _empty(send)
                return
        except NetpluginError as error:
            await problem_response(error)(scope, receive, send)
            return
        except sqlite3.Error as failed:
            LOG.exception("a task could not be journalled")
            unwritten = HostError(f"the task journal cannot be written: {failed}", step="journal")
            await problem_response(unwritten)(scope, receive, send)
            return
        await self._app(_as_json(scope), _replay(body, receive), send)

    def _refuse_browsers(self, headers: dict[bytes, bytes], peer: Peer) -> None:
        """A page in a browser on this host must not reach the agent through it.

        A browser says where a page comes from (``Origin``) when it sends for one; and where there is
        no credential, a name that was made to resolve to a loopback address shows in ``Host``. It
        cannot open a UNIX socket.
        """
        if b"origin" in headers:
            raise Forbidden("calls from a page in a browser are not taken", step="authenticate")
        host = headers.get(b"host", b"").decode("latin-1")
        open_to_all = not self._has_credential and not peer.is_local_socket
        if open_to_all and host and not _is_loopback(host):
            raise Forbidden(
                "the Host header names no loopback address", step="authenticate",
                fix="call the agent by its address, as in http://127.0.0.1:7071",
            )  # fmt: skip

    def _check_token(self, path: str, authorization: bytes) -> None:
        if not self._tokens or path in _OPEN:
            return
        scheme, _, token = authorization.partition(b" ")
        # All are compared, each in constant time: how long it took tells nothing of any.
        matches = [hmac.compare_digest(token.strip(), known) for known in self._tokens]
        if scheme.lower() != b"bearer" or not any(matches):
            raise Unauthorized(
                "a bearer token is needed and this call has none that is known", step="authenticate",
                fix="send the header Authorization: Bearer <a token of [api] token_file>",
            )  # fmt: skip

    def _journal(self, scope: Any, headers: dict[bytes, bytes], body: bytes) -> None:
        taskuuid = headers[b"taskuuid"].decode("latin-1")
        if not _NAME.match(taskuuid):
            message = f"must match {NAME_PATTERN}"
            raise InvalidRequest(
                f"taskuuid: {message}", step="journal",
                errors=[FieldError(field="taskuuid", message=message)],
            )  # fmt: skip
        query = scope["query_string"].decode("latin-1")
        # Quoted again: a ? within the path must not end it when the call is carried out.
        target = quote(scope["path"], safe="/:") + (f"?{query}" if query else "")
        callback = headers.get(b"callbackurl", b"").decode("latin-1")
        self._tasks.accept(taskuuid, callback, scope["method"], target, body)


def _is_loopback(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _as_json(scope: Any) -> Any:
    """The API speaks JSON alone: a call that does not say so (curl -d) is taken for it too."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


async def _read(receive: Any) -> bytes | None:
    """The whole body; None if the connection ended before it."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            message = f"is larger than {MAX_BODY} bytes"
            raise InvalidRequest(
                f"body {message}", step="read", errors=[FieldError(field="body", message=message)]
            )
        if not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Any) -> Any:
    sent = False

    async def replayed() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _empty(send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})

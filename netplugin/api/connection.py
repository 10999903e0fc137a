"""A connection to one agent, by the standard library alone: commands that only read need no more."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import socket
import ssl
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlencode, urlsplit

from netplugin.api.client_settings import (
    DEFAULT_URL,
    UNIX,
    checked_token,
    checked_url,
    invalid,
    read_token,
    tls,
)
from netplugin.api.errors import (
    BackendUnavailable,
    HostError,
    InvalidRequest,
    NetpluginError,
    OperationTimeout,
    from_problem,
    reason,
)

# A running agent accepts at once; only the response takes time.
_CONNECT_S = 5
# A stream has a line every 15 s at least.
_SILENCE_S = 60.0
T = TypeVar("T")
#: As ``fields.NAME_PATTERN``.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: The field of requests that has the name of an object, by the collection of the object.
_FIELDS = {"networks": "network_id", "physical-networks": "name", "tasks": "taskuuid", "vms": "vm_id"}


def path_of(collection: str, name: str) -> str:
    """The path of an object. Raises: InvalidRequest, because ``..`` would change the path of the URL."""
    if NAME.fullmatch(name):
        return f"/v1/{collection}/{name}"
    from netplugin.api.fields import NAME_PATTERN, PATTERN_WORDS

    raise InvalidRequest.of_field(_FIELDS.get(collection, "port_id"), PATTERN_WORDS[NAME_PATTERN])


@dataclass(frozen=True)
class Answer:
    """What an agent answered: ``call`` is the method and the URL."""

    call: str
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def values(self) -> dict[str, Any]:
        """One object. Raises: HostError."""
        return self._plain(dict)

    def rows(self) -> list[dict[str, Any]]:
        """A list of objects. Raises: HostError."""
        rows = self._plain(list)
        if not all(isinstance(each, dict) for each in rows):
            raise self.foreign()
        return rows

    def _plain(self, kind: type[T]) -> T:
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            raise self.foreign() from None
        if not isinstance(value, kind):
            raise self.foreign()
        return value

    def foreign(self) -> HostError:
        """The error for an answer that is not as the API says."""
        body = " ".join(self.body.decode(errors="replace").split())[:200]
        return HostError(
            f"{self.call} was answered with status {self.status} and not as the agent's API says: "
            f"{body or 'nothing'}",
            step="answer",
            fix="is it the agent that listens there, and is it of this version?",
        )

    def error(self) -> NetpluginError:
        """The error that it reports."""
        from pydantic import ValidationError

        from netplugin.api.problem import Problem

        try:
            return from_problem(Problem.model_validate_json(self.body))
        except ValidationError:
            return self.foreign()


class _Unix(http.client.HTTPConnection):
    """To the socket at a path. ``peer``: the process that listens there."""

    def __init__(self, path: str, connect_s: float) -> None:
        super().__init__("localhost")
        self._path, self._connect_s = path, connect_s
        self.peer: int | None = None

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        # Not settimeout: a socket that does not block fails at once while the queue of connections is full.
        limit = divmod(max(1, int(self._connect_s * 1e6)), 1_000_000)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *limit))
        self.sock.connect(self._path)
        found = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.peer = struct.unpack("3i", found)[0]


class Connection:
    """To one agent. Use it as a context manager or call ``close``.

    Every method raises the errors of ``netplugin.api.errors``: those that the agent returns, and
    ``BackendUnavailable`` or ``OperationTimeout`` if the agent cannot be reached.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        verify: bool | str | Path | ssl.SSLContext = True,
        cert: tuple[str, str] | str | None = None,
        timeout_s: float = 60,
    ) -> None:
        """A connection to the agent at ``url``, made with the first call.

        ``url``: ``unix:`` and the path of the agent's socket, or ``http(s)://host:port``;
        ``verify``: a file of CA certificates, or False to skip verification; ``cert``: certificate
        and key; ``timeout_s``: seconds to wait for a response.

        Raises: InvalidRequest if the URL, the token or a certificate file cannot be used.
        """
        self.url = checked_url(url)
        self.timeout_s = timeout_s
        #: Whether PUT and DELETE change what the fleet has made too, until its next change of it.
        self.override = False
        #: What goes on around each wait for an answer.
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        self._headers = {"Authorization": f"Bearer {checked_token(token)}"} if token else {}
        self._tls = tls(verify, cert) if self.url.startswith("https:") else None
        self._path = "" if self.url.startswith(UNIX) else urlsplit(self.url).path
        #: The process at the other end of the UNIX socket, if it was reached.
        self.peer: int | None = None
        #: Those that wait for the next call: calls of several threads have one each.
        self._idle: list[http.client.HTTPConnection] = []

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, timeout_s: float = 60) -> Self:
        """Configured by NETPLUGIN_URL and the other NETPLUGIN_* variables.

        Raises: InvalidRequest naming the variable that is wrong.
        """
        get = environment.get
        cert, key = get("NETPLUGIN_CERT"), get("NETPLUGIN_KEY")
        if key and not cert:
            raise invalid("NETPLUGIN_KEY is set without NETPLUGIN_CERT", "set both, or neither")
        token_file = get("NETPLUGIN_TOKEN_FILE")
        return cls(
            get("NETPLUGIN_URL") or DEFAULT_URL,
            token=read_token(Path(token_file)) if token_file else None,
            verify=get("NETPLUGIN_CA") or True,
            cert=(cert, key) if cert and key else cert or None,
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call(
        self,
        method: str,
        path: str,
        body: str | None = None,
        *,
        parameters: Mapping[str, Any] | None = None,
        more_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
        expected: Collection[int] = (),
        changes: bool = True,
    ) -> Answer:
        """``body``: JSON. ``more_s``: seconds that the call is expected to take, added to the timeout.

        ``expected``: statuses that are no error here. ``changes``: whether any other method than GET does.
        """
        sent = {**self._headers, **(headers or {})} | (
            {} if body is None else {"Content-Type": "application/json"}
        )
        if self.override and method in ("PUT", "DELETE"):
            sent["Netplugin-Override"] = "true"
        made, patience, connected = self._taken(), self.timeout_s + more_s, False
        try:
            with self.waiting():
                self._connect(made, patience)
                connected = True
                made.request(method, self._target(path, parameters), body and body.encode(), sent)
                answer = self._answer(f"{method} {self._base}{path}", made.getresponse())
        except (OSError, http.client.HTTPException) as failed:
            made.close()
            raise self._unreached(
                failed, patience if connected else None, changes and method != "GET"
            ) from failed
        self._idle.append(made)
        if not 200 <= answer.status < 300 and answer.status not in expected:
            raise answer.error()
        return answer

    def stream(self, path: str, parameters: Mapping[str, Any]) -> Iterator[str]:
        """The lines of an answer as they come, on a connection of its own; only a newline ends one."""
        made, patience, connected = self._made(), self.timeout_s, False
        try:
            self._connect(made, patience)
            connected = True
            made.request("GET", self._target(path, parameters), headers=self._headers)
            got = made.getresponse()
            patience = max(patience, _SILENCE_S)
            made.sock.settimeout(patience)
            if got.status != 200:
                raise self._answer(f"GET {self._base}{path}", got).error()
            while line := got.readline():
                yield line.decode().removesuffix("\n")
        except (OSError, http.client.HTTPException) as failed:
            raise self._unreached(failed, patience if connected else None) from failed
        finally:
            made.close()

    @staticmethod
    def _answer(call: str, got: http.client.HTTPResponse) -> Answer:
        return Answer(call, got.status, got.headers, got.read())

    def _target(self, path: str, parameters: Mapping[str, Any] | None) -> str:
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        return self._path + path + (f"?{urlencode(given)}" if given else "")

    @property
    def _base(self) -> str:
        return "http://localhost" if self.url.startswith(UNIX) else self.url

    def _made(self) -> http.client.HTTPConnection:
        """No proxy of the environment is used: it would receive the token."""
        connect_s = min(_CONNECT_S, self.timeout_s)
        if self.url.startswith(UNIX):
            return _Unix(self.url.removeprefix(UNIX), connect_s)
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if self._tls is None:
            return http.client.HTTPConnection(host, parts.port, timeout=connect_s)
        return http.client.HTTPSConnection(host, parts.port, timeout=connect_s, context=self._tls)

    def _taken(self) -> http.client.HTTPConnection:
        try:
            made = self._idle.pop()
        except IndexError:
            return self._made()
        if made.sock is not None and _has_ended(made.sock):
            made.close()
        return made

    def _connect(self, made: http.client.HTTPConnection, patience_s: float) -> None:
        self.peer = None
        if made.sock is None:
            made.connect()
        self.peer = made.peer if isinstance(made, _Unix) else None
        made.sock.settimeout(patience_s)

    def _unreached(
        self, failed: Exception, patience_s: float | None, is_change: bool = False
    ) -> NetpluginError:
        """The error for a call without a response: the URL, the cause and what to check.

        ``patience_s``: for how long an answer was waited for; None: there was no connection.
        """
        log = "see the agent's log (journalctl -u netplugin-agent)"
        carried = ""
        if is_change and patience_s is not None:
            carried = "; the change may still be carried out"
            log += "; GET the object to see what became of it, or send the call again"
        if isinstance(failed, BlockingIOError) or (
            isinstance(failed, TimeoutError) and patience_s is not None
        ):
            waited = f"{min(_CONNECT_S, self.timeout_s) if patience_s is None else patience_s:g} s"
            return OperationTimeout(
                f"the agent at {self.url} did not answer within {waited}{carried}", step="request", fix=log
            )
        fix = "is the agent running (systemctl status netplugin-agent)? is NETPLUGIN_URL its URL?"
        if self.url.startswith(UNIX):
            if isinstance(failed, PermissionError):
                fix = "call as root, or as a member of the group of [api] socket_group"
            elif patience_s is not None:
                fix = log
        elif "CERTIFICATE_VERIFY_FAILED" in str(failed):
            fix = "set NETPLUGIN_CA to the CA certificate of the agent, and use the name it is for"
        elif "SSL" in str(failed) or patience_s is not None:
            fix = "http:// or https://? With mutual TLS, set NETPLUGIN_CERT and NETPLUGIN_KEY"
        is_cut = isinstance(failed, http.client.HTTPException)
        why = "the connection was cut off" if is_cut else reason(failed)
        return BackendUnavailable(
            f"the agent at {self.url} cannot be reached: {why}{carried}", step="connect", fix=fix
        )


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other end has closed a connection that waits for the next call."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def nobody_listens(error: BaseException) -> bool:
    """Whether a call failed because no agent is listening.

    False for error responses, broken connections and missing permissions.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError | FileNotFoundError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False

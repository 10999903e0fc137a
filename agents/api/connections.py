"""Limits the number of connections, and how long a client may keep the agent waiting.

uvicorn limits only the idle time after a request: a connection without any request would stay open
forever.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agents.api.access import STATE, peer_of

LOG = logging.getLogger(__name__)
#: Bytes that a request may have in its head, and between two parts of its body. The parser joins them as they
#: come, in time that grows with the square of their number.
MAX_HEAD = 64 * 1024
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
#: Seconds to wait for the peer's end of TLS, while the connection stays open; asyncio's default is 30 s.
_TLS_END_S = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Connection limits from the ``[api]`` options.

    ``header_s`` applies to the TLS handshake and then to request line and headers, ``body_s`` to
    the body, ``idle_s`` to the time between requests.
    """

    most: int
    header_s: float
    body_s: float
    idle_s: float


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a connection limit and deadlines.

    With ``tls`` a connection counts from the begin of its handshake. asyncio's own handshake
    (``create_server(ssl=...)``) reports a connection only after it.
    """

    def __init__(
        self, limits: ConnectionLimits, tls: ssl.SSLContext | None, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._tls = tls
        self._handshake: asyncio.Task[None] | None = None
        #: Data that came with the last message of the handshake.
        self._early = b""
        self._timer: asyncio.TimerHandle | None = None
        #: When the current wait started (``loop.time``).
        self._since = 0.0
        self._slow_reader: asyncio.TimerHandle | None = None
        #: Bytes since a head or a part of a body was complete.
        self._head = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.connections.add(self)
        if not self._has_room(self._limits.most):
            if self._tls is None:
                transport.write(_FULL)
            transport.close()
            return
        self._wait(self._limits.header_s)
        if self._tls is None:
            self._begin(transport)
            return
        transport.pause_reading()  # the next bytes are TLS
        self._handshake = self.loop.create_task(self._shake_hands(transport, self._tls))

    def _begin(self, transport: Any) -> None:
        super().connection_made(transport)
        # The peer is in the ``state`` of the scope of each request.
        self.app_state = {**self.app_state, STATE: peer_of(transport)}

    async def _shake_hands(self, transport: Any, tls: ssl.SSLContext) -> None:
        try:
            made = await self.loop.start_tls(
                transport,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=self._limits.header_s,
                ssl_shutdown_timeout=_TLS_END_S,
            )
        except OSError as failed:  # includes ssl.SSLError
            LOG.debug("no TLS handshake: %s", failed)
            made = None
        if made is None:  # asyncio does not tell a protocol whose handshake has failed
            self._wait(None)
            self.connections.discard(self)
            return
        self._handshake = None
        self._wait(self._limits.header_s)
        self._begin(made)
        if self._early:
            self.data_received(self._early)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        if self._handshake is not None:
            self._handshake.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def _has_room(self, most: int) -> bool:
        """Whether the connection is within the limit.

        If not, the connection that has been idle for longest is closed to make room, so that idle
        clients cannot lock out others.
        """
        # A dropped connection stays in the set until the next iteration of the event loop.
        here: list[Any] = [c for c in self.connections if not c.transport.is_closing()]
        if len(here) <= most:
            return True
        idle = [c for c in here if c is not self and c.is_idle and c._timer is not None]
        if not idle:
            LOG.warning("%d connections are open: one more is refused", most)
            return False
        min(idle, key=lambda c: c._since)._drop()
        return True

    def _wait(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._since = self.loop.time()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._drop)

    def _drop(self) -> None:
        self.transport.abort()

    # A deadline belongs to a phase (headers, body, idle); receiving data does not extend it.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait(self._limits.header_s)

    def data_received(self, data: bytes) -> None:
        if self._handshake is not None:
            self._early += data
            return
        self._head += len(data)
        super().data_received(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._head = 0
        self._wait(self._limits.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head = 0
        self._wait(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self._wait(self._limits.idle_s)

    # A client that does not read the response has the same deadline as one that does not send the
    # body.

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._slow_reader is None:
            self._slow_reader = self.loop.call_later(self._limits.body_s, self._drop)

    def resume_writing(self) -> None:
        if self._slow_reader is not None:
            self._slow_reader.cancel()
            self._slow_reader = None
        if self.flow is not None:
            super().resume_writing()

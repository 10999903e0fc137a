"""Limits the number of connections, and how long a client may keep the agent waiting.

uvicorn limits only the idle time after a request: a connection without any request would stay open
forever.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LOG = logging.getLogger(__name__)
#: Bytes that a request may have in its head, and between two parts of its body. The parser joins them as they
#: come, in time that grows with the square of their number.
MAX_HEAD = 64 * 1024
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


#: Seconds to wait for the peer's end of TLS, while the connection stays open; asyncio's default is
#: 30 s.
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

    @staticmethod
    def read(conf: Any) -> ConnectionLimits:
        return ConnectionLimits(
            most=conf.api.max_connections,
            header_s=float(conf.api.header_timeout),
            body_s=float(conf.api.body_timeout),
            idle_s=float(conf.api.idle_timeout),
        )


class _Limited:
    """A connection that is counted and closed at its current deadline."""

    loop: asyncio.AbstractEventLoop
    transport: Any
    #: All open connections, as uvicorn keeps them.
    connections: set[Any]
    _timer: asyncio.TimerHandle | None = None
    #: When the current wait started (``loop.time``).
    _since: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return True

    def _has_room(self, most: int) -> bool:
        """Whether the connection is within the limit.

        If not, the connection that has been idle for longest is closed to make room, so that idle
        clients cannot lock out others.
        """
        if len(self.connections) <= most:
            return True
        # A dropped connection stays in the set until the next iteration of the event loop.
        limited = [c for c in self.connections if isinstance(c, _Limited)]
        here = [c for c in limited if not c.transport.is_closing()]
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


class JoinedWrites:
    """A transport that sends the head of an answer and its body at once.

    uvicorn writes them one after the other. The first of two system calls lets the other threads of the
    agent run, and the caller, who waits for the second.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """A head waits for what is written next, until the next turn of the event loop at most."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1."):
            self._head = data
            self._loop.call_soon(self._send_head)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)


class LimitedProtocol(_Limited, HttpToolsProtocol):
    """uvicorn's protocol with a connection limit and deadlines."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._slow_reader: asyncio.TimerHandle | None = None
        #: Bytes since a head or a part of a body was complete.
        self._head = 0

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        joined: Any = JoinedWrites(transport, self.loop)
        super().connection_made(joined)
        if not self._has_room(self._limits.most):
            transport.write(_FULL)
            transport.close()
            return
        self._wait(self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self.resume_writing()
        super().connection_lost(exc)

    # A deadline belongs to a phase (headers, body, idle); receiving data does not extend it.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait(self._limits.header_s)

    def data_received(self, data: bytes) -> None:
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


class Handshake(_Limited, asyncio.Protocol):
    """A TLS connection during its handshake, so that it counts from the start.

    asyncio's own handshake (``create_server(ssl=...)``) reports a connection only after it.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        connections: set[Any],
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.connections = connections
        self._limits = limits
        self._context = context
        self._make_protocol = make_protocol
        self._received: list[bytes] = []
        self._upgrade: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.connections.add(self)
        if not self._has_room(self._limits.most):
            transport.abort()
            return
        self._wait(self._limits.header_s)
        transport.pause_reading()  # the next bytes are TLS
        self._upgrade = self.loop.create_task(self._begin_tls())

    def data_received(self, data: bytes) -> None:
        """Keep data that arrives with the last handshake message, before the HTTP protocol is attached."""
        self._received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        if self._upgrade is not None:
            self._upgrade.cancel()

    def shutdown(self) -> None:
        """Called by uvicorn for every connection; no request is in progress here."""
        self._drop()

    async def _begin_tls(self) -> None:
        try:
            tls: Any = await self.loop.start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._limits.header_s,
                ssl_shutdown_timeout=_TLS_END_S,
            )
        except OSError as failed:  # includes ssl.SSLError
            LOG.debug("no TLS handshake: %s", failed)
            return
        finally:
            self._end()
        if tls is None:
            return  # the connection was dropped meanwhile
        protocol = self._make_protocol()
        tls.set_protocol(protocol)
        protocol.connection_made(tls)
        for data in self._received:
            protocol.data_received(data)

    def _end(self) -> None:
        self._wait(None)
        self.connections.discard(self)

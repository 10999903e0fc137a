"""Limits of HTTP connections: how many there are, and how long one may keep the agent waiting.

uvicorn limits only the pause after a request: a connection that never sends one would stay for ever.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LOG = logging.getLogger(__name__)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


@dataclass(frozen=True)
class ConnectionLimits:
    """``[api]`` options. Seconds: for a request line and headers, for a body, between requests."""

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


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's, that closes a connection which is one too many or keeps the agent waiting."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._slow_reader: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.most:
            # Silence must not keep callers out: the connection that is idle for longest goes.
            others = [
                c for c in self.connections if isinstance(c, LimitedProtocol) and c is not self
            ]
            idle = [c for c in others if c.is_idle and c._timer is not None]
            if not idle:
                LOG.warning("%d connections are open: one more is refused", self._limits.most)
                transport.write(_FULL)
                transport.close()
                return
            min(idle, key=lambda c: c._timer.when() if c._timer else 0.0)._drop()
        self._wait(self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self.resume_writing()
        super().connection_lost(exc)

    # A deadline is set by what the connection is waited for, never by each byte of it.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait(self._limits.header_s)

    def on_headers_complete(self) -> None:
        self._wait(self._limits.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._wait(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self._wait(self._limits.idle_s)

    # One that does not read its answer is waited for no longer than one that does not send.

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

    def _wait(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._drop)

    def _drop(self) -> None:
        self.transport.abort()

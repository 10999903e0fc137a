"""The HTTP server: uvicorn on several sockets at once, each with or without TLS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agents.listen import Listen
from agents.peer import STATE, peer_of

LOG = logging.getLogger(__name__)


class Protocol(HttpToolsProtocol):
    """uvicorn's, with the peer of the connection in the ``state`` of each scope."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, STATE: peer_of(transport)}


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, on what ``Listen`` says, and saying so once it is.

    ``started`` is called when all sockets listen.
    """

    def __init__(self, config: uvicorn.Config, listen: Listen, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._listen = listen
        self._when_started = started

    async def startup(self, sockets: Any = None) -> None:
        """Raises: OSError if a socket cannot be made."""
        loop = asyncio.get_running_loop()
        listen = self._listen
        self.servers = []
        if listen.host is not None:
            tls = listen.tls_context()
            backlog = self.config.backlog
            self.servers.append(
                await loop.create_server(
                    self._protocol, listen.host, listen.port, ssl=tls, backlog=backlog
                )
            )
            for made in self.servers[-1].sockets:
                address = made.getsockname()
                LOG.info("listening on %s port %d", address[0], address[1])
            if not listen.has_credential:
                LOG.warning(
                    "[api] insecure_loopback: every user of this host may call the agent on %s port "
                    "%d without a credential; this is for labs", listen.host, listen.port,
                )  # fmt: skip
        if listen.socket is not None:
            local = listen.socket.bind()
            self.servers.append(await loop.create_server(self._protocol, sock=local))
            LOG.info("listening on unix:%s", listen.socket.path)
        self.started = True
        self._when_started()

    async def shutdown(self, sockets: Any = None) -> None:
        if self._listen.socket is not None:
            self._listen.socket.remove()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        return Protocol(self.config, self.server_state, app_state={})

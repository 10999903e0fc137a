"""The HTTP server: uvicorn on a UNIX socket and on TCP, with the current TLS context."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn

from agents.api.connections import ConnectionLimits, LimitedProtocol
from agents.api.listen import Credentials, Listen

LOG = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, on the sockets of ``Listen``.

    ``when_started`` is called when all sockets are listening.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listen: Listen,
        credentials: Credentials,
        limits: ConnectionLimits,
        when_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._listen = listen
        self._limits = limits
        self._credentials = credentials
        self._when_started = when_started
        #: Whether the directory of the UNIX socket was missing at the start.
        self._made_directory = False

    async def startup(self, sockets: Any = None) -> None:
        """Raises: OSError if a socket cannot be created."""
        listen = self._listen
        loop = asyncio.get_running_loop()
        self.servers = []
        if listen.host is not None:
            # A new connection uses the current TLS context; open connections keep theirs.
            tcp = await loop.create_server(
                lambda: self._protocol(self._credentials.tls),
                listen.host,
                listen.port,
                backlog=self.config.backlog,
            )
            self.servers.append(tcp)
            for made in tcp.sockets:
                address = made.getsockname()
                LOG.info("listening on %s port %d", address[0], address[1])
            if not listen.access.has_credential:
                LOG.warning(
                    "[api] insecure_loopback: every user of this host may call the agent on %s port "
                    "%d without a credential; this is for labs",
                    listen.host,
                    listen.port,
                )
        if listen.socket is not None:
            self._made_directory = not listen.socket.path.parent.exists()
            local = listen.socket.bind()
            self.servers.append(await loop.create_server(self._protocol, sock=local))
            LOG.info("listening on unix:%s", listen.socket.path)
        self.started = True
        self._when_started()

    async def shutdown(self, sockets: Any = None) -> None:
        if self._listen.socket is not None:
            self._listen.socket.remove(with_directory=self._made_directory)
        await super().shutdown(sockets)

    def _protocol(self, tls: ssl.SSLContext | None = None) -> asyncio.Protocol:
        return LimitedProtocol(self._limits, tls, self.config, self.server_state, app_state={})

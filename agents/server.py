"""The HTTP server: uvicorn on several sockets at once, each with or without TLS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import uvicorn

from agents.connections import ConnectionLimits, LimitedProtocol
from agents.credentials import Credentials
from agents.listen import Listen
from agents.peer import STATE, peer_of

LOG = logging.getLogger(__name__)
# Between looks at the files of tokens and certificates.
_CREDENTIALS_EVERY_S = 5.0


class Protocol(LimitedProtocol):
    """uvicorn's with limits, and the peer of the connection in the ``state`` of each scope."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, STATE: peer_of(transport)}


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, on what ``Listen`` says, and saying so once it is.

    ``when_started`` is called when all sockets listen.
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
        self._tcp: list[asyncio.Server] = []
        self._look_now = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Raises: OSError if a socket cannot be made."""
        listen = self._listen
        self.servers = []
        if listen.host is not None:
            self._tcp = [await self._serve_tcp(host=listen.host, port=listen.port)]
            self.servers += self._tcp
            for made in self._tcp[0].sockets:
                address = made.getsockname()
                LOG.info("listening on %s port %d", address[0], address[1])
            if not listen.access.has_credential:
                LOG.warning(
                    "[api] insecure_loopback: every user of this host may call the agent on %s port "
                    "%d without a credential; this is for labs", listen.host, listen.port,
                )  # fmt: skip
        if listen.socket is not None:
            loop = asyncio.get_running_loop()
            local = listen.socket.bind()
            self.servers.append(await loop.create_server(self._protocol, sock=local))
            LOG.info("listening on unix:%s", listen.socket.path)
        self._watch = asyncio.create_task(self._watch_credentials())
        self.started = True
        self._when_started()

    async def shutdown(self, sockets: Any = None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._listen.socket is not None:
            self._listen.socket.remove()
        await super().shutdown(sockets)

    def read_credentials_again(self) -> None:
        """For a signal handler of the loop."""
        self._look_now.set()

    async def _watch_credentials(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._look_now.wait(), _CREDENTIALS_EVERY_S)
            except TimeoutError:
                pass
            asked = self._look_now.is_set()
            self._look_now.clear()
            try:
                if self._credentials.refresh(always=asked):
                    await self._renew_tcp()
            except Exception:
                LOG.exception("tokens and certificates could not be read again")

    async def _renew_tcp(self) -> None:
        """Let new connections have the new TLS context; those that are open stay as they are.

        The kernel's listening socket stays too, so that nobody is refused meanwhile.
        """
        before = self._tcp
        listening = [made.dup() for server in before for made in server.sockets]
        self._tcp = [await self._serve_tcp(sock=made) for made in listening]
        self.servers = [s for s in self.servers if s not in before] + self._tcp
        for made in (made for server in before for made in server.sockets):
            asyncio.get_running_loop().remove_reader(made.fileno())
        # asyncio makes the transport of what was accepted in a task, and that needs its server open:
        # these tasks are ready now, and run before us.
        await asyncio.sleep(0)
        for server in before:
            server.close()

    async def _serve_tcp(self, **where: Any) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            self._protocol, ssl=self._credentials.tls, backlog=self.config.backlog, **where
        )

    def _protocol(self) -> asyncio.Protocol:
        return Protocol(self._limits, self.config, self.server_state, app_state={})

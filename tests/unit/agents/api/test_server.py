"""The loop of the server that reads credentials again goes on after an error that nobody expected."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from agents.api import server
from agents.api.access import Access
from agents.api.connections import ConnectionLimits
from agents.api.listen import Credentials, Listen, LocalSocket
from netplugin.host.supervisor import Supervisor
from tests.unit.agent import DEADLINE_S, certificate


class Failing(Credentials):
    """Fails once, without having read anything."""

    def __init__(self, listen: Listen) -> None:
        super().__init__(listen)
        self.failed = False

    def refresh(self, *, always: bool = False) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("unexpected")


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """No call comes."""


def test_reading_credentials_again_is_supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.api.listen._LOOK_EVERY_S", 0.01)
    supervisor = Supervisor()

    async def scenario() -> None:
        listen = Listen(LocalSocket(tmp_path / "agent.sock", None), None, 0, Access())
        credentials = Failing(listen)
        keeping = asyncio.create_task(credentials.keep(supervisor))
        async with asyncio.timeout(DEADLINE_S):
            while not supervisor.failures():
                await asyncio.sleep(0)
            while supervisor.reasons():
                await asyncio.sleep(0.01)
        assert credentials.failed and supervisor.failures() == {"credentials": 1}
        keeping.cancel()

    asyncio.run(scenario())


async def _answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def _serving(listen: Listen, limits: ConnectionLimits) -> AsyncIterator[server.Server]:
    started = asyncio.Event()
    made = server.Server(
        uvicorn.Config(_answers, lifespan="off", log_config=None),
        listen,
        Credentials(listen),
        limits,
        when_started=started.set,
    )
    serving = asyncio.create_task(made._serve())
    await asyncio.wait_for(started.wait(), DEADLINE_S)
    yield made
    made.should_exit = True
    await asyncio.wait_for(serving, DEADLINE_S)


def test_it_removes_the_directory_that_it_made_for_its_socket_if_that_is_empty(tmp_path: Path) -> None:
    async def left(directory: Path, *other: str) -> bool:
        listen = Listen(LocalSocket(directory / "agent.sock", None), None, 0, Access())
        limits = ConnectionLimits(most=2, header_s=60, body_s=60, idle_s=60)
        async with _serving(listen, limits):
            for name in other:
                (directory / name).touch()
        assert not (directory / "agent.sock").exists()
        return directory.exists()

    (tmp_path / "there").mkdir()
    assert not asyncio.run(left(tmp_path / "made"))
    assert asyncio.run(left(tmp_path / "used", "another"))
    assert asyncio.run(left(tmp_path / "there"))


def test_what_is_idle_for_longest_makes_room(tmp_path: Path) -> None:
    """Not what would be dropped first: what is waited for has limits of different lengths."""

    async def scenario() -> None:
        limits = ConnectionLimits(most=2, header_s=600, body_s=600, idle_s=3600)
        path = tmp_path / "agent.sock"
        listen = Listen(LocalSocket(path, None), None, 0, Access())
        async with asyncio.timeout(DEADLINE_S), _serving(listen, limits):
            request = b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n"
            oldest, oldest_writer = await asyncio.open_unix_connection(path)
            oldest_writer.write(request)
            assert (await oldest.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            # It has sent nothing yet: its deadline is before that of the first.
            younger, younger_writer = await asyncio.open_unix_connection(path)
            newest, newest_writer = await asyncio.open_unix_connection(path)
            newest_writer.write(request)
            assert (await newest.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            with contextlib.suppress(ConnectionError):
                assert await oldest.read() == b""
            younger_writer.write(request)
            assert (await younger.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            for writer in (oldest_writer, younger_writer, newest_writer):
                writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nx: ",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
    ],
)
def test_a_head_without_end_is_not_read_to_the_end(tmp_path: Path, begun: bytes) -> None:
    """Nor are the trailers of a body. The parser joins their pieces, each time at the price of all."""

    async def scenario() -> int:
        limits = ConnectionLimits(most=2, header_s=600, body_s=600, idle_s=3600)
        path, sent = tmp_path / "agent.sock", 0
        listen = Listen(LocalSocket(path, None), None, 0, Access())
        async with asyncio.timeout(DEADLINE_S), _serving(listen, limits):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(begun)
            with contextlib.suppress(ConnectionError):
                while sent < 64 << 20:
                    writer.write(b"a" * 65536)
                    await writer.drain()
                    sent += 65536
            writer.close()
        return sent

    assert asyncio.run(scenario()) < 16 << 20


def test_a_tls_client_that_says_nothing_does_not_delay_the_end(tmp_path: Path) -> None:
    """The peer would have to answer the end of TLS, for which asyncio waits 30 s."""
    cert, key = certificate(tmp_path)
    listen = Listen(None, "127.0.0.1", 0, Access(), tls_cert=cert, tls_key=key)

    def connected(port: int) -> ssl.SSLSocket:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        tls = context.wrap_socket(plain)
        tls.sendall(b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n")
        assert tls.recv(4096).startswith(b"HTTP/1.1 204")
        return tls

    async def scenario() -> None:
        limits = ConnectionLimits(most=8, header_s=60, body_s=60, idle_s=3600)
        async with _serving(listen, limits) as made:
            port = made.servers[0].sockets[0].getsockname()[1]
            idle = await asyncio.to_thread(connected, port)
        idle.close()

    asyncio.run(scenario())

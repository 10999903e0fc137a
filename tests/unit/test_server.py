"""The loop of the server that reads credentials again goes on after an error that nobody expected."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from agents import server
from agents.access import Access
from agents.connections import ConnectionLimits
from agents.credentials import Credentials
from agents.listen import Listen, LocalSocket
from netplugin.host.supervisor import Supervisor
from tests.unit.agent import DEADLINE_S


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


def test_reading_credentials_again_is_supervised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CREDENTIALS_EVERY_S", 0.01)
    supervisor = Supervisor()

    async def scenario() -> None:
        listen = Listen(LocalSocket(tmp_path / "agent.sock", None), None, 0, Access())
        credentials = Failing(listen)
        made = server.Server(
            uvicorn.Config(_nothing, lifespan="off", log_config=None),
            listen,
            credentials,
            ConnectionLimits(most=8, header_s=60, body_s=60, idle_s=60),
            supervisor,
            when_started=lambda: None,
        )
        serving = asyncio.create_task(made._serve())
        async with asyncio.timeout(DEADLINE_S):
            while not supervisor.failures():
                await asyncio.sleep(0)
            while supervisor.reasons():
                await asyncio.sleep(0.01)
        assert credentials.failed and supervisor.failures() == {"credentials": 1}
        made.should_exit = True
        await asyncio.wait_for(serving, DEADLINE_S)

    asyncio.run(scenario())

"""An agent on one backend in memory, and a client of it: what most tests of the agent start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.api.client import Client
from tests.unit.agent import Agent, agent, served_agent


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Agent]:
    with agent(tmp_path) as made:
        yield made


@pytest.fixture
def client(running: Agent) -> Iterator[Client]:
    with served_agent(running) as url, Client(url) as made:
        yield made

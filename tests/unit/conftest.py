"""Fixtures of the unit tests."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.api.client import Client
from netplugin.host.ovs import OvsHost
from tests.lab.ovs import PrivateOvs
from tests.unit.agent import Agent, agent, served_agent
from tests.unit.ovs import settings_of, started


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Who sets up the log of a whole process, as the agent does, does so for one test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Agent]:
    """An agent on one backend in memory."""
    with agent(tmp_path) as made:
        yield made


@pytest.fixture
def client(running: Agent) -> Iterator[Client]:
    """A client of it, over HTTP."""
    with served_agent(running) as url, Client(url) as made:
        yield made


@pytest.fixture(scope="module")
def switch() -> Iterator[PrivateOvs]:
    """An Open vSwitch of the module's own, with dummy devices: it needs no root."""
    with tempfile.TemporaryDirectory() as name, PrivateOvs(Path(name) / "ovs", dummy=True) as running:
        yield running


@pytest.fixture
def ovs(switch: PrivateOvs) -> Iterator[OvsHost]:
    """The product's connections to it, which hold no lock."""
    with started(settings_of(switch)) as host:
        yield host

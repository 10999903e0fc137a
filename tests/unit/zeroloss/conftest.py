"""Fixtures of the acceptance library's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from netplugin_zeroloss.matrix import agent_bench, host

from tests.unit.tuning.golden import facts_of
from tests.unit.zeroloss.made_up_agent import MadeUpAgent
from tests.unit.zeroloss.trex import Trex


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> MadeUpAgent:
    """What a bench takes for the agent of its description; its host has many CPUs."""
    made_up = MadeUpAgent()
    monkeypatch.setattr(agent_bench, "client", lambda description: made_up)
    monkeypatch.setattr(host, "read_facts", lambda root: facts_of("published"))
    return made_up


@pytest.fixture
def trex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trex:
    """TRex's stateless server, which plays a trial of 38 kpps without loss."""
    played = Trex(tmp_path / "calls", monkeypatch)
    played.play("stl_clean_38kpps", seconds=0.5, share_back=1)
    return played

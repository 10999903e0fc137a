"""A machine to apply plans to, and where its journal is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tuning.fake_machine import FakeMachine


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tuning.journal"


@pytest.fixture
def host() -> FakeMachine:
    return FakeMachine()

"""Fixtures of the unit tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Who sets up the log of a whole process, as the agent does, does so for one test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)

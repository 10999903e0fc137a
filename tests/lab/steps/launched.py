"""``netplugin-agent`` that stops at each step: ``main`` for `tests.lab.preloaded`."""

from __future__ import annotations

from agents.main import main as run
from tests.lab.steps import filter as step_filter


def main() -> int:
    step_filter.install()
    return run()

"""pytest's side in the guest: sends each report to the outside, as a line of JSON."""

from __future__ import annotations

import json
from typing import BinaryIO

import pytest


class Reporter:
    """Registered by the plugin in the pytest that the guest's init starts."""

    def __init__(self, config: pytest.Config, channel: BinaryIO) -> None:
        self._config = config
        self._channel = channel

    def pytest_sessionstart(self) -> None:
        self._send("session", None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._send("report", hook.pytest_report_to_serializable(config=self._config, report=report))

    def _send(self, event: str, data: object) -> None:
        # A test may have put anything into its user properties.
        line = json.dumps({"event": event, "data": data}, default=repr)
        self._channel.write(line.encode() + b"\n")
        self._channel.flush()

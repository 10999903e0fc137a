"""A restart of vswitchd, while the database refuses transactions."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.errors import OperationTimeout
from netplugin.host import ovs
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake

DEADLINE_S = 20.0
PAUSE_S, REFUSES_S = 0.1, 0.25


class Database:
    """Refuses transactions at once for a time, as long as an earlier one has no answer."""

    locked = True

    def __init__(self) -> None:
        self.attempts = 0
        self._refuses_until: float | None = None

    def start(self) -> Database:
        return self

    def require_online(self, wait_s: float = 0.0) -> None:
        pass

    def require_lock(self, wait_s: float = 0.0) -> None:
        pass

    def commit(self, commands: Any, deadline: float) -> int:
        self.attempts += 1
        now = time.monotonic()
        if self._refuses_until is None:
            self._refuses_until = now + REFUSES_S
        if now < self._refuses_until:
            raise OperationTimeout("an earlier transaction has no answer", step="ovsdb-commit")
        return 1

    def configured(self, next_cfg: int, deadline: float) -> bool:
        return True

    def close(self) -> None:
        pass


@contextmanager
def vswitchd(rundir: Path) -> Iterator[None]:
    """What a vswitchd has while it runs: its pid file and its control socket."""
    pid, control = rundir / "ovs-vswitchd.pid", rundir / "ovs-vswitchd.1.ctl"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(control))
        listening.listen()
        pid.write_text("1")
        try:
            yield
        finally:
            pid.unlink()
            control.unlink()


def test_an_attempt_that_fails_at_once_is_not_repeated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, restarted = Database(), threading.Event()

    def wake(reason: Wake) -> None:
        if reason.reason == "ovs-vswitchd was restarted":
            restarted.set()

    monkeypatch.setattr(ovs, "Ovsdb", lambda *_: database)
    monkeypatch.setattr(ovs, "_SETTLE_S", PAUSE_S)
    host = OvsHost(OvsSettings("", tmp_path, tmp_path, "root"), Supervisor())
    try:
        host.subscribe("b", wake)
        with vswitchd(tmp_path):
            assert host.vswitchd.alive(DEADLINE_S)
        with vswitchd(tmp_path):
            assert restarted.wait(DEADLINE_S)
            assert host.answers().usable
    finally:
        host.close()
    assert 2 <= database.attempts <= 2 + REFUSES_S / PAUSE_S

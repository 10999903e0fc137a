"""What holds the connections to OVS is whole before any of them tells anything."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from netplugin import options
from netplugin.host import ovs as ovs_host
from netplugin.host import ovs_commands
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.supervisor import Supervisor
from tests.lab.ovs import PrivateOvs


def test_the_database_may_answer_before_the_watch_of_vswitchd_is_made(
    ovs: PrivateOvs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow start, made certain: the watch takes longer to make than the database to answer."""
    made: list[float] = []

    class Slow(ovs_host.VswitchdWatch):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            time.sleep(1.0)  # 20 ms are enough for the database to come on line
            super().__init__(*arguments, **named)
            made.append(time.monotonic())

    monkeypatch.setattr(ovs_host, "VswitchdWatch", Slow)
    config = tmp_path / "netplugin.conf"
    config.write_text(f"[ovs]\nconnection = {ovs.connection}\nrundir = {ovs.rundir}\n")
    host = OvsHost(OvsSettings.read(options.load([config])), Supervisor())
    try:
        host.db.require_online(30)
        assert made and host.vswitchd.alive(30)
        host.write([ovs_commands.Touch], time.monotonic() + 30)
    finally:
        host.close()

"""A host reboots under its ports, as when the power fails: all come back without a call of the platform."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.processes import run
from tests.nested import machine, plugin
from tests.nested.machine import Job, Machine, Needs

pytestmark = [pytest.mark.outside, pytest.mark.long, pytest.mark.timeout(1800)]

#: For OVS-DPDK beside all else.
NEEDS = Needs(cpus=2, memory_mb=2560, hugepages=480)
DISK_MB, DEADLINE_S = 256, 900.0


def received(guest: Machine, event: str) -> dict[str, Any]:
    message = guest.receive(DEADLINE_S)
    assert message is not None and message["event"] == event, f"{message}\n{guest.tail()}"
    return message


def test_ports_come_back_after_a_reboot(tmp_path: Path) -> None:
    parts = plugin.available()
    disk = tmp_path / "disk"
    run(["mke2fs", "-q", "-t", "ext4", disk, f"{DISK_MB}M"])
    command = [sys.executable, "-m", "tests.nested.rebooted"]
    environment = plugin.inner_environment(os.environ)
    job = Job(command, str(machine.CHECKOUT), environment, str(parts.kernel.modules))
    with machine.started(NEEDS, parts, job, disk) as guest:
        received(guest, "up")
        plugged = received(guest, "plugged")
        received(guest, "up")
        back = received(guest, "back")
        assert received(guest, "ended")["status"] == 0, guest.tail()
    print(f"\nall ports were active {back['took_s']:.1f} s after the agent was started")
    assert back["boot"] != plugged["boot"]
    assert back["ports"] and not back["wrong"], back["wrong"]
    before, after = back["vfs"]
    assert before == after and len(before) == 2
    assert back["reached"]

"""Daemons and waits of the lab, and an OVS without DPDK as the simplest real daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.ovs import PrivateOvs
from tests.lab.processes import (
    CommandError,
    Daemon,
    LabError,
    LabTimeout,
    run,
    wait_for,
)


def test_a_wait_says_what_it_waited_for() -> None:
    with pytest.raises(LabTimeout, match=r"pigs fly: not within 0\.3 s"):
        wait_for(lambda: False, 0.1, "pigs fly")


def test_a_wait_ends_with_the_daemon_and_shows_its_log(tmp_path: Path) -> None:
    with (
        Daemon("talker", ["sh", "-c", "echo last words"], tmp_path / "log") as talker,
        pytest.raises(LabError, match="last words"),
    ):
        talker.wait_for(lambda: False, 10, "it lives")


def test_a_failed_command_says_why() -> None:
    with pytest.raises(CommandError, match="no-such-file"):
        run(["cat", "/no-such-file"])


def test_a_daemon_that_ignores_term_is_stopped(tmp_path: Path) -> None:
    script = "trap '' TERM; echo up; while true; do sleep 1; done"
    stubborn = Daemon("stubborn", ["sh", "-c", script], tmp_path / "log")
    stubborn.start()
    stubborn.wait_for(lambda: "up" in stubborn.tail(), 30, "it is up")
    stubborn.stop(0.2)
    assert not stubborn.running


def test_a_paused_daemon_can_be_stopped(tmp_path: Path) -> None:
    sleeper = Daemon("sleeper", ["sleep", "1000"], tmp_path / "log")
    sleeper.start()
    sleeper.pause()
    sleeper.stop()
    assert not sleeper.running


def test_ovs_without_dpdk() -> None:
    with PrivateOvs(Path("/run/lab-ovs-plain"), dpdk=False) as ovs:
        ovs.vsctl("add-br", "br0", "--", "set", "Bridge", "br0", "datapath_type=netdev")
        assert "NORMAL" in ovs.ofctl("dump-flows", "br0")
        assert "Open_vSwitch" in ovs.dbclient("list-dbs")
        with pytest.raises(LabError, match="another OVS"), PrivateOvs(Path("/run/second")):
            pass

"""The sockets of an Open vSwitch that is not configured as an installed one: another name, other places."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from netplugin import options
from netplugin.api.errors import BackendUnavailable
from netplugin.host import ovs_sockets
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.supervisor import Supervisor
from netplugin.host.vswitchd import VswitchdWatch, appctl
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Argument, Daemon, wait_for
from tests.unit.ovs import PATIENCE_S, bridge, settings_of, soon, started, usable

OTHER = "ovs-vswitchd.zs.ctl"


class Renamed(PrivateOvs):
    """An OVS whose vswitchd has another control socket than the one of its pid file, or the usual one."""

    control: str | None = OTHER

    def _vswitchd_args(self) -> list[Argument]:
        named = [f"--unixctl={self.rundir / self.control}"] if self.control else []
        return [*super()._vswitchd_args(), *named]

    def rename(self, control: str | None) -> None:
        """What its next start has."""
        self.control = control
        self.vswitchd = Daemon("ovs-vswitchd", self._vswitchd_args(), self._log("ovs-vswitchd"), self.env)


@pytest.fixture(scope="module")
def renamed() -> Iterator[Renamed]:
    with tempfile.TemporaryDirectory() as name, Renamed(Path(name) / "ovs", dummy=True) as running:
        yield running


def found_by(switch: PrivateOvs) -> OvsSockets:
    """What an agent has that is given the connection only."""
    return OvsSockets(switch.connection)


def test_a_control_socket_of_another_name_is_found(renamed: Renamed) -> None:
    """ovsdb-server has a control socket in the same directory, which is not taken for it."""
    assert [path.name.partition(".")[0] for path in sorted(renamed.rundir.glob("*.ctl"))] == [
        "ovs-vswitchd",
        "ovsdb-server",
    ]
    for sockets in (found_by(renamed), OvsSockets.below(renamed.rundir)):
        assert sockets.control() == renamed.rundir / OTHER
        assert "Open vSwitch" in appctl(sockets, "version", deadline=soon())
    with started(replace(settings_of(renamed), sockets=OvsSockets(renamed.connection))) as host:
        usable(host)
        host.db.write([bridge("br-other")], soon())
        assert host.flows.dump("br-other", None, soon()) == []
    renamed.vsctl("del-br", "br-other")


def test_it_is_found_without_a_pid_file_and_with_an_old_one(renamed: Renamed) -> None:
    file = renamed.rundir / "ovs-vswitchd.pid"
    right = file.read_text()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(renamed.rundir / "ovs-vswitchd.1.ctl"))
    try:
        for old in ("", "no number\n", "1\n"):
            file.write_text(old)
            assert found_by(renamed).control() == renamed.rundir / OTHER
        file.unlink()
        assert found_by(renamed).control() == renamed.rundir / OTHER
    finally:
        file.write_text(right)
        (renamed.rundir / "ovs-vswitchd.1.ctl").unlink()


def test_a_restart_under_another_name_is_noticed(renamed: Renamed) -> None:
    received: list[bool] = []
    watch = VswitchdWatch(found_by(renamed), received.append, Supervisor())
    try:
        assert watch.alive(PATIENCE_S)
        for name in (None, OTHER):
            renamed.kill_vswitchd()  # its files stay
            wait_for(lambda: received[-1:] == [False], PATIENCE_S, "its end")
            assert "does not run" in watch.missing().detail
            renamed.rename(name)
            renamed.start_vswitchd()
            wait_for(lambda: received[-1:] == [True], PATIENCE_S, "its start")
    finally:
        watch.close()
    assert found_by(renamed).control() == renamed.rundir / OTHER


def test_of_two_in_one_directory_the_option_names_one(renamed: Renamed) -> None:
    second = renamed.rundir / "ovs-vswitchd.second.ctl"
    args: list[Argument] = [renamed._program, renamed.connection, "--enable-dummy=override"]
    args += ["--disable-system", f"--unixctl={second}", "-vconsole:off"]
    with Daemon("second", args, renamed.rundir / "second.log", renamed.env) as daemon:
        daemon.wait_for(second.exists, PATIENCE_S, "the second one has its socket")
        wait_for(lambda: ovs_sockets._listens(second), PATIENCE_S, "it listens")
        with pytest.raises(BackendUnavailable) as refused:
            found_by(renamed).control()
        assert OTHER in refused.value.detail and second.name in refused.value.detail
        assert "[ovs] control_socket" in str(refused.value.fix)
        named = replace(found_by(renamed), control_socket=renamed.rundir / OTHER)
        assert appctl(named, "version", deadline=soon())
        with started(replace(settings_of(renamed), sockets=OvsSockets(renamed.connection))) as host:
            reason = host.usable().reason
            assert second.name in str(reason), "readyz names them"
    assert found_by(renamed).control() == renamed.rundir / OTHER, "the second one's file may stay"


def test_other_programs_are_not_it(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "ovs-vswitchd.ours.ctl"))
        listening.listen()
        with pytest.raises(BackendUnavailable, match="does not run"):
            OvsSockets.below(tmp_path).control()


def test_that_of_another_database_is_not_taken(
    renamed: Renamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of a private OVS whose vswitchd is dead must not write to the installed one."""
    monkeypatch.setattr(ovs_sockets, "_INSTALLED", renamed.rundir)
    sockets = OvsSockets(f"unix:{tmp_path / 'db.sock'}")
    assert sockets.directories == (tmp_path, renamed.rundir)
    (tmp_path / "db.sock").touch()
    with pytest.raises(BackendUnavailable) as refused:
        sockets.control()
    assert str(tmp_path) in refused.value.detail and str(renamed.rundir) in refused.value.detail
    assert sockets.management("br0") == tmp_path / "br0.mgmt"
    (tmp_path / "db.sock").unlink()
    os.symlink(renamed.socket, tmp_path / "db.sock")
    assert sockets.control() == renamed.rundir / OTHER
    assert sockets.management("br0") == renamed.rundir / "br0.mgmt"
    assert OvsSockets("tcp:127.0.0.1:6640").control() == renamed.rundir / OTHER


def test_what_is_configured_is_what_is_used(tmp_path: Path) -> None:
    file = tmp_path / "netplugin.conf"

    def read(*lines: str) -> OvsSockets:
        file.write_text("\n".join(["[ovs]", *lines]) + "\n")
        return OvsSockets.read(options.load([file]))

    assert read() == OvsSockets()
    assert [str(path) for path in read("connection = unix:/a/db.sock").directories] == [
        "/a",
        "/var/run/openvswitch",
    ]
    named = read("connection = unix:/a/db.sock", "rundir = /b", "control_socket = /c/x.ctl")
    assert named.directories == (Path("/b"),)
    assert (named.control(), named.management("br0")) == (Path("/c/x.ctl"), Path("/b/br0.mgmt"))
    alone = read("control_socket = /c/x.ctl")
    assert alone.management("br0") == Path("/c/br0.mgmt")
    with pytest.raises(BackendUnavailable, match=r"looked at /c/x\.ctl"):
        appctl(alone, "version", deadline=soon())

"""ovs-vswitchd: its commands with a deadline, its start and its end."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout
from netplugin.host import vswitchd
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake
from netplugin.host.vswitchd import VswitchdWatch, appctl, appctl_each
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.unit.ovs import PATIENCE_S, bridge, port, settings_of, soon, started, usable

#: Time enough for a busy machine to begin: with none at all, nothing is begun.
SHORT_S = 1.0


# -- commands ----------------------------------------------------------------------------------------


def assert_printed(answer: str, printed: str) -> None:
    """The ovs-appctl of 4.0 ends the last line where the answer does not."""
    assert answer.rstrip("\n") == printed.rstrip("\n")


def test_a_command_answers_as_ovs_appctl_does(switch: PrivateOvs) -> None:
    for command in (["version"], ["vlog/list"], ["list-commands"]):
        assert_printed(appctl(switch.sockets, *command, deadline=soon()), switch.appctl(*command))
    appctl(switch.sockets, "vlog/set", "bridge:file:dbg", "bfd:file:dbg", deadline=soon())
    levels = {line.split()[0]: line.split()[-1] for line in switch.appctl("vlog/list").splitlines()[2:]}
    assert levels["bridge"] == levels["bfd"] == "DBG", "both arguments have arrived"


def test_a_long_answer_is_complete(switch: PrivateOvs, ovs: OvsHost) -> None:
    ovs.db.write([bridge("many"), *(port("many", f"many-p{n}") for n in range(200))], soon())
    shown = appctl(switch.sockets, "dpif/show", deadline=soon())
    assert len(shown) > 4096
    assert_printed(shown, switch.appctl("dpif/show"))
    switch.vsctl("del-br", "many")


def test_many_commands_are_asked_together(switch: PrivateOvs, ovs: OvsHost) -> None:
    ovs.db.write([bridge("asked"), *(port("asked", f"asked-p{n}") for n in range(30))], soon())
    names = ["nowhere", *(f"asked-p{n}" for n in range(30))]
    first, *rest = appctl_each(switch.sockets, [("qos/show", name) for name in names], soon())
    assert isinstance(first, HostError) and "no such interface" in str(first)
    for name, shown in zip(names[1:], rest, strict=True):
        assert_printed(str(shown), switch.appctl("qos/show", name))
    switch.vsctl("del-br", "asked")


def test_a_command_that_vswitchd_refuses_has_its_words(switch: PrivateOvs) -> None:
    with pytest.raises(HostError, match=r': no-such: "no-such" is not a valid command') as refused:
        appctl(switch.sockets, "no-such", deadline=soon())
    assert refused.value.step == "vswitchd"
    with pytest.raises(HostError, match="no such interface"):
        appctl(switch.sockets, "qos/show", "nowhere", deadline=soon())


def test_no_vswitchd(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=f"does not run .looked in {tmp_path}"):
        appctl(OvsSockets.below(tmp_path), "version", deadline=soon())
    (tmp_path / "ovs-vswitchd.pid").write_text("1")
    with pytest.raises(BackendUnavailable, match="does not run"):
        appctl(OvsSockets.below(tmp_path), "version", deadline=soon())
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "ovs-vswitchd.1.ctl"))
        with pytest.raises(BackendUnavailable, match="does not run"):
            appctl(OvsSockets.below(tmp_path), "version", deadline=soon())


@contextmanager
def _answering(rundir: Path, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """A control socket where ``answer`` serves one connection."""
    (rundir / "ovs-vswitchd.pid").write_text("1")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(rundir / "ovs-vswitchd.1.ctl"))
        listening.listen()

        def serve() -> None:
            served = False
            while not served:
                with listening.accept()[0] as connection:
                    served = bool(connection.recv(4096))  # who only looks whether it listens sends nothing
                    if served:
                        answer(connection)

        serving = threading.Thread(target=serve)
        serving.start()
        yield
        serving.join(PATIENCE_S)


def test_a_vswitchd_that_ends_before_it_answers(tmp_path: Path) -> None:
    with _answering(tmp_path, lambda connection: None), pytest.raises(BackendUnavailable):
        appctl(OvsSockets.below(tmp_path), "version", deadline=soon())


def test_an_answer_that_is_none(tmp_path: Path) -> None:
    with (
        _answering(tmp_path, lambda connection: connection.sendall(b'{"id": 0}')),
        pytest.raises(HostError, match="Protocol error"),
    ):
        appctl(OvsSockets.below(tmp_path), "version", deadline=soon())


def test_an_answer_that_comes_drop_by_drop_ends_at_the_deadline(tmp_path: Path) -> None:
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b'{"id":0,"error":null,"result":"')
        while not over.wait(0.01):
            connection.sendall(b"x")

    begin = time.monotonic()
    with _answering(tmp_path, drip):
        try:
            with pytest.raises(OperationTimeout, match="did not answer version"):
                appctl(OvsSockets.below(tmp_path), "version", deadline=begin + SHORT_S)
        finally:
            over.set()
    assert SHORT_S <= time.monotonic() - begin < PATIENCE_S / 2


def test_a_stopped_vswitchd_is_not_waited_for_until_a_deadline_of_minutes(
    switch: PrivateOvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vswitchd, "_MOST_S", SHORT_S)
    switch.pause_vswitchd()
    try:
        begin = time.monotonic()
        with pytest.raises(OperationTimeout):
            appctl(switch.sockets, "version", deadline=begin + 2 * PATIENCE_S)
        assert time.monotonic() - begin < PATIENCE_S
    finally:
        switch.resume_vswitchd()


def test_a_stopped_vswitchd_ends_at_the_deadline(switch: PrivateOvs) -> None:
    switch.pause_vswitchd()
    try:
        begin = time.monotonic()
        with pytest.raises(OperationTimeout, match="did not answer version"):
            appctl(switch.sockets, "version", deadline=begin + SHORT_S)
        assert SHORT_S <= time.monotonic() - begin < PATIENCE_S / 2
        for _ in range(80):  # more than wait to be accepted (listen in ovs/lib/stream-unix.c)
            with pytest.raises(OperationTimeout):
                appctl(switch.sockets, "version", deadline=time.monotonic() + 0.001)
    finally:
        switch.resume_vswitchd()
    assert "Open vSwitch" in appctl(switch.sockets, "version", deadline=soon())


# -- its start and its end ---------------------------------------------------------------------------


def test_the_watch_reports_its_end_and_the_next_one(switch: PrivateOvs) -> None:
    received: list[bool] = []
    watch = VswitchdWatch(switch.sockets, received.append, Supervisor())
    try:
        assert watch.alive(PATIENCE_S)
        switch.kill_vswitchd()
        wait_for(lambda: received == [True, False], PATIENCE_S, "its end")
        assert not watch.alive(SHORT_S)
        switch.start_vswitchd()
        wait_for(lambda: received == [True, False, True], PATIENCE_S, "its start")
        assert watch.alive()
    finally:
        watch.close()
    assert received == [True, False, True], "the end of the watch is not that of vswitchd"


def test_after_a_restart_it_is_usable_once_its_bridges_are_there(switch: PrivateOvs, ovs: OvsHost) -> None:
    usable(ovs)
    woken: list[Wake] = []
    ovs.db.write([bridge("again")], soon())
    ovs.subscribe("b", woken.append)
    woken.clear()
    switch.kill_vswitchd()
    wait_for(lambda: not ovs.usable().usable, PATIENCE_S, "its end")
    assert woken == []
    switch.start_vswitchd()
    wait_for(lambda: woken == [Wake("ovs-vswitchd was restarted")], PATIENCE_S, "its start")
    assert "again" in switch.appctl("ofproto/list") and ovs.usable().usable


def test_a_vswitchd_that_has_not_read_the_database_is_not_usable(
    switch: PrivateOvs, ovs: OvsHost, caplog: pytest.LogCaptureFixture
) -> None:
    """It is looked at again with pauses, although the database refuses at once after a lost answer."""
    usable(ovs)
    ovs.db.write([bridge("unread")], soon())
    switch.kill_vswitchd()
    wait_for(lambda: not ovs.vswitchd.alive(), PATIENCE_S, "its end")
    switch.ovsdb.pause()
    try:
        with pytest.raises(OperationTimeout):
            ovs.db.write([bridge("unanswered")], time.monotonic() + SHORT_S)
        caplog.set_level(logging.DEBUG, "netplugin.host.ovs")
        begin = time.monotonic()
        switch.vswitchd.start()
        assert ovs.vswitchd.alive(PATIENCE_S)
        assert "not configured yet" in str(ovs.usable().reason)
        wait_for(lambda: caplog.text.count("not settled yet") > 2, PATIENCE_S, "three attempts")
        attempts = caplog.text.count("not settled yet")
        assert attempts <= 1 + (time.monotonic() - begin) / 0.5
    finally:
        switch.ovsdb.resume()
    usable(ovs)
    assert "unread" in switch.appctl("ofproto/list")


def test_who_waits_for_the_lock_only_looks_after_a_restart(switch: PrivateOvs) -> None:
    settings = settings_of(switch)
    with started(settings, holder="agent one") as first:
        first.db.require_lock(PATIENCE_S)
        with started(settings, holder="agent two") as second:
            wait_for(lambda: second.answers().usable, PATIENCE_S, "it can be read")
            switch.kill_vswitchd()
            switch.start_vswitchd()
            wait_for(lambda: second.answers().usable, PATIENCE_S, "it can be read again")
            assert not second.usable().usable


@pytest.mark.parametrize("quiet", [True, False])
def test_the_datapath_s_log_is_quiet_if_that_is_set(switch: PrivateOvs, quiet: bool) -> None:
    switch.appctl("vlog/set", "dpif_netdev:file:info")
    with started(replace(settings_of(switch), quiet_datapath_log=quiet)) as host:
        usable(host)
        (line,) = (row for row in switch.appctl("vlog/list").splitlines() if row.startswith("dpif_netdev "))
    assert line.split()[-1] == ("WARN" if quiet else "INFO")

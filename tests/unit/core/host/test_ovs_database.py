"""The database of Open vSwitch: transactions, the lock, the values, lost and silent servers."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import pytest

from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout, TryAgain
from netplugin.host import ovsdb
from netplugin.host.ovs import OvsHost
from netplugin.host.ovsdb_replica import Api, SetOtherConfig, Transaction
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon, run, wait_for
from tests.unit.ovs import PATIENCE_S, bridge, port, settings_of, soon, started, usable

#: Time enough for a busy machine to begin: with none at all, nothing is begun.
SHORT_S = 1.0
AT_ONCE = 64
MARKS = {"netplugin-port": "p1", "netplugin-backend": "b"}


def _names(switch: PrivateOvs, table: str) -> set[str]:
    """What the database has, by ovs-vsctl."""
    rows = json.loads(switch.vsctl("-f", "json", "--columns=name", "list", table))["data"]
    return {name for (name,) in rows}


# -- transactions ------------------------------------------------------------------------------------


def test_what_is_committed_is_read_back_by_all(switch: PrivateOvs, ovs: OvsHost) -> None:
    ovs.db.write([bridge("back", netplugin_bridge="net1"), port("back", "back-p", tag=[7])], soon())
    made, row = ovs.view.bridge("back"), ovs.view.port("back-p")
    assert made and row and row.interface
    assert (made.datapath_type, made.fail_mode) == ("netdev", "secure")
    assert made.external_ids == {"netplugin-bridge": "net1"}
    assert (row.bridge, row.tag, row.interface.type, row.interface.error) == ("back", 7, "dummy", None)
    assert ovs.view.root.cur_cfg == ovs.view.root.next_cfg
    assert switch.get("Bridge", "back", "fail_mode") == "secure"
    assert switch.get("Interface", "back-p", "ofport") == str(row.interface.ofport)


def test_the_view_tells_a_device_that_vswitchd_cannot_make(ovs: OvsHost) -> None:
    ovs.db.write([bridge("bad"), port("bad", "bad-p", "dpdkvhostuserclient")], soon())
    row = ovs.view.port("bad-p")
    assert row and row.interface
    assert row.interface.ofport == -1 and row.interface.works_at is None and row.interface.error


def test_a_transaction_that_the_database_refuses_leaves_nothing(switch: PrivateOvs, ovs: OvsHost) -> None:
    twice = [port("refused", "refused-p"), port("refused", "refused-p")]
    with pytest.raises(HostError, match="identical values"):
        ovs.db.write([bridge("refused"), *twice], soon())
    assert "refused" not in _names(switch, "Bridge") and "refused-p" not in _names(switch, "Port")
    assert ovs.view.bridge("refused") is None
    ovs.db.write([bridge("refused")], soon())
    assert ovs.view.bridge("refused"), "the next one is not hindered by it"


@dataclass(frozen=True)
class _Between:
    """What others do when a transaction has been composed: the rows, which are held, do not show it yet."""

    others: Callable[[], object]

    def write(self, api: Api, txn: Transaction) -> None:
        self.others()


def test_what_others_make_while_a_transaction_is_on_its_way_is_planned_again(
    switch: PrivateOvs, ovs: OvsHost
) -> None:
    with pytest.raises(TryAgain, match="identical values"):
        ovs.db.write([bridge("race"), _Between(lambda: switch.vsctl("add-br", "race"))], soon())


def test_a_command_that_fails_leaves_nothing_of_the_others(switch: PrivateOvs, ovs: OvsHost) -> None:
    with pytest.raises(TryAgain, match="nowhere"):
        ovs.db.write([bridge("half"), port("nowhere", "half-p")], soon())
    assert "half" not in _names(switch, "Bridge")


class _Abort:
    def write(self, api: Api, txn: Transaction) -> None:
        txn.add_op({"op": "abort"})


def test_a_transaction_that_the_server_aborts_is_refused(switch: PrivateOvs, ovs: OvsHost) -> None:
    with pytest.raises(HostError, match="aborted"):
        ovs.db.write([bridge("aborted"), _Abort()], soon())
    assert "aborted" not in _names(switch, "Bridge")


def test_a_value_that_the_schema_does_not_allow_is_refused(switch: PrivateOvs, ovs: OvsHost) -> None:
    with pytest.raises(HostError, match="5000"):
        ovs.db.write([bridge("value"), port("value", "value-p", tag=[5000])], soon())
    assert "value" not in _names(switch, "Bridge")


def test_keys_of_a_map_are_set_and_removed_one_by_one(switch: PrivateOvs, ovs: OvsHost) -> None:
    switch.vsctl("set", "Open_vSwitch", ".", "other_config:theirs=1")
    for value in ("x", None):
        ovs.db.write([SetOtherConfig("ours", value)], soon())
        found = ovs.view.root.other_config
        assert (found.get("ours"), found.get("theirs")) == (value, "1")


def test_every_transaction_carries_the_mark_of_the_store(switch: PrivateOvs) -> None:
    marks = iter(["store-1 1", "store-1 2", "store-1 3"])
    switch.vsctl("set", "Open_vSwitch", ".", "external_ids:netplugin-store=other 9")
    with started(settings_of(switch), mark=lambda found: next(marks)) as host:
        assert host.view.root.store_mark == "other 9"
        host.db.write([bridge("marked")], soon())
        assert switch.get("Open_vSwitch", ".", "external_ids:netplugin-store") == "store-1 1"
        assert host.view.root.store_mark == "other 9", "what it wrote itself is nothing to compare with"
        switch.vsctl("set", "Open_vSwitch", ".", "external_ids:netplugin-store=other 10")
        wait_for(lambda: host.view.root.store_mark == "other 10", PATIENCE_S, "the mark of another")


# -- what others change ------------------------------------------------------------------------------


def test_a_change_by_others_wakes_the_backend_whose_port_it_is(switch: PrivateOvs, ovs: OvsHost) -> None:
    woken: list[tuple[str, Wake]] = []
    for backend in ("b", "other"):
        ovs.subscribe(backend, lambda wake, backend=backend: woken.append((backend, wake)))
    wait_for(lambda: len(woken) == 2, PATIENCE_S, "both know that OVS is there")
    woken.clear()
    marked = port("drift", "drift-p", external_ids=MARKS)
    ovs.db.write([bridge("drift", netplugin_bridge="net1"), marked], soon())
    owned = ovs.view.owned("b", "p1")
    assert owned and owned.name == "drift-p"
    assert woken == [], "its creation is no drift"
    switch.vsctl("set", "Port", "drift-p", "tag=9")
    changed = ("b", Wake("a port was changed in the OVS database", frozenset({"p1"})))
    wait_for(lambda: woken == [changed], PATIENCE_S, "the change of the tag")
    row = ovs.view.port("drift-p")
    assert row and row.tag == 9
    woken.clear()
    switch.vsctl("set-fail-mode", "drift", "standalone")
    wait_for(lambda: {who for who, wake in woken if wake.ports is None} == {"b", "other"}, PATIENCE_S, "all")
    woken.clear()
    switch.vsctl("del-br", "drift")
    wait_for(lambda: changed in woken, PATIENCE_S, "the port is gone")
    assert ovs.view.owned("b", "p1") is None and ovs.view.port("drift-p") is None
    assert ovs.view.bridge("drift") is None


# -- the lock ----------------------------------------------------------------------------------------


def test_who_does_not_hold_the_lock_writes_nothing(switch: PrivateOvs) -> None:
    settings = settings_of(switch)
    with ExitStack() as ends:
        with started(settings, holder="agent one") as first:
            first.db.require_lock(PATIENCE_S)
            second = ends.enter_context(started(settings, holder="agent two"))
            assert not second.hold().usable
            with pytest.raises(BackendUnavailable, match="'agent one'") as refused:
                second.db.write([bridge("locked")], soon())
            assert refused.value.step == "ovsdb-lock"
            first.db.write([bridge("holder")], soon())
            assert _names(switch, "Bridge") & {"locked", "holder"} == {"holder"}
        second.db.require_lock(PATIENCE_S)
        second.db.write([bridge("locked")], soon())
    assert "locked" in _names(switch, "Bridge")


def test_a_lock_that_is_stolen_ends_the_writes(switch: PrivateOvs) -> None:
    with started(settings_of(switch), holder="agent one") as host:
        host.db.require_lock(PATIENCE_S)
        steal = ["ovsdb-client", "steal", switch.connection, "netplugin"]
        with Daemon("thief", steal, switch.directory / "thief.log") as thief:
            thief.wait_for(lambda: not host.db.locked, PATIENCE_S, "the lock is lost")
            with pytest.raises(BackendUnavailable, match="another agent has the lock"):
                host.db.write([bridge("stolen")], soon())
        assert "stolen" not in _names(switch, "Bridge")


# -- servers that are lost or silent -----------------------------------------------------------------


def test_after_a_lost_connection_the_rows_are_those_of_the_new_server(
    switch: PrivateOvs, ovs: OvsHost
) -> None:
    ovs.db.write([bridge("kept"), bridge("lost")], soon())
    switch.kill_ovsdb()
    wait_for(lambda: not ovs.db.online, PATIENCE_S, "the connection is lost")
    with pytest.raises(BackendUnavailable, match="no connection") as missing:
        ovs.db.write([bridge("late")], soon())
    assert missing.value.step == "ovsdb-connect"
    assert ovs.view.bridge("lost"), "what was read last can still be looked at"
    uuid = ["uuid", json.loads(run(_query(switch, "lost")))[0]["rows"][0]["_uuid"][1]]
    root = {"op": "mutate", "table": "Open_vSwitch", "where": [], "mutations": [["bridges", "delete", uuid]]}
    run(["ovsdb-tool", "transact", switch.database, json.dumps(["Open_vSwitch", root])])
    switch.start_ovsdb()
    ovs.db.require_online(PATIENCE_S)
    assert ovs.view.bridge("kept") and ovs.view.bridge("lost") is None
    assert ovs.view.port("lost") is None, "its internal port went with it"
    ovs.db.write([bridge("late")], soon())
    assert "late" in _names(switch, "Bridge")


def _query(switch: PrivateOvs, name: str) -> list[str]:
    where = [["name", "==", name]]
    select = {"op": "select", "table": "Bridge", "where": where, "columns": ["_uuid"]}
    return ["ovsdb-tool", "query", str(switch.database), json.dumps(["Open_vSwitch", select])]


def test_a_silent_server_leaves_the_outcome_open(switch: PrivateOvs, ovs: OvsHost) -> None:
    switch.ovsdb.pause()
    try:
        for words in ("did not answer the transaction", "outcome unknown"):
            begin = time.monotonic()
            with pytest.raises(OperationTimeout, match=words):
                ovs.db.write([bridge("silent")], begin + SHORT_S)
            assert time.monotonic() - begin < PATIENCE_S
        assert ovs.view.bridge("silent") is None
    finally:
        switch.ovsdb.resume()
    wait_for(lambda: ovs.view.bridge("silent"), PATIENCE_S, "it was carried out after all")
    ovs.db.write([bridge("certain")], soon())
    assert {"silent", "certain"} <= _names(switch, "Bridge")


def test_a_configuration_that_no_vswitchd_carries_out(switch: PrivateOvs, ovs: OvsHost) -> None:
    wait_for(lambda: ovs.usable().usable, PATIENCE_S, "vswitchd is there")
    switch.stop_vswitchd()
    try:
        wait_for(lambda: not ovs.vswitchd.alive(), PATIENCE_S, "vswitchd is gone")
        last = ovs.view.root.cur_cfg
        begin = time.monotonic()
        with pytest.raises(OperationTimeout, match=rf"cur_cfg {last}, requested {last + 1}") as late:
            ovs.db.write([bridge("asleep")], begin + SHORT_S)
        assert SHORT_S <= time.monotonic() - begin < PATIENCE_S
        assert late.value.step == "vswitchd"
        ovs.db.commit([bridge("unwaited")], soon())
        assert {"asleep", "unwaited"} <= _names(switch, "Bridge"), "the rows are there"
        assert "does not run" in str(ovs.answers().reason)
        assert not ovs.db.configured(last + 2, time.monotonic() + SHORT_S)
    finally:
        switch.start_vswitchd()
    assert ovs.db.configured(last + 2, soon())
    usable(ovs)


def test_what_a_vswitchd_of_4_0_needs_to_start_is_reported(switch: PrivateOvs, ovs: OvsHost) -> None:
    version = switch.get("Open_vSwitch", ".", "ovs_version")
    switch.stop_vswitchd()
    try:
        wait_for(lambda: not ovs.vswitchd.alive(), PATIENCE_S, "vswitchd is gone")
        usual = str(ovs.answers().fix)
        assert "dpdk-extra" not in usual
        configured = ("other_config:dpdk-init=true", "other_config:dpdk-extra=--in-memory")
        switch.vsctl("--no-wait", "set", "Open_vSwitch", ".", "ovs_version=4.0.0", *configured)
        wait_for(lambda: "dpdk-extra" in str(ovs.answers().fix), PATIENCE_S, "the fix is told")
        assert str(ovs.answers().fix).startswith(usual)
        assert "dpdk-extra='--in-memory -a 0000:00:00.0'" in str(ovs.answers().fix)
    finally:
        keys = ("dpdk-init", "dpdk-extra")
        remove = ("--", "remove", "Open_vSwitch", ".", "other_config", *keys)
        switch.vsctl("--no-wait", "set", "Open_vSwitch", ".", f"ovs_version={version}", *remove)
        switch.start_vswitchd()
    usable(ovs)


def test_who_asks_sees_what_was_committed_before_on_a_slow_machine_too(
    switch: PrivateOvs, ovs: OvsHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = ovs.db._turn

    def slow(*arguments: Any) -> None:
        time.sleep(0.2)
        turn(*arguments)

    monkeypatch.setattr(ovs.db, "_turn", slow)
    for number in range(3):
        switch.vsctl("--no-wait", "add-br", f"of-others{number}")
        assert ovs.view.bridge(f"of-others{number}") is None, "the machine is not slow"
        assert ovs.caught_up().bridge(f"of-others{number}")


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_silent_server_is_not_waited_for(switch: PrivateOvs, ovs: OvsHost, is_lost: bool) -> None:
    before, after = f"before{is_lost}", f"after{is_lost}"
    ovs.db.write([bridge(before)], soon())
    switch.ovsdb.pause()
    try:
        begin = time.monotonic()
        ovs.db.catch_up(begin + 0.1)
        assert time.monotonic() - begin < 1.0, "the deadline"
        assert ovs.caught_up().bridge(before)
    finally:
        if is_lost:
            switch.kill_ovsdb()
            switch.start_ovsdb()
        else:
            switch.ovsdb.resume()
    switch.vsctl("--no-wait", "add-br", after)
    ovs.db.require_online(PATIENCE_S)
    wait_for(lambda: ovs.caught_up().bridge(after), PATIENCE_S, "it is read again")


def test_waiting_ends_with_the_change_that_it_waits_for(switch: PrivateOvs, ovs: OvsHost) -> None:
    ovs.db.write([bridge("wait")], soon())
    held: list[bool] = []
    waiting = threading.Thread(
        target=lambda: held.append(ovs.db.wait_for(lambda: ovs.view.bridge("wait") is None, soon()))
    )
    waiting.start()
    switch.vsctl("del-br", "wait")
    waiting.join(PATIENCE_S)
    assert held == [True]
    begin = time.monotonic()
    assert not ovs.db.wait_for(lambda: False, begin + SHORT_S)
    assert SHORT_S <= time.monotonic() - begin < PATIENCE_S


def test_a_server_that_starts_later(switch: PrivateOvs) -> None:
    switch.stop_ovsdb()
    host = OvsHost(settings_of(switch), Supervisor())
    try:
        with pytest.raises(BackendUnavailable, match=r"no connection .*db\.sock"):
            host.db.require_online(SHORT_S)
        with pytest.raises(BackendUnavailable):
            host.db.write([bridge("never")], soon())
        switch.start_ovsdb()
        host.db.require_online(PATIENCE_S)
    finally:
        host.close()
    assert "never" not in _names(switch, "Bridge")


@contextmanager
def between(
    switch: PrivateOvs,
    *changed: Callable[[bytes], bytes],
    answered: Callable[[bytes], bytes] = bytes,
) -> Iterator[str]:
    """An address of the server; what is sent to it on its n-th connection is changed by the n-th of these,
    and what it answers by ``answered``."""
    path = switch.directory / "between.sock"
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as ends:
        listening.bind(str(path))
        listening.listen()
        ends.callback(path.unlink)
        ends.callback(listening.shutdown, socket.SHUT_RDWR)
        threading.Thread(target=_accept, args=(listening, switch, changed, answered), daemon=True).start()
        yield f"unix:{path}"


def _accept(
    listening: socket.socket,
    switch: PrivateOvs,
    changed: Sequence[Callable[[bytes], bytes]],
    answered: Callable[[bytes], bytes],
) -> None:
    with suppress(OSError):  # it is shut down
        for change in chain(changed, repeat(bytes)):
            client, _ = listening.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(switch.connection.removeprefix("unix:"))
            for ends in ((client, server, change), (server, client, answered)):
                threading.Thread(target=_relay, args=ends, daemon=True).start()


def _relay(one: socket.socket, other: socket.socket, change: Callable[[bytes], bytes]) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 20):
            data = change(data)
            with suppress(OSError):  # nobody hears it any more
                other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("method", ["lock", "get_schema", "monitor_cond_since"])
def test_a_request_that_is_never_answered_is_made_again(
    switch: PrivateOvs, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """At first the server does not get it, and then it does not know it: twice each, as the schema is read by
    a connection of its own."""
    monkeypatch.setattr(ovsdb, "_ANSWER_S", 3.0)
    word = f'"method":"{method}"'.encode()

    def lost(data: bytes) -> bytes:
        return b"" if word in data else data

    def refused(data: bytes) -> bytes:
        return data.replace(word, b'"method":"unknown"')

    with between(switch, lost, lost, refused, refused) as address:
        with started(settings_of(switch, connection=address), holder="agent one") as host:
            host.db.require_lock(PATIENCE_S)
            host.db.write([bridge(f"answered-{method}")], soon())
    assert f"answered-{method}" in _names(switch, "Bridge")


def test_a_transaction_that_is_never_answered_is_made_again(
    switch: PrivateOvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while another connection of this agent has the lock: it may be carried out there still."""
    monkeypatch.setattr(ovsdb, "_ANSWER_S", 3.0)

    def lost(data: bytes) -> bytes:
        return b"" if b"never-answered" in data else data

    with between(switch, lost, lost) as address:
        with started(settings_of(switch, connection=address), holder="agent one") as host:
            host.db.require_lock(PATIENCE_S)
            host.db.write([bridge("never-answered")], soon())
            host.db.require_certain()
    assert "never-answered" in _names(switch, "Bridge")


def test_a_port_that_the_first_attempt_has_made_is_planned_again(
    switch: PrivateOvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server carries a transaction out, and its answer is lost."""
    monkeypatch.setattr(ovsdb, "_ANSWER_S", 3.0)
    is_silent = threading.Event()

    def sent(data: bytes) -> bytes:
        if b"made-p" in data:
            is_silent.set()
        return data

    def sent_again(data: bytes) -> bytes:
        is_silent.clear()
        return data

    def answered(data: bytes) -> bytes:
        return b"" if is_silent.is_set() else data

    with between(switch, sent, sent, sent_again, answered=answered) as address:
        with started(settings_of(switch, connection=address), holder="agent one") as host:
            host.db.require_lock(PATIENCE_S)
            host.db.write([bridge("made")], soon())
            with pytest.raises(TryAgain, match="identical values"):
                host.db.write([port("made", "made-p")], soon())
            assert host.view.port("made-p"), "the plan finds it"


def test_a_transaction_that_arrives_after_the_lock_has_gone_changes_nothing(
    switch: PrivateOvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its way when its outcome became unknown."""
    monkeypatch.setattr(ovsdb, "_ANSWER_S", 3.0)
    arrives, refused = threading.Event(), threading.Event()

    def delayed(data: bytes) -> bytes:
        if b"too-late" in data:
            arrives.wait(PATIENCE_S)
        return data

    def answered(data: bytes) -> bytes:
        if b"not owner" in data:
            refused.set()
        return data

    steal = ["ovsdb-client", "steal", switch.connection, "netplugin"]
    with between(switch, delayed, delayed, answered=answered) as address, ExitStack() as ends:
        settings = settings_of(switch, connection=address)
        host = ends.enter_context(started(settings, holder="agent one"))
        host.db.require_lock(PATIENCE_S)
        with pytest.raises(OperationTimeout, match="did not answer the transaction"):
            host.db.write([bridge("too-late")], time.monotonic() + SHORT_S)
        last = "the lock is still that of the connection before"
        wait_for(lambda: host.hold().step == "ovsdb-lock", PATIENCE_S, last)
        with Daemon("thief", steal, switch.directory / "late.log") as thief:
            thief.wait_for(lambda: '"locked":true' in thief.tail(), PATIENCE_S, "the lock is stolen")
            arrives.set()
            assert refused.wait(PATIENCE_S), "it has arrived"
        host.db.require_lock(PATIENCE_S)
        host.db.write([bridge("in-time")], soon())
    assert _names(switch, "Bridge") & {"too-late", "in-time"} == {"in-time"}


def test_a_transaction_whose_connection_is_lost_is_made_again(switch: PrivateOvs, ovs: OvsHost) -> None:
    switch.ovsdb.pause()
    committed: list[int] = []
    writing = threading.Thread(target=lambda: committed.append(ovs.db.commit([bridge("again")], soon())))
    writing.start()
    wait_for(lambda: ovs.db._committing.locked(), PATIENCE_S, "it is on its way")
    switch.kill_ovsdb()
    switch.start_ovsdb()
    writing.join(PATIENCE_S)
    assert committed and "again" in _names(switch, "Bridge")
    assert ovs.db.configured(committed[0], soon()) and ovs.view.bridge("again")


def test_those_who_write_at_once_see_what_the_others_wrote(switch: PrivateOvs, ovs: OvsHost) -> None:
    """A bridge that all of them need is made once."""
    failed: list[Exception] = []

    def write(number: int) -> None:
        try:
            ovs.db.write([bridge("shared", netplugin_bridge=""), port("shared", f"shared-p{number}")], soon())
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=[number]) for number in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failed == []
    shared = ovs.view.bridge("shared")
    assert shared and {p.name for p in ovs.view.unmanaged_on(shared)} == {
        "shared",
        *(f"shared-p{number}" for number in range(AT_ONCE)),
    }


def test_a_fork_of_the_process_answers_at_once_and_disturbs_nobody(switch: PrivateOvs, ovs: OvsHost) -> None:
    """It has no thread that follows the connection, and the lock may have been held when it was made."""
    ovs.db.write([bridge("parent")], soon())
    with ovs.db._changed:
        child = os.fork()
        if child == 0:
            try:
                ovs.db.write([bridge("child")], soon())
            except BackendUnavailable:
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ovs.db.write([bridge("after")], soon())
    assert {"parent", "after"} <= _names(switch, "Bridge") and "child" not in _names(switch, "Bridge")

"""The connections to OVS: whole before they tell anything, and one agent's at a time."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from netplugin import options
from netplugin.api.errors import BackendUnavailable
from netplugin.host import ovs as ovs_host
from netplugin.host.names import VHOST, device_name
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.ovsdb import Ovsdb
from netplugin.host.ovsdb_replica import Touch
from netplugin.host.supervisor import Supervisor
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import plug
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

DEADLINE_S = 90.0


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
    config.write_text(f"[ovs]\nconnection = {ovs.connection}\n")
    host = OvsHost(OvsSettings.read(options.load([config])), Supervisor())
    try:
        host.db.require_online(30)
        assert made and host.vswitchd.alive(30)
        host.db.write([Touch()], time.monotonic() + 30)
    finally:
        host.close()


# -- the lock of the database -------------------------------------------------------------------------


@contextmanager
def connected(ovs: PrivateOvs, holder: str | None) -> Iterator[Ovsdb]:
    database = Ovsdb(ovs.connection, holder=holder).start()
    try:
        database.require_online(DEADLINE_S)
        yield database
    finally:
        database.close()


def write(database: Ovsdb) -> int:
    return database.commit([Touch()], time.monotonic() + DEADLINE_S)


def holder_in(ovs: PrivateOvs) -> str:
    """The holder of the lock that is recorded in the database, after it has the lock."""
    return ovs.get("Open_vSwitch", ".", "external_ids:netplugin-agent")


@contextmanager
def mistaken(database: Ovsdb, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thinks that it has the lock. Its thread reports nothing of that, or it would not do so later."""
    turned = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(database, "_report", turned.set)
        database._wake()
        assert turned.wait(DEADLINE_S)
        database._api.idl.has_lock = True
        yield
        database._api.idl.has_lock = False


def test_no_transaction_is_carried_out_without_the_lock(
    ovs: PrivateOvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(ovs, "the first") as first:
        write(first)
        wait_for(lambda: holder_in(ovs) == "the first", DEADLINE_S, "it says who it is")
        with connected(ovs, "the second") as second, connected(ovs, None) as tool:
            with pytest.raises(BackendUnavailable, match="last taken by: 'the first'") as refused:
                write(second)
            assert refused.value.step == "ovsdb-lock" and not second.locked
            write(tool)  # an operator's: it needs no lock
            # The one who thinks that it has it is refused by the server's word.
            before = ovs.get("Open_vSwitch", ".", "external_ids:netplugin-settled")
            with mistaken(second, monkeypatch), pytest.raises(BackendUnavailable, match="has the lock"):
                write(second)
            assert ovs.get("Open_vSwitch", ".", "external_ids:netplugin-settled") == before
            first.close()
            second.require_lock(DEADLINE_S)
            write(second)
            wait_for(lambda: holder_in(ovs) == "the second", DEADLINE_S, "so does the next")


def reasons(agent: PrivateAgent) -> str:
    return " ".join(agent.get("/readyz")[1]["reasons"])


def names(agent: PrivateAgent, other: PrivateAgent) -> bool:
    """Whether an agent says that it waits for the other one."""
    reported = reasons(agent)
    return "has the lock 'netplugin'" in reported and f"process {other.daemon.pid}, store" in reported


def test_a_second_agent_waits_for_the_lock_and_goes_on_with_it(ovs: PrivateOvs) -> None:
    """With stores of their own; whoever waits changes nothing, and keeps what it does not know."""
    port = device_name(VHOST, "p1")
    with (
        PrivateAgent(BASE / "agent", ovs) as first,
        PrivateAgent(BASE / "other", ovs, ready=False) as second,
    ):
        plug(first, "p1", make_spec(1))
        made = ovs.get("Interface", port, "ofport")
        wait_for(lambda: names(second, first), DEADLINE_S, "it says for whom it waits")
        status, error = second.call("PUT", "/v1/ports/p2", make_spec(2))
        assert (status, error["code"], error["step"]) == (503, "backend_unavailable", "ovsdb-lock")
        assert error["retryable"] and "end the other agent" in error["fix"]
        found = {finding["id"]: finding for finding in second.get("/v1/host/checks")[1]}
        assert found["dpdkvhostuser-unusable"]["fix"] == error["fix"]
        assert second.call("POST", "/v1/reconcile", {})[1]["errors"][0]["step"] == "ovsdb-lock"
        assert second.get("/v1/pmd")[0] == 200, "reading needs no lock"
        ovs.stop_vswitchd()
        wait_for(lambda: second.get("/v1/pmd")[0] == 503, DEADLINE_S, "nobody can be asked")
        ovs.start_vswitchd()
        wait_for(lambda: second.get("/v1/pmd")[0] == 200, DEADLINE_S, "nor after a restart of OVS")
        made = ovs.get("Interface", port, "ofport")
        first.kill()
        wait_for(lambda: "another store made them" in reasons(second), DEADLINE_S, "it goes on")
        assert ovs.get("Interface", port, "ofport") == made
        plug(second, "p2", make_spec(2))
        first.start(ready=False)
        wait_for(lambda: names(first, second), DEADLINE_S, "now the other one waits")
        assert first.call("DELETE", "/v1/ports/p1")[0] == 503
        assert ovs.get("Interface", port, "ofport") == made
        # A server that is started again has no locks: one of the two gets it, and one only.
        ovs.restart_ovsdb()
        wait_for(lambda: names(first, second) != names(second, first), DEADLINE_S, "one of them waits")
        first.stop()
        report = reconciled(second)
        assert set(report["orphans_kept"]) <= {"p1"}, "p1 is gone if the first had the lock"
        second.call("POST", "/v1/reconcile", {"remove_orphans": True})
        assert second.call("DELETE", "/v1/ports/p2")[0] == 204
    for directory in (first.directory, second.directory):
        shutil.rmtree(directory)


def test_an_older_store_is_recognized_by_what_was_deleted_since(
    ovs: PrivateOvs, agent: PrivateAgent, tmp_path: Path
) -> None:
    """No port is left that could tell of it."""
    plug(agent, "p1", make_spec(1))
    agent.stop()
    state = agent.directory / "state"
    shutil.copytree(state, tmp_path / "copy")
    agent.start()
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    agent.stop()
    mark = ovs.get("Open_vSwitch", ".", "external_ids:netplugin-store")
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "copy", state)
    agent.start()
    found = {finding["id"]: finding for finding in agent.get("/v1/host/checks")[1]}
    reported = found["store-older-dpdkvhostuser"]["found"]
    assert f"it lacks commit {mark.split('/')[1]}, which changed the host last. " in reported
    assert reported.endswith(": p1") and agent.get("/v1/ports/p1")[1]["state"] == "active"


def test_the_mark_that_was_there_stays_known_to_who_writes_another(ovs: PrivateOvs) -> None:
    """Several backends share the database, and the first of them that writes replaces the mark."""
    mark = "external_ids:netplugin-store"
    ovs.vsctl("set", "Open_vSwitch", ".", f"{mark}=other/7")
    database = Ovsdb(ovs.connection, mark=lambda found: f"mine/{len(found)}").start()
    try:
        database.require_online(DEADLINE_S)
        for _ in range(2):
            database.wait_configured(write(database), time.monotonic() + DEADLINE_S)
            assert ovs.get("Open_vSwitch", ".", mark) == "mine/7"
            assert database.view.root.store_mark == "other/7"
        ovs.vsctl("set", "Open_vSwitch", ".", f"{mark}=other/8")
        wait_for(lambda: database.view.root.store_mark == "other/8", DEADLINE_S, "it wrote again")
    finally:
        database.close()
        ovs.vsctl("remove", "Open_vSwitch", ".", "external_ids", "netplugin-store")


def reconciled(agent: PrivateAgent) -> Any:
    """The report of a look at the host, as soon as one is possible."""
    reports: list[Any] = []

    def look() -> bool:
        reports.append(agent.call("POST", "/v1/reconcile", {})[1])
        return reports[-1]["errors"] == []

    wait_for(look, DEADLINE_S, "the agent can look at the host")
    return reports[-1]

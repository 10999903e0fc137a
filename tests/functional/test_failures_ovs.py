"""What the host refuses: the right code and step within the deadline, and nothing left behind."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from netplugin.host.names import VHOST, device_name
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned, plug, plug_all, ports, until_plugged
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.lab.testpmd import Testpmd, TestpmdOptions

#: Seconds within which the agent of these tests must have answered, whatever the host does:
#: operation_timeout (12) and the grace for cleaning up. Less than the operation_timeout of the other tests.
ANSWER_S = 80.0


@pytest.fixture
def hasty(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    """An agent that does not wait long for what hangs; a busy machine makes 2 s of one."""
    options = {"ovs": {"timeout": "4"}, "agent": {"operation_timeout": "12"}}
    with PrivateAgent(BASE / "agent", ovs, options) as private:
        yield private
    for name in ovs.vsctl("list-br").split():
        ovs.vsctl("del-br", name)
    shutil.rmtree(BASE / "agent")


def refused(agent: PrivateAgent, port_id: str, spec: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    status, error = agent.call("PUT", f"/v1/ports/{port_id}", spec)
    assert time.monotonic() - start < ANSWER_S
    assert isinstance(error, dict) and error["status"] == status, error
    return error


def nothing_left(agent: PrivateAgent, ovs: PrivateOvs, port_id: str) -> None:
    """Neither intent nor row nor flow; what could not be cleaned at once is clean soon."""
    wait_for(lambda: agent.get(f"/v1/ports/{port_id}")[0] == 404, 30, "the intent is gone")
    name = device_name(VHOST, port_id)
    wait_for(lambda: name not in ovs.vsctl("--columns=name", "list", "Interface"), 30, "the row is gone")
    wait_for(lambda: planned(agent) == [], 30, "nothing is left to do")


def test_vswitchd_that_hangs(ovs: PrivateOvs, hasty: PrivateAgent) -> None:
    until_plugged(hasty, "p0", make_spec(9))
    ovs.pause_vswitchd()
    try:
        error = refused(hasty, "p1", make_spec(1))
        assert (error["code"], error["status"], error["step"]) == ("timeout", 504, "vswitchd")
        assert error["retryable"] and "cur_cfg" in error["detail"]
    finally:
        ovs.resume_vswitchd()
    nothing_left(hasty, ovs, "p1")
    assert ports(ovs) == [device_name(VHOST, "p0")]
    until_plugged(hasty, "p1", make_spec(1))


def test_a_change_that_fails_goes_back(ovs: PrivateOvs, hasty: PrivateAgent) -> None:
    until_plugged(hasty, "p1", make_spec(1, vlan_id=100))
    ovs.pause_vswitchd()
    try:
        error = refused(hasty, "p1", make_spec(1, vlan_id=200))
        assert error["code"] == "timeout"
    finally:
        ovs.resume_vswitchd()
    wait_for(lambda: hasty.get("/v1/ports/p1")[1]["state"] == "active", 30, "active again")
    assert hasty.get("/v1/ports/p1")[1]["spec"]["network"]["vlan_id"] == 100
    assert ovs.get("Port", device_name(VHOST, "p1"), "tag") == "100"


def test_ovsdb_server_that_is_gone(ovs: PrivateOvs, hasty: PrivateAgent) -> None:
    until_plugged(hasty, "p0", make_spec(9))
    ovs.stop_ovsdb()
    try:
        wait_for(lambda: hasty.get("/readyz")[0] == 503, 30, "the agent knows")
        error = refused(hasty, "p1", make_spec(1))
        assert (error["code"], error["status"]) == ("backend_unavailable", 503)
        assert error["step"] == "ovsdb-connect" and "ovsdb-server" in error["fix"]
        assert hasty.get("/v1/ports/p1")[0] == 404
        assert hasty.call("DELETE", "/v1/ports/p0")[0] == 503
    finally:
        ovs.start_ovsdb()
    wait_for(lambda: hasty.get("/readyz")[0] == 200, 20, "the agent is ready again")
    # The delete was requested, and is done now that it can be.
    wait_for(lambda: hasty.get("/v1/ports/p0")[0] == 404, 20, "the port is gone")
    nothing_left(hasty, ovs, "p1")


def test_ovsdb_server_that_hangs(ovs: PrivateOvs, hasty: PrivateAgent) -> None:
    until_plugged(hasty, "p0", make_spec(9))
    ovs.ovsdb.pause()
    try:
        error = refused(hasty, "p1", make_spec(1))
        assert (error["code"], error["step"]) == ("timeout", "ovsdb-commit")
    finally:
        ovs.ovsdb.resume()
    # The transaction lands late, when the caller has its error already: it is found and removed.
    nothing_left(hasty, ovs, "p1")


@pytest.mark.parametrize("hangs", ["ovsdb", "vswitchd"])
def test_an_adoption_that_times_out_leaves_the_nic(ovs: PrivateOvs, hasty: PrivateAgent, hangs: str) -> None:
    """After a lost store: before the write (vswitchd tells no flows), and within it."""
    port = device_name(VHOST, "p1")

    def row() -> tuple[str, str]:
        """A port that was made again has others."""
        return ovs.get("Port", port, "_uuid"), ovs.get("Interface", port, "ofport")

    until_plugged(hasty, "p1", make_spec(1))
    made = row()
    hasty.lose_store()
    daemon = getattr(ovs, hangs)
    daemon.pause()
    try:
        error = refused(hasty, "p1", make_spec(1))
        assert error["code"] == "timeout", error
    finally:
        daemon.resume()
    wait_for(
        lambda: hasty.call("POST", "/v1/reconcile", {})[1]["errors"] == [],
        90,
        "the agent has looked at the host",
    )
    assert row() == made
    until_plugged(hasty, "p1", make_spec(1))
    assert row() == made and hasty.get("/readyz")[0] == 200, "adopted as it is"
    assert hasty.call("DELETE", "/v1/ports/p1")[0] == 204


def test_vswitchd_that_is_gone(ovs: PrivateOvs, hasty: PrivateAgent) -> None:
    ovs.stop_vswitchd()
    try:
        wait_for(lambda: hasty.get("/readyz")[0] == 503, 30, "the agent knows")
        error = refused(hasty, "p1", make_spec(1))
        assert (error["code"], error["step"]) == ("backend_unavailable", "vswitchd")
    finally:
        ovs.start_vswitchd()
    wait_for(lambda: hasty.get("/readyz")[0] == 200, 20, "the agent is ready again")
    nothing_left(hasty, ovs, "p1")


def test_a_socket_directory_that_is_missing_or_open(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    directory = agent.directory / "vhost"
    assert directory.stat().st_mode & 0o7777 == 0o711
    directory.chmod(0o777)
    error = refused(agent, "p1", make_spec(1))
    assert (error["code"], error["step"]) == ("backend_unavailable", "socket-directory")
    directory.rmdir()
    error = refused(agent, "p1", make_spec(1))
    assert (error["code"], error["step"]) == ("backend_unavailable", "socket-directory")
    assert str(directory) in error["fix"]
    backend = agent.get("/v1/backends")[1][0]
    assert not backend["usable"] and str(directory) in backend["reason"]
    nothing_left(agent, ovs, "p1")


def test_an_uplink_that_cannot_be_attached(ovs: PrivateOvs) -> None:
    options = {"ovs": {"uplinks": "physnet1:0000:ff:1f.7"}}
    with PrivateAgent(BASE / "agent", ovs, options) as agent:
        error = refused(agent, "p1", make_spec(1))
        assert (error["code"], error["status"], error["step"]) == ("host_error", 502, "verify")
        assert "0000:ff:1f.7" in error["detail"] or "uplink" in error["detail"]
        nothing_left(agent, ovs, "p1")
        assert ovs.vsctl("list-br").split() == []
    shutil.rmtree(BASE / "agent")


def test_the_agent_killed_in_the_middle_of_a_plug(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p0", make_spec(9))
    ovs.pause_vswitchd()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(agent.call, "PUT", "/v1/ports/p1", make_spec(1))
        name = device_name(VHOST, "p1")
        wait_for(lambda: name in ports(ovs), 30, "the row is written")
        agent.kill()
        assert call.result(30)[0] == 0
    ovs.resume_vswitchd()
    agent.start()
    wait_for(lambda: agent.get("/v1/ports/p1")[1]["state"] == "active", 20, "the port is active")
    assert planned(agent) == []


def test_the_agent_killed_right_after_its_answer(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """That the port is active may not be on the disk yet: the next start finds it so, and changes nothing."""
    pids = set()
    for vlan in range(1, 7):
        status, port = agent.call("PUT", "/v1/ports/p1", make_spec(1, vlan_id=vlan))
        agent.kill()
        assert (status, port["state"]) == (200, "active")
        was = ovs.get("Open_vSwitch", ".", "next_cfg")
        agent.start()
        pids.add(agent.daemon.pid)
        wait_for(lambda: _settled(agent), 30, "the port is active")
        assert agent.get("/v1/ports/p1")[1]["spec"] == port["spec"]
        assert ovs.get("Open_vSwitch", ".", "next_cfg") == was and planned(agent) == []
    assert len(pids) == 6


@pytest.mark.parametrize("after_ms", [0, 2, 5, 10, 20, 40])
def test_the_agent_killed_at_any_time(ovs: PrivateOvs, agent: PrivateAgent, after_ms: int) -> None:
    """Wherever it dies in a batch of plugs and deletes, the next start ends in a settled state."""
    plug_all(agent, {f"a{n}": make_spec(n) for n in range(8)})
    more = {
        "put": [{"port_id": f"b{n}", "spec": make_spec(20 + n)} for n in range(8)],
        "delete": [f"a{n}" for n in range(4)],
    }
    with ThreadPoolExecutor() as pool:
        pool.submit(agent.call, "POST", "/v1/ports:batch", more)
        threading.Event().wait(after_ms / 1e3)  # the moment of death is what is tried here
        agent.kill()
    agent.start()
    wait_for(lambda: _settled(agent), 30, "every port is active or gone")
    assert planned(agent) == []
    known = {device_name(VHOST, port["port_id"]) for port in agent.get("/v1/ports")[1]}
    assert set(ports(ovs)) == known
    assert {f"a{n}" for n in range(4, 8)} <= {p["port_id"] for p in agent.get("/v1/ports")[1]}


def _settled(agent: PrivateAgent) -> bool:
    return all(port["state"] == "active" for port in agent.get("/v1/ports")[1])


def test_memory_that_runs_short_when_the_vm_connects(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """Buffers are taken when the VM connects: too late for the plug, not too late to report it.

    The lab's OVS has 256 MB: enough for the buffers of one MTU, not for those of 9,000 bytes too.
    """
    small = plug(agent, "small", make_spec(2))
    large = plug(agent, "large", make_spec(1, network={"mtu": 9000}))
    with Testpmd(Path(small["binding"]["socket_path"]), TestpmdOptions()):
        ovs.wait_connected(small["binding"]["device"])
        with Testpmd(Path(large["binding"]["socket_path"]), TestpmdOptions()):
            wait_for(lambda: state(agent, "large")["state"] == "degraded", 30, "degraded")
            assert "memory" in state(agent, "large")["error"]["detail"]
            assert state(agent, "small")["state"] == "active"
    wait_for(lambda: state(agent, "large")["state"] == "active", 30, "active, the VM being gone")
    assert state(agent, "large")["error"] is None


def state(agent: PrivateAgent, port_id: str) -> dict[str, Any]:
    body: dict[str, Any] = agent.get(f"/v1/ports/{port_id}")[1]
    return body


# SHA-256 of both begins with 4ee0db8bd01, of which the names of the devices are made.
_NAMESAKES = ("vm-3073211", "vm-6140880")


def test_an_id_whose_names_collide_fails_alone(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    first, second = _NAMESAKES
    plug(agent, first, make_spec(1))
    error = refused(agent, second, make_spec(2))
    assert (error["code"], error["status"], error["port_id"]) == ("conflict", 409, second)
    assert first in error["detail"]
    batch = [("x", 3), (second, 2), ("y", 4)]
    body = {"put": [{"port_id": i, "spec": make_spec(n)} for i, n in batch]}
    results = agent.call("POST", "/v1/ports:batch", body)[1]["results"]
    assert [entry["status"] for entry in results] == [200, 409, 200]
    with ThreadPoolExecutor(8) as callers:  # which share a transaction
        others = {f"w{n}": make_spec(n) for n in range(10, 17)}
        calls = [
            callers.submit(agent.call, "PUT", f"/v1/ports/{i}", spec)
            for i, spec in [*others.items(), (second, make_spec(2))]
        ]
        assert [call.result()[0] for call in calls] == [200] * 7 + [409]
    assert second not in {port["port_id"] for port in agent.get("/v1/ports")[1]}
    agent.call("DELETE", f"/v1/ports/{first}")
    plug(agent, second, make_spec(2))

"""What the store says is never the reason that a running VM loses its NIC: real agents, real taps."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from netplugin.host.names import TAP, device_name
from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import namespace
from tests.lab.processes import run, wait_for

UPLINK, FAR_END = "stwire0", "stwire1"
OPTIONS = {"linuxbridge": {"physical_interfaces": f"physnet1:{UPLINK}"}}


def spec(number: int, **network: Any) -> dict[str, Any]:
    return {
        "vm_id": f"vm{number}",
        "mac": f"52:54:00:00:01:{number:02x}",
        "backend": "linuxbridge",
        "network": {"type": "flat", "physical_network": "physnet1", **network},
    }


@pytest.fixture(scope="module", autouse=True)
def uplink() -> Iterator[None]:
    run(["ip", "link", "add", UPLINK, "type", "veth", "peer", "name", FAR_END])
    for name in (UPLINK, FAR_END):
        run(["ip", "link", "set", name, "up"])
    yield
    run(["ip", "link", "delete", UPLINK])


@pytest.fixture
def agent() -> Iterator[PrivateAgent]:
    with PrivateAgent(BASE / "agent", None, OPTIONS) as private:
        yield private
        remove_all(private)
    shutil.rmtree(private.directory)


def remove_all(agent: PrivateAgent) -> None:
    """Whatever the test left, by the store or next to it."""
    if agent.get("/healthz")[0] != 200:
        agent.start(ready=False)
    for port in agent.get("/v1/ports")[1]:
        agent.call("DELETE", f"/v1/ports/{port['port_id']}")
    agent.call("POST", "/v1/reconcile", {"remove_orphans": True})
    for number in range(1, 4):
        assert index(f"p{number}") is None
    assert "bridge netplugin" not in run(["nft", "list", "tables"])


def state_of(agent: PrivateAgent) -> Path:
    return agent.directory / "state"


def index(port_id: str) -> str | None:
    """Which device a port's tap is: one that was made again has another number."""
    path = Path("/sys/class/net", device_name(TAP, port_id), "ifindex")
    # Of a device that is going, the kernel says that it is not there or that the request is invalid.
    with suppress(OSError):
        return path.read_text().strip()
    return None


def put(agent: PrivateAgent, number: int, **network: Any) -> tuple[int, Any]:
    return agent.call("PUT", f"/v1/ports/p{number}", spec(number, **network))


def plug(agent: PrivateAgent, number: int, **network: Any) -> str:
    status, port = put(agent, number, **network)
    assert (status, port["state"]) == (200, "active"), port
    made = index(f"p{number}")
    assert made is not None
    return made


def looked(agent: PrivateAgent) -> Any:
    status, report = agent.call("POST", "/v1/reconcile", {})
    assert status == 200
    return report


def reasons(agent: PrivateAgent) -> str:
    return " ".join(agent.get("/readyz")[1]["reasons"])


def findings(agent: PrivateAgent, begin: str) -> list[dict[str, Any]]:
    found = agent.get("/v1/host/checks")[1]
    return [finding for finding in found if finding["id"].startswith(begin)]


def netplugin(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "netplugin.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# -- an older store, a lost one, another one ------------------------------------------------------


def test_a_store_that_is_put_back_removes_no_port_that_it_does_not_know(
    agent: PrivateAgent, tmp_path: Path
) -> None:
    plug(agent, 1)
    agent.stop()
    shutil.copytree(state_of(agent), tmp_path / "copy")
    agent.start()
    second = plug(agent, 2)
    agent.stop()
    shutil.rmtree(state_of(agent))
    shutil.copytree(tmp_path / "copy", state_of(agent))
    agent.start_with_orphans()
    assert looked(agent)["orphans_kept"] == ["p2"]
    assert index("p2") == second
    [finding] = findings(agent, "ports-not-in-store")
    assert "an older copy" in finding["found"] and finding["found"].endswith(": p2")
    assert "an older copy" in reasons(agent)
    assert plug(agent, 2) == second, "adopted as it is"
    assert agent.get("/readyz")[0] == 200 and findings(agent, "ports-not-in-store") == []


def test_an_older_store_is_recognized_by_what_was_deleted_since(agent: PrivateAgent, tmp_path: Path) -> None:
    """No port tells of it: the rules of all carry the last commit."""
    first = plug(agent, 1)
    plug(agent, 2)
    agent.stop()
    shutil.copytree(state_of(agent), tmp_path / "copy")
    agent.start()
    assert findings(agent, "store-older") == [], "the same store again"
    assert agent.call("DELETE", "/v1/ports/p2")[0] == 204
    agent.stop()
    shutil.rmtree(state_of(agent))
    shutil.copytree(tmp_path / "copy", state_of(agent))
    agent.start()
    [finding] = findings(agent, "store-older-linuxbridge")
    assert "the store is an older copy" in finding["found"] and finding["found"].endswith(": p2")
    assert index("p1") == first and index("p2") is not None, "plugged again: a VM may need it"
    agent.stop()
    agent.start()
    assert findings(agent, "store-older") == [finding], "until somebody has seen to it"
    assert agent.call("DELETE", "/v1/ports/p2")[0] == 204
    agent.call("POST", "/v1/reconcile", {"remove_orphans": True})
    agent.stop()
    agent.start()
    assert findings(agent, "store-older") == [] and index("p1") == first


def test_a_second_agent_waits_for_the_network_namespace(agent: PrivateAgent) -> None:
    """It says for whom; when that one ends it goes on, and keeps the ports that it does not know."""
    first = plug(agent, 1)
    with PrivateAgent(BASE / "other", None, OPTIONS, ready=False) as other:
        status, error = put(other, 2)
        assert (status, error["code"], error["step"]) == (503, "backend_unavailable", "lock")
        assert f"process {agent.daemon.pid} " in error["detail"] and error["retryable"], error
        assert error["detail"] in reasons(other)
        [finding] = findings(other, "linuxbridge-unusable")
        assert finding["fix"] == error["fix"]
        assert other.call("DELETE", "/v1/ports/p1")[0] == 204, "it is no port of this agent"
        assert (index("p1"), index("p2")) == (first, None)
        assert agent.get("/readyz")[0] == 200
        agent.kill()
        wait_for(lambda: "another store made them" in reasons(other), 90, "it has looked")
        assert index("p1") == first
        second = plug(other, 2)
        agent.start(ready=False)
        assert f"process {other.daemon.pid} " in reasons(agent)
        status, error = agent.call("DELETE", "/v1/ports/p1")
        assert (status, error["step"]) == (503, "lock"), error
        assert (index("p1"), index("p2")) == (first, second)
        other.stop()
        wait_for(lambda: index("p1") is None, 90, "what was asked meanwhile is done")
        assert looked(agent)["orphans_kept"] == ["p2"] and index("p2") == second
    shutil.rmtree(other.directory)


def test_an_agent_of_another_network_namespace_is_not_in_the_way(agent: PrivateAgent) -> None:
    networks = {"linuxbridge": {"physical_interfaces": "physnet1:"}}
    with (
        namespace("np-beside"),
        PrivateAgent(BASE / "other", None, networks, netns="np-beside") as other,
    ):
        plug(agent, 1)
        assert put(other, 1)[1]["state"] == "active"
        assert other.call("DELETE", "/v1/ports/p1")[0] == 204
        assert index("p1") is not None and agent.get("/readyz")[0] == 200
    shutil.rmtree(other.directory)


def test_a_port_that_was_deleted_and_is_there_again_goes_by_itself(agent: PrivateAgent) -> None:
    plug(agent, 1)
    name = device_name(TAP, "p1")
    alias = Path("/sys/class/net", name, "ifalias").read_text().strip()
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    run(["ip", "tuntap", "add", name, "mode", "tap"])
    run(["ip", "link", "set", name, "alias", alias])
    assert looked(agent)["orphans_kept"] == []
    assert index("p1") is None


def test_an_explicit_call_removes_what_the_store_does_not_know(agent: PrivateAgent) -> None:
    plug(agent, 1)
    agent.lose_store()
    assert "another store made them" in reasons(agent)
    report = agent.call("POST", "/v1/reconcile", {"remove_orphans": True})[1]
    assert report["orphans_kept"] == [] and index("p1") is None
    assert agent.get("/readyz")[0] == 200


def test_an_adoption_that_fails_leaves_the_nic(agent: PrivateAgent) -> None:
    made = plug(agent, 1)
    agent.lose_store()
    status, error = put(agent, 1, mtu=9000)  # more than the uplink has
    assert status >= 400, error
    assert index("p1") == made
    port = agent.get("/v1/ports/p1")[1]
    assert port["state"] == "failed" and port["error"]["detail"] == error["detail"]
    assert plug(agent, 1) == made


# -- a store that cannot be read, or written ------------------------------------------------------


def test_one_row_that_cannot_be_read_hurts_no_other(agent: PrivateAgent) -> None:
    first, second = plug(agent, 1), plug(agent, 2)
    agent.stop()
    with sqlite3.connect(state_of(agent) / "agent.db") as db:
        db.execute("UPDATE ports SET spec = '{' WHERE port_id = 'p1'")
    db.close()
    agent.start_with_orphans()
    assert (index("p1"), index("p2")) == (first, second)
    assert [port["port_id"] for port in agent.get("/v1/ports")[1]] == ["p2"]
    assert "could not be read" in reasons(agent) and "p1" in reasons(agent)
    assert len(findings(agent, "store-row-ports-p1")) == 1
    assert "netplugin_store_rows_set_aside 1.0" in agent.get("/metrics")[1]
    run(["ip", "link", "set", device_name(TAP, "p2"), "down"])
    wait_for(
        lambda: agent.get("/v1/ports/p2")[1]["observed"]["link_state"] == "up",
        30,
        "the other port is seen to as ever",
    )
    assert plug(agent, 1) == first
    assert findings(agent, "store-row") == [] and agent.get("/readyz")[0] == 200


def test_a_damaged_database_is_moved_aside_and_no_nic_goes(agent: PrivateAgent) -> None:
    made = plug(agent, 1)
    agent.stop()
    path = state_of(agent) / "agent.db"
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    agent.start_with_orphans()
    assert index("p1") == made and looked(agent)["orphans_kept"] == ["p1"]
    [finding] = findings(agent, "store-damaged")
    [aside] = state_of(agent).glob("agent.db.damaged-*")
    assert str(aside) in finding["found"]
    assert plug(agent, 1) == made


def test_a_full_disk_is_reported_and_is_no_end(agent: PrivateAgent) -> None:
    made = plug(agent, 1)
    agent.stop()
    copy = agent.directory / "copy"
    shutil.move(state_of(agent), copy)
    state_of(agent).mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=1M,mode=0700", "tmpfs", str(state_of(agent))])
    try:
        shutil.copytree(copy, state_of(agent), dirs_exist_ok=True)
        filler = state_of(agent) / "filler"
        fill(filler)
        agent.start(ready=False)
        assert "the store cannot be written" in reasons(agent)
        status, error = put(agent, 2)
        assert status >= 500 and error["step"] == "store", error
        assert [port["port_id"] for port in agent.get("/v1/ports")[1]] == ["p1"]
        assert index("p1") == made and index("p2") is None
        filler.unlink()
        looked(agent)
        # What failed meanwhile is tried again with a back-off.
        wait_for(lambda: agent.get("/readyz")[0] == 200, 90, "the store can be written again")
        plug(agent, 2)
        remove_all(agent)
        agent.stop()
    finally:
        agent.stop()
        run(["umount", str(state_of(agent))])


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


# -- copies ---------------------------------------------------------------------------------------


def test_copies_are_made_checked_and_put_back(agent: PrivateAgent, tmp_path: Path) -> None:
    made = plug(agent, 1)
    state, copy = state_of(agent), tmp_path / "copy.db"
    at = ("--state-path", state)
    assert netplugin("store", "backup", *at, copy).returncode == 0  # while the agent runs
    assert netplugin("store", "check", *at, copy).stdout == f"{copy}: ok\n"
    assert netplugin("store", "check", *at).returncode == 0
    refused = netplugin("store", "restore", *at, copy)
    assert refused.returncode == 1 and "another agent runs" in refused.stderr
    second = plug(agent, 2)
    for _ in range(2):
        agent.stop()
        agent.start()
    assert len(list((state / "backups").iterdir())) == 1, "nothing was written in between"
    agent.stop()
    bad = tmp_path / "bad.db"
    bad.write_bytes(copy.read_bytes()[:5000])
    assert netplugin("store", "check", *at, bad).returncode == 1
    assert netplugin("store", "restore", *at, bad).returncode == 1
    assert netplugin("store", "restore", *at, copy).returncode == 0
    assert len(list(state.glob("agent.db.before-restore-*"))) == 1
    agent.start_with_orphans()
    assert [port["port_id"] for port in agent.get("/v1/ports")[1]] == ["p1"]
    assert looked(agent)["orphans_kept"] == ["p2"]
    assert (index("p1"), index("p2")) == (made, second)

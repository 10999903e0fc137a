"""A host of a fleet: a real agent on real OVS does what a real etcd has, and removes nothing by accident."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.etcd import PrivateEtcd
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import tail_of, wait_for

HOST = "host-1"
DESIRED = f"/netplugin/v1/desired/{HOST}"
REPORTED = f"/netplugin/v1/reported/{HOST}"
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def etcd() -> Iterator[PrivateEtcd]:
    directory = BASE / "etcd"
    with PrivateEtcd(directory) as private:
        private.enable_auth(HOST)
        yield private
    shutil.rmtree(directory)


@pytest.fixture
def agent(ovs: PrivateOvs, etcd: PrivateEtcd) -> Iterator[PrivateAgent]:
    """An agent of the fleet; its ports are removed by the fleet, which is a test of that too."""
    credentials = etcd.credentials("host-1")
    fleet = {
        "endpoints": ",".join(etcd.endpoints),
        "host": HOST,
        "ca": str(credentials.ca),
        "cert": str(credentials.cert),
        "key": str(credentials.key),
    }
    with PrivateAgent(BASE / "agent", ovs, {"fleet": fleet}) as private:
        yield private
        ids = [port["port_id"] for port in private.get("/v1/ports")[1] or ()]
        if ids:
            private.call("POST", "/v1/ports:batch", {"delete": ids, "override": True})
    shutil.rmtree(BASE / "agent")
    etcd.replace_cluster()
    etcd.enable_auth(HOST)


def desire(etcd: PrivateEtcd, path: str, generation: int, spec: dict[str, Any] | None) -> int:
    """Returns the revision, after which a report has it."""
    what = {"deleted": True} if spec is None else {"spec": spec}
    return etcd.put(f"{DESIRED}/{path}", {"generation": generation, **what})


def states(agent: PrivateAgent) -> dict[str, str]:
    return {port["port_id"]: port["state"] for port in agent.get("/v1/ports")[1] or ()}


def summary(etcd: PrivateEtcd) -> dict[str, Any]:
    found = etcd.get(f"{REPORTED}/summary")
    return found if isinstance(found, dict) else {"counts": {}, "revision": 0}


def until(what: str, condition: Any) -> Any:
    return wait_for(condition, DEADLINE_S, what, lambda: tail_of(BASE / "agent" / "agent.log", 60))


def finding(agent: PrivateAgent) -> str:
    found = [each["found"] for each in agent.get("/v1/host/checks")[1] if each["id"].startswith("fleet-")]
    return str(found[0]) if found else ""


def connected(agent: PrivateAgent) -> bool:
    text = agent.get("/metrics")[1]
    return "netplugin_fleet_connected 1.0" in text


def test_a_port_of_the_fleet_comes_is_reported_and_goes(agent: PrivateAgent, etcd: PrivateEtcd) -> None:
    until("the agent follows etcd", lambda: connected(agent))
    assert etcd.get(f"/netplugin/v1/alive/{HOST}")["identity"]
    written = desire(etcd, "port/nic1", 1, make_spec(1))
    until("it is verified and reported", lambda: summary(etcd)["revision"] >= written)
    assert states(agent) == {"nic1": "active"} and summary(etcd)["counts"]["owned"] == 1

    # Locally it is changed by those who mean it.
    status, refused = agent.call("DELETE", "/v1/ports/nic1")
    assert status == 409 and "--override" in refused["fix"]
    other = make_spec(1) | {"qos": {"egress_kbps": 10_000}}
    assert agent.call("PUT", "/v1/ports/nic1", other)[0] == 409
    assert agent.call("PUT", "/v1/ports/nic1", other, {"Netplugin-Override": "true"})[0] == 200
    shown = until("it is shown", lambda: etcd.get(f"{REPORTED}/port/nic1"))
    assert shown["state"] == "overridden"
    desire(etcd, "port/nic1", 2, make_spec(1))
    until("the fleet has it again", lambda: f"{REPORTED}/port/nic1" not in etcd.keys(REPORTED))
    assert agent.get("/v1/ports/nic1")[1]["spec"]["qos"]["egress_kbps"] is None

    # What is wrong for one says so, and the others go on.
    etcd.put(f"{DESIRED}/port/nonsense", '{"generation": 1, "spec": {"vm_id": 3}}')
    desire(etcd, "port/trusted", 1, make_spec(3) | {"port_security": {"enabled": False}})
    desire(etcd, "port/nic2", 1, make_spec(2))
    until("nic2 is there", lambda: states(agent) == {"nic1": "active", "nic2": "active"})
    until("both are reported", lambda: len(etcd.keys(f"{REPORTED}/port/")) == 2)
    assert etcd.get(f"{REPORTED}/port/nonsense")["error"]["code"] == "invalid_request"
    assert etcd.get(f"{REPORTED}/port/trusted")["error"]["code"] == "forbidden"

    removed = desire(etcd, "port/nic1", 3, None)
    until("it is gone", lambda: states(agent) == {"nic2": "active"})
    until("and reported", lambda: summary(etcd)["revision"] >= removed)
    etcd.ctl("del", f"{DESIRED}/port/nic1")


def test_a_host_does_without_etcd_and_merges_what_it_missed(agent: PrivateAgent, etcd: PrivateEtcd) -> None:
    desire(etcd, "port/nic1", 1, make_spec(1))
    desire(etcd, "port/nic2", 1, make_spec(2))
    until("both are there", lambda: len(states(agent)) == 2)
    etcd.kill()
    until("it is noticed", lambda: not connected(agent))
    agent.kill()
    agent.start()  # with no etcd at all
    assert states(agent) == {"nic1": "active", "nic2": "active"} and agent.get("/readyz")[0] == 200
    assert "endpoint" in finding(agent) or "connect" in finding(agent), finding(agent)
    agent.kill()
    etcd.start()
    desire(etcd, "port/nic2", 2, None)
    desire(etcd, "port/nic3", 1, make_spec(3))
    agent.start()
    until("it has merged", lambda: set(states(agent)) == {"nic1", "nic3"})


def test_nothing_goes_with_a_lost_prefix_an_old_copy_or_another_cluster(
    agent: PrivateAgent, etcd: PrivateEtcd, tmp_path: Path
) -> None:
    desire(etcd, "port/nic1", 1, make_spec(1))
    until("the first is there", lambda: len(states(agent)) == 1)
    etcd.backup(tmp_path / "old")
    desire(etcd, "port/nic2", 1, make_spec(2))
    desire(etcd, "port/nic3", 1, make_spec(3))
    everything = {"nic1": "active", "nic2": "active", "nic3": "active"}
    until("all are there", lambda: states(agent) == everything)

    etcd.ctl("del", "/netplugin/", "--prefix")
    until("they are unlisted", lambda: summary(etcd)["counts"].get("unlisted") == 3)
    assert states(agent) == everything

    etcd.restore(tmp_path / "old")
    until("it is refused", lambda: (summary(etcd).get("refused") or {}).get("code") == "conflict")
    assert "older copy" in finding(agent) and not connected(agent)
    assert states(agent) == everything
    desire(etcd, "port/nic1", 9, None)  # by a writer that knows nothing of it
    agent.kill()
    agent.start()
    until("it is refused again", lambda: "older copy" in finding(agent))
    assert states(agent) == everything

    # An operator lets it count: what it says is done, and what it does not name stays.
    at, cluster = etcd.revision(), summary(etcd)["cluster"]
    word = {"number": 1, "cluster": cluster, "replaces": cluster, "revision": at}
    etcd.put("/netplugin/v1/accepted", word)
    until("the removal is done", lambda: set(states(agent)) == {"nic2", "nic3"})
    until("the others are unlisted", lambda: summary(etcd)["counts"].get("unlisted") == 2)

    etcd.replace_cluster()
    until("the other cluster is refused", lambda: "cluster" in finding(agent))
    assert set(states(agent)) == {"nic2", "nic3"}

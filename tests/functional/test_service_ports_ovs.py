"""Service ports on OVS: devices of the host that serve VMs, and what they may not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.functional.conftest import make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import namespace
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.service import Service, service
from tests.lab.vm import Vm

BRIDGE, BACKEND = "br-phys1", "dpdkvhostuser"
MAC = "52:54:00:00:05:01"


@pytest.fixture
def dhcp(agent: PrivateAgent) -> Iterator[Service]:
    """A service that is no port yet; what a test makes of it is removed."""
    with service("np-svc", "svc0", MAC, "10.0.0.5") as made:
        yield made
        for port in agent.get("/v1/service-ports")[1]:
            assert agent.call("DELETE", f"/v1/service-ports/{port['port_id']}")[0] == 204


def put(agent: PrivateAgent, port_id: str, spec: dict[str, Any]) -> tuple[int, Any]:
    return agent.call("PUT", f"/v1/service-ports/{port_id}", spec)


def placed(agent: PrivateAgent, port_id: str, spec: dict[str, Any]) -> dict[str, Any]:
    status, port = put(agent, port_id, spec)
    assert (status, port.get("state")) == (200, "active"), port
    assert all(port["spec"][name] == spec[name] for name in ("device", "mac", "backend")), port
    return dict(port)


@contextmanager
def vm(agent: PrivateAgent, ovs: PrivateOvs, number: int, vlan_id: int) -> Iterator[Vm]:
    status, body = agent.call("PUT", f"/v1/ports/vm{number}", make_spec(number, vlan_id))
    assert status == 200, body
    with Vm(
        f"np-vm{number}", body["binding"]["socket_path"], body["spec"]["mac"], f"10.0.0.{number}"
    ) as made:
        ovs.wait_connected(body["binding"]["device"])
        yield made


def planned(agent: PrivateAgent) -> list[Any]:
    status, report = agent.call("POST", "/v1/reconcile", {"dry_run": True})
    assert status == 200 and report["errors"] == [], report
    return list(report["changes"])


def reaches(one: Vm, other: Service) -> None:
    wait_for(lambda: one.pings(other.address), 20, f"{one.name} reaches {other.name}")


def test_a_service_answers_vms_of_its_vlan_alone(agent: PrivateAgent, ovs: PrivateOvs, dhcp: Service) -> None:
    """Also after a killed agent, a deleted row and a device that vanished; DELETE leaves the device."""
    port = placed(agent, "svc", dhcp.spec(BACKEND))
    assert port["observed"]["device"] == "svc0"
    assert agent.get("/v1/ports")[1] == [] and agent.get("/v1/ports/svc")[0] == 404
    with vm(agent, ovs, 1, 100) as near, vm(agent, ovs, 2, 101) as far:
        reaches(near, dhcp)
        for _ in range(2):
            assert not far.pings(dhcp.address) and not dhcp.pings(far.address)
        run(["ip", "netns", "exec", dhcp.name, "ip", "link", "set", "eth0", "address", "52:54:00:00:05:66"])
        near.forget()
        assert not near.pings(dhcp.address), "it sends from its own MAC only"
        placed(agent, "svc", dhcp.spec(BACKEND, trusted=True))
        reaches(near, dhcp)
        run(["ip", "netns", "exec", dhcp.name, "ip", "link", "set", "eth0", "address", MAC])
        placed(agent, "svc", dhcp.spec(BACKEND))
        near.forget()
        reaches(near, dhcp)

        agent.daemon.kill()
        ovs.vsctl("del-port", "svc0")
        agent.start()
        wait_for(lambda: not planned(agent), 20, "the row that somebody deleted is back")
        reaches(near, dhcp)

        run(["ip", "link", "delete", "svc0"])
        wait_for(lambda: state(agent)[0] == "degraded", 20, "the port says that its device is gone")
        assert "svc0" in state(agent)[1]
        status, port = put(agent, "svc", dhcp.spec(BACKEND))
        assert (status, port["state"]) == (200, "degraded"), "it stays, and waits for its device"
        dhcp.make_device()
        wait_for(lambda: state(agent)[0] == "active", 20, "the device is back")
        near.forget()
        reaches(near, dhcp)
        # As a platform does after a reboot: the same name, another MAC.
        dhcp.remove_device()
        again = replace(dhcp, mac="52:54:00:00:05:77")
        again.make_device()
        wait_for(
            lambda: put(agent, "svc", again.spec(BACKEND))[1].get("state") == "active",
            20,
            "it takes the new one",
        )
        near.forget()
        reaches(near, again)
        placed(agent, "svc", again.spec(BACKEND, vlan_id=101))
        far.forget()
        reaches(far, dhcp)
        assert planned(agent) == []
    assert agent.call("DELETE", "/v1/service-ports/svc")[0] == 204
    assert agent.call("DELETE", "/v1/service-ports/svc")[0] == 204
    assert "svc0" not in ovs.vsctl("list-ports", BRIDGE).split()
    assert "mtu 1500" in run(["ip", "link", "show", "svc0"])


def state(agent: PrivateAgent) -> tuple[str, str]:
    port = agent.get("/v1/service-ports/svc")[1]
    return port["state"], str((port["error"] or {}).get("detail"))


def test_an_internal_port_serves_vms_from_a_namespace(agent: PrivateAgent, ovs: PrivateOvs) -> None:
    """It is a tap of vswitchd: it stays when the agent is killed, and is another after a restart of OVS."""
    with namespace("np-int") as name:
        made = Service(name, "int0", MAC, "10.0.0.5")
        spec = made.spec(BACKEND, internal=True)
        assert placed(agent, "svc", spec)["observed"]["moved"] is False
        assert "state DOWN" in run(["ip", "link", "show", "int0"])
        move(made)
        with vm(agent, ovs, 1, 100) as near, vm(agent, ovs, 2, 101) as far:
            reaches(near, made)
            assert not far.pings(made.address) and not made.pings(far.address)
            made.ip("link", "set", "int0", "address", "52:54:00:00:05:66")
            near.forget()
            assert not near.pings(made.address), "it sends from its own MAC only"
            made.ip("link", "set", "int0", "address", MAC)
            wait_for(lambda: moved(agent), 20, "the port says that its device was moved")
            agent.daemon.kill()
            agent.start()
            wait_for(lambda: not planned(agent), 20, "the restarted agent has nothing to do")
            placed(agent, "svc", made.spec(BACKEND, vlan_id=101, internal=True))
            far.forget()
            reaches(far, made)
        ovs.vswitchd.stop()
        ovs.start_vswitchd()
        wait_for(lambda: not moved(agent), 20, "the port says that its device is another")
        wait_for(lambda: not planned(agent), 20, "the flows are back")
        ovs.vsctl("del-port", "int0")
        wait_for(lambda: "int0" in ovs.vsctl("list-ports", BRIDGE).split(), 20, "it is made again")
        wait_for(lambda: state(agent)[0] == "active" and not planned(agent), 20, "the port works")
        made.ip("link", "delete", "int0")  # that of the vswitchd that has ended
        move(made)
        assert agent.call("DELETE", "/v1/service-ports/svc")[0] == 204
        wait_for(lambda: "int0" not in made.ip("link") + run(["ip", "link"]), 20, "the device is gone")


def move(service: Service) -> None:
    run(["ip", "link", "set", service.device, "netns", service.name, "address", service.mac])
    service.ip("link", "set", service.device, "up")
    service.ip("address", "add", f"{service.address}/24", "dev", service.device)


def moved(agent: PrivateAgent) -> bool:
    return bool(agent.get("/v1/service-ports/svc")[1]["observed"]["moved"])


def test_what_cannot_be_a_service_port_is_refused_and_nothing_changes(
    agent: PrivateAgent, ovs: PrivateOvs, dhcp: Service
) -> None:
    assert agent.call("PUT", "/v1/ports/vm1", make_spec(1))[0] == 200
    placed(agent, "svc", dhcp.spec(BACKEND))
    before = ovs.vsctl("show")

    def refused(port_id: str, spec: dict[str, Any], status: int, *words: str) -> None:
        answer, problem = put(agent, port_id, spec)
        assert answer == status and all(w in problem["detail"] for w in words), problem
        assert problem["fix"], problem

    good = dhcp.spec(BACKEND)
    run(["ip", "link", "add", "npt0", "type", "veth", "peer", "name", "thin0", "mtu", "1400"])
    run(["ip", "link", "add", "onbridge", "type", "veth", "peer", "name", "spare0"])
    run(["ip", "link", "add", "theirs", "type", "bridge"])
    run(["ip", "link", "set", "onbridge", "master", "theirs"])
    ovs.vsctl("add-br", "br-other", "--", "set", "bridge", "br-other", "datapath_type=netdev")
    ovs.vsctl("add-port", "br-other", "spare0")
    try:
        refused("new", {**good, "device": "nothing0"}, 422, "device", "nothing0")
        refused("new", {**good, "device": "lo"}, 422, "lo")
        refused("new", {**good, "device": "theirs"}, 422, "bridge")
        refused("new", {**good, "device": "npt0"}, 422, "npt0")
        refused("new", {**good, "device": "thin0"}, 422, "1400", "1500")
        refused("new", {**good, "device": "onbridge"}, 409, "theirs")
        refused("new", {**good, "device": "spare0"}, 409, "br-other")
        refused("new", {**good, "device": "thin0", "internal": True}, 409, "thin0")
        refused("new", {**good, "device": BRIDGE, "internal": True}, 409, BRIDGE)
        refused("new", {**good, "device": "npt1", "internal": True}, 422, "npt1")
        refused("svc", {**good, "internal": True}, 409, "internal")
        refused("new", good, 409, "svc0", "svc")
        refused("vm1", {**good, "device": "thin0"}, 409, "vm1")
        refused("svc", {**good, "device": "thin0"}, 422, "thin0")
        for path in ("/v1/ports/svc", "/v1/ports/new"):
            answer, problem = agent.call("PUT", path, {**make_spec(3), "device": "svc0"})
            assert answer == 422 and problem["errors"][0]["field"] == "device", problem
        assert agent.call("PUT", "/v1/ports/svc", make_spec(3))[0] == 409
        assert agent.call("DELETE", "/v1/ports/svc")[0] == 409
        assert agent.call("DELETE", "/v1/service-ports/vm1")[0] == 409
        batch = {"put": [{"port_id": "svc", "spec": make_spec(3)}], "delete": ["vm1"]}
        results = agent.call("POST", "/v1/ports:batch", batch)[1]["results"]
        assert [result["status"] for result in results] == [409, 204]
        assert [p["port_id"] for p in agent.get("/v1/service-ports")[1]] == ["svc"]
        assert planned(agent) == []
    finally:
        ovs.vsctl("del-br", "br-other")
        for name in ("npt0", "onbridge", "theirs"):
            run(["ip", "link", "delete", name])
    assert agent.call("PUT", "/v1/ports/vm1", make_spec(1))[0] == 200
    assert sorted(ovs.vsctl("show").splitlines()) == sorted(before.splitlines())

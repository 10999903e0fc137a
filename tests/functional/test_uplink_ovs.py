"""A DPDK uplink: frames from the wire reach a VM's port, and the uplink comes and goes with ports."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.host.names import UPLINK, device_name
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned, plug
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import pings
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.testpmd import Testpmd, TestpmdOptions

# DPDK's af_packet driver replaces a NIC: the other end of the veth is the wire.
DEVICE = "net_af_packet0,iface=nic0,qdisc_bypass=1"


@pytest.fixture
def wire() -> Iterator[str]:
    run(["ip", "link", "add", "nic0", "type", "veth", "peer", "name", "wire0"])
    try:
        for name in ("nic0", "wire0"):
            run(["ip", "link", "set", name, "up"])
        run(["ip", "address", "add", "10.9.0.1/24", "dev", "wire0"])
        yield "wire0"
    finally:
        run(["ip", "link", "delete", "nic0"])


@pytest.fixture
def agent(ovs: PrivateOvs, wire: str) -> Iterator[PrivateAgent]:
    options = {"ovs": {"uplinks": f"'\"physnet1:{DEVICE}\"'"}}
    with PrivateAgent(BASE / "agent", ovs, options) as private:
        yield private
    for name in ovs.vsctl("list-br").split():
        ovs.vsctl("del-br", name)
    shutil.rmtree(BASE / "agent")


def test_a_vm_is_reached_from_the_wire(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    spec = make_spec(1, vlan_id=None)
    body = plug(agent, "p1", spec)
    name = device_name(UPLINK, DEVICE)
    assert ovs.get("Interface", name, "options:dpdk-devargs") == DEVICE
    assert ovs.get("Interface", name, "external_ids:netplugin-uplink") == "physnet1"
    assert planned(agent) == []
    socket = Path(body["binding"]["socket_path"])
    with Testpmd(socket, TestpmdOptions(mac=spec["mac"])):
        ovs.wait_connected(body["binding"]["device"])
        wait_for(lambda: pings(None, "10.9.0.2"), 20, "the VM answers")
        # On a VLAN of its own it receives nothing of the untagged wire.
        plug(agent, "p1", make_spec(1, vlan_id=7))
        run(["ip", "neighbour", "flush", "dev", "wire0"])
        assert not any(pings(None, "10.9.0.2") for _ in range(3))
        plug(agent, "p1", spec)
        wait_for(lambda: pings(None, "10.9.0.2"), 20, "the VM answers again")
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    assert ovs.vsctl("list-br").split() == []


def test_the_uplink_is_repaired_and_kept(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p1", make_spec(1, vlan_id=5))
    plug(agent, "p2", make_spec(2, vlan_id=6, network={"mtu": 1400}))
    name = device_name(UPLINK, DEVICE)
    assert ovs.get("Interface", name, "mtu_request") == "1500"
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    assert ovs.get("Interface", name, "mtu_request") == "1500", "it is no port's to change"
    ovs.vsctl("del-port", name)
    wait_for(lambda: name in ovs.vsctl("list-ports", "br-phys1"), 30, "the uplink is put back")
    wait_for(lambda: planned(agent) == [], 30, "nothing is left to do")


def test_an_uplink_that_takes_no_jumbo_frames_fails_the_plug(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """af_packet says no to more than 1500 bytes: a first port is refused, one that is there is kept."""
    agent.restart_with({"ovs": {"uplink_mtu": "physnet1:9000"}})
    status, error = agent.call("PUT", "/v1/ports/p1", make_spec(1, vlan_id=5, network={"mtu": 9000}))
    assert (status, error["code"]) == (502, "host_error") and "uplink" in error["detail"]
    assert ovs.vsctl("list-br").split() == [], "nothing is left of it"
    agent.restart_with({"ovs": {"uplink_mtu": "physnet1:1500"}})
    plug(agent, "p1", make_spec(1, vlan_id=5))
    status, error = agent.call("PUT", "/v1/ports/p2", make_spec(2, vlan_id=6, network={"mtu": 9000}))
    assert (status, error["code"], error["step"]) == (409, "unsupported", "mtu")
    assert "[ovs] uplink_mtu" in error["detail"]
    assert agent.call("POST", "/v1/reconcile", {})[0] == 200
    assert agent.get("/v1/ports/p1")[1]["state"] == "active"
    assert planned(agent) == []


def test_what_the_operator_set_on_an_uplink_stays(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p1", make_spec(1, vlan_id=5))
    name = device_name(UPLINK, DEVICE)
    ovs.vsctl("set", "Interface", name, "options:n_rxq_desc=1024")
    assert planned(agent) == []
    plug(agent, "p2", make_spec(2, vlan_id=6, network={"mtu": 1400}))
    ovs.vsctl("set", "Interface", name, "mtu_request=1450")
    assert agent.call("POST", "/v1/reconcile", {})[0] == 200
    assert ovs.get("Interface", name, "mtu_request") == "1450"
    assert agent.get("/v1/ports/p2")[1]["state"] == "active"
    assert agent.get("/v1/ports/p1")[1]["state"] == "degraded", "its MTU does not fit any more"
    assert ovs.get("Interface", name, "options:n_rxq_desc") == "1024"

"""Physical networks at run time, on a real OVS-DPDK and on Linux bridges, with the agent killed between."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from netplugin.host.names import BRIDGE, UPLINK, device_name
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned, plug
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for

# DPDK's af_packet driver replaces a NIC.
DEVICE = "net_af_packet0,iface=nic0,qdisc_bypass=1"
NAME = device_name(UPLINK, DEVICE)
SEGMENT = device_name(BRIDGE, "storage")
#: Seconds in which the agent sees and repairs what others changed.
SOON_S = 30.0


@pytest.fixture(scope="module")
def agent(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    """One for all tests: each leaves neither a network nor a bridge."""
    for name in ("nic0", "nic1"):
        run(["ip", "link", "add", name, "mtu", "9000", "type", "veth", "peer", "name", f"far-{name}"])
        for end in (name, f"far-{name}"):
            run(["ip", "link", "set", end, "up"])
    options = {"agent": {"enabled_backends": "dpdkvhostuser,linuxbridge"}}
    with PrivateAgent(BASE / "agent", ovs, options) as private:
        yield private
    for name in ("nic0", "nic1"):
        run(["ip", "link", "delete", name])
    shutil.rmtree(BASE / "agent")


def put(agent: PrivateAgent, **spec: Any) -> dict[str, Any]:
    status, body = agent.call("PUT", "/v1/physical-networks/storage", spec)
    assert status == 200, body
    assert body["findings"] == [] and body["errors"] == []
    found: dict[str, Any] = body
    return found


def kill(agent: PrivateAgent) -> None:
    agent.kill()
    agent.start()


def test_on_ovs(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    kept: dict[str, Any] = {"bridge": "br-storage", "keep": True, "ovs": {"devices": [DEVICE]}}
    made = put(agent, **kept)
    assert (made["origin"], made["bridge"], made["ports"]) == ("api", "br-storage", 0)
    assert ovs.get("Bridge", "br-storage", "external_ids:netplugin-bridge") == "storage"
    assert int(ovs.get("Interface", NAME, "ofport")) > 0
    before = ovs.get("Open_vSwitch", ".", "next_cfg")
    assert put(agent, **kept) == made
    assert ovs.get("Open_vSwitch", ".", "next_cfg") == before, "the same again writes nothing"
    kill(agent)
    assert planned(agent) == [] and ovs.vsctl("list-br").split() == ["br-storage"]
    # The name of a bridge that others removed comes back with its uplink.
    ovs.vsctl("del-br", "br-storage")
    wait_for(lambda: "br-storage" in ovs.vsctl("list-br").split(), SOON_S, "the bridge is put back")
    wait_for(lambda: NAME in ovs.vsctl("list-ports", "br-storage"), SOON_S, "and its uplink")
    wait_for(lambda: planned(agent) == [], SOON_S, "nothing is left to do")

    plug(agent, "p1", make_spec(1, network={"physical_network": "storage", "mtu": 1400}))
    for method, body in (("DELETE", None), ("PUT", {**kept, "bridge": "br-other"})):
        status, error = agent.call(method, "/v1/physical-networks/storage", body)
        assert (status, error["code"]) == (409, "conflict") and "p1" in error["detail"]
    # af_packet takes no more than 1500 bytes: the network goes back to what it was.
    status, error = agent.call("PUT", "/v1/physical-networks/storage", {**kept, "mtu": 9000})
    assert status == 502, error
    assert agent.get("/v1/physical-networks/storage")[1] == {**made, "ports": 1}
    put(agent, **kept, mtu=1450)
    assert ovs.get("Interface", NAME, "mtu") == "1450"
    assert agent.get("/v1/ports/p1")[1]["state"] == "active"

    kill(agent)
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    assert ovs.vsctl("list-br").split() == ["br-storage"], "it is kept"
    put(agent, **{**kept, "keep": False})
    assert ovs.vsctl("list-br").split() == [], "nothing needs it"
    put(agent, **kept)
    ovs.vsctl("add-port", "br-storage", "theirs", "--", "set", "Interface", "theirs", "type=internal")
    run(["ip", "address", "add", "10.9.8.1/24", "dev", "br-storage"])
    for method, body in (("DELETE", None), ("PUT", {**kept, "keep": False})):
        status, error = agent.call(method, "/v1/physical-networks/storage", body)
        assert (status, error["code"]) == (409, "conflict"), error
        assert "address 10.9.8.1/24, port theirs" in error["detail"]
    ovs.vsctl("del-port", "theirs")
    run(["ip", "address", "delete", "10.9.8.1/24", "dev", "br-storage"])
    assert agent.call("DELETE", "/v1/physical-networks/storage")[0] == 204
    assert ovs.vsctl("list-br").split() == []
    assert [each["name"] for each in agent.get("/v1/physical-networks")[1]] == ["physnet1"]


def test_a_device_that_dpdk_does_not_take_leaves_nothing(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    kept = {"keep": True, "ovs": {"devices": ["net_af_packet1,iface=missing"]}}
    status, error = agent.call("PUT", "/v1/physical-networks/storage", kept)
    assert (status, error["code"], error["step"]) == (502, "host_error", "uplink"), error
    assert agent.get("/v1/physical-networks/storage")[0] == 404
    assert ovs.vsctl("list-br").split() == []
    kept["ovs"] = {"devices": ["fffe:1f:1f.7"]}
    status, error = agent.call("PUT", "/v1/physical-networks/storage", kept)
    assert status == 502 and "there is no PCI device fffe:1f:1f.7" in error["detail"], error
    assert planned(agent) == []


def _master(name: str) -> str:
    words = run(["ip", "-o", "link", "show", name]).split()
    return words[words.index("master") + 1] if "master" in words else ""


def test_on_linux_bridges(agent: PrivateAgent) -> None:
    kept: dict[str, Any] = {"keep": True, "mtu": 9000, "linuxbridge": {"interface": "nic1"}}
    put(agent, **kept)
    assert _master("nic1") == SEGMENT and "mtu 9000" in run(["ip", "link", "show", SEGMENT])
    kill(agent)
    assert planned(agent) == [] and _master("nic1") == SEGMENT
    run(["ip", "link", "delete", SEGMENT])
    wait_for(lambda: _master("nic1") == SEGMENT, SOON_S, "the bridge is put back")
    run(["ip", "link", "set", "nic1", "nomaster"])
    wait_for(lambda: _master("nic1") == SEGMENT, SOON_S, "the uplink is put back")
    on_it = make_spec(1, None, backend="linuxbridge", network={"physical_network": "storage"})
    plug(agent, "p1", on_it)
    status, error = agent.call("DELETE", "/v1/physical-networks/storage")
    assert (status, error["code"]) == (409, "conflict") and "p1" in error["detail"]
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    assert _master("nic1") == SEGMENT, "it is kept"
    # An interface with addresses would lose them on a bridge.
    run(["ip", "address", "add", "10.9.9.1/24", "dev", "far-nic1"])
    other = {**kept, "linuxbridge": {"interface": "far-nic1"}}
    status, error = agent.call("PUT", "/v1/physical-networks/storage", other)
    assert (status, error["code"], error["step"]) == (409, "conflict", "validate"), error
    assert [each["field"] for each in error["errors"]] == ["linuxbridge.interface"]
    assert _master("nic1") == SEGMENT and _master("far-nic1") == ""
    assert agent.call("DELETE", "/v1/physical-networks/storage")[0] == 204
    assert _master("nic1") == "" and SEGMENT not in run(["ip", "link"])


def test_a_linux_bridge_has_the_name_that_was_chosen(agent: PrivateAgent) -> None:
    kept: dict[str, Any] = {"keep": True, "bridge": "br-storage", "linuxbridge": {"interface": "nic1"}}
    taken = {**kept, "bridge": "far-nic1"}
    status, error = agent.call("PUT", "/v1/physical-networks/storage", taken)
    assert (status, error["errors"][0]["field"]) == (409, "bridge"), error
    put(agent, **kept)
    assert _master("nic1") == "br-storage"
    port = plug(
        agent, "p1", make_spec(1, None, backend="linuxbridge", network={"physical_network": "storage"})
    )
    assert port["binding"]["bridge"] == port["observed"]["bridge"] == "br-storage"
    assert _master(port["binding"]["device"]) == "br-storage"
    kill(agent)
    assert planned(agent) == [] and _master("nic1") == "br-storage"
    agent.daemon.kill()
    for words in ("br-storage down", "br-storage name other0", "other0 up"):
        run(["ip", "link", "set", *words.split()])
    agent.start()
    wait_for(lambda: _master("nic1") == "br-storage", SOON_S, "the bridge has its name again")
    wait_for(lambda: not planned(agent), SOON_S, "all is as it was")
    assert _master(port["binding"]["device"]) == "br-storage"
    assert agent.call("PUT", "/v1/physical-networks/storage", {**kept, "bridge": "br-other"})[0] == 409
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    put(agent, **{**kept, "bridge": "br-other"})
    assert _master("nic1") == "br-other" and "br-storage" not in run(["ip", "link"])
    assert agent.call("DELETE", "/v1/physical-networks/storage")[0] == 204
    assert _master("nic1") == "" and "br-other" not in run(["ip", "link"])

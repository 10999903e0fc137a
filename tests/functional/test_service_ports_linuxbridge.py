"""Service ports on Linux bridges: devices of the host that serve VMs, and what becomes of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from drivers.linuxbridge.segments import Segment
from netplugin.host.names import TAP, device_name
from tests.lab.namespaces import ANSWER_S
from tests.lab.processes import wait_for
from tests.lab.service import Service, service
from tests.lab.switch import switch, wire
from tests.lab.traffic_hosts import Host, host, make_spec, overlay
from tests.lab.traffic_news import news

BACKEND, DEVICE, MAC = "linuxbridge", "svc0", "52:54:00:00:05:01"
UPLINK = "eth2"
FLAT = {"type": "flat", "physical_network": "physnet1"}
OTHER = {"type": "flat", "physical_network": "physnet2"}
BLUE = overlay("blue")
ALLOWED = {"allowed_addresses": [{"ip": "10.0.0.5"}]}


@pytest.fixture(scope="module")
def hypervisor() -> Iterator[Host]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        made = stack.enter_context(host(1, f"physnet1:{UPLINK},physnet2:"))
        wire(made.name, UPLINK)
        made.network("blue", 5001, [made.address])
        yield made


@pytest.fixture
def dhcp(hypervisor: Host) -> Iterator[Service]:
    """A service that is no port yet; afterwards, nothing but its device is left of it."""
    before = hypervisor.links()
    with service("np-svc", DEVICE, MAC, "10.0.0.5", hypervisor.name) as made:
        device = attributes(hypervisor)
        yield made
        hypervisor.unplug(*hypervisor.ports())
        for port in hypervisor.agent.get("/v1/service-ports")[1]:
            assert delete(hypervisor, port["port_id"]) == 204
        assert attributes(hypervisor) in (device, None)
        assert hypervisor.links() <= {*before, DEVICE}
        assert "netplugin" not in hypervisor.sh("nft", "list", "ruleset")


def attributes(on: Host) -> dict[str, Any] | None:
    """What the device's owner has made of it; None if it is gone."""
    link = on.link(DEVICE)
    keys = ("flags", "mtu", "master", "ifalias", "address", "operstate", "qdisc")
    found = {key: link.get(key) for key in keys}
    found["qdiscs"] = [q["kind"] for q in on.json("tc", "-j", "qdisc") if q["dev"] == DEVICE]
    found["ipv6"] = link and on.sh("cat", f"/proc/sys/net/ipv6/conf/{DEVICE}/disable_ipv6")
    return found if link else None


def put(on: Host, spec: dict[str, Any], port_id: str = "svc") -> tuple[int, Any]:
    return on.agent.call("PUT", f"/v1/service-ports/{port_id}", spec)


def placed(on: Host, spec: dict[str, Any]) -> dict[str, Any]:
    status, port = put(on, spec)
    assert (status, port.get("state")) == (200, "active"), port
    return dict(port)


def delete(on: Host, port_id: str = "svc") -> int:
    return on.agent.call("DELETE", f"/v1/service-ports/{port_id}")[0]


def begun(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def state(on: Host) -> tuple[str, str]:
    port = on.agent.get("/v1/service-ports/svc")[1]
    return port["state"], str((port["error"] or {}).get("detail"))


@pytest.mark.parametrize("network", [FLAT, BLUE], ids=["flat", "vxlan"])
def test_it_and_the_vms_of_its_network_alone_reach_each_other(
    hypervisor: Host, dhcp: Service, network: dict[str, Any]
) -> None:
    port = placed(hypervisor, dhcp.spec(BACKEND, network=network, port_security=ALLOWED))
    assert port["observed"]["device"] == DEVICE
    assert hypervisor.ports() == [] and hypervisor.agent.get("/v1/ports/svc")[0] == 404
    with (
        hypervisor.vm("a", make_spec(1, network), "10.0.0.1") as a,
        hypervisor.vm("b", make_spec(2, OTHER), "10.0.0.2") as b,
    ):
        assert a.reaches(dhcp.address) and dhcp.pings(a.address, ANSWER_S)
        assert not b.pings(dhcp.address), "it is on another network"


def test_it_sends_from_its_own_mac_unless_it_is_trusted(hypervisor: Host, dhcp: Service) -> None:
    placed(hypervisor, dhcp.spec(BACKEND, network=OTHER))
    with hypervisor.vm("a", make_spec(1, OTHER), "10.0.0.1") as a:
        assert a.reaches(dhcp.address)
        dhcp.ip("link", "set", "eth0", "address", "52:54:00:00:05:66")
        a.ip("neigh", "flush", "all")
        assert not a.pings(dhcp.address)
        placed(hypervisor, dhcp.spec(BACKEND, network=OTHER, trusted=True))
        assert a.reaches(dhcp.address)


DRIFT = {
    "off its bridge": ("ip", "link", "set", DEVICE, "nomaster"),
    "on another's bridge": ("ip", "link", "set", DEVICE, "master", "theirs"),
    "mark lost": ("ip", "link", "set", DEVICE, "alias", ""),
    "guard lost": ("tc", "qdisc", "delete", "dev", DEVICE, "ingress"),
    "rules flushed": ("nft", "flush", "ruleset"),
    "not in the map": ("nft", f"delete element bridge netplugin ports {{ {DEVICE} }}"),
    "not among services": ("nft", f"delete element bridge netplugin services {{ {DEVICE} }}"),
    "MAC released": ("bridge", "fdb", "delete", MAC, "dev", DEVICE, "master"),
    "learning": ("bridge", "link", "set", "dev", DEVICE, "learning", "on"),
    "bridge gone": ("ip", "link", "delete", Segment("physnet2").bridge),
}


def test_what_others_change_is_repaired_and_delete_leaves_the_device(hypervisor: Host, dhcp: Service) -> None:
    """By a check of the whole host, and by an agent that was not there when it was changed."""
    hypervisor.sh("ip", "link", "add", "theirs", "type", "bridge")
    try:
        placed(hypervisor, dhcp.spec(BACKEND, network=OTHER))
        asked = everything(hypervisor)
        for what, command in DRIFT.items():
            hypervisor.sh(*command)
            hypervisor.repair()
            assert everything(hypervisor) == asked and hypervisor.changes() == [], what
        hypervisor.kill()
        for command in (DRIFT["rules flushed"], DRIFT["guard lost"], DRIFT["off its bridge"]):
            hypervisor.sh(*command)
        hypervisor.start()
        assert everything(hypervisor) == asked and state(hypervisor)[0] == "active"
    finally:
        hypervisor.sh("ip", "link", "delete", "theirs")


def everything(on: Host) -> object:
    """What the agent has made of the device, by the system's own tools."""
    link = on.link(DEVICE)
    filters = [f for f in on.json("tc", "-j", "filter", "show", "dev", DEVICE, "ingress") if "options" in f]
    fixed = [line for line in on.sh("bridge", "fdb", "show", "dev", DEVICE).splitlines() if "static" in line]
    rules = on.sh("nft", "-s", "list", "ruleset")
    learning = link.get("linkinfo", {}).get("info_slave_data", {}).get("learning")
    of_it = [line.strip() for line in rules.splitlines() if DEVICE in line]
    mark = link.get("ifalias", "").partition(" store=")[0]
    return link.get("master"), mark, len(filters), sorted(fixed), learning, of_it


def test_a_device_that_goes_down_or_vanishes_is_reported_and_used_again(
    hypervisor: Host, dhcp: Service
) -> None:
    spec = dhcp.spec(BACKEND, network=OTHER)
    placed(hypervisor, spec)
    dhcp.ip("link", "set", "eth0", "down")
    wait_for(lambda: state(hypervisor)[0] == "degraded", 20, "the port says that its other end is down")
    assert "other end" in state(hypervisor)[1]
    dhcp.ip("link", "set", "eth0", "up")
    wait_for(lambda: state(hypervisor)[0] == "active", 20, "it is up again")
    hypervisor.sh("ip", "link", "delete", DEVICE)
    wait_for(lambda: "not on this host" in state(hypervisor)[1], 20, "the port says that its device is gone")
    status, port = put(hypervisor, spec)
    assert (status, port["state"]) == (200, "degraded"), "it stays, and waits for its device"
    dhcp.make_device()
    wait_for(lambda: state(hypervisor)[0] == "active", 20, "the device is back")
    with hypervisor.vm("a", make_spec(1, OTHER), "10.0.0.1") as a:
        assert a.reaches(dhcp.address)
        # As a platform does after a reboot: the same name, another MAC.
        dhcp.remove_device()
        again = replace(dhcp, mac="52:54:00:00:05:77")
        again.make_device()
        placed(hypervisor, again.spec(BACKEND, network=OTHER))
        a.ip("neigh", "flush", "all")
        assert a.reaches(again.address)
        fixed = hypervisor.sh("bridge", "fdb", "show", "brport", DEVICE)
        assert again.mac in fixed and MAC not in fixed, "the MAC of the old device is nobody's"
    assert hypervisor.changes() == []


def test_an_agent_that_is_killed_midway_finishes_when_it_is_back(hypervisor: Host, dhcp: Service) -> None:
    """It is killed at the first events that the kernel reports, of a PUT and of a DELETE."""
    spec = dhcp.spec(BACKEND, network=OTHER)
    free = attributes(hypervisor)
    placed(hypervisor, spec)
    asked = everything(hypervisor)
    assert delete(hypervisor) == 204 and attributes(hypervisor) == free
    for count in (2, 5, 8):
        with news(hypervisor.name) as reported:
            call = begun(lambda: put(hypervisor, spec))
            reported.wait(count, call.is_alive)
            hypervisor.kill()
            call.join()
        hypervisor.start()
        assert state(hypervisor)[0] == "active", "its intent was committed before"
        assert everything(hypervisor) == asked and hypervisor.changes() == []
        with news(hypervisor.name) as reported:
            call = begun(lambda: delete(hypervisor))
            reported.wait(count, call.is_alive)
            hypervisor.kill()
            call.join()
        hypervisor.start()
        assert delete(hypervisor) == 204
        assert attributes(hypervisor) == free and hypervisor.changes() == []


def test_what_cannot_be_a_service_port_is_refused_and_nothing_changes(
    hypervisor: Host, dhcp: Service
) -> None:
    hypervisor.plug("a", make_spec(1, OTHER))
    good = dhcp.spec(BACKEND, network=OTHER)
    placed(hypervisor, good)
    hypervisor.sh("ip", "link", "add", "theirs", "type", "bridge")
    hypervisor.sh("ip", "link", "add", "spare0", "type", "veth", "peer", "name", "spare1")
    tap = device_name(TAP, "a")

    def links() -> list[list[Any]]:
        keys = ("ifname", "mtu", "master", "ifalias")
        return [[link.get(key) for key in keys] for link in hypervisor.json("ip", "-j", "link")]

    def refused(device: str, status: int, *words: str, port_id: str = "new") -> None:
        before = everything(hypervisor), links()
        answer, problem = put(hypervisor, {**good, "device": device}, port_id)
        assert answer == status and all(w in problem["detail"] for w in words), problem
        assert problem["fix"], problem
        assert (everything(hypervisor), links()) == before

    try:
        refused("nothing0", 422, "nothing0")
        refused("theirs", 422, "bridge")
        refused("lo", 422, "lo")
        refused(tap, 422, tap)
        refused(UPLINK, 422, "physical_interfaces")
        refused(DEVICE, 409, "svc")
        refused("spare0", 409, "device", port_id="svc")
        hypervisor.sh("ip", "link", "set", "spare0", "alias", "an operator's")
        refused("spare0", 409, "an operator's")
        hypervisor.sh("ip", "link", "set", "spare0", "alias", "")
        hypervisor.sh("ip", "link", "set", "spare0", "master", "theirs")
        refused("spare0", 409, "theirs")
        hypervisor.sh("ip", "link", "set", "spare0", "nomaster", "mtu", "1400")
        refused("spare0", 422, "1400", "1500")
        assert hypervisor.changes() == [] and hypervisor.ports() == ["a"]
        assert json.loads(hypervisor.sh("ip", "-j", "link", "show", "spare0"))[0].get("ifalias") is None
    finally:
        for name in ("theirs", "spare0"):
            hypervisor.sh("ip", "link", "delete", name)


def test_a_network_stays_as_long_as_a_vm_or_a_service_is_on_it(hypervisor: Host, dhcp: Service) -> None:
    placed(hypervisor, dhcp.spec(BACKEND, network=FLAT))
    spec = make_spec(1, FLAT)
    with hypervisor.vm("a", spec, "10.0.0.1") as a:
        assert a.reaches(dhcp.address)
    hypervisor.unplug("a")
    assert (
        hypervisor.link(DEVICE)["master"] == hypervisor.link(UPLINK)["master"] == Segment("physnet1").bridge
    )
    assert hypervisor.changes() == [] and state(hypervisor)[0] == "active"
    with hypervisor.vm("a", spec, "10.0.0.1") as a:
        assert a.reaches(dhcp.address)
        assert delete(hypervisor) == 204
        assert not a.pings(dhcp.address)
        assert hypervisor.link(UPLINK)["master"] == Segment("physnet1").bridge
        assert hypervisor.changes() == []


def test_a_device_that_is_no_port_sends_nothing(hypervisor: Host, dhcp: Service) -> None:
    """An operator's device on the network's bridge; on a bridge of the operator's it sends."""
    bridge = Segment("physnet2").bridge

    def shut() -> bool:
        return f'"{DEVICE}" : drop' in hypervisor.sh("nft", "list", "map", "bridge", "netplugin", "ports")

    with hypervisor.vm("a", make_spec(1, OTHER), "10.0.0.1") as a:
        hypervisor.sh("ip", "link", "set", DEVICE, "master", bridge)
        wait_for(shut, 20, "what comes from the device is dropped")
        assert not a.pings(dhcp.address) and not dhcp.pings(a.address)
        assert hypervisor.link(DEVICE).get("ifalias") is None and hypervisor.changes() == []
        placed(hypervisor, dhcp.spec(BACKEND, network=OTHER))
        assert a.reaches(dhcp.address) and not shut()
        assert delete(hypervisor) == 204
        hypervisor.sh("ip", "link", "set", DEVICE, "master", bridge)
        wait_for(shut, 20, "it is dropped again")
        hypervisor.sh("ip", "link", "set", DEVICE, "nomaster")
        wait_for(lambda: not shut(), 20, "off the bridge, its frames are none of ours")

"""What is requested, configured or lost around ports in use: they keep what they have, and it is reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from drivers.linuxbridge.segments import Segment
from netplugin.host.names import TAP, device_name
from tests.lab.processes import wait_for
from tests.lab.switch import switch, wire
from tests.lab.traffic_hosts import Host, host, make_spec, overlay

UPLINK, OTHER = "eth2", "eth3"
ON_WIRE = {"type": "flat", "physical_network": "physnet1"}
LOCAL = {"type": "flat", "physical_network": "physnet2"}
BLUE = Segment(network_id="blue")
INTERFACES = f"physnet1:{UPLINK},physnet2:"


@pytest.fixture(scope="module")
def machine() -> Iterator[Host]:
    with switch(), host(1, INTERFACES) as one:
        wire(one.name, UPLINK)
        wire(one.name, OTHER)
        yield one


@pytest.fixture
def one(machine: Host) -> Iterator[Host]:
    """The host with the configuration of all tests, and nothing plugged on it afterwards."""
    options = {group: dict(values) for group, values in machine.agent.groups.items()}
    yield machine
    machine.sh("ip", "link", "set", UPLINK, "up")
    machine.agent.stop()
    machine.agent.groups = options
    machine.agent.start_without_orphans()
    machine.unplug(*machine.ports())
    for network in machine.agent.get("/v1/networks")[1]:
        machine.agent.call("DELETE", f"/v1/networks/{network['network_id']}")


def restart(one: Host, ready: bool = True, **options: dict[str, str]) -> None:
    one.agent.stop()
    for group, values in options.items():
        one.agent.groups.setdefault(group, {}).update(values)
    one.agent.start(ready=ready)


def tap(port_id: str) -> str:
    return device_name(TAP, port_id)


def findings(one: Host) -> dict[str, dict[str, Any]]:
    status, found = one.agent.get("/v1/host/checks")
    assert status == 200, found
    return {finding["id"]: finding for finding in found}


def reconcile(one: Host) -> dict[str, Any]:
    status, report = one.agent.call("POST", "/v1/reconcile", {})
    assert status == 200, report
    found: dict[str, Any] = report
    return found


# -- options that were changed --------------------------------------------------------------------


def test_ports_of_a_backend_that_is_not_enabled_any_more(one: Host) -> None:
    """Nobody looks at them: they are never called active, and a DELETE says what it cannot do."""
    one.plug("p", make_spec(1, LOCAL))
    restart(one, ready=False, agent={"enabled_backends": "sriov"})
    port = one.port("p")
    assert (port["state"], port["error"]["code"]) == ("failed", "backend_unavailable")
    assert "[agent] enabled_backends" in port["error"]["fix"]
    assert one.agent.get("/v1/ports?state=active")[1] == []
    assert [p["port_id"] for p in one.agent.get("/v1/ports?state=failed")[1]] == ["p"]
    metric = 'netplugin_ports{backend="linuxbridge",state="failed"} 1.0'
    assert metric in one.agent.get("/metrics")[1]
    finding = findings(one)["linuxbridge-ports-failed"]
    assert finding["status"] == "fail" and "enabled_backends" in finding["fix"]
    for method, body in (("DELETE", None), ("PUT", make_spec(1, LOCAL))):
        status, error = one.agent.call(method, "/v1/ports/p", body)
        assert (status, error["code"]) == (503, "backend_unavailable"), method
        assert "enabled_backends" in error["fix"]
    assert tap("p") in one.links(), "the VM keeps its NIC"
    restart(one, agent={"enabled_backends": "linuxbridge"})
    assert one.port("p")["state"] == "active"
    one.unplug("p")


def test_a_network_taken_out_of_physical_interfaces(one: Host) -> None:
    """Its ports keep all they have and say why they are failed; others are repaired as always."""
    one.plug("wired", make_spec(1, ON_WIRE))
    one.plug("local", make_spec(2, LOCAL))
    before = one.link(tap("wired"))
    restart(one, linuxbridge={"physical_interfaces": "physnet2:"})
    port = one.port("wired")
    assert port["state"] == "degraded" and port["error"]["code"] == "backend_unavailable"
    assert "[linuxbridge] physical_interfaces" in port["error"]["detail"]
    now = one.link(tap("wired"))
    assert {key: now[key] for key in ("master", "mtu", "ifindex")} == {
        key: before[key] for key in ("master", "mtu", "ifindex")
    }
    assert one.link(UPLINK)["master"] == before["master"], "the way out stays too"
    assert "physical_interfaces" in findings(one)["linuxbridge-ports-degraded"]["found"]
    one.sh("ip", "link", "set", tap("local"), "down")
    one.sh("nft", "flush", "ruleset")
    assert one.port("local")["state"] == "active"
    wait_for(lambda: tap("wired") in one.sh("nft", "list", "ruleset"), 30, "its filter is back")
    reconcile(one)
    assert "UP" in one.link(tap("local"))["flags"], "the other port is repaired"
    status, error = one.put("new", make_spec(3, ON_WIRE))
    assert (status, error["code"]) == (422, "invalid_request")
    restart(one, linuxbridge={"physical_interfaces": INTERFACES})
    assert one.port("wired")["state"] == "active"


def test_a_network_that_has_another_interface(one: Host) -> None:
    """Its ports leave by the one they have until the operator takes it from them."""
    segment = Segment("physnet1")
    one.plug("wired", make_spec(1, ON_WIRE))
    before = one.link(tap("wired"))["ifindex"]
    for interfaces in (f"physnet1:{OTHER},physnet2:", "physnet1:,physnet2:"):
        restart(one, linuxbridge={"physical_interfaces": interfaces})
        port = one.port("wired")
        assert (port["state"], port["error"]["code"]) == ("degraded", "conflict")
        assert "[linuxbridge] physical_interfaces" in port["error"]["detail"]
        assert "physical_interfaces" in findings(one)["linuxbridge-ports-degraded"]["found"]
        one.sh("ip", "link", "set", tap("wired"), "down")
        reconcile(one)
        link = one.link(tap("wired"))
        assert (link["ifindex"], link["master"]) == (before, segment.bridge) and "UP" in link["flags"]
        assert UPLINK in left_by(one, segment)
        status, error = one.put("new", make_spec(3, ON_WIRE))
        assert (status, error["code"]) == (409, "conflict") and UPLINK in error["detail"]
    # What the error says that lets them move.
    restart(one, linuxbridge={"physical_interfaces": f"physnet1:{OTHER},physnet2:"})
    words = one.port("wired")["error"]["fix"].partition("at once: ")[2].partition(",")[0]
    one.sh(*words.split())
    reconcile(one)
    assert OTHER in left_by(one, segment) and one.port("wired")["state"] == "active"
    assert one.link(tap("wired"))["ifindex"] == before
    one.plug("new", make_spec(3, ON_WIRE))


def left_by(one: Host, segment: Segment) -> str:
    """What the kernel says of the ports of the segment's bridge."""
    return one.sh("ip", "link", "show", "master", segment.bridge)


def test_the_address_of_tunnels_taken_away(one: Host) -> None:
    one.network("blue", 5001, ["10.9.0.2"])
    one.plug("p", make_spec(1, overlay("blue")))
    one.plug("local", make_spec(2, LOCAL))
    before = one.sh("bridge", "fdb", "show", "dev", BLUE.device)
    address = one.agent.groups["linuxbridge"]["local_ip"]
    one.agent.stop()
    del one.agent.groups["linuxbridge"]["local_ip"]
    one.agent.start()
    port = one.port("p")
    assert port["state"] == "degraded" and "[linuxbridge] local_ip" in port["error"]["fix"]
    assert one.sh("bridge", "fdb", "show", "dev", BLUE.device) == before
    assert "local_ip" in findings(one)["linuxbridge-ports-degraded"]["fix"]
    assert one.port("local")["state"] == "active"
    restart(one, linuxbridge={"local_ip": address})
    assert one.port("p")["state"] == "active"


# -- one port that fails, or does not work --------------------------------------------------------


def test_peers_change_while_a_port_has_failed(one: Host) -> None:
    """It is reported in the answer; the network of the others is as asked."""
    one.network("blue", 5001, ["10.9.0.2"])
    one.plug("good", make_spec(1, overlay("blue")))
    one.plug("bad", make_spec(2, overlay("blue")))
    one.agent.stop()  # or it would put the tap back at once
    one.sh("ip", "link", "delete", tap("bad"))
    one.sh("ip", "link", "add", tap("bad"), "type", "bridge")
    try:
        one.agent.start()
        assert one.port("bad")["state"] == "failed"
        spec = {"type": "vxlan", "vni": 5001, "peers": ["10.9.0.2", "10.9.0.3"]}
        status, network = one.agent.call("PUT", "/v1/networks/blue", spec)
        assert status == 200 and network["spec"]["peers"] == spec["peers"]
        [error] = network["errors"]
        assert (error["port_id"], error["code"]) == ("bad", "conflict")
        assert "10.9.0.3" in one.sh("bridge", "fdb", "show", "dev", BLUE.device)
        assert one.port("good")["state"] == "active"
    finally:
        one.sh("ip", "link", "delete", tap("bad"))
    reconcile(one)
    assert one.port("bad")["state"] == "active"


def test_the_filter_of_a_degraded_port_is_tightened(one: Host) -> None:
    """What the host says of its way out is no reason to leave a VM free to spoof."""
    one.plug("p", make_spec(1, ON_WIRE))
    one.sh("ip", "link", "set", UPLINK, "down")
    reconcile(one)
    assert one.port("p")["state"] == "degraded"
    tight = make_spec(1, ON_WIRE, port_security={"allowed_addresses": [{"ip": "10.0.0.5"}]})
    status, port = one.put("p", tight)
    assert (status, port["state"]) == (200, "degraded"), port
    assert "down" in port["error"]["detail"]
    reconcile(one)
    port = one.port("p")
    assert port["spec"]["port_security"]["allowed_addresses"][0]["ip"] == "10.0.0.5"
    assert "10.0.0.5" in one.sh("nft", "list", "ruleset")
    assert one.put("p", tight)[0] == 200, "the same again has the same answer"
    one.sh("ip", "link", "set", UPLINK, "up")
    reconcile(one)
    assert one.port("p")["state"] == "active"


# -- a lost store ---------------------------------------------------------------------------------


def test_a_delete_that_names_a_kept_orphan_removes_it(one: Host) -> None:
    one.plug("gone", make_spec(1, LOCAL))
    one.plug("kept", make_spec(2, LOCAL))
    one.agent.lose_store()
    assert reconcile(one)["orphans_kept"] == ["gone", "kept"]
    assert one.agent.get("/readyz")[0] == 503, "the store is lost"
    assert one.delete("gone") == 204
    assert tap("gone") not in one.links() and tap("kept") in one.links()
    assert tap("gone") not in one.sh("nft", "list", "ruleset")
    assert reconcile(one)["orphans_kept"] == ["kept"]
    assert one.delete("gone") == 204, "and again"
    assert one.agent.get("/readyz")[0] == 503, "one is still kept"
    assert one.delete("kept") == 204
    assert one.agent.get("/readyz")[0] == 200

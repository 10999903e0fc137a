"""OVS-DPDK: what is configured or lost around ports that VMs use; they keep what they have."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivers.ovs.remains import ASIDE
from netplugin.host.names import UPLINK, VHOST, device_name
from tests.functional.conftest import make_spec
from tests.functional.hosts_ovs import Host, clean, host, nic, spec_on
from tests.lab.processes import wait_for
from tests.lab.switch import switch

MAPPINGS = "physnet1:br-phys1,physnet2:br-phys2"
NIC = device_name(UPLINK, nic(1, "eth2"))
OTHER_NETWORK = {"physical_network": "physnet2"}


@pytest.fixture(scope="module")
def machine() -> Iterator[Host]:
    more = {"bridge_mappings": MAPPINGS}
    with switch(), host(1, uplinks=["eth2"], memory_mb=192, more=more) as one:
        yield one


@pytest.fixture
def one(machine: Host) -> Iterator[Host]:
    """The host with the configuration of all tests, and nothing plugged on it afterwards."""
    options = {group: dict(values) for group, values in machine.agent.groups.items()}
    with clean(machine):
        yield machine
        machine.agent.stop()
        machine.agent.groups = options
        machine.agent.start_without_orphans()


def vhost(port_id: str) -> str:
    return device_name(VHOST, port_id)


def findings(one: Host) -> dict[str, dict[str, Any]]:
    status, found = one.agent.get("/v1/host/checks")
    assert status == 200, found
    return {finding["id"]: finding for finding in found}


def interface(one: Host, port_id: str) -> tuple[str, str]:
    """Its number and its path: both stay as long as the port is not made again."""
    name = vhost(port_id)
    return (
        one.ovs.get("Interface", name, "ofport"),
        one.ovs.get("Interface", name, "options:vhost-server-path"),
    )


# -- options that were changed --------------------------------------------------------------------


def test_a_network_taken_out_of_bridge_mappings(one: Host) -> None:
    live = one.plug("live", make_spec(1))
    one.plug("other", make_spec(2, network=OTHER_NETWORK))
    before, flows = interface(one, "live"), one.flows("br-phys1")
    one.agent.stop()
    one.agent.groups["ovs"]["bridge_mappings"] = "physnet2:br-phys2"
    del one.agent.groups["ovs"]["uplinks"]
    one.agent.start()
    status, listed = one.agent.get("/v1/ports")
    assert status == 200
    states = {port["port_id"]: port for port in listed}
    assert states["other"]["state"] == "active"
    assert states["live"]["state"] == "degraded"
    assert states["live"]["error"]["code"] == "backend_unavailable"
    assert "[ovs] bridge_mappings" in states["live"]["error"]["detail"]
    assert states["live"]["binding"] == live["binding"]
    assert interface(one, "live") == before and one.flows("br-phys1") == flows
    assert NIC in one.ovs.vsctl("list-ports", "br-phys1").split(), "the way out stays too"
    assert "bridge_mappings" in findings(one)["dpdkvhostuser-ports-degraded"]["found"]
    # Whatever else happens to either of the two is repaired as always.
    one.ovs.ofctl("del-flows", "br-phys1")
    one.ovs.vsctl("set", "Port", vhost("other"), "tag=7")
    one.repair()
    assert one.flows("br-phys1") == flows
    assert one.ovs.get("Port", vhost("other"), "tag") == "100"
    tight = {"allowed_addresses": [{"ip": "10.0.0.5"}]}
    status, port = one.put("live", make_spec(1, port_security=tight))
    assert (status, port["state"]) == (200, "degraded"), port
    assert any("10.0.0.5" in flow for flow in one.flows("br-phys1"))
    status, error = one.put("new", make_spec(3))
    assert (status, error["code"]) == (422, "invalid_request")
    assert one.agent.call("DELETE", "/v1/ports/live")[0] == 204
    assert one.ovs.vsctl("list-br").split() == ["br-phys2", "br-underlay"]


def test_a_network_mapped_to_another_bridge(one: Host) -> None:
    """What is plugged stays on its bridge with its way out, and says that it is not where it should be."""
    live = one.plug("live", make_spec(1))
    one.plug("other", make_spec(2, network=OTHER_NETWORK))
    before = {port_id: interface(one, port_id) for port_id in ("live", "other")}
    flows = one.flows("br-phys1")
    for mappings in ("physnet1:br-new,physnet2:br-phys2", "physnet1:br-phys2,physnet2:br-phys1"):
        one.agent.restart_with({"ovs": {"bridge_mappings": mappings}})
        port = one.agent.get("/v1/ports/live")[1]
        assert (port["state"], port["error"]["code"]) == ("degraded", "conflict")
        assert "[ovs] bridge_mappings" in port["error"]["detail"]
        assert port["binding"] == live["binding"]
        assert "bridge_mappings" in findings(one)["dpdkvhostuser-ports-degraded"]["found"]
        one.ovs.ofctl("del-flows", "br-phys1")
        one.repair()
        assert {port_id: interface(one, port_id) for port_id in before} == before
        assert one.flows("br-phys1") == flows
        assert NIC in one.ovs.vsctl("list-ports", "br-phys1").split(), "the way out stays too"
        status, error = one.put("new", make_spec(3))
        assert (status, error["code"]) == (409, "conflict"), error
        assert one.planned() == []
        assert one.ovs.vsctl("list-br").split() == ["br-phys1", "br-phys2", "br-underlay"]
    assert one.agent.get("/v1/ports/other")[1]["state"] == "degraded", "it was exchanged too"
    one.agent.restart_with({"ovs": {"bridge_mappings": "physnet1:br-new,physnet2:br-phys2"}})
    assert one.agent.get("/v1/ports/other")[1]["state"] == "active"
    tight = {"allowed_addresses": [{"ip": "10.0.0.5"}]}
    status, port = one.put("live", make_spec(1, port_security=tight))
    assert (status, port["state"]) == (200, "degraded"), port
    assert any("10.0.0.5" in flow for flow in one.flows("br-phys1"))
    assert one.agent.call("DELETE", "/v1/ports/live")[0] == 204
    assert one.plug("live", make_spec(1))["binding"]["bridge"] == "br-new"
    assert NIC in one.ovs.vsctl("list-ports", "br-new").split()


def test_two_bridges_of_the_operators_exchanged(one: Host) -> None:
    """They carry no mark of ours: that of each port says for which network it was put there."""
    bridges = ("br-a", "br-b")
    for bridge in bridges:
        one.ovs.vsctl("add-br", bridge, "--", "set", "Bridge", bridge, "datapath_type=netdev")
        one.ovs.vsctl("set-fail-mode", bridge, "secure")
    try:
        one.agent.restart_with({"ovs": {"bridge_mappings": "physnet1:br-a,physnet2:br-b", "uplinks": ""}})
        live = {"a": one.plug("a", make_spec(1)), "b": one.plug("b", make_spec(2, network=OTHER_NETWORK))}
        before = {port_id: interface(one, port_id) for port_id in live}
        # As a version that did not write this mark left it: the next look writes it.
        one.ovs.vsctl("remove", "Port", vhost("a"), "external_ids", "netplugin-mapping")
        one.repair()
        flows = [one.flows(bridge) for bridge in bridges]
        one.agent.restart_with({"ovs": {"bridge_mappings": "physnet1:br-b,physnet2:br-a"}})
        for port_id, bridge in zip(live, bridges, strict=True):
            port = one.agent.get(f"/v1/ports/{port_id}")[1]
            assert (port["state"], port["error"]["code"]) == ("degraded", "conflict")
            assert f"the port is on bridge {bridge}" in port["error"]["detail"]
            assert port["binding"] == live[port_id]["binding"]
            assert one.ovs.vsctl("list-ports", bridge).split() == [vhost(port_id)]
        assert "bridge_mappings" in findings(one)["dpdkvhostuser-ports-degraded"]["found"]
        assert {port_id: interface(one, port_id) for port_id in live} == before
        assert [one.flows(bridge) for bridge in bridges] == flows and one.planned() == []
        one.agent.restart_with({"ovs": {"bridge_mappings": "physnet1:br-a,physnet2:br-b"}})
        assert {port["state"] for port in one.agent.get("/v1/ports")[1]} == {"active"}
        assert one.plug("a", make_spec(1, network=OTHER_NETWORK))["binding"]["bridge"] == "br-b"
        for port_id in live:
            assert one.agent.call("DELETE", f"/v1/ports/{port_id}")[0] == 204
    finally:
        for bridge in bridges:
            one.ovs.vsctl("--if-exists", "del-br", bridge)


def test_the_address_of_tunnels_taken_away(one: Host) -> None:
    one.network("blue", 5001, "10.9.0.2")
    one.plug("p", spec_on("blue", 1))
    flows = one.flows("np-tunnels")
    one.agent.stop()
    del one.agent.groups["ovs"]["local_ip"]
    one.agent.start()
    port = one.agent.get("/v1/ports/p")[1]
    assert (port["state"], port["error"]["code"]) == ("degraded", "backend_unavailable")
    assert "[ovs] local_ip" in port["error"]["detail"]
    one.ovs.ofctl("del-flows", "np-tunnels")
    one.repair()
    assert one.flows("np-tunnels") == flows
    status, error = one.put("new", spec_on("blue", 2))
    assert (status, error["code"]) == (503, "backend_unavailable")


def test_the_mtu_of_an_uplink_is_the_operators(one: Host) -> None:
    """To change it stops the NIC for everybody, so no VM's port does."""
    one.plug("a", make_spec(1))
    assert one.ovs.get("Interface", NIC, "mtu_request") == "1500"
    large = make_spec(2, network={"mtu": 1600})
    status, error = one.put("large", large)
    assert (status, error["code"], error["step"]) == (409, "unsupported", "mtu")
    assert "[ovs] uplink_mtu" in error["detail"] and "mtu_request=1600" in error["fix"]
    assert one.ovs.get("Interface", NIC, "mtu_request") == "1500"
    one.ovs.vsctl("set", "Interface", NIC, "mtu_request=1600")
    wait_for(lambda: one.ovs.get("Interface", NIC, "mtu") == "1600", 90, "the operator raises it")
    one.plug("large", large)
    assert one.agent.call("DELETE", "/v1/ports/large")[0] == 204
    one.repair()
    assert one.ovs.get("Interface", NIC, "mtu_request") == "1600", "and nobody lowers it"
    assert one.planned() == []


# -- sockets --------------------------------------------------------------------------------------


def test_a_changed_socket_directory_is_for_new_ports(one: Host) -> None:
    """``vhost-server-path`` cannot change live: a port made again would take the VM's NIC."""
    live = one.plug("live", make_spec(1))
    before = interface(one, "live")
    new = Path(one.agent.groups["ovs"]["vhost_socket_dir"]).with_name("elsewhere")
    one.agent.restart_with({"ovs": {"vhost_socket_dir": str(new)}})
    assert one.agent.get("/v1/ports/live")[1]["binding"] == live["binding"]
    one.repair()
    assert interface(one, "live") == before
    path = Path(one.plug("new", make_spec(2))["binding"]["socket_path"])
    assert path.is_relative_to(new)
    assert "vhost_socket_dir" in findings(one)["vhost-socket-dir"]["expected"]
    # Whatever becomes of its row: the VM has the socket by its path.
    one.ovs.vsctl("del-port", vhost("live"))
    one.repair()
    assert interface(one, "live")[1] == before[1] == live["binding"]["socket_path"]
    assert one.agent.get("/v1/ports/live")[1]["state"] == "active"
    assert one.agent.call("DELETE", "/v1/ports/live")[0] == 204
    assert not Path(before[1]).parent.exists()


#: Listens as QEMU does, and says who came; or says what is refused.
_QEMU = """
import os, socket, sys
own, other = sys.argv[1:]
for act in (lambda: os.listdir(os.path.dirname(other)),
            lambda: os.unlink(other),
            lambda: os.rename(os.path.dirname(other), os.path.dirname(other) + ".old"),
            lambda: socket.socket(socket.AF_UNIX).bind(other + "2"),
            lambda: os.listdir(os.path.dirname(os.path.dirname(own)))):
    try:
        act()
    except PermissionError:
        continue
    sys.exit("the neighbour's socket can be reached")
server = socket.socket(socket.AF_UNIX)
server.bind(own)
server.listen()
server.settimeout(90)
server.accept()
print("OVS came")
"""


def test_qemus_of_two_users_cannot_touch_each_others_sockets(one: Host) -> None:
    users = {"a": 40001, "b": 40002}
    paths = {
        port_id: one.plug(port_id, make_spec(number, qemu_user=users[port_id]))["binding"]["socket_path"]
        for number, port_id in enumerate(users, start=1)
    }
    assert "qemu-user" not in findings(one)
    for port_id, neighbour in (("a", "b"), ("b", "a")):
        uid = users[port_id]
        assert Path(paths[port_id]).parent.stat().st_uid == uid
        done = subprocess.run(
            [
                "setpriv",
                f"--reuid={uid}",
                f"--regid={uid}",
                "--clear-groups",
                "--",
                sys.executable,
                "-c",
                _QEMU,
                paths[port_id],
                paths[neighbour],
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd="/",
        )
        assert (done.returncode, done.stdout) == (0, "OVS came\n"), done.stderr
    status, error = one.put("a", make_spec(1, qemu_user=40003))
    assert (status, error["code"]) == (409, "conflict") and "qemu_user" in error["detail"]
    for port_id, path in paths.items():
        assert one.agent.call("DELETE", f"/v1/ports/{port_id}")[0] == 204
        assert not Path(path).parent.exists(), "the directory goes with the port"


def test_what_a_qemu_leaves_in_its_directory_holds_nobody_up(one: Host) -> None:
    """Nested deeper than Python recurses, and with a mount."""
    directory = Path(one.plug("p1", make_spec(1, qemu_user=40001))["binding"]["socket_path"]).parent
    code = "import os\nfor i in range(1600): os.mkdir('d'); os.chdir('d')"
    as_qemu = ["setpriv", "--reuid=40001", "--regid=40001", "--clear-groups", "--"]
    subprocess.run([*as_qemu, sys.executable, "-c", code], cwd=directory, check=True)
    assert one.agent.call("DELETE", "/v1/ports/p1") == (204, None)
    one.plug("p1", make_spec(1, qemu_user=40001))
    aside = directory.parent / ASIDE
    wait_for(lambda: not any(aside.iterdir()), 60, "all of it is removed")
    (directory / "mount").mkdir()
    in_agent = ["nsenter", "--target", str(one.agent.daemon.pid), "--mount", "--"]
    subprocess.run([*in_agent, "mount", "-t", "tmpfs", "none", directory / "mount"], check=True)
    subprocess.run([*in_agent, "touch", directory / "mount/kept"], check=True)
    assert one.agent.call("DELETE", "/v1/ports/p1") == (204, None)
    one.plug("p2", make_spec(2, qemu_user=40002))
    wait_for(lambda: "vhost-socket-remains" in findings(one), 60, "the finding tells of it")
    (left,) = aside.iterdir()
    finding = findings(one)["vhost-socket-remains"]
    assert finding["status"] == "warn" and f"{left}: Device or resource busy" in finding["found"]
    subprocess.run([*in_agent, "ls", left / "mount/kept"], check=True)
    subprocess.run([*in_agent, "umount", left / "mount"], check=True)
    assert one.agent.call("DELETE", "/v1/ports/p2") == (204, None)
    wait_for(lambda: not any(aside.iterdir()), 60, "it is tried again with the next")
    wait_for(lambda: "vhost-socket-remains" not in findings(one), 60, "the finding ends")


def test_qemus_of_one_user_are_reported(one: Host) -> None:
    """Each port has a directory of its own all the same; a crash loses none of them."""
    bodies = [one.plug(f"p{number}", make_spec(number)) for number in (1, 2)]
    first, second = (Path(body["binding"]["socket_path"]).parent for body in bodies)
    assert first != second and first.parent == second.parent
    assert [d.stat().st_mode & 0o7777 for d in (first, second)] == [0o2770, 0o2770]
    finding = findings(one)["qemu-user"]
    assert finding["status"] == "warn" and "2 VMs" in finding["found"]
    other = first.parent / "not-ours"
    other.mkdir()
    shutil.rmtree(first)
    second.chmod(0o777)
    one.agent.kill()
    one.agent.start()
    assert first.is_dir() and second.stat().st_mode & 0o7777 == 0o2770
    one.agent.call("DELETE", "/v1/ports/p1")
    assert not first.exists() and second.exists() and other.exists()
    other.rmdir()


# -- a lost store ---------------------------------------------------------------------------------


def test_a_new_network_waits_until_ovsdb_was_read(one: Host) -> None:
    """Its number would be one that ports on the host have already."""
    blue = one.network("blue", 5001)["local_vlan"]
    one.plug("p", spec_on("blue", 1))
    one.agent.stop()
    shutil.rmtree(one.agent.groups["DEFAULT"]["state_path"])
    one.ovs.stop_ovsdb()
    try:
        one.agent.start(ready=False)
        spec = {"type": "vxlan", "vni": 5002, "peers": []}
        status, error = one.agent.call("PUT", "/v1/networks/green", spec)
        assert (status, error["code"]) == (503, "backend_unavailable"), error
        assert error["retryable"] and error["step"] == "ovsdb-connect"
    finally:
        one.ovs.start_ovsdb()
    wait_for(
        lambda: one.agent.call("POST", "/v1/reconcile", {})[1]["errors"] == [],
        90,
        "the agent has looked at the host",
    )
    status, body = one.agent.get("/readyz")
    assert status == 503 and "another store made them" in " ".join(body["reasons"]), body
    assert one.network("green", 5002)["local_vlan"] != blue
    assert one.network("blue", 5001)["local_vlan"] == blue
    one.plug("p", spec_on("blue", 1))
    assert one.agent.get("/readyz")[0] == 200, "it is adopted"


def test_an_orphan_that_is_requested_on_another_network(one: Host) -> None:
    """It is refused for what is in the way, and not for an option that is set."""
    one.plug("p", make_spec(1, network={"mtu": 1300}))
    before = interface(one, "p")
    one.agent.lose_store()
    one.network("blue", 5001, mtu=9000)
    status, error = one.put("p", spec_on("blue", 1))
    assert (status, error["code"], error["step"]) == (409, "unsupported", "mtu"), error
    assert "br-underlay has" in error["detail"] and "local_ip" not in error["detail"]
    assert interface(one, "p") == before, "it is still there"

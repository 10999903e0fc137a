"""The plug-in for ZStack under Python 2.7, with the real agent and a real OVS-DPDK.

`vm_plugin` of ZStack's host agent writes the path that `createNicBackend` returns into the domain, so
a VM is started on it as QEMU would: the socket is made at that path, and OVS connects.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.functional.conftest import BASE
from tests.functional.test_plug_ovs import _transactions, planned, rows
from tests.lab.agent import PrivateAgent
from tests.lab.guest import (
    BOOT_DEADLINE_S,
    Guest,
    apply_tcg_workaround,
    domain_xml,
    with_interface,
    with_shared_memory,
)
from tests.lab.hypervisor import silence
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import LabError, run, wait_for
from tests.lab.python27 import python27
from tests.lab.service import service
from tests.lab.vm import Vm
from tests.unit.zstack.conftest import PLUGINS
from tests.unit.zstack.kvmagent import Answer, Kvmagent

BRIDGE, NIC = "br_eth9", "eth9"
# DPDK's af_packet driver replaces a NIC whose netdev a driver of DPDK has taken.
DEVICES = {name: f"net_af_packet{name[-1]},iface=nic{name[-1]}" for name in ("eth8", "eth9")}
COUNT = 500


def vm_nic(number: int = 1, **fields: Any) -> dict[str, Any]:
    """A NIC as the management node describes it."""
    return {
        "uuid": f"{number:032x}",
        "mac": f"52:54:00:00:09:{number:02x}",
        "type": "dpdkvhostuserclient",
        "bridgeName": BRIDGE,
        "physicalInterface": NIC,
        "nicInternalName": f"vnic{number}.0",
        "mtu": 1500,
        **fields,
    }


def vm_uuid(number: int = 1) -> str:
    return f"{number:x}" * 32


@dataclass(frozen=True)
class Zstack:
    """A host whose kvmagent has the plug-in."""

    agent: PrivateAgent
    kvmagent: Kvmagent
    options: Path

    def call(self, method: str, *arguments: object) -> Any:
        """What a method returns. It raises nothing, and does not return None, which would be a PCI device."""
        answer = self.kvmagent.call(method, *arguments)
        assert answer.raised == "", answer.text
        return answer.returned

    def refused(self, method: str, *arguments: object) -> Answer:
        answer = self.kvmagent.call(method, *arguments)
        assert answer.raised == "PluginError" and not answer.ovs_error, answer
        return answer

    def configure(self, deadline: float = 35) -> None:
        interfaces = "".join(f"{name} = {device}\n" for name, device in DEVICES.items())
        self.options.write_text(
            f"[zstack]\nsocket = {self.agent.directory}/agent.sock\ndeadline = {deadline}\n"
            f"[interfaces]\n{interfaces}"
        )


@pytest.fixture(scope="module")
def kvmagent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvmagent]:
    try:
        python = python27()
    except LabError as error:
        pytest.skip(f"Debian 11's Python 2.7 cannot be fetched: {error}")
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "netplugin_zstack.py").write_bytes((PLUGINS / "netplugin_zstack.py").read_bytes())
    running = Kvmagent(python, tmp_path_factory.mktemp("kvmagent"), folder)
    yield running
    running.close()


@pytest.fixture(scope="module")
def wires() -> Iterator[None]:
    for number in (8, 9):
        run(["ip", "link", "add", f"nic{number}", "type", "veth", "peer", "name", f"wire{number}"])
        for name in (f"nic{number}", f"wire{number}"):
            run(["ip", "link", "set", name, "up"])
    yield
    for number in (8, 9):
        run(["ip", "link", "delete", f"nic{number}"])


@pytest.fixture
def host(ovs: PrivateOvs, wires: None, kvmagent: Kvmagent, tmp_path: Path) -> Iterator[Zstack]:
    options = {"api": {"socket": str(BASE / "agent/agent.sock")}, "ovs": {"bridge_mappings": ""}}
    with PrivateAgent(BASE / "agent", ovs, options) as agent:
        running = Zstack(agent, kvmagent, tmp_path / "zstack.conf")
        running.configure()
        kvmagent.load(running.options, tmp_path / "sys")
        yield running
        if agent.get("/readyz")[0] == 200:
            ids = [port["port_id"] for port in agent.get("/v1/ports")[1]]
            agent.call("POST", "/v1/ports:batch", {"delete": ids})
    for name in ovs.vsctl("list-br").split():
        ovs.vsctl("del-br", name)
    shutil.rmtree(BASE / "agent")


@pytest.fixture
def bridge(host: Zstack) -> Zstack:
    assert host.call("prepareBridge", NIC, BRIDGE) == 0
    return host


@contextmanager
def vm(path: str, number: int, ovs: PrivateOvs) -> Iterator[Vm]:
    with Vm(f"zs{number}", path, vm_nic(number)["mac"], f"10.0.9.{number}") as running:
        device = next(
            row["name"]
            for row in rows(ovs, "Interface", "name", "options")
            if row["options"].get("vhost-server-path") == path
        )
        ovs.wait_connected(device)
        yield running


def test_a_vm_from_its_bridge_to_its_end(ovs: PrivateOvs, host: Zstack) -> None:
    pid = ovs.vswitchd.pid
    assert host.call("isOvsProcRunning", "ovs-vswitchd") is True
    assert host.call("listBrs") == []
    for _ in range(2):
        assert host.call("prepareBridge", NIC, BRIDGE) == 0
    assert host.call("listBrs") == [BRIDGE] == ovs.vsctl("list-br").split()
    assert host.call("listPorts", BRIDGE) == [NIC], "also without a VM, as for a migration"
    paths = []
    for number in (1, 2):
        paths.append(host.call("createNicBackend", vm_uuid(number), vm_nic(number)))
        before = _transactions(ovs)
        assert host.call("createNicBackend", vm_uuid(number), vm_nic(number)) == paths[-1]
        assert _transactions(ovs) == before, "the same NIC again is not written again"
    with vm(paths[0], 1, ovs) as one, vm(paths[1], 2, ovs) as two:
        wait_for(lambda: one.pings(two.address), 20, "the other VM answers")
        with two.receives() as ear:
            one.send(two.mac, COUNT // 2)
            # A second L2 network while frames are under way.
            assert host.call("prepareBridge", "eth8", "br_eth8") == 0
            one.send(two.mac, COUNT // 2)
            wait_for(lambda: ear.listen() >= COUNT, 60, "no frame is lost")
            assert ear.settle() == COUNT, "and none comes twice"
    assert ovs.vswitchd.pid == pid and ovs.vswitchd.running, "OVS runs on"
    assert host.call("destoryNicBackend", vm_uuid(1), "vnic1.0") == paths[0]
    assert [port["port_id"] for port in host.agent.get("/v1/ports")[1]] == ["vnic2.0"]
    assert host.refused("prepareDeleteBr", BRIDGE).text, "a NIC is on it"
    assert host.call("destoryNicBackend", vm_uuid(2)) == ""
    for name in (BRIDGE, "br_eth8", BRIDGE):
        assert host.call("prepareDeleteBr", name) == 0
    assert ovs.vsctl("list-br") == "" and planned(host.agent) == []


def test_attach_and_detach_with_the_path_of_the_domain(ovs: PrivateOvs, bridge: Zstack) -> None:
    path = bridge.call("createNicBackend", vm_uuid(), vm_nic(vlanId="100"))
    second = bridge.call("createNicBackend", vm_uuid(), vm_nic(2, vlanId="200"))
    assert path != second
    assert {row["tag"] for row in rows(ovs, "Port", "name", "tag") if row["tag"] != []} >= {100, 200}
    for _ in range(3):  # kvmagent tries to detach three times, and needs the path each time
        assert bridge.call("destoryNicBackend", vm_uuid(), "vnic2.0") == second
    assert bridge.call("createNicBackend", vm_uuid(), vm_nic(vlanId="100")) == path


def test_dhcp_joins_the_network_of_the_bridge(ovs: PrivateOvs, bridge: Zstack) -> None:
    """kvmagent makes a veth whose inner end is in a namespace, and puts the outer end on the bridge."""
    path = bridge.call("createNicBackend", vm_uuid(), vm_nic())
    with service("dhcp", "outer3", "52:54:00:00:09:fe", "10.0.9.254") as dhcp:
        address = bridge.options.parent / "sys/class/net/outer3/address"
        address.parent.mkdir(parents=True)
        address.write_text(f"{dhcp.mac}\n")
        for _ in range(2):
            assert bridge.kvmagent.call("addOuterToBridge", BRIDGE, "outer3").raised == ""
        assert bridge.call("listPorts", BRIDGE) == [NIC, "vnic1.0", "outer3"]
        with vm(path, 1, ovs) as one:
            wait_for(lambda: one.pings("10.0.9.254"), 20, "the server answers")
        assert bridge.kvmagent.call("deleteOuterFromBridge", BRIDGE, "outer3").raised == ""
        assert bridge.call("listPorts", BRIDGE) == [NIC, "vnic1.0"]
        assert bridge.kvmagent.call("addOuterToBridge", BRIDGE, "outer3").raised == ""
        # kvmagent makes the pair again after a reboot of the host, with other addresses.
        dhcp.remove_device()
        replace(dhcp, mac="52:54:00:00:09:77").make_device()
        address.write_text("52:54:00:00:09:77\n")
        assert bridge.kvmagent.call("addOuterToBridge", BRIDGE, "outer3").raised == ""
        assert bridge.call("destoryNicBackend", vm_uuid()) == ""
        assert bridge.call("prepareDeleteBr", BRIDGE) == 0
        assert ovs.vsctl("list-br") == "", "our service port has gone with it"


def test_the_checks_of_the_management_node_pass_and_a_vlan_is_kept(ovs: PrivateOvs, host: Zstack) -> None:
    assert host.call("prepareBridge", NIC, BRIDGE) == 0
    assert host.call("resourceConfigure", 1, 2048, 2048) == 0
    assert host.call("getBondFromFile", NIC)["slaves"] == [DEVICES[NIC]], "DPDK has it"
    path = host.call("createNicBackend", vm_uuid(), vm_nic(vlanId="7"))
    before = _transactions(ovs)
    assert host.call("createNicBackend", vm_uuid(), vm_nic(vlanId="7")) == path
    assert _transactions(ovs) == before, "the same NIC again is not written again"
    assert host.call("destoryNicBackend", vm_uuid(), "vnic1.0") == path
    assert host.call("createNicBackend", vm_uuid(), vm_nic(vlanId="7")) == path
    assert host.call("destoryNicBackend", vm_uuid()) == ""
    assert host.call("prepareDeleteBr", BRIDGE) == 0
    assert ovs.vsctl("list-br") == ""


def test_the_agent_is_down(bridge: Zstack) -> None:
    path = bridge.call("createNicBackend", vm_uuid(), vm_nic())
    bridge.agent.kill()
    for method, arguments in (
        ("createNicBackend", (vm_uuid(), vm_nic())),
        ("destoryNicBackend", (vm_uuid(),)),
        ("prepareBridge", (NIC, BRIDGE)),
        ("dpdkOvsSync", ([],)),
    ):
        assert bridge.refused(method, *arguments).text.endswith("Fix: systemctl status netplugin-agent")
    bridge.agent.start()
    assert bridge.call("createNicBackend", vm_uuid(), vm_nic()) == path


def test_ovs_is_down(ovs: PrivateOvs, bridge: Zstack) -> None:
    ovs.vswitchd.stop()
    try:
        for method, arguments in (
            ("createNicBackend", (vm_uuid(), vm_nic())),
            ("prepareBridge", ("eth8", "br_eth8")),
            ("isOvsProcRunning", ("ovs-vswitchd",)),
            ("resourceConfigure", (2048, 2048, 1024)),
        ):
            answer = bridge.refused(method, *arguments)
            assert "vswitchd" in answer.text and "Fix: " in answer.text, answer.text
    finally:
        ovs.start_vswitchd()
    wait_for(lambda: bridge.agent.get("/readyz")[0] == 200, 30, "the agent is ready again")
    assert bridge.agent.get("/v1/ports")[1] == [], "what failed has left nothing"
    assert bridge.call("createNicBackend", vm_uuid(), vm_nic())


def test_ovs_hangs_until_the_deadline(ovs: PrivateOvs, bridge: Zstack) -> None:
    bridge.configure(deadline=5)
    ovs.vswitchd.pause()
    try:
        answer = bridge.refused("createNicBackend", vm_uuid(), vm_nic())
        assert "PUT /v1/ports/vnic1.0 within 5 s" in answer.text
    finally:
        ovs.vswitchd.resume()
    bridge.configure()
    assert bridge.call("createNicBackend", vm_uuid(), vm_nic())
    assert bridge.call("destoryNicBackend", vm_uuid()) == ""


def test_a_sync_leaves_alone_what_is_not_ours(ovs: PrivateOvs, bridge: Zstack) -> None:
    for command in (
        ("add-br", "br-theirs", "--", "set", "Bridge", "br-theirs", "datapath_type=netdev"),
        ("add-port", "br-theirs", "vnic7.0", "--", "set", "Interface", "vnic7.0", "type=dummy-internal"),
        ("add-port", BRIDGE, "vnic8.0", "--", "set", "Interface", "vnic8.0", "type=internal"),
    ):
        ovs.vsctl("--no-wait", *command)
    theirs = [ovs.vsctl("list-ports", "br-theirs"), ovs.vsctl("get", "Port", "vnic8.0", "_uuid")]
    bridge.call("createNicBackend", vm_uuid(2), vm_nic(2))
    listed = {
        "name": BRIDGE,
        "physicalInterface": NIC,
        "phy_type": "nic",
        "ports": [{**vm_nic(), "vmUuid": vm_uuid()}],
    }
    device = next(iter(bridge.agent.get("/v1/ports/vnic2.0")[1]["binding"]["device"].split()))
    ovs.vsctl("set", "Port", device, "tag=77")  # as someone else would
    answer = bridge.kvmagent.call("dpdkOvsSync", [listed])
    assert answer.returned == 0, answer.text
    assert "sync: ZStack does not list vnic2.0; it stays" in answer.log, "its VM may be starting"
    assert {port["port_id"] for port in bridge.agent.get("/v1/ports")[1]} == {"vnic1.0", "vnic2.0"}
    assert ovs.get("Port", device, "tag") == "0", "repaired"
    assert [ovs.vsctl("list-ports", "br-theirs"), ovs.vsctl("get", "Port", "vnic8.0", "_uuid")] == theirs
    ovs.vsctl("del-port", "vnic8.0")


@pytest.mark.long
def test_a_guest_from_the_domain_that_kvmagent_renders(ovs: PrivateOvs, bridge: Zstack) -> None:
    """Two of them: one ping needs both ends."""
    with PrivateLibvirt(BASE / "libvirt") as libvirt:
        connection, guests = libvirt.connect(), []
        for number in (1, 2):
            nic, name = vm_nic(number), f"zstack-{number}"
            path = bridge.call("createNicBackend", vm_uuid(number), nic)
            guest = Guest(name)
            xml = with_interface(with_shared_memory(domain_xml(name)), rendered(nic, path))
            guest.start(connection, apply_tcg_workaround(xml))
            ovs.wait_connected(
                bridge.agent.get(f"/v1/ports/vnic{number}.0")[1]["binding"]["device"], BOOT_DEADLINE_S
            )
            guests.append((guest, nic))
        for number, (guest, nic) in enumerate(guests, 1):
            guest.boot()
            silence(guest)
            guest.configure(nic["mac"], f"10.0.9.{number}/24")
        guests[0][0].wait_pings("10.0.9.2")
        for number in (1, 2):
            libvirt.destroy_domain(f"zstack-{number}")
            assert bridge.call("destoryNicBackend", vm_uuid(number)) == ""
    assert bridge.call("prepareDeleteBr", BRIDGE) == 0


def rendered(nic: dict[str, Any], path: str) -> str:
    """The interface as vm_plugin writes it."""
    return (
        f"<interface type='vhostuser'><mac address='{nic['mac']}'/>"
        f"<alias name='net{nic['nicInternalName'].split('.')[1]}'/>"
        f"<source type='unix' path='{path}' mode='server'/><model type='virtio'/></interface>"
    )

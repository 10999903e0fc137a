"""Each method of the plug-in under Python 2.7: success, the agent's error, agent down, deadline."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.errors import Conflict, HostError, Unsupported
from tests.unit.zstack.agent import DOWN, StubAgent, silent_agent, stub_agent
from tests.unit.zstack.conftest import PLUGINS, Host

VM = "9f0b4a1e6c1d4d0f8a55f7d2f2a7c3de"
BRIDGE = "br_enp3s0f0"
NIC: dict[str, Any] = {
    "uuid": "886203c1c7dd462cbf91970841df121d",
    "mac": "FA:46:E8:1B:AB:00",
    "type": "dpdkvhostuserclient",
    "bridgeName": BRIDGE,
    "physicalInterface": "enp3s0f0",
    "nicInternalName": "vnic12.0",
    "mtu": 1500,
    "useVirtio": True,
}
PORT = {
    "vm_id": VM,
    "mac": "fa:46:e8:1b:ab:00",
    "backend": "dpdkvhostuser",
    "port_name": "vnic12.0",
    "network": {"type": "flat", "physical_network": BRIDGE, "mtu": 1500},
    "queues": 1,
    "rx_queue_size": 256,
    "tx_queue_size": 256,
    "port_security": {"enabled": True, "allowed_addresses": [], "roles": []},
}
#: A call of each method that asks the agent, and the first request of it that can fail.
CALLS: dict[str, tuple[list[Any], str]] = {
    "createNicBackend": ([VM, NIC], "PUT /v1/ports/vnic12.0"),
    "destoryNicBackend": ([VM, "vnic12.0"], "GET /v1/ports"),
    "destoryNicBackendNoWait": ([VM], "GET /v1/ports"),
    "prepareBridge": (["enp3s0f0", BRIDGE], "GET /v1/physical-networks"),
    "prepareDeleteBr": ([BRIDGE], "DELETE /v1/physical-networks/.*"),
    "listBrs": ([], "GET /v1/physical-networks"),
    "listPorts": ([BRIDGE], "GET /v1/ports"),
    "addOuterToBridge": ([BRIDGE, "outer3"], "PUT /v1/service-ports/zstack-outer3"),
    "deleteOuterFromBridge": ([BRIDGE, "outer3"], "DELETE /v1/service-ports/zstack-outer3"),
    "dpdkOvsSync": ([[]], "POST /v1/reconcile"),
    "resourceConfigure": ([2048, 2048, 4096], "GET /v1/backends"),
    "smartNicInit": (["enp3s0f0", 2048, 2048, 4096, 1], "GET /v1/vfs"),
    "configPmdCpuMaskForOvs": (["0x3c"], "PUT /v1/pmd"),
    "isOvsProcRunning": (["ovs-vswitchd"], "GET /v1/backends"),
    "getBondFromFile": (["enp9s0"], "GET /v1/physical-networks"),
}


def nic(**fields: object) -> dict[str, Any]:
    return {**NIC, **fields}


def bridge(*nics: dict[str, Any], name: str = BRIDGE, interface: str = "enp3s0f0") -> dict[str, Any]:
    ports = [{**each, "vmUuid": VM} for each in nics]
    return {"name": name, "physicalInterface": interface, "phy_type": "nic", "ports": ports}


def test_python_27_and_3_compile_it(python_27: Path, tmp_path: Path) -> None:
    for name in ("netplugin_zstack.py", "install.py"):
        compiling = f"compile(open({str(PLUGINS / name)!r}).read(), {name!r}, 'exec')"
        for python in (python_27, "/usr/bin/python3"):
            subprocess.run([python, "-B", "-c", compiling], check=True, timeout=30)


def test_it_takes_the_place_of_the_dpdk_control_only(host: Host) -> None:
    assert host.kvmagent.call("getOvsCtl", True).returned == "OvsCtl"
    assert host.kvmagent.call("getOvsCtl", False).returned == "kernel"
    host.kvmagent.load(host.options, host.sysfs)
    assert host.kvmagent.call("getOvsCtl", True).returned == "OvsCtl"
    assert host.kvmagent.call("getOvsCtl", False).returned == "kernel"


# -- what goes wrong with any of them ----------------------------------------------------------------


@pytest.mark.parametrize("method", CALLS)
def test_the_agents_error_is_raised_with_its_fix(method: str, host: Host, network: StubAgent) -> None:
    arguments, request = CALLS[method]
    network.faults[request] = DOWN
    answer = host.kvmagent.call(method, *arguments)
    assert answer.raised == "PluginError"
    assert answer.text == "ovs-vswitchd does not run. Fix: systemctl start ovs-vswitchd"
    # kvmagent's DHCP logs an OvsError and goes on without the guest's address.
    assert not answer.ovs_error


@pytest.mark.parametrize("method", CALLS)
def test_an_agent_that_is_down_is_named(method: str, host: Host) -> None:
    answer = host.kvmagent.call(method, *CALLS[method][0])
    assert answer.raised == "PluginError"
    assert f"does not answer at {host.socket} (" in answer.text
    assert "No such file or directory" in answer.text
    assert answer.text.endswith("Fix: systemctl status netplugin-agent")


def test_an_mtu_that_the_bridge_has_not_names_the_option(host: Host, network: StubAgent) -> None:
    network.faults[CALLS["createNicBackend"][1]] = Unsupported("network.mtu 9000 is above it", step="mtu")
    answer = host.kvmagent.call("createNicBackend", *CALLS["createNicBackend"][0])
    assert f"Fix: set [zstack] mtu in {host.options} before" in answer.text


@pytest.mark.parametrize("method", CALLS)
def test_an_agent_that_hangs_is_not_waited_for(method: str, host: Host) -> None:
    host.configure(deadline=0.2)
    with silent_agent(host.socket):
        started = time.monotonic()
        answer = host.kvmagent.call(method, *CALLS[method][0])
    assert answer.raised == "PluginError"
    assert "within 0.2 s, and may still complete it" in answer.text
    assert 0.15 <= time.monotonic() - started < 60


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_the_deadline_is_one_for_all_bytes(version: str, host: Host, network: StubAgent) -> None:
    host.configure(deadline=3)  # of which the calls before it need some
    network.version = version
    network.hangs = "PUT .*"
    started = time.monotonic()
    answer = host.kvmagent.call("createNicBackend", VM, NIC)
    assert "PUT /v1/ports/vnic12.0 within 3 s" in answer.text
    assert time.monotonic() - started < 60


def test_a_linux_bridge_is_none_of_its_bridges(host: Host, network: StubAgent) -> None:
    network.networks["linux"] = {"name": "linux", "bridge": "br_linux", "ovs": None, "linuxbridge": {}}
    assert host.kvmagent.call("listBrs").returned == [BRIDGE]
    assert "br_linux" in host.kvmagent.call("createNicBackend", VM, {**NIC, "bridgeName": "br_linux"}).text


def test_an_agent_that_is_busy_is_asked_again(host: Host, network: StubAgent) -> None:
    network.overloads = 2
    assert host.kvmagent.call("listBrs").returned == [BRIDGE]
    assert len(network.requests) == 3
    network.overloads, network.retry_after = 10, "3600"
    assert host.kvmagent.call("listBrs").text == "the queue is full", "its deadline is earlier"
    assert len(network.requests) == 4


def test_another_program_at_the_socket(host: Host, agent: StubAgent) -> None:
    agent.text = "Bad Gateway"
    answer = host.kvmagent.call("listBrs")
    assert answer.text == "GET /v1/physical-networks is answered with status 502"


def test_fields_that_the_agent_refuses_are_named(host: Host, network: StubAgent) -> None:
    answer = host.kvmagent.call("createNicBackend", VM, nic(mtu=100))
    assert answer.raised == "PluginError"
    assert "network.mtu: Input should be greater than or equal to 576" in answer.text


def test_a_letter_beyond_ascii_in_an_error(host: Host, network: StubAgent) -> None:
    network.faults["PUT .*"] = HostError("Gerät „br“", step="ovs")
    assert host.kvmagent.call("createNicBackend", VM, NIC).text == "Gerät „br“"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sockett = /run/x\n", "nothing has the name sockett"),
        ("[interface]\na = b\n", "nothing has the name interface"),
        ("hold_mac = maybe\n", "'maybe'"),
        ("[vlans]\nbr = many\n", "'many'"),
        ("mtu 1500\n", "parsing errors"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_is_plugged(
    text: str, named: str, host: Host, network: StubAgent
) -> None:
    host.configure(text)
    answer = host.kvmagent.call("createNicBackend", VM, NIC)
    assert answer.text.startswith(f"{host.options} is not valid: ") and named in answer.text
    assert network.requests == []


# -- NICs --------------------------------------------------------------------------------------------


def test_plug_unplug_and_both_again(host: Host, network: StubAgent) -> None:
    for _ in range(2):
        answer = host.kvmagent.call("createNicBackend", VM, NIC)
        assert (answer.returned, answer.type) == ("/run/vhost/vnic12.0", "str")
    assert network.writes() == [("PUT", "/v1/ports/vnic12.0", PORT)] * 2
    # Each of kvmagent's tries to detach needs the path for the XML.
    for _ in range(3):
        answer = host.kvmagent.call("destoryNicBackend", VM, "vnic12.0")
        assert (answer.returned, answer.type) == ("/run/vhost/vnic12.0", "str")
    assert network.ports == {}
    assert host.kvmagent.call("destoryNicBackend", VM, "vnic99.0").returned == ""


def test_all_of_a_vm_go_and_no_others(host: Host, network: StubAgent) -> None:
    for vm, name in ((VM, "vnic12.0"), (VM, "vnic12.1"), ("other", "vnic13.0")):
        assert host.kvmagent.call("createNicBackend", vm, nic(nicInternalName=name)).returned
    network.answer("PUT", "/v1/ports/mine", {**PORT, "backend": "linuxbridge"})
    assert host.kvmagent.call("destoryNicBackend", VM).returned == ""
    assert set(network.ports) == {"vnic13.0", "mine"}


def test_a_nic_that_cannot_be_removed_is_named(host: Host, network: StubAgent) -> None:
    host.kvmagent.call("createNicBackend", VM, NIC)
    network.faults["DELETE vnic12.0"] = DOWN
    answer = host.kvmagent.call("destoryNicBackend", VM, "vnic12.0")
    assert answer.text == (
        f"VM {VM}: 1 failed: vnic12.0: ovs-vswitchd does not run. Fix: systemctl start ovs-vswitchd"
    )


def test_a_nic_without_its_bridge_or_of_another_type(host: Host, agent: StubAgent) -> None:
    answer = host.kvmagent.call("createNicBackend", VM, NIC)
    assert answer.text.startswith(f"no physical network has the bridge {BRIDGE}. Fix: ")
    agent.networks["n"] = {"name": "n", "bridge": BRIDGE, "ovs": {"devices": []}}
    answer = host.kvmagent.call("createNicBackend", VM, nic(type="VF"))
    assert answer.text == "NIC vnic12.0: no backend for the type VF"
    assert agent.writes() == []


def test_a_port_that_is_degraded_is_logged(host: Host, network: StubAgent) -> None:
    host.kvmagent.call("createNicBackend", VM, NIC)
    problem = DOWN.problem().model_dump(mode="json")
    network._put_port = lambda name, body: {**network.ports[name], "state": "degraded", "error": problem}  # type: ignore[method-assign]
    answer = host.kvmagent.call("createNicBackend", VM, NIC)
    assert answer.returned == "/run/vhost/vnic12.0"
    assert answer.log[0].startswith("port vnic12.0 is degraded: ovs-vswitchd does not run")


MAPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"vlanId": "100"}, {"network": {**PORT["network"], "type": "vlan", "vlan_id": 100}}),  # type: ignore[dict-item]
    ({"vlanId": "0"}, {}),
    ({"mtu": None}, {"network": {"type": "flat", "physical_network": BRIDGE}}),
    ({"vHostAddOn": {"queueNum": "4"}}, {}),
    ({"vHostAddOn": {"queueNum": 1, "rxBufferSize": "512"}, "driverType": "virtio"}, {}),
    (
        {"vHostAddOn": {"queueNum": "4", "rxBufferSize": "512"}, "driverType": "virtio"},
        {"queues": 4, "rx_queue_size": 512, "tx_queue_size": 1024},
    ),
    (
        {"type": "vDPA", "pciDeviceAddress": "0000:03:00.2"},
        {"backend": "vdpa", "vf": {"pci_address": "0000:03:00.2"}},
    ),
    ({"pciDeviceAddress": "0000:03:00.2"}, {}),
    ({"ips": ["10.0.0.5"]}, {}),
    (
        {"ips": ["10.0.0.5", "2001:db8::5"], "cleanTraffic": True},
        {
            "port_security": {
                "enabled": True,
                "allowed_addresses": [{"ip": "10.0.0.5"}, {"ip": "2001:db8::5"}],
                "roles": [],
            }
        },
    ),
    ({"cleanTraffic": True}, {}),
]


@pytest.mark.parametrize(("fields", "expected"), MAPPED)
def test_what_a_nic_becomes(
    fields: dict[str, Any], expected: dict[str, Any], host: Host, network: StubAgent
) -> None:
    assert host.kvmagent.call("createNicBackend", VM, nic(**fields)).raised == ""
    assert network.writes()[0][2] == {**PORT, **expected}


def test_the_options_for_nics_without_clean_traffic(host: Host, network: StubAgent) -> None:
    host.configure("hold_mac = no\nroles = router, dhcp_server\n")
    host.kvmagent.call("createNicBackend", VM, NIC)
    open_port = {"enabled": False, "allowed_addresses": [], "roles": ["router", "dhcp_server"]}
    assert network.writes()[-1][2]["port_security"] == open_port
    host.kvmagent.call("createNicBackend", VM, nic(cleanTraffic=True))
    assert network.writes()[-1][2]["port_security"] == PORT["port_security"]


def test_a_number_that_is_none(host: Host, network: StubAgent) -> None:
    answer = host.kvmagent.call("createNicBackend", VM, nic(vlanId="many"))
    assert answer.text == "NIC vnic12.0: vlanId is u'many', not a number"


# -- bridges -----------------------------------------------------------------------------------------


def test_a_bridge_is_made_once_and_removed(host: Host, agent: StubAgent) -> None:
    host.configure("mtu = 9000\n")
    for _ in range(2):
        assert host.kvmagent.call("prepareBridge", "enp3s0f0", BRIDGE).returned == 0
    body = {
        "bridge": BRIDGE,
        "mtu": 9000,
        "keep": True,
        "ovs": {"devices": ["0000:03:00.0"], "bond": None},
    }
    assert agent.writes() == [("PUT", f"/v1/physical-networks/{BRIDGE}", body)]
    assert host.kvmagent.call("listBrs").returned == [BRIDGE]
    host.kvmagent.call("addOuterToBridge", BRIDGE, "outer3")
    agent.answer("PUT", "/v1/service-ports/theirs", agent.services["zstack-outer3"]["spec"])
    assert host.kvmagent.call("prepareDeleteBr", BRIDGE).returned == 0
    assert agent.networks == {} and set(agent.services) == {"theirs"}
    assert host.kvmagent.call("prepareDeleteBr", BRIDGE).returned == 0


def test_a_bridge_with_another_uplink_is_not_changed(host: Host, network: StubAgent) -> None:
    host.netdev("enp4s0", "0000:04:00.0")
    answer = host.kvmagent.call("prepareBridge", "enp4s0", BRIDGE)
    assert answer.text == f"bridge {BRIDGE} has the uplink 0000:03:00.0, not enp4s0"
    assert network.writes() == []


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"mode": 1}, "active-backup"),
        ({"mode": "balance-slb"}, "balance-slb"),
        ({"mode": "balance-tcp", "lacp": "active"}, "lacp"),
        ({"mode": 4}, "lacp"),
    ],
)
def test_a_bond_becomes_one(fields: dict[str, object], mode: str, host: Host, agent: StubAgent) -> None:
    host.kvmagent.call("bond", {"name": "bond1", "slaves": ["enp3s0f0", "0000:03:00.1"], **fields})
    assert host.kvmagent.call("prepareBridge", "bond1", "br_bond1").returned == 0
    assert agent.networks["br_bond1"]["ovs"] == {"devices": ["0000:03:00.0", "0000:03:00.1"], "bond": mode}
    assert "bond1" in host.kvmagent.call("listPorts", "br_bond1").returned


def test_a_bond_of_a_mode_that_ovs_lacks(host: Host, agent: StubAgent) -> None:
    host.kvmagent.call("bond", {"name": "bond1", "slaves": ["enp3s0f0"], "mode": 2})
    answer = host.kvmagent.call("prepareBridge", "bond1", "br_bond1")
    assert answer.text.startswith("bond bond1: mode 2 is not supported. Fix: use one of 1, 4, 802.3ad")


def test_the_ports_of_a_bridge(host: Host, network: StubAgent) -> None:
    assert host.kvmagent.call("listPorts", BRIDGE).returned == ["enp3s0f0"], "without a VM too"
    host.kvmagent.call("createNicBackend", VM, NIC)
    host.kvmagent.call("addOuterToBridge", BRIDGE, "outer3")
    network.networks["other"] = {"name": "other", "bridge": "br_other", "ovs": {"devices": []}}
    host.kvmagent.call("createNicBackend", VM, nic(bridgeName="br_other", nicInternalName="vnic12.1"))
    assert host.kvmagent.call("listPorts", BRIDGE).returned == ["enp3s0f0", "vnic12.0", "outer3"]
    assert host.kvmagent.call("listPorts", "br_other").returned == ["vnic12.1"]
    answer = host.kvmagent.call("listPorts", "br_none")
    assert answer.text.startswith("no physical network has the bridge br_none")


def test_a_service_device_joins_and_leaves(host: Host, network: StubAgent) -> None:
    host.kvmagent.call("addOuterToBridge", BRIDGE, "outer3")
    flat = {"type": "flat", "physical_network": BRIDGE}
    body = {
        "device": "outer3",
        "mac": "52:54:00:00:00:03",
        "backend": "dpdkvhostuser",
        "network": flat,
        "trusted": True,
    }
    assert network.writes() == [("PUT", "/v1/service-ports/zstack-outer3", body)]
    host.configure(f"[vlans]\n{BRIDGE} = 100\n")
    host.kvmagent.call("addOuterToBridge", BRIDGE, "outer3")
    assert network.writes()[-1][2]["network"] == {**flat, "type": "vlan", "vlan_id": 100}
    host.kvmagent.call("deleteOuterFromBridge", BRIDGE, "outer3")
    assert network.services == {}
    answer = host.kvmagent.call("addOuterToBridge", BRIDGE, "outer4")
    assert answer.text == "outer4 is no network interface of this host. Fix: create it first"


# -- a NIC that DPDK has -----------------------------------------------------------------------------


def test_a_nic_that_dpdk_has_passes_kvmagents_check(host: Host, network: StubAgent) -> None:
    assert host.kvmagent.call("getBondFromFile", "enp3s0f0").returned is None, "has a netdev"
    network.networks["br_enp5s0"] = {
        "name": "br_enp5s0",
        "bridge": "br_enp5s0",
        "ovs": {"devices": ["0000:05:00.0"], "bond": None},
    }
    host.netdev("enp5s0", "0000:05:00.0", driver="vfio-pci", netdev=False)
    bond = host.kvmagent.call("getBondFromFile", "enp5s0").returned
    assert (bond["name"], bond["slaves"]) == ("enp5s0", ["0000:05:00.0"])
    assert host.kvmagent.call("prepareBridge", "enp5s0", "br_enp5s0").returned == 0
    assert host.kvmagent.call("listPorts", "br_enp5s0").returned == ["enp5s0"]
    host.kvmagent.call("bond", {"name": "bond7", "slaves": ["enp3s0f0"]})
    assert host.kvmagent.call("getBondFromFile", "bond7").returned["slaves"] == ["enp3s0f0"]


def test_a_nic_that_nobody_has_does_not_pass(host: Host, network: StubAgent) -> None:
    assert host.kvmagent.call("getBondFromFile", "enp9s0").returned is None
    host.configure("[interfaces]\nenp9s0 = 0000:09:00.0\nenp8s0 = 0000:08:00.0\n")
    host.netdev("enp9s0", "0000:09:00.0", driver="ice", netdev=False)
    assert host.kvmagent.call("getBondFromFile", "enp9s0").returned is None, "no driver of DPDK"
    host.netdev("enp8s0", "0000:08:00.0", driver="vfio-pci", netdev=False)
    assert host.kvmagent.call("getBondFromFile", "enp8s0").returned["slaves"] == ["0000:08:00.0"]


def test_the_address_of_a_nic_that_is_gone_is_an_option(host: Host, agent: StubAgent) -> None:
    answer = host.kvmagent.call("prepareBridge", "enp8s0", "br_enp8s0")
    assert answer.text.startswith("enp8s0 is no PCI network interface of this host. Fix: ")
    host.configure("[interfaces]\nenp8s0 = 0000:08:00.0\n")
    assert host.kvmagent.call("prepareBridge", "enp8s0", "br_enp8s0").returned == 0
    assert agent.networks["br_enp8s0"]["ovs"]["devices"] == ["0000:08:00.0"]


# -- sync --------------------------------------------------------------------------------------------


def test_a_sync_makes_what_is_missing_and_reports_what_it_repairs(host: Host, agent: StubAgent) -> None:
    agent.report["changes"] = [{"backend": "dpdkvhostuser", "detail": "set the VLAN of vnic12.0"}]
    answer = host.kvmagent.call("dpdkOvsSync", [bridge(NIC, nic(nicInternalName="vnic12.1"))])
    assert answer.returned == 0
    assert "sync: set the VLAN of vnic12.0" in answer.log
    assert set(agent.networks) == {BRIDGE} and set(agent.ports) == {"vnic12.0", "vnic12.1"}


def test_a_sync_removes_only_what_zstack_left_behind(host: Host, network: StubAgent) -> None:
    put = network._put_port
    for name in ("vnic1.0", "vnic2.0", "tester", "vnic3.0"):
        put(name, PORT)
    put("vnic4.0", {**PORT, "network": {"type": "flat", "physical_network": "other"}})
    network.ports["vnic2.0"]["observed"]["connected"] = True
    network.networks["theirs"] = {"name": "theirs", "bridge": "br-theirs", "ovs": {"devices": []}}
    host.kvmagent.call("createNicBackend", VM, NIC)
    answer = host.kvmagent.call("dpdkOvsSync", [bridge(nic(nicInternalName="vnic3.0"))])
    assert answer.returned == 0
    # Gone: not listed and without a VM. A VM is connected to vnic2.0, and that of vnic12.0 may be starting.
    assert set(network.ports) == {"vnic2.0", "vnic3.0", "vnic4.0", "vnic12.0", "tester"}
    assert set(network.networks) == {BRIDGE, "theirs"}
    assert "sync: ZStack does not list vnic1.0; it is removed" in answer.log
    assert "sync: ZStack does not list vnic2.0; it stays" in answer.log
    host.kvmagent.call("dpdkOvsSync", [bridge()], settings={"YOUNG_S": 0})
    assert set(network.ports) == {"vnic2.0", "vnic4.0", "tester"}


def test_a_sync_names_all_that_fails_and_does_the_rest(host: Host, network: StubAgent) -> None:
    network._put_port("vnic1.0", PORT)
    network.faults["PUT /v1/ports/vnic12.1"] = Conflict("another port has this MAC", step="admit")
    network.report["errors"] = [DOWN.problem().model_dump(mode="json")]
    nics = (nic(nicInternalName="vnic12.1"), nic(nicInternalName="vnic12.2", mtu=5), NIC)
    answer = host.kvmagent.call("dpdkOvsSync", [bridge(name="br_x", interface="x"), bridge(*nics)])
    assert answer.text.startswith("sync: 4 failed: br_x: x is no PCI network interface")
    assert "; vnic12.1: another port has this MAC; vnic12.2: the body is not valid" in answer.text
    assert "; ovs-vswitchd does not run. Fix: " in answer.text
    assert set(network.ports) == {"vnic12.0"}


# -- the host ----------------------------------------------------------------------------------------


def test_what_is_checked_and_left_alone(host: Host, network: StubAgent) -> None:
    assert host.kvmagent.call("isOvsProcRunning", "ovsdb-server").returned is True
    assert host.kvmagent.call("resourceConfigure", 2048, 2048, 4096).returned == 0
    assert host.kvmagent.call("smartNicInit", "enp3s0f0", 2048, 2048, 4096, "1.0").returned == []
    assert host.kvmagent.call("smartNicRestore", "enp3s0f0").returned == 0
    answer = host.kvmagent.call("smartNicInit", "enp3s0f0", 2048, 2048, 4096, 8)
    assert answer.text.startswith("enp3s0f0 has 1 virtual functions, not 8. Fix: write 8 into ")
    assert network.writes() == []


def test_a_backend_that_is_not_usable_says_why(host: Host, agent: StubAgent) -> None:
    agent.backends[0].update(usable=False, reason="DPDK is not initialized", fix="set dpdk-init")
    sentence = "dpdkvhostuser: DPDK is not initialized. Fix: set dpdk-init"
    assert host.kvmagent.call("isOvsProcRunning", "ovs-vswitchd").text == sentence
    assert host.kvmagent.call("resourceConfigure", 2048, 2048, 4096).text == sentence
    for method in ("checkOvsStatusWapper", "checkBondStatusWapper"):
        answer = host.kvmagent.call(method)
        assert (answer.raised, answer.log) == ("", (sentence,))
    agent.backends.clear()
    assert "no backend dpdkvhostuser" in host.kvmagent.call("isOvsProcRunning").text


def test_kvmagent_starts_without_the_agent(host: Host) -> None:
    answer = host.kvmagent.call("checkOvsStatusWapper")
    assert answer.raised == "" and "does not answer" in answer.log[0]


def test_the_mask_of_the_pmd_threads(host: Host, agent: StubAgent) -> None:
    assert host.kvmagent.call("configPmdCpuMaskForOvs", "0x3c").raised == ""
    assert agent.writes() == [("PUT", "/v1/pmd", {"cpus": "2,3,4,5"})]
    answer = host.kvmagent.call("configPmdCpuMaskForOvs", None)
    assert answer.text == "None is no CPU mask, the CPUs stay. Fix: give one, such as 0x3c"


def test_it_works_again_once_the_agent_is_back(host: Host) -> None:
    assert host.kvmagent.call("listBrs").raised
    with stub_agent(host.socket):
        assert host.kvmagent.call("listBrs").returned == []

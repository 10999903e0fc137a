"""OpenNebula's drivers (tools/opennebula), called as OpenNebula calls them, against the agent."""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from netplugin.api.client import Client
from netplugin.api.errors import HostError
from netplugin.api.models import Features, PortSpec
from tests.docs.blocks import ROOT
from tests.unit.agent import DEADLINE_S, Agent, agent, served_agent
from tests.unit.fakes import FakeBackend, FakeHost, Write, WriteNetwork

TOOLS = ROOT / "tools/opennebula"
#: OpenNebula's own scripts of these actions: they keep what they get, and end with a status of their own.
KVM = """#!/bin/sh
{ echo "$(basename "$0")" "$@"; cat; } > "$(dirname "$0")/called"
exit 7
"""
#: The NICs of the domain are in ``nics``. A guest that is ``busy`` releases none.
VIRSH = """#!/bin/sh
cd "$(dirname "$0")" && touch nics
[ "$1 $2 $4" = "--connect qemu:///system one-5" ] || { echo "error: no domain $4" >&2; exit 1; }
case $3 in
domiflist) cat nics ;;
attach-device) cp "$5" nics; echo attach >> called ;;
detach-device) [ -e busy ] || : > nics; echo detach >> called ;;
esac
"""
DOMAIN = """<domain type='kvm'><name>one-5</name><devices>
  <interface type='bridge'><source bridge='onebr0'/><mac address='02:00:00:00:05:00'/>
    <bandwidth><inbound average='1000'/></bandwidth><target dev='one-5-0'/><boot order='1'/></interface>
  <interface type='bridge'><source bridge='br9'/><mac address='02:00:00:00:05:09'/></interface>
</devices></domain>"""


class Backend(FakeBackend):
    features: ClassVar[Features] = FakeBackend.features.model_copy(update={"qos": True})


@dataclass
class Node:
    """A hypervisor: the remotes of OpenNebula with our drivers, and the agent."""

    remotes: Path
    agent: Agent
    socket: Path

    def run(
        self, action: str, *arguments: str, stdin: str = "", kind: str = "vnm/netplugin", **env: str
    ) -> subprocess.CompletedProcess[str]:
        path = f"{self.remotes}:{os.environ['PATH']}"
        return subprocess.run(
            [self.remotes / kind / action, *arguments],
            input=stdin,
            env={"PATH": path, "NETPLUGIN_URL": f"unix:{self.socket}", **env},
            text=True,
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def network(self, action: str, vm: str, *arguments: str) -> None:
        """An action of the network driver, which succeeds and says nothing."""
        done = self.run(action, *arguments, stdin=encoded(vm))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def refused(self, action: str, vm: str, *arguments: str, **env: str) -> str:
        """The one line of an action of the network driver that fails."""
        done = self.run(action, *arguments, stdin=encoded(vm), **env)
        assert (done.returncode, done.stdout) == (1, ""), done
        line, end = done.stderr.split("\n")
        assert end == "" and line.startswith(f"netplugin {action}: ")
        return line.removeprefix(f"netplugin {action}: ")

    def client(self) -> Client:
        return Client(f"unix:{self.socket}")

    def ports(self) -> set[str]:
        return set(self.agent.host.ports)

    def called(self) -> tuple[str, str]:
        """The arguments and the stdin of OpenNebula's script."""
        first, _, rest = (self.remotes / "vmm/kvm/called").read_text().partition("\n")
        return first, rest


@pytest.fixture(scope="module")
def remotes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenNebula's remotes, on which our drivers are installed."""
    remotes = tmp_path_factory.mktemp("one") / "remotes"
    kvm = remotes / "vmm/kvm"
    kvm.mkdir(parents=True)
    (remotes / "vnm").mkdir()
    for action in ("deploy", "attach_nic", "detach_nic", "save"):
        (kvm / action).write_text(KVM)
        (kvm / action).chmod(0o755)
    (kvm / "kvmrc").write_text("")
    (remotes / "virsh").write_text(VIRSH)
    (remotes / "virsh").chmod(0o755)
    subprocess.run([TOOLS / "install", remotes], check=True, timeout=DEADLINE_S)
    return remotes


@pytest.fixture(scope="module")
def started(remotes: Path) -> Iterator[Node]:
    host, path = FakeHost(), remotes.parent / "agent.sock"
    backends = {name: Backend(name, host) for name in ("linuxbridge", "dpdkvhostuser")}
    with agent(remotes.parent, backends=backends) as running:
        running.host = host
        with served_agent(running, uds=str(path)):
            yield Node(remotes, running, path)


@pytest.fixture
def node(started: Node) -> Iterator[Node]:
    """The module's, without ports before and after a test."""
    yield started
    started.agent.host.on_apply = FakeHost().on_apply
    with started.client() as client:
        for port in client.list_ports():
            client.delete_port(port.port_id)
    (started.remotes / "vmm/kvm/called").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("opennebula_driver", TOOLS / "driver.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def encoded(vm: str) -> str:
    """In lines, as update_nic gets it; the other actions get one line."""
    return base64.encodebytes(vm.encode()).decode()


def nic(nic_id: int = 0, vm_id: int = 5, kind: str = "NIC", **attributes: str) -> str:
    """A NIC as OpenNebula describes it; an attribute of None is left out."""
    found = {
        "BRIDGE": "onebr0",
        "BRIDGE_TYPE": "linux",
        "CLUSTER_ID": "0",
        "MAC": f"02:00:00:00:{vm_id:02x}:{nic_id:02x}",
        "IP": f"10.0.{vm_id}.{nic_id + 1}",
        "MODEL": "virtio",
        "NETWORK": "private",
        "NETWORK_ID": "3",
        "NIC_ID": str(nic_id),
        "PHYDEV": "physnet1",
        "SECURITY_GROUPS": "0",
        "TARGET": f"one-{vm_id}-{nic_id}",
        "VN_MAD": "netplugin",
        **attributes,
    }
    inside = "".join(f"<{name}><![CDATA[{text}]]></{name}>" for name, text in found.items())
    return f"<{kind}>{inside}</{kind}>"


def vm(*nics: str, vm_id: int = 5) -> str:
    """What the network drivers get: ``XPATH_LIST`` of one_vmm_exec.rb, and the NICs."""
    history = "<HISTORY_RECORDS><HISTORY><VM_MAD>kvm</VM_MAD></HISTORY></HISTORY_RECORDS>"
    return f"<VM><ID>{vm_id}</ID><DEPLOY_ID/><TEMPLATE>{''.join(nics)}</TEMPLATE>{history}</VM>"


def alias(**attributes: str) -> str:
    return nic(7, kind="NIC_ALIAS", IP="10.0.9.9", PARENT_ID="0", **attributes)


# -- the life of a VM ------------------------------------------------------------------------------


def test_a_vm_is_deployed_and_shut_down(node: Node) -> None:
    node.network("pre", vm(nic(vm_id=51), vm_id=51))
    both = vm(nic(0), nic(1, VLAN_ID="100", MTU="9000"))
    node.network("pre", both)
    written = len(node.agent.host.written)
    node.network("pre", both)
    node.network("post", both, "c6b3f0f2-0000-4000-8000-000000000005", "node1")
    assert len(node.agent.host.written) == written, "the same again changes nothing"
    assert node.ports() == {"one-51-0", "one-5-0", "one-5-1"}
    assert node.agent.host.ports["one-5-1"].network.vlan_id == 100
    node.network("clean", both, "node1")
    assert node.ports() == {"one-51-0"}
    node.network("clean", both, "node1")
    assert node.ports() == {"one-51-0"}


def test_a_nic_is_attached_and_detached(node: Node) -> None:
    node.network("pre", vm(nic(0)))
    attached = vm(nic(0), nic(1, ATTACH="YES"))
    node.network("pre", attached)
    assert node.ports() == {"one-5-0", "one-5-1"}
    node.network("clean", attached, "node1")
    assert node.ports() == {"one-5-0"}


@pytest.mark.parametrize("other", [nic(1, kind="PCI", ATTACH="YES"), nic(1, VN_MAD="bridge", ATTACH="YES")])
def test_detaching_another_nic_leaves_ours(node: Node, other: str) -> None:
    node.network("pre", vm(nic(0)))
    node.network("clean", vm(nic(0), other), "node1")
    assert node.ports() == {"one-5-0"}


@pytest.mark.parametrize("text", ["CONTEXT", "GRAPHICS", "DISK", "USER_INPUTS"])
def test_attach_in_the_users_text_keeps_no_port(node: Node, text: str) -> None:
    more = f"<{text}><ATTACH>YES</ATTACH><VN_MAD>netplugin</VN_MAD><NIC_ID>0</NIC_ID></{text}>"
    node.network("pre", vm(nic(0), nic(1), more))
    assert node.ports() == {"one-5-0", "one-5-1"}
    node.network("clean", vm(nic(0), nic(1), more), "node1")
    assert node.ports() == set()


def test_attach_in_several_nics_is_not_opennebulas(node: Node) -> None:
    all_of_them = vm(nic(0, ATTACH="YES"), nic(1, ATTACH="YES"), nic(2))
    node.network("pre", all_of_them)
    node.network("clean", all_of_them, "node1")
    assert node.ports() == set()


def test_an_alias_is_attached_and_detached(node: Node) -> None:
    own = nic(0, FILTER_IP_SPOOFING="YES")

    def allowed() -> list[str]:
        return [each.ip for each in node.agent.host.ports["one-5-0"].port_security.allowed_addresses]

    node.network("pre", vm(own, nic(1)))
    node.network("pre", vm(own, nic(1), alias(ATTACH="YES", VN_MAD="fw")))
    assert allowed() == ["10.0.5.1", "10.0.9.9"]
    node.network("clean", vm(own, nic(1), alias(ATTACH="YES", VN_MAD="fw")), "node1")
    assert allowed() == ["10.0.5.1"] and node.ports() == {"one-5-0", "one-5-1"}


def test_what_a_failed_attachment_left_is_removed(node: Node) -> None:
    node.network("pre", vm(nic(0), nic(1), nic(2)))
    node.network("pre", vm(nic(0), nic(3)))
    assert node.ports() == {"one-5-0", "one-5-3"}
    node.network("pre", vm(nic(0), nic(1)))
    node.network("clean", vm(nic(0)), "node1")
    assert node.ports() == set()


def test_an_update_changes_the_nics_of_its_network(node: Node) -> None:
    node.network("pre", vm(nic(0), nic(1, NETWORK_ID="4")))
    changed = vm(nic(0, VLAN_ID="7"), nic(1, NETWORK_ID="4", VLAN_ID="8"))
    node.network("update_nic", changed, "c6b3f0f2-0000-4000-8000-000000000005", "3")
    vlans = {port_id: spec.network.vlan_id for port_id, spec in node.agent.host.ports.items()}
    assert vlans == {"one-5-0": 7, "one-5-1": None}


# -- failures --------------------------------------------------------------------------------------


def test_a_failure_leaves_what_was_there(node: Node) -> None:
    node.network("pre", vm(nic(0)))

    def refuse(change: Write | WriteNetwork) -> None:
        if isinstance(change, Write) and change.spec is not None and "one-5-2" in change.ports:
            raise HostError("no more room", step="bridge", fix="make\nroom")

    node.agent.host.on_apply = refuse  # type: ignore[assignment]
    line = node.refused("pre", vm(nic(0), nic(1), nic(2), nic(3)))
    assert line.startswith("one-5-2: ") and line.endswith("no more room; make room")
    assert node.ports() == {"one-5-0"}


def test_a_port_of_another_vm_is_not_touched(node: Node) -> None:
    """Of another platform, with an ID that would be ours."""
    other = {"vm_id": "vm9", "mac": "52:54:00:00:00:09", "backend": "linuxbridge"}
    network = {"type": "flat", "physical_network": "physnet1"}
    with node.client() as client:
        client.put_port("one-5-1", PortSpec.model_validate({**other, "network": network}))
    assert "one-5-1: " in node.refused("pre", vm(nic(0), nic(1)))
    assert node.ports() == {"one-5-1"}
    node.network("clean", vm(nic(1, ATTACH="YES")), "node1")
    node.network("clean", vm(nic(1)), "node1")
    assert node.ports() == {"one-5-1"}


@pytest.mark.parametrize(
    ("bad", "printed"),
    [
        (nic(1, MAC="nonsense"), "one-5-1: mac"),
        (nic(1, VLAN_ID="4095"), "one-5-1: network.vlan_id"),
        (nic(1, NIC_ID="1/../../x"), "NIC_ID '1/../../x' is not a number"),
        (nic(1, VLAN_ID="ten"), "one-5-1: VLAN_ID 'ten' is not a number"),
        (nic(1, NETPLUGIN_BACKEND="none"), "one-5-1: backend: 'none' is not enabled"),
        (nic(1, kind="PCI", PCI_ID="2"), "PCI 2: NICs of type PCI are not supported"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(node: Node, bad: str, printed: str) -> None:
    line = node.refused("pre", vm(nic(0), bad))
    assert printed in line
    assert node.ports() == set()


@pytest.mark.parametrize(
    "stdin", ["", "<VM/>", "<VM><ID>../x</ID></VM>", "<!DOCTYPE VM><VM><ID>1</ID></VM>", "x", "<VM>\xff</VM>"]
)
def test_what_is_no_vm_is_refused(driver: ModuleType, stdin: str) -> None:
    for action in ("pre", "post", "clean", "update_nic"):
        with pytest.raises(driver.Failed):
            driver.ACTIONS[action](["one-5", "3"], base64.b64encode(stdin.encode("latin-1")))


def test_a_port_that_cannot_be_deleted_fails_the_clean_up_and_not_the_others(node: Node) -> None:
    node.network("pre", vm(nic(0), nic(1)))

    def refuse(change: Write | WriteNetwork) -> None:
        if "one-5-0" in change.ports:
            raise HostError("busy", step="bridge")

    node.agent.host.on_apply = refuse  # type: ignore[assignment]
    assert "one-5-0: " in node.refused("clean", vm(nic(0), nic(1)), "node1")
    assert node.ports() == {"one-5-0"}


@pytest.mark.parametrize("action", ["pre", "clean"])
def test_an_agent_that_is_down_is_a_failure(remotes: Path, tmp_path: Path, action: str) -> None:
    node = Node(remotes, None, tmp_path / "agent.sock")  # type: ignore[arg-type]
    assert f"the agent at unix:{node.socket} does not answer" in node.refused(action, vm(nic(0)))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(node.socket))
        listening.listen()
        line = node.refused(action, vm(nic(0)), NETPLUGIN_TIMEOUT="1")
        assert line == "the agent did not answer within 1 s"


@pytest.mark.parametrize("action", ["update_sg", "vnet_create", "vnet_delete"])
def test_an_action_without_work_needs_no_agent(remotes: Path, tmp_path: Path, action: str) -> None:
    node = Node(remotes, None, tmp_path / "none")  # type: ignore[arg-type]
    assert node.run(action, "x", stdin="any").returncode == 0


# -- the mapping -----------------------------------------------------------------------------------

IP6 = {"IP6_GLOBAL": "2001:db8::1", "IP6_LINK": "fe80::1"}
FILTERED = {"FILTER_IP_SPOOFING": "YES", "FILTER_MAC_SPOOFING": "NO"}


def ips(*found: str) -> dict[str, Any]:
    return {"allowed_addresses": [{"ip": ip} for ip in found]}


@pytest.mark.parametrize(
    ("attributes", "field", "expected"),
    [
        ({}, "network", {"type": "flat", "physical_network": "physnet1"}),
        ({"VLAN_ID": "5"}, "network", {"type": "vlan", "physical_network": "physnet1", "vlan_id": 5}),
        ({"MTU": "9000"}, "network", {"type": "flat", "physical_network": "physnet1", "mtu": 9000}),
        ({}, "backend", "linuxbridge"),
        ({"BRIDGE_TYPE": "openvswitch_dpdk"}, "backend", "dpdkvhostuser"),
        ({"BRIDGE_TYPE": "openvswitch", "NETPLUGIN_BACKEND": "vdpa"}, "backend", "vdpa"),
        ({}, "queues", 1),
        ({"VIRTIO_QUEUES": "4"}, "queues", 4),
        ({}, "qos", {"ingress_kbps": None, "egress_kbps": None}),
        (
            {"INBOUND_AVG_BW": "125", "OUTBOUND_AVG_BW": "0"},
            "qos",
            {"ingress_kbps": 1000, "egress_kbps": None},
        ),
        ({}, "port_security", {"enabled": True}),
        ({"FILTER_MAC_SPOOFING": "YES"}, "port_security", {"enabled": True}),
        ({"FILTER_MAC_SPOOFING": "no"}, "port_security", {"enabled": False}),
        ({"FILTER_IP_SPOOFING": "yes"}, "port_security", ips("10.0.5.1")),
        (FILTERED | IP6, "port_security", ips("10.0.5.1", "2001:db8::1", "fe80::1")),
    ],
)
def test_an_attribute_is_mapped(
    driver: ModuleType, attributes: dict[str, str], field: str, expected: object
) -> None:
    root = ET.fromstring(vm(nic(0, **attributes), alias()))
    if field == "port_security" and isinstance(expected, dict) and "allowed_addresses" in expected:
        expected = {"allowed_addresses": [*expected["allowed_addresses"], {"ip": "10.0.9.9"}]}
    assert driver.spec_of(root, root.find("TEMPLATE/NIC"))[field] == expected


@pytest.mark.parametrize(
    ("attributes", "printed"),
    [
        ({"FILTER": "clean-traffic"}, "FILTER is not supported"),
        ({"VLAN_TAGGED_ID": "1,2"}, "VLAN_TAGGED_ID"),
        ({"CVLANS": "1"}, "CVLANS"),
        ({"OUTER_VLAN_ID": "5000"}, "OUTER_VLAN_ID"),
        ({"MODEL": "e1000"}, "MODEL e1000"),
        ({"SECURITY_GROUPS": "0,100"}, "SECURITY_GROUPS 100"),
        ({"BRIDGE_TYPE": "openvswitch"}, "BRIDGE_TYPE is 'openvswitch'"),
        ({"PHYDEV": ""}, "PHYDEV is not set"),
        ({"VIRTIO_QUEUES": "auto"}, "VIRTIO_QUEUES 'auto' is not a number"),
        ({"MTU": "-1"}, "MTU '-1' is not a number"),
        ({"IP": "", "FILTER_IP_SPOOFING": "YES"}, "FILTER_IP_SPOOFING is YES, but the NIC has no address"),
    ],
)
def test_what_has_no_equivalent_is_refused(
    driver: ModuleType, attributes: dict[str, str], printed: str
) -> None:
    root = ET.fromstring(vm(nic(0, **attributes)))
    with pytest.raises(driver.Failed, match=printed):
        driver.spec_of(root, root.find("TEMPLATE/NIC"))


# -- the KVM driver --------------------------------------------------------------------------------


def deployed(node: Node, whole: str, **env: str) -> subprocess.CompletedProcess[str]:
    """As one_vmm_exec.rb deploys: the VM's file is beside that of the domain."""
    directory = node.remotes / "datastores/0/5"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vm.xml").write_text(whole)
    arguments = (f"{directory}/deployment.0", "node1", "5", "node1")
    return node.run("deploy", *arguments, stdin=DOMAIN, kind="vmm/kvm-netplugin", **env)


def test_a_domain_gets_the_interfaces_of_its_ports(node: Node) -> None:
    both = vm(nic(0), nic(9, VN_MAD="bridge"))
    node.network("pre", both)
    assert deployed(node, both).returncode == 7, "that of OpenNebula's script"
    called, domain = node.called()
    assert called.startswith("deploy /") and called.endswith("deployment.0 node1 5 node1")
    found = ET.fromstring(domain).findall("devices/interface")
    assert [each.get("type") for each in found] == ["ethernet", "bridge"]
    ours = found[0]
    target, boot = ours.find("target"), ours.find("boot")
    assert target is not None and target.attrib == {"dev": "fake-one-5-0", "managed": "no"}
    assert boot is not None and boot.get("order") == "1"


def test_a_domain_without_our_nics_stays_as_it_is_without_an_agent(node: Node) -> None:
    done = deployed(node, vm(nic(0, VN_MAD="bridge")), NETPLUGIN_URL="unix:/nowhere")
    assert done.returncode == 7
    assert node.called()[1] == DOMAIN


def test_a_domain_is_not_deployed_without_its_ports(node: Node) -> None:
    done = deployed(node, vm(nic(0)))
    assert done.returncode == 1 and done.stderr == "netplugin deploy: VM one-5 has no ports here\n"
    assert not (node.remotes / "vmm/kvm/called").exists()


def test_an_interface_is_attached_as_the_agent_describes_it(node: Node) -> None:
    whole = vm(nic(0), nic(1, ATTACH="YES"))
    node.network("pre", whole)
    data = f"<VMM_DRIVER_ACTION_DATA><HOST>node1</HOST>{whole}</VMM_DRIVER_ACTION_DATA>"
    nics, busy, log = (node.remotes / name for name in ("nics", "busy", "called"))

    def change(action: str, domain: str = "one-5") -> str:
        done = node.run(action, domain, "mac", stdin=data, kind="vmm/kvm-netplugin")
        assert done.returncode == (1 if done.stderr else 0)
        return done.stderr

    assert change("attach_nic", "one-6") == "netplugin attach_nic: error: no domain one-6\n"
    assert change("attach_nic") == change("attach_nic") == ""
    assert "fake-one-5-1" in nics.read_text()
    busy.touch()
    assert "has not released the NIC 02:00:00:00:05:01" in change("detach_nic")
    busy.unlink()
    assert change("detach_nic") == change("detach_nic") == ""
    assert log.read_text().split() == ["attach", "detach", "detach"], "not what is done already"


@pytest.mark.parametrize("action", ["attach_nic", "detach_nic", "save"])
def test_what_is_not_ours_is_done_by_opennebula(node: Node, action: str) -> None:
    data = f"<VMM_DRIVER_ACTION_DATA>{vm(nic(1, VN_MAD='bridge', ATTACH='YES'))}</VMM_DRIVER_ACTION_DATA>"
    assert node.run(action, "one-5", "a b", stdin=data, kind="vmm/kvm-netplugin").returncode == 7
    assert node.called() == (f"{action} one-5 a b", data)


@pytest.mark.parametrize("action", ["deploy", "attach_nic", "detach_nic", "update_nic"])
def test_missing_arguments_are_named(node: Node, action: str) -> None:
    kind = "vnm/netplugin" if action == "update_nic" else "vmm/kvm-netplugin"
    done = node.run(action, stdin=encoded(vm(nic(0))), kind=kind)
    assert done.returncode == 1 and done.stderr.startswith(f"netplugin {action}: arguments are missing: ")
    assert done.stderr.count("\n") == 1


# -- installing ------------------------------------------------------------------------------------


def test_installing_again_follows_opennebula(remotes: Path, tmp_path: Path) -> None:
    remotes = shutil.copytree(remotes, tmp_path / "remotes")
    (remotes / "vmm/kvm/save").unlink()
    shutil.copy(remotes / "vmm/kvm/deploy", remotes / "vmm/kvm/resize")
    subprocess.run([TOOLS / "install", remotes], check=True, timeout=DEADLINE_S)
    installed = {path.name for path in (remotes / "vmm/kvm-netplugin").iterdir()}
    assert installed == {"deploy", "attach_nic", "detach_nic", "resize"}
    assert (remotes / "vmm/kvm/deploy").read_text() == KVM, "OpenNebula's own are untouched"


def test_it_is_not_installed_where_no_opennebula_is(tmp_path: Path) -> None:
    done = subprocess.run([TOOLS / "install", tmp_path], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1 and "has no vmm/kvm" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_it_needs_the_standard_library_only() -> None:
    """Nothing else is installed for the Python of a hypervisor."""
    done = subprocess.run([sys.executable, "-I", "-S", TOOLS / "driver.py"], capture_output=True, text=True)
    assert "No module named" not in done.stderr and "driver.py" in done.stderr

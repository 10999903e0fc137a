"""A VM of OpenNebula on a Linux bridge of the agent: the drivers, the domain, libvirt, and the frames."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.lab.agent import PrivateAgent
from tests.lab.libvirtd import URI, PrivateLibvirt
from tests.lab.processes import CommandError, run, wait_for

MAC = "02:00:0a:00:00:{:02x}"
VM = "one-5"
#: What OpenNebula's own script does with the domain, once it has written it.
DEPLOY = f"""#!/bin/sh
cat > "$1" && exec virsh --quiet --connect {URI} create "$1"
"""
DEADLINE_S = 60.0
OPEN = "<FILTER_MAC_SPOOFING>NO</FILTER_MAC_SPOOFING>"


@pytest.fixture
def agent(short_path: Path) -> Iterator[PrivateAgent]:
    options = {
        "api": {"socket": str(short_path / "agent.sock"), "socket_group": "nogroup"},
        "linuxbridge": {"physical_interfaces": "physnet1:"},
    }
    with PrivateAgent(short_path / "agent", options=options) as running:
        yield running


@pytest.fixture
def remotes(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kvm = short_path / "remotes/vmm/kvm"
    kvm.mkdir(parents=True)
    (short_path / "remotes/vnm").mkdir()
    for name in ("deploy", "attach_nic", "detach_nic"):
        (kvm / name).write_text(DEPLOY)
        (kvm / name).chmod(0o755)
    run([ROOT / "tools/opennebula/install", short_path / "remotes"])
    monkeypatch.setenv("NETPLUGIN_URL", f"unix:{short_path / 'agent.sock'}")
    return short_path / "remotes"


def nic(number: int, attach: str = "") -> str:
    return f"""<NIC>{attach}<BRIDGE>onebr0</BRIDGE><BRIDGE_TYPE>linux</BRIDGE_TYPE><IP>10.0.0.{number}</IP>
      <MAC>{MAC.format(number)}</MAC><NETWORK_ID>0</NETWORK_ID><NIC_ID>{number}</NIC_ID>
      <PHYDEV>physnet1</PHYDEV><SECURITY_GROUPS>0</SECURITY_GROUPS><TARGET>{VM}-{number}</TARGET>
      <FILTER_IP_SPOOFING>YES</FILTER_IP_SPOOFING><VN_MAD>netplugin</VN_MAD></NIC>"""


def vm(*nics: str) -> str:
    return f"<VM><ID>5</ID><DEPLOY_ID/><TEMPLATE>{''.join(nics)}</TEMPLATE></VM>"


def domain() -> str:
    """As LibVirtDriverKVM.cc writes it, with the least that runs; its bridge does not exist."""
    return f"""<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
	<name>{VM}</name>
	<vcpu><![CDATA[1]]></vcpu>
	<memory>65536</memory>
	<os>
		<type arch='x86_64'>hvm</type>
	</os>
	<devices>
		<emulator><![CDATA[/usr/bin/qemu-system-x86_64]]></emulator>
		<interface type='bridge'>
			<source bridge='onebr0'/>
			<mac address='{MAC.format(0)}'/>
			<target dev='{VM}-0'/>
			<model type='virtio'/>
		</interface>
	</devices>
	<features>
		<acpi/>
	</features>
</domain>
"""


#: A user who is not root, as oneadmin.
ONEADMIN = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def network(action: Path, whole: str, *arguments: str) -> None:
    assert run([*ONEADMIN, action, *arguments], stdin=base64.b64encode(whole.encode()).decode()) == ""


def members(bridge: str) -> set[str]:
    return {path.name for path in Path(f"/sys/class/net/{bridge}/brif").iterdir()}


def test_a_vm_of_opennebula_runs_on_ports_of_the_agent(agent: PrivateAgent, remotes: Path) -> None:
    vnm, vmm = remotes / "vnm/netplugin", remotes / "vmm/kvm-netplugin"
    with PrivateLibvirt() as libvirtd:
        with pytest.raises(CommandError, match=r"one-5-0: .*port_security.enabled=false"):
            network(vnm / "pre", vm(nic(0).replace("<FILTER_IP_SPOOFING>YES</FILTER_IP_SPOOFING>", OPEN)))
        network(vnm / "pre", vm(nic(0)))
        binding = agent.get(f"/v1/ports/{VM}-0")[1]["binding"]
        (remotes / "vm.xml").write_text(vm(nic(0)))
        run([vmm / "deploy", remotes / "deployment.0", "node1", "5", "node1"], DEADLINE_S, stdin=domain())
        uuid = libvirtd.connect().lookupByName(VM).UUIDString()
        network(vnm / "post", vm(nic(0)), uuid, "node1")
        port = agent.get(f"/v1/ports/{VM}-0")[1]
        assert port["state"] == "active" and port["binding"] == binding
        carrier = Path(f"/sys/class/net/{binding['device']}/carrier")
        wait_for(lambda: carrier.read_text() == "1\n", DEADLINE_S, "QEMU has the tap of the port")
        assert members(binding["bridge"]) == {binding["device"]}

        both = vm(nic(0), nic(1, "<ATTACH>YES</ATTACH>"))
        network(vnm / "pre", both)
        action = f"<VMM_DRIVER_ACTION_DATA>{both}</VMM_DRIVER_ACTION_DATA>"
        run([vmm / "attach_nic", VM, MAC.format(1), "onebr0", "virtio"], DEADLINE_S, stdin=action)
        network(vnm / "post", both, uuid, "node1")
        second = agent.get(f"/v1/ports/{VM}-1")[1]["binding"]["device"]
        live = libvirtd.connect().lookupByName(VM).XMLDesc()
        assert f"'{binding['device']}'" in live and f"'{second}'" in live

        libvirtd.destroy_domain(VM)
        network(vnm / "clean", both, "node1")
        assert members(binding["bridge"]) == {binding["device"]}, "the NIC that is not detached"
        network(vnm / "clean", vm(nic(0), nic(1)), "node1")
    assert agent.get("/v1/ports")[1] == []
    assert not carrier.exists() and not Path(f"/sys/class/net/{binding['bridge']}").exists()

#!/usr/bin/env python3
"""OpenNebula's network driver ``netplugin``, and the actions of its KVM driver that need the VM's ports.

It is installed once for each action, under the name of the action (``install``), and runs on the
hypervisor as oneadmin. It calls the agent on its UNIX socket: ``NETPLUGIN_URL``, or the default of the
agent. The actions of the network driver get the VM (base64 of its XML) on stdin:

    pre, post   [deploy-id host]        plug the VM's NICs
    clean       [host]                  unplug them; if one is being detached, only that one
    update_nic  deploy-id network-id    plug those of one network again

The actions of the KVM driver are called instead of OpenNebula's own, which they call in turn:

    deploy      file ...                deploy the domain (stdin) with the NICs that the agent renders
    attach_nic  domain ...              attach the interface that the agent describes
    detach_nic  domain mac ...          detach it

A failure is one line on stderr, which OpenNebula shows to the user, and status 1.
docs/opennebula.md has the mapping and its limits.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

#: The VN_MAD of the networks that this driver serves.
VN_MAD = "netplugin"
#: The backend by the BRIDGE_TYPE of the network, if it does not name one.
BACKENDS = {"linux": "linuxbridge", "openvswitch_dpdk": "dpdkvhostuser"}
#: Attributes of a NIC that would be without effect, and why.
UNSUPPORTED = {
    "FILTER": "use FILTER_MAC_SPOOFING and FILTER_IP_SPOOFING",
    "VLAN_TAGGED_ID": "a NIC has one VLAN",
    "CVLANS": "a NIC has one VLAN",
    "OUTER_VLAN_ID": "VXLAN networks are not mapped",
    "SCRIPT": "the agent configures the NIC",
}
ADDRESSES = ("IP", "IP6", "IP6_GLOBAL", "IP6_ULA", "IP6_LINK", "VROUTER_IP")
#: Further addresses of a NIC, whatever the driver of their network.
ALIASES = "TEMPLATE/NIC_ALIAS"
#: Where OpenNebula itself sets ATTACH for a NIC. In the rest of the template it is the user's text.
NICS = ("TEMPLATE/NIC", "TEMPLATE/PCI", ALIASES)
DEFAULT_URL = "unix:/run/netplugin/agent.sock"
#: Seconds for all calls of one action. An agent answers each within its [agent] operation_timeout (30).
DEADLINE_S = int(os.environ.get("NETPLUGIN_TIMEOUT", "90"))


class Failed(Exception):
    """The sentence for OpenNebula."""


class Late(Exception):
    """The deadline has passed: unlike after a failure, nothing more is tried."""


# -- the agent -------------------------------------------------------------------------------------


class _Agent(http.client.HTTPConnection):
    """A connection to the agent's UNIX socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def call(method: str, path: str, body: Any = None) -> Any:
    """Call the agent and return what it answers. Raises: Failed."""
    url = os.environ.get("NETPLUGIN_URL", DEFAULT_URL)
    if not url.startswith("unix:"):
        raise Failed(f"NETPLUGIN_URL is {url}, but must be unix: and the path of the agent's socket")
    agent = _Agent(url.removeprefix("unix:"))
    try:
        sent = None if body is None else json.dumps(body)
        agent.request(method, path, sent, {"Content-Type": "application/json"})
        response = agent.getresponse()
        read = response.read()
        answer = json.loads(read) if read else None
    except PermissionError as error:
        raise Failed(f"{url}: {error.strerror}: add oneadmin to the group of [api] socket_group") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed(f"the agent at {url} does not answer: {error or type(error).__name__}") from error
    finally:
        agent.close()
    if response.status >= 300:
        problem = answer if isinstance(answer, dict) else {}
        detail = problem.get("detail") or f"the agent answers with status {response.status}"
        raise Failed(f"{detail}; {problem['fix']}" if problem.get("fix") else detail)
    return answer


def ports_of(vm_id: str) -> list[str]:
    """The ports that a VM has at the agent."""
    return [port["port_id"] for port in call("GET", f"/v1/ports?vm_id={vm_id}")]


def unplug(port_ids: Sequence[str]) -> None:
    """Delete ports, all that can be deleted. Raises: Failed for the first that cannot."""
    failed = []
    for port_id in port_ids:
        try:
            call("DELETE", f"/v1/ports/{port_id}")
        except Failed as error:
            failed.append(Failed(f"{port_id}: {error}"))
    if failed:
        raise failed[0]


# -- OpenNebula's VM -------------------------------------------------------------------------------


def parsed(xml: bytes) -> ET.Element:
    """The VM in what a driver gets. Raises: Failed."""
    try:
        if b"<!DOCTYPE" in xml:
            raise Failed("a document type is not allowed in the XML of a VM")
        document = ET.fromstring(xml)
    except ET.ParseError as error:
        raise Failed(f"stdin has no VM: {error}") from error
    vm = document if document.tag == "VM" else document.find("VM")
    if vm is None or not is_number(value(vm, "ID")):
        raise Failed("stdin has no VM with an ID")
    return vm


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def decoded(stdin: bytes) -> ET.Element:
    try:
        return parsed(base64.b64decode(stdin))
    except binascii.Error as error:
        raise Failed(f"stdin is not base64: {error}") from error


def value(element: ET.Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def vm_id_of(vm: ET.Element) -> str:
    """The name of the VM's domain, which is also its ID at the agent."""
    return f"one-{value(vm, 'ID')}"


def port_id_of(vm: ET.Element, nic: ET.Element) -> str:
    """The ID of a NIC's port: what OpenNebula has as its TARGET by default."""
    nic_id = value(nic, "NIC_ID")
    if not is_number(nic_id):
        raise Failed(f"NIC_ID {nic_id!r} is not a number")
    return f"{vm_id_of(vm)}-{nic_id}"


def ours(vm: ET.Element, kind: str = "NIC") -> Iterator[ET.Element]:
    return (each for each in vm.iterfind(f"TEMPLATE/{kind}") if value(each, "VN_MAD") == VN_MAD)


def number(nic: ET.Element, name: str) -> int | None:
    """An attribute that is a number; None if it is not set. Raises: Failed."""
    text = value(nic, name)
    if text and not is_number(text):
        raise Failed(f"{name} {text!r} is not a number")
    return int(text) if text else None


def kbps(nic: ET.Element, name: str) -> int | None:
    """A rate of OpenNebula (kilobytes a second) in kbit/s; 0 is no limit."""
    return (number(nic, name) or 0) * 8 or None


def security(nic: ET.Element, aliases: Sequence[ET.Element]) -> dict[str, Any]:
    """The filters. A NIC may send from its own MAC only, unless FILTER_MAC_SPOOFING is NO."""
    if value(nic, "FILTER_IP_SPOOFING").upper() == "YES":
        found = [value(each, name) for each in (nic, *aliases) for name in ADDRESSES]
        if not any(found):
            raise Failed("FILTER_IP_SPOOFING is YES, but the NIC has no address")
        return {"allowed_addresses": [{"ip": ip} for ip in dict.fromkeys(filter(None, found))]}
    return {"enabled": value(nic, "FILTER_MAC_SPOOFING").upper() != "NO"}


def spec_of(vm: ET.Element, nic: ET.Element) -> dict[str, Any]:
    """The PortSpec of a NIC. Raises: Failed, for what has no equivalent."""
    for name, instead in UNSUPPORTED.items():
        if value(nic, name):
            raise Failed(f"{name} is not supported: {instead}")
    if value(nic, "MODEL") not in ("", "virtio"):
        raise Failed(f"MODEL {value(nic, 'MODEL')} is not supported: use virtio")
    groups = set(filter(None, value(nic, "SECURITY_GROUPS").split(","))) - {"0"}
    if groups:
        raise Failed(f"SECURITY_GROUPS {','.join(sorted(groups))}: only the default group, 0, is supported")
    bridge_type = value(nic, "BRIDGE_TYPE")
    backend = value(nic, "NETPLUGIN_BACKEND") or BACKENDS.get(bridge_type)
    if backend is None:
        raise Failed(f"BRIDGE_TYPE is {bridge_type!r}: use {' or '.join(BACKENDS)}, or set NETPLUGIN_BACKEND")
    if not value(nic, "PHYDEV"):
        raise Failed("PHYDEV is not set: it names the physical network of the agent")
    vlan_id, mtu = number(nic, "VLAN_ID"), number(nic, "MTU")
    network = {"type": "flat" if vlan_id is None else "vlan", "physical_network": value(nic, "PHYDEV")}
    optional = {"vlan_id": vlan_id, "mtu": mtu}
    aliases = [each for each in vm.iterfind(ALIASES) if value(each, "PARENT_ID") == value(nic, "NIC_ID")]
    return {
        "vm_id": vm_id_of(vm),
        "mac": value(nic, "MAC"),
        "backend": backend,
        "network": network | {name: given for name, given in optional.items() if given is not None},
        "queues": number(nic, "VIRTIO_QUEUES") or 1,
        "qos": {"ingress_kbps": kbps(nic, "INBOUND_AVG_BW"), "egress_kbps": kbps(nic, "OUTBOUND_AVG_BW")},
        "port_security": security(nic, aliases),
    }


# -- actions of the network driver -----------------------------------------------------------------


def plug(vm: ET.Element, nics: Sequence[ET.Element]) -> None:
    """Plug these NICs. If one fails, those that are new are unplugged. Raises: Failed."""
    specs = {}
    for nic in nics:
        port_id = port_id_of(vm, nic)
        try:
            specs[port_id] = spec_of(vm, nic)
        except Failed as error:
            raise Failed(f"{port_id}: {error}") from error
    before = set(ports_of(vm_id_of(vm)))
    new: list[str] = []
    for port_id, spec in specs.items():
        try:
            call("PUT", f"/v1/ports/{port_id}", spec)
        except Failed as error:
            try:
                unplug(new)
            except Failed as left:
                raise Failed(f"{port_id}: {error}; and then {left}") from error
            raise Failed(f"{port_id}: {error}") from error
        new += {port_id} - before


def pre(arguments: Sequence[str], stdin: bytes) -> None:
    vm = decoded(stdin)
    for device in ours(vm, "PCI"):
        raise Failed(f"PCI {value(device, 'PCI_ID')}: NICs of type PCI are not supported")
    nics = list(ours(vm))
    # OpenNebula does not clean up after an attachment that failed.
    known = {port_id_of(vm, nic) for nic in nics}
    unplug([port_id for port_id in ports_of(vm_id_of(vm)) if port_id not in known])
    plug(vm, nics)


def clean(arguments: Sequence[str], stdin: bytes) -> None:
    vm = decoded(stdin)
    detached = [nic for kind in NICS for nic in vm.iterfind(kind) if value(nic, "ATTACH") == "YES"]
    # OpenNebula detaches one at a time, so more than one are not its own.
    if len(detached) != 1:
        unplug(ports_of(vm_id_of(vm)))
        return
    aliases = [each for each in detached if each.tag == "NIC_ALIAS"]
    for alias in aliases:
        vm.find("TEMPLATE").remove(alias)  # type: ignore[union-attr]
    parents = {value(alias, "PARENT_ID") for alias in aliases}
    gone = {port_id_of(vm, nic) for nic in ours(vm) if nic in detached}
    unplug([port_id for port_id in ports_of(vm_id_of(vm)) if port_id in gone])
    plug(vm, [nic for nic in ours(vm) if value(nic, "NIC_ID") in parents])


def update_nic(arguments: Sequence[str], stdin: bytes) -> None:
    vm = decoded(stdin)
    plug(vm, [nic for nic in ours(vm) if value(nic, "NETWORK_ID") == arguments[1]])


def nothing(arguments: Sequence[str], stdin: bytes) -> None:
    """Security groups and virtual networks have no state of their own on a host."""


# -- actions of the KVM driver ---------------------------------------------------------------------


def original(arguments: Sequence[str]) -> list[str]:
    """OpenNebula's own script of this action."""
    here = Path(sys.argv[0])
    return [str(here.parent.parent / "kvm" / here.name), *arguments]


def then(command: Sequence[str], stdin: bytes) -> NoReturn:
    """Run a command, without the deadline, and exit with its status."""
    signal.alarm(0)
    sys.exit(subprocess.run(command, input=stdin, check=False).returncode)


def without_rates(xml: str, macs: Collection[str]) -> str:
    """The domain without <bandwidth> in these NICs: their ports have the rates, and the agent refuses it."""
    try:
        domain = ET.fromstring(xml)
    except ET.ParseError:
        return xml  # the agent says what is wrong with it
    for nic in domain.iterfind("devices/interface"):
        mac, rates = nic.find("mac"), nic.find("bandwidth")
        if mac is not None and rates is not None and mac.get("address") in macs:
            nic.remove(rates)
    return ET.tostring(domain, encoding="unicode")


def deploy(arguments: Sequence[str], stdin: bytes) -> None:
    # OpenNebula writes the VM next to the domain before it deploys it.
    vm = parsed((Path(arguments[0]).parent / "vm.xml").read_bytes())
    if next(ours(vm), None) is not None:
        domain = {"xml": without_rates(stdin.decode(), {value(nic, "MAC") for nic in ours(vm)})}
        stdin = call("POST", f"/v1/vms/{vm_id_of(vm)}:render-domain", domain)["xml"].encode()
    then(original(arguments), stdin)


def virsh(*arguments: str) -> str:
    """Run virsh, without the deadline, and return what it prints. Raises: Failed."""
    signal.alarm(0)
    command = ["virsh", "--connect", os.environ.get("LIBVIRT_URI", "qemu:///system"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr)
    return done.stdout


def attach_nic(arguments: Sequence[str], stdin: bytes) -> None:
    change_nic("attach-device", arguments, stdin)


def detach_nic(arguments: Sequence[str], stdin: bytes) -> None:
    change_nic("detach-device", arguments, stdin)


def change_nic(command: str, arguments: Sequence[str], stdin: bytes) -> None:
    """Attach or detach the NIC with ATTACH=YES; one of another driver is left to OpenNebula."""
    vm = parsed(stdin)
    nic = next((nic for nic in ours(vm) if value(nic, "ATTACH") == "YES"), None)
    if nic is None:
        then(original(arguments), stdin)
    interface = call("GET", f"/v1/ports/{port_id_of(vm, nic)}")["binding"]["interface_xml"]
    domain, mac, attach = arguments[0], value(nic, "MAC").lower(), command == "attach-device"
    if (mac in virsh("domiflist", domain)) != attach:
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(interface)
            file.flush()
            virsh(command, domain, file.name)
    if not attach and mac in virsh("domiflist", domain):
        # libvirt has requested it of the guest, and waited for some seconds.
        raise Failed(f"the guest has not released the NIC {mac}: try again")


ACTIONS: dict[str, Callable[[Sequence[str], bytes], None]] = {
    "pre": pre,
    "post": pre,
    "clean": clean,
    "update_nic": update_nic,
    "update_sg": nothing,
    "vnet_create": nothing,
    "vnet_delete": nothing,
    "deploy": deploy,
    "attach_nic": attach_nic,
    "detach_nic": detach_nic,
}


#: The arguments that an action reads, of those that OpenNebula gives it.
USAGE = {
    "update_nic": ("deploy-id", "network-id"),
    "deploy": ("file",),
    "attach_nic": ("domain",),
    "detach_nic": ("domain",),
}


def _late(*_: Any) -> NoReturn:
    raise Late(f"the agent did not answer within {DEADLINE_S} s")


def main() -> int:
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    try:
        if name not in ACTIONS:
            command = original(arguments)
            os.execv(command[0], command)
        if len(arguments) < len(USAGE.get(name, ())):
            raise Failed(f"arguments are missing: {name} {' '.join(USAGE[name])} ...")
        stdin = sys.stdin.buffer.read()
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(DEADLINE_S)
        ACTIONS[name](arguments, stdin)
    except (Failed, Late, OSError, ValueError) as error:
        # A line that began with ERROR: would be logged, and not shown to the user.
        print(f"{VN_MAD} {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

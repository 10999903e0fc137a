"""Every kind of frame that a VM may send, on OVS-DPDK: docs/security-frames.md is held to this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet6 import ICMPv6ND_NA, ICMPv6NDOptDstLLAddr, IPv6
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet

from tests.functional.conftest import make_spec
from tests.functional.hosts_ovs import UNDERLAY, Host
from tests.functional.wired_hosts import PEER, outside, wired_ovs
from tests.lab.frames import (
    ANY_ADDRESS,
    BROADCAST,
    OTHER_VLAN,
    OTHER_VNI,
    Backend,
    Kind,
    Sender,
    Setting,
)
from tests.lab.frames_nics import Ear, PacketNic, host_stack, packet_nic, vhost_nics
from tests.lab.frames_scene import Scene, tagged, tunnelled, untagged
from tests.lab.processes import wait_for

VNI, VLAN = 5001, 100
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "flat": {"type": "flat", "physical_network": "physnet1", "vlan_id": None},
    "VLAN": {"type": "vlan", "physical_network": "physnet1", "vlan_id": VLAN},
    "another VLAN": {"type": "vlan", "physical_network": "physnet1", "vlan_id": OTHER_VLAN},
    "VXLAN": {"type": "vxlan", "network_id": "blue", "physical_network": None, "vlan_id": None},
    "another VXLAN": {
        "type": "vxlan",
        "network_id": "red",
        "physical_network": None,
        "vlan_id": None,
    },
}
#: A sender and a neighbour on each of the first, one VM on each other.
ON_TRIAL = ("flat", "VLAN", "VXLAN")


#: The bridges that switch the frames of VMs, and the beginning of their addresses.
SWITCHING, HERE = ("br-phys1", "np-overlay"), "10.5.0."


@dataclass(frozen=True)
class Hypervisor:
    host: Host
    specs: Mapping[str, dict[str, Any]]
    nics: Mapping[str, PacketNic]


@pytest.fixture(scope="module")
def hypervisor() -> Iterator[Hypervisor]:
    """With two VMs on each network that is looked at, and one on every other, and with addresses on the
    bridges of VMs."""
    with ExitStack() as stack:
        made = stack.enter_context(wired_ovs())
        for name, vni in (("blue", VNI), ("red", OTHER_VNI)):
            made.network(name, vni, made.address, PEER, mtu=1450)
        names = [f"{who}-{where}" for where in ON_TRIAL for who in ("sender", "neighbour")]
        names += [f"bystander-{where}" for where in NETWORKS if where not in ON_TRIAL]
        specs, sockets, macs, devices = {}, [], [], []
        for number, name in enumerate(names, start=1):
            specs[name] = make_spec(number, network=NETWORKS[name.partition("-")[2]])
            body = made.plug(port_id(name), specs[name])
            sockets.append(Path(body["binding"]["socket_path"]))
            macs.append(specs[name]["mac"])
            devices.append(body["binding"]["device"])
        nics = stack.enter_context(vhost_nics("np-vms", sockets, macs))
        for device in devices:
            made.ovs.wait_connected(device, 90.0)
        for number, bridge in enumerate(SWITCHING):
            # OVS ends tunnels at every port that has an address.
            made.ip("address", "add", f"{HERE}{number}/24", "dev", bridge)
            made.ip("link", "set", bridge, "up")
        yield Hypervisor(made, specs, dict(zip(names, nics, strict=True)))


def port_id(name: str) -> str:
    return name.replace(" ", "-")


@pytest.mark.parametrize("network", ON_TRIAL)
def test_each_frame_comes_out_where_the_table_says(hypervisor: Hypervisor, network: str) -> None:
    name = f"sender-{network}"
    with scene(hypervisor, network) as made:
        differences: list[str] = []
        for setting in Setting:
            spec = {**hypervisor.specs[name], "port_security": setting.port_security}
            hypervisor.host.plug(port_id(name), spec)
            differences += made.differences(setting)
        assert not differences, "\n".join(differences)


@pytest.mark.parametrize("security", [Setting.DISABLED, Setting.OWN_MAC])
@pytest.mark.parametrize("network", ["flat", "VXLAN"])
def test_no_vm_answers_for_the_hosts_that_tunnels_lead_to(
    hypervisor: Hypervisor, network: str, security: Setting
) -> None:
    """Nor at a port that an operator adds, once the agent has seen it."""
    made, name = hypervisor.host, f"sender-{network}"
    spec = {**hypervisor.specs[name], "port_security": security.port_security}
    made.plug(port_id(name), spec)
    bridge = SWITCHING[network == "VXLAN"]
    made.ovs.vsctl(
        "--may-exist", "add-port", bridge, "np-theirs", "--", "set", "Interface", "np-theirs", "type=internal"
    )
    try:
        wait_for(lambda: _is_shut(made, bridge, "np-theirs"), 60.0, "the bridge forwards nothing to it")
        made.ip("address", "add", f"{HERE}9/24", "dev", "np-theirs")
        made.ip("link", "set", "np-theirs", "up")
        made.ovs.appctl("tnl/neigh/flush")
        # An answer to ARP that the datapath has a flow for teaches OVS nothing.
        made.ovs.appctl("revalidator/purge")
        with scene(hypervisor, network) as stage:
            found = stage.differences(security, [CLAIMS])
            taught = made.ovs.appctl("tnl/neigh/show")
        assert not found and spec["mac"] not in taught, taught
    finally:
        made.ovs.vsctl("del-port", "np-theirs")


def _is_shut(made: Host, bridge: str, name: str) -> bool:
    shown = made.ovs.ofctl("show", bridge)
    return "NO_FWD" in shown.partition(f"({name}): ")[2].partition("state:")[0]


def _claims(sender: Sender) -> list[Packet]:
    """That a peer's address has moved to the VM: to all, and in answers to the host."""
    own, peer6 = sender.mac, "fd00:1::254"
    head = Ether(src=own, dst=BROADCAST)
    advert = Ether(src=own, dst="33:33:00:00:00:01") / IPv6(src=sender.link_local, dst="ff02::1")
    return [
        head / ARP(op=1, hwsrc=own, psrc=PEER, pdst=PEER),
        *(head / ARP(op=2, hwsrc=own, psrc=PEER, pdst=f"{HERE}{n}", hwdst=BROADCAST) for n in (0, 1, 9)),
        advert / ICMPv6ND_NA(tgt=peer6, R=0, S=0, O=1) / ICMPv6NDOptDstLLAddr(lladdr=own),
    ]


CLAIMS = Kind("claims of a peer's address", _claims, ANY_ADDRESS, "", "")


@contextmanager
def scene(hypervisor: Hypervisor, network: str) -> Iterator[Scene]:
    made, nics = hypervisor.host, hypervisor.nics
    name = f"sender-{network}"
    neighbour = f"neighbour-{network}"
    overlay = network == "VXLAN"
    sender = Sender(
        hypervisor.specs[name]["mac"],
        made.ovs.get("Interface", UNDERLAY, "mac_in_use"),
        made.address,
        vlan=VLAN if network == "VLAN" else 300,
    )
    others: dict[str, Ear] = {
        ("the sender" if who == name else f"a VM of another network ({who})"): nic
        for who, nic in nics.items()
        if who != neighbour
    }
    unwrap = {"flat": untagged, "VLAN": tagged(VLAN), "VXLAN": tunnelled(VNI)}[network]
    far = outside(made.name, overlay=overlay)
    with packet_nic(*far) as wire, host_stack(made.name) as stack:
        others["the host's own protocols"] = stack
        yield Scene(
            Backend.DPDKVHOSTUSER,
            network,
            sender,
            nics[name],
            wire,
            unwrap,
            nics[neighbour],
            others,
            settle=lambda: made.ovs.appctl("revalidator/wait"),
        )

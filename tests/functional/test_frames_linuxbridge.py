"""Every kind of frame that a VM may send, on Linux bridges: docs/security-frames.md is held to this.

VLAN networks are in tests/functional/test_frames_nested.py: the machine's own kernel may lack VLANs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from drivers.linuxbridge.segments import Segment
from tests.functional.wired_hosts import PEER, WIRE, outside, wired_linuxbridge
from tests.lab.frames import OTHER_VNI, Backend, Sender, Setting
from tests.lab.frames_nics import Ear, Nic, host_stack, packet_nic, tap_nic
from tests.lab.frames_scene import Scene, Unwrap, tunnelled, untagged
from tests.lab.traffic_hosts import WIRE as UNDERLAY
from tests.lab.traffic_hosts import Host, Machine, make_spec, overlay

VNI = 5001
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "flat": {"type": "flat", "physical_network": "physnet1"},
    "VXLAN": overlay("blue"),
    "another VXLAN": overlay("red"),
}


@pytest.fixture(scope="module")
def hypervisor() -> Iterator[Host]:
    with wired_linuxbridge() as host:
        yield host


@pytest.mark.parametrize("network", ["flat", "VXLAN"])
def test_each_frame_comes_out_where_the_table_says(hypervisor: Host, network: str) -> None:
    for name, vni in (("blue", VNI), ("red", OTHER_VNI)):
        hypervisor.network(name, vni, [hypervisor.address, PEER], mtu=1450)
    vxlan = network == "VXLAN"
    far = outside(hypervisor.name, overlay=vxlan)
    segment = Segment(network_id="blue") if vxlan else Segment("physnet1")
    unwrap = tunnelled(VNI) if vxlan else untagged
    with scene(hypervisor, network, NETWORKS, segment, far, unwrap) as made:
        send_all(hypervisor, NETWORKS[network], made)


def send_all(host: Machine, network: Mapping[str, Any], made: Scene) -> None:
    differences: list[str] = []
    for setting in Setting:
        host.plug("sender", make_spec(1, network, port_security=setting.port_security))
        differences += made.differences(setting)
    assert not differences, "\n".join(differences)


@contextmanager
def scene(
    host: Machine,
    network: str,
    networks: Mapping[str, Mapping[str, Any]],
    segment: Segment,
    far: tuple[str, str],
    unwrap: Unwrap,
) -> Iterator[Scene]:
    """The sender, a neighbour, and a VM on each of the other networks; ``far`` is the wire's end."""
    with ExitStack() as stack:
        nics: dict[str, Nic] = {}
        there = {"sender": network, "neighbour": network}
        there |= {f"a VM of {name}": name for name in networks if name != network}
        for number, (who, where) in enumerate(there.items(), start=1):
            port_id = who.replace(" ", "-")
            body = host.plug(port_id, make_spec(number, networks[where]))
            stack.callback(host.unplug, port_id)
            nics[who] = stack.enter_context(tap_nic(host.name, body["binding"]["device"]))
        mac = str(make_spec(1, {})["mac"])
        vlan = networks[network].get("vlan_id", 300)
        sender = Sender(mac, host.link(segment.bridge)["address"], host.address, vlan)
        # What leaves by it has its checksum.
        host.sh("ethtool", "-K", UNDERLAY if network == "VXLAN" else WIRE, "tx", "off")
        wire = stack.enter_context(packet_nic(*far))
        others: dict[str, Ear] = {"the sender": nics["sender"]}
        others |= {who: nic for who, nic in nics.items() if who.startswith("a VM of")}
        others["the host's own protocols"] = stack.enter_context(host_stack(host.name))
        yield Scene(
            Backend.LINUXBRIDGE,
            network,
            sender,
            nics["sender"],
            wire,
            unwrap,
            nics["neighbour"],
            others,
        )

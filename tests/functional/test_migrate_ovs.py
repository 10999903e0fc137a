"""A port's phases of a live migration on OVS-DPDK: what comes out of it, and that the network learns."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from netplugin.host.announcement import announcement, group_of, handover
from tests.functional.conftest import make_spec
from tests.functional.hosts_ovs import Host
from tests.functional.migrate_parts import (
    DEADLINE_S,
    Side,
    comes,
    frame,
    of,
    plain,
    receives_announcement,
)
from tests.functional.wired_hosts import PEER, outside, wired_ovs
from tests.lab.frames_nics import PacketNic, packet_nic, vhost_nics
from tests.lab.frames_scene import Unwrap, tagged, tunnelled
from tests.lab.namespaces import entered
from tests.lab.processes import wait_for
from tests.lab.switch import SWITCH, VXLAN_PORT

VNI, VLAN = 5001, 100
SO_NO_CHECK = 11  # <asm-generic/socket.h>
VXLAN = {"type": "vxlan", "network_id": "blue", "physical_network": None, "vlan_id": None}


@dataclass(frozen=True)
class Site:
    """A hypervisor, and what hears the network around it: the wire of physnet1 and a VXLAN peer."""

    host: Host
    wire: PacketNic
    peer: PacketNic


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        made = stack.enter_context(wired_ovs())
        made.network("blue", VNI, made.address, PEER, mtu=1450)
        wire, peer = (
            stack.enter_context(packet_nic(*outside(made.name, overlay=overlay))) for overlay in (False, True)
        )
        yield Site(made, wire, peer)


@pytest.fixture
def clean(site: Site) -> Iterator[Site]:
    yield site
    for port in site.host.agent.get("/v1/ports")[1]:
        assert site.host.agent.call("DELETE", f"/v1/ports/{port['port_id']}")[0] == 204
    assert site.host.planned() == []


@contextmanager
def guests(*bodies: dict[str, Any]) -> Iterator[list[PacketNic]]:
    """The VMs of these ports: from here on they run."""
    sockets = [Path(body["binding"]["socket_path"]) for body in bodies]
    with vhost_nics("np-vms", sockets, [body["spec"]["mac"] for body in bodies]) as nics:
        yield nics


def test_a_destination_is_closed_until_it_is_activated(clean: Site) -> None:
    here = clean.host
    mover, near = Side(here.agent, "mover", make_spec(1)), make_spec(2)
    prepared, near_body = mover.prepare(), here.plug("near", near)
    assert mover.prepare() == prepared | {"timings_ms": mover.prepare()["timings_ms"]}
    assert (prepared["state"], mover.phase) == ("active", "prepared")
    with guests(prepared, near_body) as (vm, neighbour):
        for body in (prepared, near_body):
            here.ovs.wait_connected(body["binding"]["device"], 90.0)
        comes(neighbour, near, clean.wire, vm, neighbour)
        for sent in (frame(mover.spec), frame(mover.spec, bytes.fromhex("525400000002"))):
            vm.send(sent)
        received = comes(neighbour, near, clean.wire, vm)
        assert not of(received, near), "nothing is forwarded to a closed port, which is flooded to else"
        assert not of(clean.wire.received() + neighbour.received(), mover.spec)
        assert here.planned() == []

        assert here.put("mover", mover.spec)[1]["code"] == "conflict"
        assert mover.step("leave", 409)["detail"].startswith("the port is prepared")
        assert mover.phase == "prepared"

        assert mover.step("activate")["migration"]["phase"] == "activated"
        receives_announcement(clean.wire, mover.spec["mac"], tagged(VLAN))
        receives_announcement(neighbour, mover.spec["mac"], plain)
        comes(vm, mover.spec, neighbour)
        comes(vm, mover.spec, clean.wire)
        comes(neighbour, near, vm)
        mover.step("activate")
        assert mover.step("commit")["migration"] is None
        assert mover.step("commit")["migration"] is None
        assert mover.step("abort", 409)["code"] == "conflict"
        comes(neighbour, near, vm)
        assert here.planned() == []


def test_a_source_is_closed_and_can_return_or_go(clean: Site) -> None:
    here = clean.host
    mover, near = Side(here.agent, "mover", make_spec(1)), make_spec(2)
    body, near_body = here.plug("mover", mover.spec), here.plug("near", near)
    with guests(body, near_body) as (vm, neighbour):
        for each in (body, near_body):
            here.ovs.wait_connected(each["binding"]["device"], 90.0)
        comes(vm, mover.spec, neighbour)
        comes(neighbour, near, vm)
        assert mover.step("leave")["migration"]["phase"] == "left"
        comes(neighbour, near, clean.wire, vm, neighbour)
        vm.send(frame(mover.spec))
        assert not of(comes(neighbour, near, clean.wire, vm), near)
        assert not of(clean.wire.received() + neighbour.received(), mover.spec)

        assert mover.step("abort")["migration"] is None
        receives_announcement(clean.wire, mover.spec["mac"], tagged(VLAN))
        comes(vm, mover.spec, neighbour)
        comes(neighbour, near, vm)

        mover.step("leave")
        assert mover.step("commit", 204) is None
        assert not mover.is_there
        assert mover.step("commit", 204) is None
        assert mover.step("activate", 404)["code"] == "not_found"


def test_a_closed_port_stays_closed_whatever_dies_or_is_changed(clean: Site) -> None:
    here = clean.host
    mover, near = Side(here.agent, "mover", make_spec(1)), make_spec(2)
    prepared, near_body = mover.prepare(), here.plug("near", near)
    bridge, device = prepared["binding"]["bridge"], prepared["binding"]["device"]
    # Before the VMs run: testpmd does not come back to a vswitchd that was restarted.
    here.ovs.kill_vswitchd()
    here.ovs.start_vswitchd()
    wait_for(lambda: here.agent.get("/readyz")[0] == 200, DEADLINE_S, "the agent has seen it")
    wait_for(lambda: here.planned() == [], DEADLINE_S, "the agent has repaired it")
    with guests(prepared, near_body) as (vm, neighbour):
        for each in (prepared, near_body):
            here.ovs.wait_connected(each["binding"]["device"], 90.0)
        for disturb in ("nothing", "agent", "mod-port", "del-flows"):
            if disturb == "agent":
                here.agent.kill()
                here.agent.start()
            elif disturb == "mod-port":
                here.ovs.ofctl("mod-port", bridge, device, "forward")
                here.repair()
            elif disturb == "del-flows":
                here.ovs.ofctl("del-flows", bridge)
                here.repair()
            wait_for(lambda: here.planned() == [], DEADLINE_S, "the agent has repaired it")
            assert mover.phase == "prepared"
            comes(neighbour, near, clean.wire, vm, neighbour)
            vm.send(frame(mover.spec))
            assert not of(comes(neighbour, near, clean.wire, vm), near), disturb
            assert not of(clean.wire.received() + neighbour.received(), mover.spec), disturb
        assert mover.step("abort", 204) is None
    assert not mover.is_there
    assert device not in here.ovs.vsctl("list-ports", bridge).split()
    assert mover.step("abort", 204) is None


def test_vxlan_peers_learn_at_once(clean: Site) -> None:
    here = clean.host
    mover = Side(here.agent, "mover", make_spec(3, network=VXLAN))
    prepared = mover.prepare()
    with guests(prepared) as (vm,):
        here.ovs.wait_connected(prepared["binding"]["device"], 90.0)
        vm.send(frame(mover.spec))
        clean.peer.received()
        mover.step("activate")
        receives_announcement(clean.peer, mover.spec["mac"], tunnelled(VNI))
        comes(vm, mover.spec, clean.peer)


def passed_on(ear: PacketNic, mac: str, unwrap: Unwrap) -> int:
    """How many requests of the VM have come since the last look that were passed on."""
    expected = bytes.fromhex(group_of(mac).replace(":", "")) + handover(mac)[6:42]
    frames = (unwrap(each) or b"" for each in ear.received())
    return sum(each[:42] == expected for each in frames)


def receives_once(ear: PacketNic, mac: str, unwrap: Unwrap) -> None:
    """It is announced, and an announcement asks for no other."""
    received: list[int] = []

    def is_there() -> bool:
        received.append(passed_on(ear, mac, unwrap))
        return received[-1] > 0

    wait_for(is_there, DEADLINE_S, f"{mac} is announced")
    assert sum(received) == 1


def in_vlan(sent: bytes) -> bytes:
    return sent[:12] + b"\x81\x00" + VLAN.to_bytes(2, "big") + sent[12:]


def test_a_vm_is_announced_when_the_host_that_it_left_asks(clean: Site) -> None:
    here, mover, near = clean.host, Side(clean.host.agent, "mover", make_spec(1)), make_spec(2)
    mac, other = mover.spec["mac"], near["mac"]
    near_body = here.plug("near", near | {"port_security": {"enabled": False}})
    mover.prepare("auto")
    with guests(near_body) as (neighbour,):
        here.ovs.wait_connected(near_body["binding"]["device"], 90.0)
        comes(neighbour, near, clean.wire, clean.wire, neighbour)
        # Not another VM, not of another VM, not on another network.
        neighbour.send(handover(mac))
        clean.wire.send(in_vlan(handover(other)))
        clean.wire.send(handover(mac))
        comes(neighbour, near, clean.wire)
        assert passed_on(neighbour, mac, plain) == 0
        for _ in range(3):
            clean.wire.send(in_vlan(handover(mac)))
            receives_once(clean.wire, mac, tagged(VLAN))
            receives_once(neighbour, mac, plain)
        # A second host that waits for it, with what the first has passed on.
        group = bytes.fromhex(group_of(mac).replace(":", ""))
        clean.wire.send(in_vlan(group + handover(mac)[6:]))
        clean.wire.send(in_vlan(announcement(mac)))
        comes(neighbour, near, clean.wire)
        assert passed_on(clean.wire, mac, tagged(VLAN)) == 0
    assert here.planned() == []
    here.agent.kill()
    here.agent.start()
    clean.wire.send(in_vlan(handover(mac)))
    receives_once(clean.wire, mac, tagged(VLAN))
    mover.step("abort", 204)
    wait_for(lambda: here.planned() == [], DEADLINE_S, "nothing is left of it")


def test_vxlan_peers_learn_when_the_host_that_the_vm_left_asks(clean: Site) -> None:
    mover = Side(clean.host.agent, "mover", make_spec(3, network=VXLAN))
    mover.prepare("auto")
    with entered(SWITCH):
        peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with peer:
        peer.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)  # no NIC sums for the kernel here
        peer.bind((PEER, 0))
        head = b"\x08" + bytes(3) + VNI.to_bytes(3, "big") + b"\0"  # RFC 7348, section 5
        peer.sendto(head + handover(mover.spec["mac"]), (clean.host.address, VXLAN_PORT))
        receives_once(clean.peer, mover.spec["mac"], tunnelled(VNI))


def asks(ear: PacketNic, mac: str) -> bool:
    return any((tagged(VLAN)(each) or b"")[:42] == handover(mac)[:42] for each in ear.received())


def test_the_agent_follows_the_guest(clean: Site) -> None:
    here = clean.host
    mover, near = Side(here.agent, "mover", make_spec(1)), make_spec(2)
    near_body = here.plug("near", near)
    prepared = mover.prepare("auto")
    assert mover.phase == "prepared"
    with guests(prepared, near_body) as (vm, neighbour):
        wait_for(lambda: mover.phase == "activated", DEADLINE_S, "the guest runs here")
        receives_announcement(clean.wire, mover.spec["mac"], tagged(VLAN))
        comes(vm, mover.spec, neighbour)
        comes(neighbour, near, vm)
        assert mover.step("commit")["migration"] is None
        assert mover.step("leave", activation="auto")["migration"]["phase"] == "leaving"
        comes(vm, mover.spec, neighbour)
        comes(neighbour, near, vm)
        assert not asks(clean.wire, mover.spec["mac"])
    wait_for(lambda: asks(clean.wire, mover.spec["mac"]), DEADLINE_S, "the guest has stopped here")
    wait_for(lambda: mover.phase == "left", DEADLINE_S, "the port is closed")
    with guests(prepared, near_body) as (vm, neighbour):
        wait_for(lambda: mover.phase == "leaving", DEADLINE_S, "the guest goes on here")
        comes(vm, mover.spec, neighbour)
        comes(neighbour, near, vm)
    assert mover.step("commit", 204) is None
    kinds = here.agent.get("/v1/events?follow=false&after=0&kind=migration&port_id=mover")
    assert kinds[0] == 200

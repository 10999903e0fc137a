"""A port's phases of a live migration on Linux bridges: what comes out of it, and whom the agent follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from netplugin.host.announcement import announcement
from tests.functional.migrate_parts import (
    DEADLINE_S,
    Side,
    comes,
    frame,
    of,
    plain,
    receives_announcement,
)
from tests.functional.wired_hosts import PEER, outside, wired_linuxbridge
from tests.lab.frames_nics import PacketNic, packet_nic, tap_nic
from tests.lab.frames_scene import tunnelled
from tests.lab.processes import wait_for
from tests.lab.traffic_hosts import Host, make_spec, overlay

VNI = 5001
FLAT = {"type": "flat", "physical_network": "physnet1"}
#: With a filter the bridge has a fixed entry of the MAC, without one it learns it.
FILTERS = [{"enabled": True}, {"enabled": False}]


@dataclass(frozen=True)
class Site:
    host: Host
    wire: PacketNic
    peer: PacketNic


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        made = stack.enter_context(wired_linuxbridge())
        made.network("blue", VNI, [made.address, PEER], mtu=1450)
        wire, peer = (
            stack.enter_context(packet_nic(*outside(made.name, overlay=overlay))) for overlay in (False, True)
        )
        yield Site(made, wire, peer)


@pytest.fixture
def clean(site: Site) -> Iterator[Site]:
    yield site
    site.host.unplug(*site.host.ports())
    assert site.host.changes() == []


@pytest.mark.parametrize("security", FILTERS)
def test_a_destination_is_closed_until_it_is_activated(clean: Site, security: dict[str, bool]) -> None:
    here = clean.host
    mover = Side(here.agent, "mover", make_spec(1, FLAT, port_security=security))
    near = make_spec(2, FLAT)
    prepared, near_body = mover.prepare(), here.plug("near", near)
    with (
        tap_nic(here.name, prepared["binding"]["device"]) as vm,
        tap_nic(here.name, near_body["binding"]["device"]) as neighbour,
    ):
        for disturb in ("nothing", "agent", "flags"):
            if disturb == "agent":
                here.kill()
                here.start()
            elif disturb == "flags":
                here.sh("bridge", "link", "set", "dev", prepared["binding"]["device"], "bcast_flood", "on")
                here.repair()
            assert (mover.phase, here.changes()) == ("prepared", [])
            comes(neighbour, near, clean.wire, vm, neighbour)
            for sent in (frame(mover.spec), announcement(mover.spec["mac"])):
                vm.send(sent)
            neighbour.send(frame(near, bytes.fromhex(mover.spec["mac"].replace(":", ""))))
            assert not of(comes(neighbour, near, clean.wire, vm), near), disturb
            assert not of(clean.wire.received() + neighbour.received(), mover.spec), disturb
        mover.step("activate")
        comes(vm, mover.spec, neighbour)
        comes(vm, mover.spec, clean.wire)
        comes(neighbour, near, vm)
        vm.send(announcement(mover.spec["mac"]))
        receives_announcement(clean.wire, mover.spec["mac"], plain)
        assert mover.step("commit")["migration"] is None
        assert here.changes() == []


@pytest.mark.parametrize("security", FILTERS)
def test_a_source_is_closed_and_can_return_or_go(clean: Site, security: dict[str, bool]) -> None:
    here = clean.host
    mover = Side(here.agent, "mover", make_spec(1, FLAT, port_security=security))
    near = make_spec(2, FLAT)
    body, near_body = here.plug("mover", mover.spec), here.plug("near", near)
    with (
        tap_nic(here.name, body["binding"]["device"]) as vm,
        tap_nic(here.name, near_body["binding"]["device"]) as neighbour,
    ):
        comes(vm, mover.spec, neighbour)
        comes(neighbour, near, vm)
        mover.step("leave")
        comes(neighbour, near, clean.wire, vm, neighbour)
        vm.send(frame(mover.spec))
        neighbour.send(frame(near, bytes.fromhex(mover.spec["mac"].replace(":", ""))))
        assert not of(comes(neighbour, near, clean.wire, vm), near), "the bridge has forgotten where it was"
        assert not of(clean.wire.received() + neighbour.received(), mover.spec)
        # The bridge learns that the VM is elsewhere.
        clean.wire.send(announcement(mover.spec["mac"]))
        mover.step("abort")
        comes(vm, mover.spec, neighbour)
        comes(neighbour, near, vm)
        mover.step("leave")
        assert mover.step("commit", 204) is None
    assert not mover.is_there
    assert body["binding"]["device"] not in here.links()


@pytest.mark.parametrize("security", FILTERS)
def test_the_agent_follows_the_guest(clean: Site, security: dict[str, bool]) -> None:
    """By its first frame, as QEMU sends it when the guest goes on: a carrier does not show that it runs."""
    here = clean.host
    mover = Side(here.agent, "mover", make_spec(1, overlay("blue"), port_security=security))
    near = make_spec(2, overlay("blue"))
    prepared, near_body = mover.prepare("auto"), here.plug("near", near)
    with tap_nic(here.name, near_body["binding"]["device"]) as neighbour:
        with tap_nic(here.name, prepared["binding"]["device"]) as vm:
            comes(neighbour, near, clean.peer, vm)
            assert not of(comes(neighbour, near, clean.peer, vm), near)
            here.repair()
            assert mover.phase == "prepared", "QEMU has opened the tap, and the guest does not run"
            clean.peer.received()
            vm.send(announcement(mover.spec["mac"]))
            receives_announcement(clean.peer, mover.spec["mac"], tunnelled(VNI))
            wait_for(lambda: mover.phase == "activated", DEADLINE_S, "the guest runs here")
            comes(neighbour, near, vm)
            assert mover.step("commit")["migration"] is None
            assert here.changes() == []
            assert mover.step("leave", activation="auto")["migration"]["phase"] == "leaving"
            comes(vm, mover.spec, neighbour)
            comes(neighbour, near, vm)
        wait_for(lambda: mover.phase == "left", DEADLINE_S, "QEMU has ended here")
    assert mover.step("commit", 204) is None

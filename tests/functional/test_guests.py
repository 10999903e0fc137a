"""Two real guests on NICs of each backend: which frames of the other they receive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.guest import Guest
from tests.lab.hypervisor import BRIDGE_BACKEND, OVS_BACKEND, Hypervisor, Nic
from tests.lab.namespaces import ANSWER_S
from tests.lab.processes import wait_for
from tests.lab.service import Service, service
from tests.lab.traffic import (
    another_address,
    another_mac,
    claim_by_arp,
    echo_requests,
    echoes_received,
    fragments_made,
    know,
    leased,
    neighbour_mac,
    set_neighbour,
)

DEVICE = "eth0"
COUNT = 3
MTU = 2000
OTHER_MAC = "52:54:00:66:66:66"
OTHER_ADDRESS = "10.0.0.66"
OPEN = {"enabled": False}


@dataclass(frozen=True)
class Pair:
    """A guest that speaks and one that listens."""

    host: Hypervisor
    speaker_nic: Nic
    listener_nic: Nic
    speaker: Guest
    listener: Guest

    def received(self, speak: Callable[[], None]) -> int:
        """How many of these echo requests the listener receives."""
        before = echoes_received(self.listener)
        speak()
        return echoes_received(self.listener) - before

    def receives_all(self, source: str | None = None, why: str = "all echo requests are heard") -> None:
        """The listener receives each of them, some time after the last was sent."""
        before = echoes_received(self.listener)
        echo_requests(self.speaker, self.listener_nic.address, COUNT, source)
        wait_for(lambda: echoes_received(self.listener) - before == COUNT, 30, why)

    def pings_received(self, source: str | None = None) -> int:
        to = self.listener_nic.address
        return self.received(lambda: echo_requests(self.speaker, to, COUNT, source))

    def secure(self, *addresses: str) -> None:
        """What the speaker may send: its MAC, and if any are named, these addresses only."""
        allowed = [{"ip": address} for address in addresses]
        self.host.plug(self.speaker_nic, port_security={"allowed_addresses": allowed})


@pytest.fixture(scope="module")
def host() -> Iterator[Hypervisor]:
    with Hypervisor((OVS_BACKEND, BRIDGE_BACKEND)) as running:
        yield running


@pytest.fixture(scope="module", params=(OVS_BACKEND, BRIDGE_BACKEND))
def booted(request: pytest.FixtureRequest, host: Hypervisor) -> Iterator[Pair]:
    vlan_id = 100 if request.param == OVS_BACKEND else None
    nics = [Nic(request.param, number, vlan_id, MTU) for number in (1, 2)]
    for nic in nics:
        host.plug(nic)
    try:
        speaker, listener = host.boot(nics)
        for guest in (speaker, listener):
            guest.check(f"ip link set {DEVICE} mtu {MTU}")
        speaker.wait_pings(nics[1].address)
        know(speaker, DEVICE, nics[1])
        yield Pair(host, nics[0], nics[1], speaker, listener)
    finally:
        host.destroy(nics)
        host.unplug(nics)


@pytest.fixture
def pair(booted: Pair) -> Iterator[Pair]:
    """The guests with their ports as they were plugged first."""
    yield booted
    booted.host.plug(booted.speaker_nic)
    booted.host.plug(booted.listener_nic)


def test_they_ping_each_other(pair: Pair) -> None:
    assert pair.speaker.pings(pair.listener_nic.address)
    assert pair.listener.pings(pair.speaker_nic.address)


def test_a_frame_of_the_whole_mtu_passes(pair: Pair) -> None:
    before = fragments_made(pair.speaker)
    headers = 28
    assert pair.speaker.pings(pair.listener_nic.address, size=MTU - headers)
    assert fragments_made(pair.speaker) == before


@pytest.mark.parametrize("booted", [OVS_BACKEND], indirect=True)
def test_they_meet_on_the_same_vlan_only(pair: Pair) -> None:
    pair.receives_all()
    pair.host.plug(pair.listener_nic, vlan_id=200)
    assert pair.pings_received() == 0
    assert not pair.listener.pings(pair.speaker_nic.address, wait_s=2)
    pair.host.plug(pair.speaker_nic, vlan_id=200)
    pair.speaker.wait_pings(pair.listener_nic.address)
    pair.receives_all()


@pytest.mark.parametrize("with_addresses", [False, True])
def test_a_spoofed_mac_is_not_received(pair: Pair, with_addresses: bool) -> None:
    own = [pair.speaker_nic.address] if with_addresses else []
    pair.secure(*own)
    pair.receives_all()
    with another_mac(pair.speaker, DEVICE, pair.speaker_nic, OTHER_MAC, [pair.listener_nic]):
        assert pair.pings_received() == 0
        pair.host.plug(pair.speaker_nic, port_security=OPEN)
        pair.receives_all(why="the same frames are heard without the filter")
        pair.secure(*own)
        assert pair.pings_received() == 0
    pair.receives_all()


def test_a_spoofed_address_is_not_received(pair: Pair) -> None:
    own = pair.speaker_nic.address
    pair.secure(own)
    with another_address(pair.speaker, DEVICE, OTHER_ADDRESS):
        pair.receives_all()
        assert pair.pings_received(OTHER_ADDRESS) == 0
        pair.secure(own, OTHER_ADDRESS)
        pair.receives_all(OTHER_ADDRESS, "the same frames are heard once allowed")
        pair.secure(own)
        assert pair.pings_received(OTHER_ADDRESS) == 0


def test_a_spoofed_arp_changes_no_neighbour(pair: Pair) -> None:
    own, listener = pair.speaker_nic.address, pair.listener
    pair.secure(own)
    set_neighbour(listener, DEVICE, OTHER_ADDRESS, OTHER_MAC)
    with another_address(pair.speaker, DEVICE, OTHER_ADDRESS):
        claim_by_arp(pair.speaker, DEVICE, OTHER_ADDRESS)
        assert neighbour_mac(listener, DEVICE, OTHER_ADDRESS) == OTHER_MAC
        pair.secure(own, OTHER_ADDRESS)
        claim_by_arp(pair.speaker, DEVICE, OTHER_ADDRESS)
        wait_for(
            lambda: neighbour_mac(listener, DEVICE, OTHER_ADDRESS) == pair.speaker_nic.mac,
            30,
            "it is believed once allowed",
        )


@pytest.fixture
def dhcp(pair: Pair) -> Iterator[Service]:
    """The namespace of a DHCP server, with a device on the host that is no port yet."""
    with service("np-svc", "svc0", OTHER_MAC, "10.0.0.5", mtu=MTU) as made:
        yield made
        pair.host.call("DELETE", "/v1/service-ports/svc")


def test_dnsmasq_gives_a_guest_its_address_if_its_port_is_a_dhcp_servers(
    pair: Pair, dhcp: Service, tmp_path: Path
) -> None:
    nic, guest = pair.speaker_nic, pair.speaker

    def place(*roles: str) -> None:
        security = {"allowed_addresses": [{"ip": dhcp.address}], "roles": roles}
        spec = dhcp.spec(nic.backend, network=nic.spec()["network"], port_security=security)
        assert pair.host.call("PUT", "/v1/service-ports/svc", spec)["state"] == "active"

    place()
    with dhcp.dnsmasq(tmp_path, "10.0.0.100", "10.0.0.100") as server:
        server.wait_for(lambda: "IP range" in server.tail(), 30, "it listens")
        guest.wait_pings(dhcp.address)
        assert leased(guest, DEVICE) is None, "it is no DHCP server yet"
        place("dhcp_server")
        assert leased(guest, DEVICE, tries=60) == "10.0.0.100"
    assert dhcp.pings("10.0.0.100", ANSWER_S), "the guest has it"
    guest.check(f"ip addr del 10.0.0.100/24 dev {DEVICE}")


def test_frames_of_an_unplugged_vm_are_no_longer_received(pair: Pair) -> None:
    pair.receives_all()
    pair.host.unplug([pair.speaker_nic])
    assert not pair.listener.pings(pair.speaker_nic.address, wait_s=2)

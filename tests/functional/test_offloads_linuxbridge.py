"""What a VM on a Linux bridge has the host do with its frames changes nothing that a filter has judged.

The checksums of each kind of frame are in test_frames_linuxbridge.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from scapy.layers.inet import IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6, IPv6ExtHdrDestOpt
from scapy.layers.l2 import ARP, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from tests.lab.namespaces import entered, within
from tests.lab.offloads import TCP4, TCP6, TUNNEL, UDP_SEGMENTS, Offload, forged
from tests.lab.offloads import UDP as UDP_FRAGMENTS
from tests.lab.processes import run
from tests.lab.raw_nic import RawNic, opened, until, until_received
from tests.lab.service import Service, service
from tests.lab.switch import switch
from tests.lab.traffic_hosts import Host, host, make_spec

A, OWN, OWN6, LINK_LOCAL = "52:54:00:00:00:01", "10.0.0.1", "2001:db8::1", "fe80::5054:ff:fe00:1"
EVERYBODY, GROUP6 = "ff:ff:ff:ff:ff:ff", "33:33:00:00:00:01"
NETWORK = {"type": "flat", "physical_network": "physnet1"}
SECURITY = {"allowed_addresses": [{"ip": OWN}, {"ip": OWN6}]}
# linux/if_packet.h
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
#: What is left of a frame after its headers, with two bytes of no matter at the end.
_REST = Raw(b"." * 34)


@pytest.fixture(scope="module")
def one() -> Iterator[Host]:
    with switch(), host(1, "physnet1:") as made:
        yield made


@contextmanager
def sender_and_neighbour(one: Host) -> Iterator[tuple[RawNic, RawNic]]:
    specs = {"a": make_spec(1, NETWORK, port_security=SECURITY), "b": make_spec(2, NETWORK)}
    ends = [RawNic(one.name, one.plug(name, spec)["binding"]["device"]) for name, spec in specs.items()]
    with opened(*ends):
        until(ends[0], ends[1], _last())
        yield ends[0], ends[1]
    one.unplug("a", "b")


def _last() -> Packet:
    """A frame that passes."""
    return Ether(src=A, dst=EVERYBODY) / IP(src=OWN, dst="10.0.0.9") / UDP(sport=1, dport=2)


def _ether(to: str = EVERYBODY) -> Packet:
    return Ether(src=A, dst=to)


#: Frames that pass, the byte of one checksum, and what it would make of these two bytes.
FORGED: dict[str, tuple[Packet, int, int]] = {
    "ARP of another": (_ether() / ARP(hwsrc=A, psrc=OWN, pdst="10.0.0.9") / _REST, 30, 0x00FE),
    "IPv4 of another": (_ether() / IP(src=OWN, dst="10.0.0.9") / UDP(sport=1, dport=2) / _REST, 28, 0x00FE),
    "IPv6 of another": (
        _ether(GROUP6) / IPv6(src=OWN6, dst="ff02::1") / UDP(sport=1, dport=2) / _REST,
        36,
        0x00FE,
    ),
    "DHCP answer": (_ether() / IP(src=OWN, dst="10.0.0.9") / UDP(sport=67, dport=69) / _REST, 36, 68),
    "router advertisement": (
        _ether(GROUP6) / IPv6(src=LINK_LOCAL, dst="ff02::1") / ICMPv6EchoRequest() / _REST,
        54,
        134 << 8,
    ),
}


def test_no_checksum_is_written_over_what_was_judged(one: Host) -> None:
    with sender_and_neighbour(one) as (a, b):
        for what, (packet, at, value) in FORGED.items():
            frame, offload = forged(bytes(packet), at, value)
            assert a.send_with(offload, frame), what
            received = until(a, b, _last())
            assert not [each for each in received if each[at : at + 2] == struct.pack("!H", value)], what


def test_nor_over_what_a_service_sends(one: Host) -> None:
    """Who is root in a container sends such frames by a raw socket."""
    with ExitStack() as stack:
        made = stack.enter_context(service("np-svc", "svc0", A, OWN, one.name))
        _, b = stack.enter_context(sender_and_neighbour(one))
        one.unplug("a")
        run(within(made.name, ["ethtool", "-K", "eth0", "tx", "on"]))
        spec = made.spec("linuxbridge", network=NETWORK, port_security=SECURITY)
        assert one.agent.call("PUT", "/v1/service-ports/svc", spec)[0] == 200
        raw = stack.enter_context(_raw(made))
        for what, (packet, at, value) in FORGED.items():
            frame, offload = forged(bytes(packet), at, value)
            raw.send(offload.header() + frame)
            last = Offload().header() + bytes(_last() / Raw(what.encode()))
            received = until_received(lambda last=last: raw.send(last), b, what.encode())
            assert not [each for each in received if each[at : at + 2] == struct.pack("!H", value)], what
        assert one.agent.call("DELETE", "/v1/service-ports/svc")[0] == 204


@contextmanager
def _raw(made: Service) -> Iterator[socket.socket]:
    with entered(made.name):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        raw.bind(("eth0", 0))
    with raw:
        raw.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        yield raw


# -- segments --------------------------------------------------------------------------------------


def _ambiguous(port: int, payload: int) -> bytes:
    """What is UDP to a port, and an IPv4 packet with TCP as well."""
    head = struct.pack("!HHHHBBHII", 0x4500, port, 40 + payload, 0, 64, 6, 0, 0x0A000001, 0x0A000002)
    return head + bytes(TCP(sport=1, dport=2)) + bytes(payload)


def _over_ipv4(port: int, payload: int) -> bytes:
    """With options of 8 bytes, so that it begins at byte 42."""
    head = IP(src=OWN, dst="10.0.0.9", proto=17, options=[IPOption_NOP()] * 8)
    return bytes(_ether() / head / Raw(_ambiguous(port, payload)))


def _over_ipv6(port: int, payload: int) -> bytes:
    head = IPv6(src=OWN6, dst="ff02::1", nh=17)
    return bytes(_ether(GROUP6) / head / Raw(_ambiguous(port, payload)))


def test_no_length_is_written_over_a_port(one: Host) -> None:
    """A tunnel is said to begin in the UDP header, with a packet of 68 or 546 bytes (since Linux 6.17)."""
    gso, outer = TCP4 | TUNNEL, 34
    with sender_and_neighbour(one) as (a, b):
        for frame, at, size in (
            (_over_ipv4(69, 3 * 28), 42, 28),
            (_over_ipv4(69, 500 + 28), 42, 500),
            (_over_ipv6(547, 3 * 506), 54, 506),
            (_over_ipv6(547, 1000 + 506), 54, 1000),
            (_over_ipv6(547, 3 * 253), 54, 253),
        ):
            a.send_with(Offload(at + 20, 16, gso, size, (outer, at)), frame)
            ports = {each[at + 2 : at + 4] for each in until(a, b, _last())}
            assert not ports & {struct.pack("!H", 68), struct.pack("!H", 546)}, (at, size)


def test_no_fragment_is_without_its_ports(one: Host) -> None:
    packet = _ether() / IP(src=OWN, dst="10.0.0.9") / UDP(sport=1, dport=2) / Raw(bytes(64))
    hidden = _ether(GROUP6) / IPv6(src=OWN6, dst="ff02::1")
    hidden = hidden / IPv6ExtHdrDestOpt() / UDP(sport=1, dport=2) / Raw(bytes(64))
    with sender_and_neighbour(one) as (a, b):
        for size, frame, start in ((4, packet, 34), (7, packet, 34), (8, hidden, 62)):
            for offload in (Offload(start, 6, UDP_FRAGMENTS, size), Offload(None, 0, UDP_FRAGMENTS, size)):
                a.send_with(offload, bytes(frame))
                assert until(a, b, _last())[:-1] == []


def test_what_vms_do_ask_for_passes(one: Host) -> None:
    data = Raw(bytes(range(250)) * 12)
    four, six = IP(src=OWN, dst="10.0.0.9"), IPv6(src=OWN6, dst="ff02::1")
    inside = Ether(src=A) / IP(src="192.0.2.1", dst="192.0.2.2") / TCP(sport=1, dport=2) / Raw(b"." * 64)
    requests = {
        "TCP": (_ether() / four / TCP(sport=1, dport=2) / Raw(b"." * 64), Offload(34, 16), 1),
        "UDP over IPv6": (_ether(GROUP6) / six / UDP(sport=1, dport=2) / Raw(b"." * 64), Offload(54, 6), 1),
        "in VXLAN": (_ether() / four / UDP(sport=1, dport=4789) / VXLAN() / inside, Offload(84, 16), 1),
        "TSO": (_ether() / four / TCP(sport=1, dport=2) / data, Offload(34, 16, TCP4, 1000), 3),
        "TSO over IPv6": (
            _ether(GROUP6) / six / TCP(sport=1, dport=2) / data,
            Offload(54, 16, TCP6, 1000),
            3,
        ),
        "UFO": (_ether() / four / UDP(sport=1, dport=2) / data, Offload(34, 6, UDP_FRAGMENTS, 1480), 3),
        "USO": (_ether() / four / UDP(sport=1, dport=2) / data, Offload(34, 6, UDP_SEGMENTS, 1000), 3),
        "USO over IPv6": (
            _ether(GROUP6) / six / UDP(sport=0x4501, dport=2) / data,
            Offload(54, 6, UDP_SEGMENTS, 1000),
            3,
        ),
    }
    with sender_and_neighbour(one) as (a, b):
        for what, (packet, offload, count) in requests.items():
            taken = a.send_with(offload, bytes(packet))
            received = until(a, b, _last())[:-1]
            # Linux segments UDP since 6.2.
            assert taken or offload.gso == UDP_SEGMENTS, what
            assert len(received) == count * taken, what

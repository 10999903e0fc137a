"""Frames that a VM may try, by name: what port security is there to drop, and what it must not."""

from __future__ import annotations

from scapy.layers.dhcp import BOOTP, DHCP
from scapy.layers.dhcp6 import DHCP6_Advertise
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    ICMPv6ND_NA,
    ICMPv6ND_RA,
    ICMPv6ND_Redirect,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
)
from scapy.layers.l2 import ARP, LLC, SNAP, STP, Dot3, Ether
from scapy.packet import Packet, Raw

MAC, OTHER = "52:54:00:00:00:01", "52:54:00:00:00:02"
IP4, OTHER4 = "10.7.0.1", "10.7.0.2"
IP6, OTHER6 = "fd07::1", "fd07::2"
LINK = "fe80::5054:ff:fe00:1"
EVERYBODY = "ff:ff:ff:ff:ff:ff"
_ALL_NODES = "33:33:00:00:00:01"
ADDRESSES = [{"ip": IP4}, {"ip": IP6}]


def plain(mac: str = MAC, to: str = OTHER) -> bytes:
    """What every VM may send."""
    return _bytes(_udp(mac, to))


def _udp(mac: str = MAC, to: str = OTHER, source: str = IP4) -> Packet:
    return Ether(src=mac, dst=to) / IP(src=source, dst=OTHER4) / UDP(sport=7, dport=7) / b"12345678"


def _bytes(packet: Packet) -> bytes:
    return bytes(packet)


def tags() -> dict[str, bytes]:
    """Frames with VLAN tags of every kind."""
    addresses, packet = plain()[:12], plain()[12:]

    def tagged(*words: int) -> bytes:
        return addresses + b"".join(word.to_bytes(2) for word in words) + packet

    return {
        "VID 0": tagged(0x8100, 0),
        "VID 0, priority 5": tagged(0x8100, 0xA000),
        "VID 200": tagged(0x8100, 200),
        "VID 0, VID 200": tagged(0x8100, 0, 0x8100, 200),
        "VID 100, VID 200": tagged(0x8100, 100, 0x8100, 200),
        "VID 0, VID 0, VID 200": tagged(0x8100, 0, 0x8100, 0, 0x8100, 200),
        "802.1ad VID 0": tagged(0x88A8, 0),
        "802.1ad VID 200": tagged(0x88A8, 200),
        "802.1ad VID 0, VID 200": tagged(0x88A8, 0, 0x8100, 200),
        "802.1ad VID 200, VID 100": tagged(0x88A8, 200, 0x8100, 100),
        "VID 0, 802.1ad VID 200": tagged(0x8100, 0, 0x88A8, 200),
    }


def of_router() -> dict[str, bytes]:
    """What a router sends (RFC 4861), also where a filter may not look for it (RFC 7113)."""
    to = Ether(src=MAC, dst=_ALL_NODES)
    ip = IPv6(src=LINK, dst="ff02::1", hlim=255)
    advert = ICMPv6ND_RA(routerlifetime=1800)
    whole = bytes(ip / IPv6ExtHdrDestOpt() / advert)[40:]
    return {
        name: _bytes(frame)
        for name, frame in {
            "router advertisement": to / ip / advert,
            "redirect": to / ip / ICMPv6ND_Redirect(tgt=LINK, dst=OTHER6),
            "router advertisement behind hop-by-hop": to / ip / IPv6ExtHdrHopByHop() / advert,
            "router advertisement behind options": (
                to / ip / IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt() / advert
            ),
            "router advertisement in an atomic fragment": (to / ip / IPv6ExtHdrFragment(id=7) / advert),
            "router advertisement in a first fragment": (to / ip / IPv6ExtHdrFragment(id=7, m=1) / advert),
            "options behind hop-by-hop in a first fragment": (
                to / ip / IPv6ExtHdrFragment(id=7, m=1, nh=60) / Raw(whole)
            ),
            # Its options go on in the next fragment, and the header that tells what it is, too.
            "a first fragment without its last header": (
                to / ip / IPv6ExtHdrFragment(id=7, m=1, nh=60) / Raw(b"\x3a\x02" + b"\0" * 6)
            ),
        }.items()
    }


def of_dhcp_server() -> dict[str, bytes]:
    """Answers of DHCP servers (RFC 2131, 8415); a client looks at the port they come to."""
    answer = BOOTP(op=2, yiaddr=OTHER4) / DHCP(options=[("message-type", "offer"), "end"])
    to = Ether(src=MAC, dst=EVERYBODY)
    ip = IP(src=IP4, dst="255.255.255.255")
    ip6 = IPv6(src=LINK, dst="ff02::1")
    offer, other = UDP(sport=67, dport=68) / answer, UDP(sport=1067, dport=68) / answer
    return {
        name: _bytes(frame)
        for name, frame in {
            "DHCP offer": to / ip / offer,
            "DHCP offer from another port": to / ip / other,
            "DHCP offer in a first fragment": (
                to
                / IP(src=IP4, dst="255.255.255.255", flags="MF", proto=17)
                / Raw(bytes(ip / offer)[20 : 20 + 64])
            ),
            "DHCPv6 advertise": to / ip6 / UDP(sport=547, dport=546) / DHCP6_Advertise(),
            "DHCPv6 advertise in a first fragment": (
                to
                / ip6
                / IPv6ExtHdrFragment(id=8, m=1)
                / UDP(sport=547, dport=546)
                / DHCP6_Advertise()
                / Raw(b"\0" * 4)
            ),
        }.items()
    }


def of_bridges() -> dict[str, bytes]:
    """What bridges and switches send each other (IEEE 802.1D, 802.1Q; Cisco's own)."""
    bpdu = LLC(dsap=0x42, ssap=0x42, ctrl=3) / STP()
    cisco = LLC(dsap=0xAA, ssap=0xAA, ctrl=3)
    frames: dict[str, Packet] = {
        "STP": Dot3(src=MAC, dst="01:80:c2:00:00:00") / bpdu,
        "PVST+": Dot3(src=MAC, dst="01:00:0c:cc:cc:cd") / cisco / SNAP(OUI=0x0C, code=0x010B) / STP(),
        "CDP": Dot3(src=MAC, dst="01:00:0c:cc:cc:cc") / cisco / SNAP(OUI=0x0C, code=0x2000) / b"\2",
        "LLDP": Ether(src=MAC, dst="01:80:c2:00:00:0e", type=0x88CC) / b"\2\7\4",
        "LACP": Ether(src=MAC, dst="01:80:c2:00:00:02", type=0x8809) / b"\1\1",
        "GVRP": Dot3(src=MAC, dst="01:80:c2:00:00:21") / bpdu,
    }
    return {name: _bytes(frame) for name, frame in frames.items()}


def reserved() -> dict[str, bytes]:
    """IP to each address that no bridge forwards (IEEE 802.1Q, table 8-1)."""
    return {
        f"IP to 01:80:c2:00:00:{last:02x}": _bytes(_udp(to=f"01:80:c2:00:00:{last:02x}"))
        for last in range(16)
    }


def lies() -> dict[str, bytes]:
    """What is sent in another's name, at whatever layer."""
    to, own = Ether(src=MAC, dst=EVERYBODY), {"psrc": IP4, "pdst": OTHER4}
    lie = ARP(op=2, hwsrc=OTHER, hwdst=EVERYBODY, **own)
    frames: dict[str, Packet] = {
        "another's MAC": _udp(OTHER),
        "ARP with another's MAC": to / lie,
        "ARP with a MAC of 8 bytes": to / ARP(op=2, hwlen=8, hwsrc=MAC, **own),
        "ARP in SNAP with another's MAC": (
            Dot3(src=MAC, dst=EVERYBODY) / LLC(dsap=0xAA, ssap=0xAA, ctrl=3) / SNAP(OUI=0, code=0x806) / lie
        ),
        "RARP with another's MAC": (
            Ether(src=MAC, dst=EVERYBODY, type=0x8035) / ARP(op=3, hwsrc=OTHER, psrc="0.0.0.0")
        ),
        "RARP answer": (Ether(src=MAC, dst=EVERYBODY, type=0x8035) / ARP(op=4, hwsrc=MAC, psrc=IP4)),
    }
    return {name: _bytes(frame) for name, frame in frames.items()}


def of_others_addresses() -> dict[str, bytes]:
    """What is dropped only of a VM that has addresses of its own."""
    to = Ether(src=MAC, dst=EVERYBODY)
    frames: dict[str, Packet] = {
        "another's IPv4 address": _udp(source=OTHER4),
        "another's IPv6 address": to / IPv6(src=OTHER6, dst="fd07::3") / ICMPv6EchoRequest(),
        "ARP of another's address": to / ARP(op=1, hwsrc=MAC, psrc=OTHER4, pdst=IP4),
        "ARP probe for another's address": to / ARP(op=1, hwsrc=MAC, psrc="0.0.0.0", pdst=OTHER4),
        "neighbour advertisement of another's address": (
            to / IPv6(src=IP6, dst="ff02::1", hlim=255) / ICMPv6ND_NA(tgt=OTHER6)
        ),
        "the same in a first fragment": (
            to
            / IPv6(src=IP6, dst="ff02::1", hlim=255)
            / IPv6ExtHdrFragment(id=9, m=1)
            / ICMPv6ND_NA(tgt=OTHER6)
        ),
    }
    return {name: _bytes(frame) for name, frame in frames.items()}


def harmless() -> dict[str, bytes]:
    """What a VM needs, whatever its filter."""
    to = Ether(src=MAC, dst=EVERYBODY)
    frames: dict[str, Packet] = {
        "IPv4": _udp(),
        "IPv4, a first fragment": (
            Ether(src=MAC, dst=OTHER)
            / IP(src=IP4, dst=OTHER4, flags="MF", proto=17)
            / Raw(bytes(UDP(sport=7, dport=7, len=1000)) + b"\0" * 64)
        ),
        "IPv4, a later fragment": (
            Ether(src=MAC, dst=OTHER) / IP(src=IP4, dst=OTHER4, frag=9, proto=17) / Raw(b"\0" * 64)
        ),
        "IPv6": to / IPv6(src=IP6, dst=OTHER6) / ICMPv6EchoRequest(),
        "IPv6, a first fragment": (
            to
            / IPv6(src=IP6, dst=OTHER6)
            / IPv6ExtHdrFragment(id=1, m=1)
            / ICMPv6EchoRequest(data=b"\0" * 56)
        ),
        "IPv6, a later fragment": (
            to / IPv6(src=IP6, dst=OTHER6) / IPv6ExtHdrFragment(id=1, offset=8, nh=58) / Raw(b"\0" * 56)
        ),
        "ARP": to / ARP(op=1, hwsrc=MAC, psrc=IP4, pdst=OTHER4),
        "ARP probe for its own address": to / ARP(op=1, hwsrc=MAC, psrc="0.0.0.0", pdst=IP4),
        # So QEMU, or vswitchd for it, tells where a VM has been migrated to.
        "RARP announcement": (
            Ether(src=MAC, dst=EVERYBODY, type=0x8035)
            / ARP(op=3, hwsrc=MAC, hwdst=MAC, psrc="0.0.0.0", pdst="0.0.0.0")
        ),
        "DHCP discover": (
            to
            / IP(src="0.0.0.0", dst="255.255.255.255")
            / UDP(sport=68, dport=67)
            / BOOTP()
            / DHCP(options=[("message-type", "discover"), "end"])
        ),
    }
    return {name: _bytes(frame) for name, frame in frames.items()}

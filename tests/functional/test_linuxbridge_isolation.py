"""What a VM on a Linux bridge may not do to its neighbours, its host and other networks: frame by frame."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from scapy.layers.dhcp import BOOTP, DHCP
from scapy.layers.dhcp6 import DHCP6_Advertise, DHCP6_Solicit
from scapy.layers.inet import ICMP, IP, UDP, fragment
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    ICMPv6MLReport2,
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6ND_RA,
    ICMPv6ND_Redirect,
    ICMPv6ND_RS,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import ARP, LLC, SNAP, STP, Dot1AD, Dot1Q, Dot3, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from drivers.linuxbridge.segments import Segment
from netplugin.host.names import BRIDGE, device_name
from tests.lab.namespaces import connect, entered
from tests.lab.processes import wait_for
from tests.lab.raw_nic import (
    RawNic,
    RawWire,
    arrivals,
    drain,
    marker,
    named,
    new_name,
    opened,
    until,
    until_received,
)
from tests.lab.switch import SWITCH, switch
from tests.lab.traffic_hosts import Host, bare_machine, host, make_spec

A, B, C, OTHER = (f"52:54:00:00:00:{n:02x}" for n in (1, 2, 3, 0x66))
OWN, ALLOWED = "10.0.0.5", "2001:db8::5"
LINK_LOCAL = "fe80::5054:ff:fe00:1"
EVERYBODY, NEAR, FAR = "ff:ff:ff:ff:ff:ff", "wire0", "wire1"
RESERVED = [f"01:80:c2:00:00:{n:02x}" for n in range(16)]
FLAT = {"type": "flat", "physical_network": "physnet1"}
HOST_IP = "10.0.0.200"
BRIDGE_NAME = device_name(BRIDGE, "physnet1")


@pytest.fixture(scope="module")
def one() -> Iterator[Host]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        made = stack.enter_context(host(1, f"physnet1:{NEAR}"))
        connect(made.name, NEAR, SWITCH, FAR)
        made.sh("ip", "addr", "add", f"{HOST_IP}/32", "dev", "lo")
        yield made


@pytest.fixture(autouse=True)
def clean(one: Host) -> Iterator[None]:
    yield
    one.unplug(*one.ports())


def spec(number: int, **fields: Any) -> dict[str, Any]:
    return make_spec(number, FLAT, **fields)


def open_to_all(number: int) -> dict[str, Any]:
    return spec(number, port_security={"enabled": False})


@contextmanager
def nics(one: Host, **specs: Mapping[str, Any]) -> Iterator[list[RawNic]]:
    """Plug them, and hold each open as a VM does."""
    taps = [one.plug(port_id, each)["binding"]["device"] for port_id, each in specs.items()]
    made = [RawNic(one.name, tap) for tap in taps]
    with opened(*made):
        yield made


# -- frames to reserved groups, and the host -------------------------------------------------------


def test_nothing_is_learned_of_frames_to_reserved_groups(one: Host) -> None:
    """They pass a bridge before its rules, and it took up their senders: so a VM got another's frames."""
    with nics(one, a=open_to_all(1), b=open_to_all(2), c=spec(3)) as (a, b, c):
        until(c, b, marker(C))
        for group in RESERVED:
            until(b, c, marker(B))  # where B is, is known now
            until(a, c, marker(A))
            a.send(bytes(marker(B, group)))
            until(a, c, marker(A))
            drain(a)
            until(c, b, marker(C, B))
            assert not any(bytes.fromhex(B.replace(":", "")) == f[:6] for f in drain(a)), group


def test_a_vm_does_not_reach_the_host(one: Host) -> None:
    """By no address that the host has, of IP or of Ethernet, and by no group."""
    with ExitStack() as stack:
        with entered(one.name):
            inbox = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        inbox.bind(("", 7777))
        a, b, c = stack.enter_context(nics(one, a=open_to_all(1), b=spec(2), c=open_to_all(3)))
        until(a, c, marker(A))
        until(b, c, marker(B))
        tap = one.port("a")["binding"]["device"]
        own = [one.link(name)["address"] for name in (BRIDGE_NAME, tap, NEAR)]
        wait_for(lambda: not connections(one), 60, "the agent has closed the connections of all calls")
        before = counters(one)
        for nic, source in ((a, A), (b, B)):
            for to in (EVERYBODY, *own, *RESERVED):
                ask = ARP(hwsrc=source, psrc=OWN, pdst=HOST_IP)
                packet = Ether(src=source, dst=to) / IP(src=OWN, dst=HOST_IP)
                for frame in (
                    Ether(src=source, dst=to) / ask,
                    packet / ICMP(),
                    packet / UDP(sport=1, dport=7777),
                ):
                    nic.send(bytes(frame))
            until(nic, c, marker(source))
        assert counters(one) == before
        for nic in (a, b):
            assert not [
                f
                for f in drain(nic)
                if f[12:14] in (b"\x08\x06", b"\x08\x00") and f[6:12] not in (mac_bytes(A), mac_bytes(B))
            ]
        inbox.setblocking(False)
        with pytest.raises(BlockingIOError):
            inbox.recv(1)


def counters(one: Host) -> dict[str, int]:
    """What the host's own IP has received (that over its loopback aside, which nobody uses)."""
    lines = [line.split() for line in one.sh("cat", "/proc/net/snmp").splitlines()]
    names, values = (words for words in lines if words[0] == "Ip:")
    found = dict(zip(names[1:], map(int, values[1:]), strict=True))
    echoes = [line for line in lines if line[0] == "Icmp:"]
    found |= dict(zip(echoes[0][1:], map(int, echoes[1][1:]), strict=True))
    return {name: found[name] for name in ("InDelivers", "ForwDatagrams", "InEchos")}


def connections(one: Host) -> list[str]:
    """Of TCP, that still say something: over the loopback, but counted (net/tcp_states.h)."""
    listens, waits = "0A", "06"
    lines = one.sh("cat", "/proc/net/tcp").splitlines()[1:]
    return [line for line in lines if line.split()[3] not in (listens, waits)]


def mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


# -- tags -----------------------------------------------------------------------------------------


def tagged() -> dict[str, Packet]:
    inner = IP(src=OWN, dst="10.0.0.9") / UDP(sport=1, dport=2)
    ether = Ether(src=A, dst=EVERYBODY)
    frames = {
        f"{kind:x} VID {tag}": Ether(src=A, dst=EVERYBODY, type=kind) / Dot1Q(vlan=tag) / inner
        for kind in (0x8100, 0x88A8, 0x9100, 0x9200, 0x9300)
        for tag in (0, 1, 200, 4095)
    }
    return frames | {
        "priority": ether / Dot1Q(vlan=0, prio=5) / inner,
        "0, 200": ether / Dot1Q(vlan=0) / Dot1Q(vlan=200) / inner,
        "100, 200": ether / Dot1Q(vlan=100) / Dot1Q(vlan=200) / inner,
        "ad 200, 100": ether / Dot1AD(vlan=200) / Dot1Q(vlan=100) / inner,
        "ad 0, ad 200": ether / Dot1AD(vlan=0) / Dot1AD(vlan=200) / inner,
        "three": ether / Dot1Q(vlan=0) / Dot1Q(vlan=0) / Dot1Q(vlan=200) / inner,
        "cut short": Ether(src=A, dst=EVERYBODY, type=0x8100),
    }


@pytest.mark.parametrize("enabled", [True, False], ids=["filtered", "open"])
@pytest.mark.parametrize("shaped", [False, True], ids=["", "shaped"])
def test_only_untagged_frames_enter(one: Host, enabled: bool, shaped: bool) -> None:
    security = {"enabled": enabled}
    qos = {"egress_kbps": 100_000} if shaped else {}
    with (
        nics(one, a=spec(1, port_security=security, qos=qos), b=open_to_all(2)) as (a, b),
        opened(wire := RawWire(SWITCH, FAR)),
    ):
        for ear in (b, wire):
            until(a, ear, marker(A))
            assert arrivals(a, ear, tagged(), marker(A)) == set()


# -- what routers, DHCP servers and switches send -------------------------------------------------


def of_routers(source: str = LINK_LOCAL) -> dict[str, Packet]:
    ether, ip = Ether(src=A, dst="33:33:00:00:00:01"), IPv6(src=source, dst="ff02::1", hlim=255)
    redirect = ICMPv6ND_Redirect(tgt=LINK_LOCAL, dst="2001:db8:9::9")
    return {
        "advertisement": ether / ip / ICMPv6ND_RA(),
        "unicast advertisement": Ether(src=A, dst=B) / ip / ICMPv6ND_RA(),
        "redirect": ether / ip / redirect,
    }


def hidden_router() -> dict[str, Packet]:
    """RFC 7113: behind extension headers, and in fragments."""
    ether, ip = Ether(src=A, dst=EVERYBODY), IPv6(src=LINK_LOCAL, dst="ff02::1", hlim=255)
    advertisement = ICMPv6ND_RA()
    many = ip
    for _ in range(20):
        many = many / IPv6ExtHdrDestOpt()
    first = IPv6ExtHdrFragment(nh=60, m=1, id=7) / IPv6ExtHdrDestOpt(nh=58)
    return {
        "hop-by-hop": ether / ip / IPv6ExtHdrHopByHop() / advertisement,
        "options": ether / ip / IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt() / advertisement,
        "routing": ether / ip / IPv6ExtHdrRouting() / advertisement,
        "atomic fragment": ether / ip / IPv6ExtHdrFragment(nh=58, id=5) / advertisement,
        "first fragment": ether / ip / IPv6ExtHdrFragment(nh=58, m=1, id=6) / advertisement,
        "options in the fragment": ether / ip / first,
        "rest of it": ether / ip / IPv6ExtHdrFragment(nh=60, offset=1, id=7) / advertisement,
        "many headers": ether / many / advertisement,
        "endless": ether / ip / IPv6ExtHdrDestOpt(nh=58, len=200),
        "no header at all": Ether(src=A, dst=EVERYBODY, type=0x86DD),
    }


def of_dhcp_servers(four: str = OWN, six: str = LINK_LOCAL) -> dict[str, Packet]:
    ether = Ether(src=A, dst=EVERYBODY)
    offer = BOOTP(op=2, yiaddr="10.0.0.77") / DHCP(options=[("message-type", "offer"), "end"])
    ip = IP(src=four, dst="255.255.255.255")
    return {
        "offer": ether / ip / UDP(sport=67, dport=68) / offer,
        "unicast offer": Ether(src=A, dst=B)
        / IP(src=four, dst="10.0.0.77")
        / UDP(sport=67, dport=68)
        / offer,
        "advertise": ether / IPv6(src=six, dst="fe80::9") / UDP(sport=547, dport=546) / DHCP6_Advertise(),
    }


def hidden_dhcp_server(four: str = OWN) -> dict[str, Packet]:
    ether = Ether(src=A, dst=EVERYBODY)
    answer = UDP(sport=67, dport=68) / BOOTP(op=2)
    options = IP(src=four, dst="255.255.255.255", options=[b"\x01"] * 8)
    return {
        "other port": ether / IP(src=four) / UDP(sport=6767, dport=68) / BOOTP(op=2),
        "ip options": ether / options / answer,
        "first fragment": ether / IP(src=four, flags="MF", id=9) / answer,
        "cut short": ether / IP(src=four, proto=17, len=20),
        "long header": ether / IP(src=four, proto=17, ihl=15, len=60),
        "short header": ether / IP(src=four, proto=17, ihl=4, len=60),
    }


def of_switches() -> dict[str, Packet]:
    pvst = Dot3(src=A, dst="01:00:0c:cc:cc:cd") / LLC(dsap=0xAA, ssap=0xAA, ctrl=3)
    cisco = Dot3(src=A, dst="01:00:0c:cc:cc:cc") / LLC(dsap=0xAA, ssap=0xAA, ctrl=3)
    return {
        "stp": Dot3(src=A, dst=RESERVED[0]) / LLC(dsap=0x42, ssap=0x42, ctrl=3) / STP(),
        "stp to all": Dot3(src=A, dst=EVERYBODY) / LLC(dsap=0x42, ssap=0x42, ctrl=3) / STP(),
        "pvst+": pvst / SNAP(OUI=0x00000C, code=0x010B) / STP(),
        "cdp": cisco / SNAP(OUI=0x00000C, code=0x2000),
        "ip in snap": Dot3(src=A, dst=EVERYBODY)
        / LLC(dsap=0xAA, ssap=0xAA, ctrl=3)
        / SNAP(code=0x0800)
        / IP(src="10.0.0.6"),
    }


def lies() -> dict[str, Packet]:
    ether = Ether(src=A, dst=EVERYBODY)
    arp = {"hwsrc": A, "psrc": OWN, "pdst": "10.0.0.9"}
    return {
        "other mac": Ether(src=OTHER, dst=EVERYBODY) / ARP(**arp),
        "other mac within": ether / ARP(**{**arp, "hwsrc": OTHER}),
        "answer for another": ether / ARP(op=2, **{**arp, "hwsrc": B}),
        "long addresses": ether / ARP(hwlen=8, **arp),
        "short addresses": ether / ARP(plen=2, **arp),
        "token ring": ether / ARP(hwtype=6, **arp),
        "arp cut short": Ether(src=A, dst=EVERYBODY, type=0x0806),
        "rarp for another": Ether(src=A, dst=EVERYBODY, type=0x8035)
        / ARP(op=3, **{**arp, "hwsrc": OTHER, "psrc": "0.0.0.0"}),
        "rarp answer": Ether(src=A, dst=EVERYBODY, type=0x8035) / ARP(op=4, **arp),
    }


def harmless() -> dict[str, Packet]:
    """Of a VM that has no role: what it needs to live."""
    ether, ip = Ether(src=A, dst=EVERYBODY), IPv6(src=LINK_LOCAL, dst="ff02::1")
    own = IPv6(src=ALLOWED, dst="2001:db8::9")
    return {
        "arp": ether / ARP(hwsrc=A, psrc=OWN, pdst="10.0.0.9"),
        "arp probe": ether / ARP(hwsrc=A, psrc="0.0.0.0", pdst=OWN),
        "arp announcement": ether / ARP(hwsrc=A, psrc=OWN, pdst=OWN),
        "ping": ether / IP(src=OWN, dst="10.0.0.9") / ICMP(),
        "fragment": ether / IP(src=OWN, dst="10.0.0.9", flags="MF", id=3) / UDP(dport=9),
        "rest of it": ether / IP(src=OWN, dst="10.0.0.9", frag=10, id=3, proto=17),
        "dhcp": ether / IP(src="0.0.0.0", dst="255.255.255.255") / UDP(sport=68, dport=67) / BOOTP(),
        "ping6": ether / own / ICMPv6EchoRequest(),
        "ping6 behind options": ether / own / IPv6ExtHdrDestOpt() / ICMPv6EchoRequest(),
        "fragment of ping6": ether / own / IPv6ExtHdrFragment(nh=58, m=1) / ICMPv6EchoRequest(),
        "rest of ping6": ether / own / IPv6ExtHdrFragment(nh=58, offset=9),
        "router solicitation": ether / ip / ICMPv6ND_RS(),
        "solicitation": ether / ip / ICMPv6ND_NS(tgt="2001:db8::9"),
        "advertisement": ether / ip / ICMPv6ND_NA(tgt=ALLOWED),
        "address tried": ether / IPv6(src="::", dst="ff02::1") / ICMPv6ND_NS(tgt=ALLOWED),
        "listener report": ether / ip / IPv6ExtHdrHopByHop() / ICMPv6MLReport2(),
        "dhcpv6": ether / IPv6(src=LINK_LOCAL, dst="ff02::1:2") / UDP(sport=546, dport=547) / DHCP6_Solicit(),
    }


def forbidden() -> dict[str, Packet]:
    groups = {
        "router": of_routers(),
        "allowed router": of_routers(ALLOWED),
        "hidden router": hidden_router(),
        "dhcp": of_dhcp_servers(),
        "allowed dhcp": of_dhcp_servers(six=ALLOWED),
        "hidden dhcp": hidden_dhcp_server(),
        "switch": of_switches(),
        "lie": lies(),
        "tagged": tagged(),
        "reserved": named(marker(A, group) for group in RESERVED),
    }
    return {f"{group}: {what}": f for group, frames in groups.items() for what, f in frames.items()}


ADDRESSES = [{"ip": OWN}, {"ip": ALLOWED}]
LAST = Ether(src=A, dst=EVERYBODY) / IP(src=OWN, dst="10.0.0.250") / UDP(sport=5, dport=6)


@pytest.mark.parametrize("addresses", [[], ADDRESSES], ids=["own MAC", "addresses"])
def test_a_vm_without_a_role_sends_nothing_of_routers_dhcp_servers_and_switches(
    one: Host, addresses: list[dict[str, str]]
) -> None:
    security = {"allowed_addresses": addresses}
    with (
        nics(one, a=spec(1, port_security=security), b=open_to_all(2)) as (a, b),
        opened(wire := RawWire(SWITCH, FAR)),
    ):
        for ear in (b, wire):
            until(a, ear, LAST)
            assert arrivals(a, ear, forbidden(), LAST) == set()
            assert arrivals(a, ear, harmless(), LAST) == set(harmless())


@pytest.mark.parametrize("addresses", [[], ADDRESSES], ids=["own MAC", "addresses"])
def test_a_vm_with_a_role_sends_what_goes_with_it(one: Host, addresses: list[dict[str, str]]) -> None:
    router, server = of_routers(), of_dhcp_servers()
    expected = {"router": router, "dhcp_server": server}
    with nics(one, b=open_to_all(2)) as (b,):
        for role, frames in expected.items():
            security = {"roles": [role], "allowed_addresses": addresses}
            with nics(one, a=spec(1, port_security=security)) as (a,):
                until(a, b, LAST)
                assert arrivals(a, b, router | server, LAST) == set(frames), role
                assert arrivals(a, b, of_switches() | lies() | tagged(), LAST) == set()


def test_an_address_is_tried_only_if_it_is_allowed(one: Host) -> None:
    """An ARP probe (RFC 5227) of another's address makes its owner give it up."""
    ether = Ether(src=A, dst=EVERYBODY)
    probes = {
        "own": ether / ARP(hwsrc=A, psrc="0.0.0.0", pdst=OWN),
        "another": ether / ARP(hwsrc=A, psrc="0.0.0.0", pdst="10.0.0.6"),
    }
    security = {"allowed_addresses": ADDRESSES}
    with nics(one, a=spec(1, port_security=security), b=open_to_all(2)) as (a, b):
        until(a, b, LAST)
        assert arrivals(a, b, probes, LAST) == {"own"}


# -- what bridges learn ---------------------------------------------------------------------------


def test_a_mac_that_is_known_is_not_taken_by_another_port(one: Host) -> None:
    with (
        nics(one, a=open_to_all(1), b=spec(2), c=spec(3)) as (a, b, c),
        opened(wire := RawWire(SWITCH, FAR)),
    ):
        until(c, b, marker(C, B))
        for thief in (a, wire):
            until(thief, c, marker(B))  # a frame that says that B is here
            drain(a), drain(wire)
            until(c, b, marker(C, B))
            assert not [f for f in drain(a) + drain(wire) if f[:6] == mac_bytes(B)]
        tap = one.port("b")["binding"]["device"]
        link = one.link(tap)
        assert link["linkinfo"]["info_slave_data"]["learning"] is False


def test_what_a_port_may_fill_the_table_of_macs_with_has_a_limit(one: Host) -> None:
    with nics(one, a=open_to_all(1), b=spec(2)) as (a, b):
        until(a, b, marker(A))
        for number in range(9000):
            a.send(bytes.fromhex("ffffffffffff0202") + struct.pack("!I", number) + b"\x88\xb5")
            if number % 256 == 0:
                drain(b)
        until(a, b, marker(A))
        entries = one.sh("bridge", "fdb", "show", "br", BRIDGE_NAME).splitlines()
        assert 8000 <= len([e for e in entries if e.startswith("02:02")]) <= 8192
        until(b, a, marker(B, A))
        until(a, b, marker(A, B))


# -- VXLAN ----------------------------------------------------------------------------------------

VNI, THEIR_VNI, UDP_PORT = 5001, 7000, 4789
BLUE = Segment(network_id="blue")


@dataclass
class Sender:
    """A machine on the wire between hosts, which can send whatever it likes."""

    name: str
    address: str

    def send(self, packet: Packet) -> None:
        """An IP packet with all its headers; the kernel finds the way."""
        family = socket.AF_INET6 if packet.version == 6 else socket.AF_INET
        with entered(self.name):
            outbox = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW)
        with outbox:
            outbox.sendto(bytes(packet), (packet.dst, 0))


def packet(source: str, target: str, vni: int, inner: Packet, name: bytes = b"") -> Packet:
    ip = IPv6 if ":" in source else IP
    head = ip(src=source, dst=target) / UDP(sport=33333, dport=UDP_PORT)
    return head / VXLAN(vni=vni, flags="Instance") / inner / Raw(name)


@contextmanager
def senders(family: int = 4) -> Iterator[tuple[Sender, Sender]]:
    """A peer, and who is none."""
    with bare_machine(2, family=family) as peer, bare_machine(3, family=family) as non_peer:
        yield Sender(*peer), Sender(*non_peer)


@contextmanager
def blue(each: Host, peer: Sender) -> Iterator[tuple[RawNic, Callable[[], list[bytes]]]]:
    """A VM on a network with this peer; and what the VM has received when the peer's next frame comes."""
    each.network("blue", VNI, [peer.address], mtu=1400)
    network = {"type": "vxlan", "network_id": "blue"}
    vm = make_spec(9, network, port_security={"enabled": False})
    with nics(each, v=vm) as (nic,):

        def received() -> list[bytes]:
            def send() -> None:
                peer.send(packet(peer.address, each.address, VNI, marker(C), name))

            name = new_name()
            return until_received(send, nic, name)

        yield nic, received
    each.unplug("v")
    assert each.agent.call("DELETE", "/v1/networks/blue")[0] == 204


def fragments(whole: Packet, family: int) -> list[Packet]:
    """Cut so that the VNI is in the second piece."""
    if family == 4:
        return list(fragment(whole, fragsize=8))
    udp = bytes(whole[UDP])
    ip = IPv6(src=whole.src, dst=whole.dst)
    cut = [
        ip / IPv6ExtHdrFragment(nh=17, m=1, id=1) / Raw(udp[:8]),
        ip / IPv6ExtHdrFragment(nh=17, offset=1, id=1) / Raw(udp[8:]),
    ]
    options = bytes(IPv6ExtHdrDestOpt(nh=17))
    hidden = [
        ip / IPv6ExtHdrFragment(nh=60, m=1, id=2) / Raw(options),
        ip / IPv6ExtHdrFragment(nh=60, offset=len(options) // 8, id=2) / Raw(udp),
    ]
    return [*cut, *hidden]


@pytest.mark.parametrize("family", [4, 6])
def test_only_peers_send_into_a_vxlan_network(one: Host, family: int) -> None:
    with ExitStack() as stack:
        each = one if family == 4 else stack.enter_context(host(4, family=6))
        peer, non_peer = stack.enter_context(senders(family))
        _, received = stack.enter_context(blue(each, peer))
        received()
        name = new_name()
        whole = packet(non_peer.address, each.address, VNI, marker(OTHER), name)
        whole[UDP].chksum = 0 if family == 4 else None
        non_peer.send(whole)
        for piece in fragments(whole.__class__(bytes(whole)), family):
            non_peer.send(piece)
        assert not [frame for frame in received() if name in frame]
        learned = each.sh("bridge", "fdb", "show", "dev", BLUE.device)
        assert non_peer.address not in learned and f"{C} dst {peer.address}" in learned
        # Frames of a new peer are accepted at once, and those of a former peer are not.
        each.network("blue", VNI, [non_peer.address], mtu=1400)
        peer.address, non_peer.address = non_peer.address, peer.address
        peer.name, non_peer.name = non_peer.name, peer.name
        received()
        non_peer.send(packet(non_peer.address, each.address, VNI, marker(OTHER), name))
        assert not [frame for frame in received() if name in frame]


def test_networks_of_the_operator_are_none_of_our_business(one: Host) -> None:
    """Another VNI on the same UDP port, and rules of others."""
    one.sh("nft", "add table inet theirs")
    one.sh(
        "ip",
        "link",
        "add",
        "theirs",
        "up",
        "type",
        "vxlan",
        "id",
        str(THEIR_VNI),
        "dstport",
        str(UDP_PORT),
        "local",
        one.address,
    )
    try:
        with senders() as (peer, non_peer):
            with blue(one, peer) as (_, received), opened(ear := RawWire(one.name, "theirs")):
                name = new_name()
                theirs = packet(non_peer.address, one.address, THEIR_VNI, marker(OTHER), name)
                until_received(lambda: non_peer.send(theirs), ear, name)
                received()
            rules = one.sh("nft", "list", "ruleset")
            assert "table inet theirs" in rules and "table inet netplugin" not in rules
    finally:
        one.sh("ip", "link", "delete", "theirs")
        one.sh("nft", "delete table inet theirs")


def test_a_vm_does_not_send_into_a_network_through_the_host(one: Host) -> None:
    """Frames that the host takes for packets to its tunnel's end, from the address of a peer."""
    with senders() as (peer, _), blue(one, peer) as (_, received), nics(one, a=open_to_all(1)) as (a,):
        received()
        name = new_name()
        tap = one.port("a")["binding"]["device"]
        own = [one.link(device)["address"] for device in (BRIDGE_NAME, tap, NEAR)]
        inner = packet(peer.address, one.address, VNI, marker(OTHER), name)
        for to in (EVERYBODY, *own, *RESERVED):
            a.send(bytes(Ether(src=A, dst=to) / inner))
        assert not [frame for frame in received() if name in frame]


def test_rules_for_peers_that_are_flushed_come_back(one: Host) -> None:
    with senders() as (peer, non_peer), blue(one, peer) as (_, received):
        for command in (
            "flush ruleset",
            "flush chain inet netplugin input",
            f"add element inet netplugin peers4 {{ {UDP_PORT} . {VNI} . {non_peer.address} }}",
            f"delete element inet netplugin networks {{ {UDP_PORT} . {VNI} }}",
        ):
            one.sh("nft", command)
            wait_for(lambda: one.changes() == [], 20, "nothing is left to change")
            rules = one.sh("nft", "list table inet netplugin")
            assert peer.address in rules and non_peer.address not in rules, command
            name = new_name()
            non_peer.send(packet(non_peer.address, one.address, VNI, marker(OTHER), name))
            assert not [frame for frame in received() if name in frame], command


# -- without the agent ----------------------------------------------------------------------------


def of_others() -> dict[str, Packet]:
    """From addresses that are not on the list."""
    ether, tried = Ether(src=A, dst=EVERYBODY), IPv6(src="::", dst="ff02::1")
    hidden = IPv6(src=ALLOWED) / IPv6ExtHdrDestOpt() / ICMPv6ND_NA(tgt="2001:db8::6")
    return {
        "ip": ether / IP(src="10.0.0.6") / UDP(dport=9),
        "ip of dhcp": ether / IP(src="0.0.0.0", dst="255.255.255.255") / UDP(sport=9, dport=67),
        "arp": ether / ARP(hwsrc=A, psrc="10.0.0.6", pdst="10.0.0.9"),
        "arp answer": ether / ARP(op=2, hwsrc=A, psrc="10.0.0.6", pdst="10.0.0.9"),
        "arp probe": ether / ARP(hwsrc=A, psrc="0.0.0.0", pdst="10.0.0.6"),
        "ipv6": ether / IPv6(src="2001:db8::6") / UDP(dport=9),
        "link-local": ether / IPv6(src="fe80::6") / UDP(dport=9),
        "advertisement": ether / IPv6(src=ALLOWED) / ICMPv6ND_NA(tgt="2001:db8::6"),
        "hidden advertisement": ether / hidden,
        "address tried": ether / tried / ICMPv6ND_NS(tgt="2001:db8::6"),
        "other protocol": marker(A),
    }


@pytest.mark.parametrize("shaped", [False, True], ids=["", "shaped"])
@pytest.mark.parametrize("addresses", [[], ADDRESSES], ids=["own MAC", "addresses"])
def test_a_flush_of_all_rules_opens_no_tap_while_there_is_no_agent(
    one: Host, shaped: bool, addresses: list[dict[str, str]]
) -> None:
    qos = {"egress_kbps": 100_000} if shaped else {}
    filtered = spec(1, qos=qos, port_security={"allowed_addresses": addresses})
    refused = forbidden() | (of_others() if addresses else {})
    with (
        nics(one, a=filtered, b=open_to_all(2), c=open_to_all(3)) as (a, b, c),
        opened(wire := RawWire(SWITCH, FAR)),
    ):
        until(a, b, LAST)
        one.kill()
        try:
            one.sh("nft", "flush", "ruleset")
            for ear in (b, wire):
                assert arrivals(a, ear, refused, LAST) == set()
                assert arrivals(a, ear, harmless(), LAST) == set(harmless())
            until(c, b, marker(C))
            before = counters(one)
            bridge = one.link(BRIDGE_NAME)["address"]
            for to in (EVERYBODY, bridge, *RESERVED):
                ask = ARP(hwsrc=C, psrc="10.0.0.3", pdst=HOST_IP)
                c.send(bytes(Ether(src=C, dst=to) / ask))
                c.send(bytes(Ether(src=C, dst=to) / IP(src="10.0.0.3", dst=HOST_IP) / ICMP()))
            until(c, b, marker(C))
            assert counters(one) == before
            answers = [f for f in drain(c) if f[12:14] == b"\x08\x06"]
            assert not [f for f in answers if f[6:12] != mac_bytes(A)]
            assert arrivals(c, b, tagged(), marker(C)) == set()
        finally:
            one.start()
        wait_for(lambda: "npt" in one.sh("nft", "list", "ruleset"), 20, "the table is back")


def test_ports_from_before_get_what_they_lack_while_their_vms_run(one: Host) -> None:
    """As an agent left them that knew neither guards nor fixed MACs."""
    with nics(one, a=spec(1), b=spec(2)) as (a, b):
        until(a, b, LAST)
        taps = {i: one.port(i)["binding"]["device"] for i in ("a", "b")}
        before = {name: one.link(name)["ifindex"] for name in (*taps.values(), BRIDGE_NAME)}
        one.kill()
        for device in (*taps.values(), BRIDGE_NAME):
            one.sh("tc", "qdisc", "delete", "dev", device, "ingress")
        for port_id, mac in (("a", A), ("b", B)):
            one.sh("bridge", "link", "set", "dev", taps[port_id], "learning", "on")
            one.sh("bridge", "fdb", "delete", mac, "dev", taps[port_id], "master")
        one.sh("ip", "link", "set", BRIDGE_NAME, "type", "bridge", "no_linklocal_learn", "0")
        until(a, b, LAST)
        one.start()
        assert arrivals(a, b, forbidden(), LAST) == set()
        assert {name: one.link(name)["ifindex"] for name in before} == before
        assert all(one.port(i)["state"] == "active" for i in taps) and one.changes() == []
        for port_id, mac in (("a", A), ("b", B)):
            entries = one.sh("bridge", "fdb", "show", "dev", taps[port_id]).splitlines()
            assert any(e.startswith(mac) and "sticky" in e and "static" in e for e in entries)
        text = one.sh("tc", "filter", "show", "dev", BRIDGE_NAME, "ingress")
        assert "direct-action" in text

"""Every kind of frame that a VM may send, and what becomes of it: the data of docs/security-frames.md.

``KINDS`` says which frames a kind has, in which settings of ``port_security`` they pass, and what
neutron's OVS firewall and libvirt's clean-traffic do with the same frame. The functional tests
(tests/functional/test_frames_*.py) send them and hold each backend to it; ``python -m
tests.lab.frames`` writes the page from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scapy.contrib.lacp import LACP
from scapy.contrib.lldp import LLDPDU
from scapy.contrib.slowprot import SlowProtocol
from scapy.layers.dhcp import BOOTP, DHCP
from scapy.layers.dhcp6 import DHCP6_Advertise, DHCP6_Solicit
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import (
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6ND_RA,
    ICMPv6ND_Redirect,
    ICMPv6ND_RS,
    ICMPv6NDOptDstLLAddr,
    ICMPv6NDOptPrefixInfo,
    ICMPv6NDOptSrcLLAddr,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
)
from scapy.layers.l2 import ARP, LLC, SNAP, STP, Dot1AD, Dot1Q, Dot3, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from netplugin.host.names import link_local

BROADCAST = "ff:ff:ff:ff:ff:ff"
#: A MAC that nobody has: a frame to it goes to every port of its network.
NOBODY = "52:54:00:00:99:99"
FOREIGN_MAC = "52:54:00:00:66:66"
#: The VM's addresses (allowed, where addresses are) and those of others.
OWN_IP, OWN_IP6 = "10.0.0.1", "fd00:1::1"
FOREIGN_IP, FOREIGN_IP6 = "10.0.0.66", "fd00:1::66"
_ALL_NODES, _ALL_ROUTERS, _DHCP_SERVERS = "ff02::1", "ff02::2", "ff02::1:2"
#: The VLAN of another network, and the VNI of another's.
OTHER_VLAN, OTHER_VNI = 200, 5002
#: The length of the mark that a test puts behind each frame. With it a frame has at least 60 bytes (without
#: the FCS), so nobody has to fill it up.
MARK_BYTES = 46
_EXPERIMENTAL = 0x88B5  # IEEE 802: for experiments
_RARP = 0x8035
#: Where TCP and UDP have their checksum.
_CHECKSUM = {6: 16, 17: 6}


class Setting(StrEnum):
    """What ``port_security`` of the sending port says; each is one column of the table."""

    DISABLED = "disabled"
    OWN_MAC = "own MAC"
    ADDRESSES = "addresses"
    ROLES = "own MAC, roles"
    ADDRESSES_ROLES = "addresses, roles"

    @property
    def port_security(self) -> dict[str, Any]:
        if self is Setting.DISABLED:
            return {"enabled": False}
        addresses = [{"ip": OWN_IP}, {"ip": OWN_IP6}]
        found: dict[str, Any] = {"enabled": True}
        if self in (Setting.ADDRESSES, Setting.ADDRESSES_ROLES):
            found["allowed_addresses"] = addresses
        if self in (Setting.ROLES, Setting.ADDRESSES_ROLES):
            found["roles"] = ["router", "dhcp_server"]
        return found


class Backend(StrEnum):
    """Who carries the frame: the columns of exceptions."""

    LINUXBRIDGE = "linuxbridge"
    DPDKVHOSTUSER = "dpdkvhostuser"
    RELAY = "relay"


@dataclass(frozen=True)
class Sender:
    """The VM that sends, and the host it is on."""

    mac: str
    #: The MAC and an address of the host's own stack, as far as a VM can know them.
    host_mac: str
    host_ip: str
    #: The VLAN of its network; of one without, a VLAN that nobody has.
    vlan: int = 100

    @property
    def link_local(self) -> str:
        return link_local(self.mac)


#: From the sender to the frames; each ends with a mark that the test puts behind it.
Build = Callable[[Sender], Sequence[Packet]]


def checksum_from(frame: bytes) -> int | None:
    """The first byte of the frame at which a VM on a Linux bridge may have the host write a checksum.

    None: at no byte. It is where TCP and UDP have theirs, and behind the headers of all else.
    """
    ethertype = int.from_bytes(frame[12:14], "big")
    if ethertype in (0x0806, _RARP):
        return None
    if ethertype == 0x0800:
        later = int.from_bytes(frame[20:22], "big") & 0x1FFF
        return 14 + 4 * (frame[14] & 0x0F) + (0 if later else _CHECKSUM.get(frame[23], 0))
    if ethertype != 0x86DD:
        return 14
    extended = frame[20] in (44, 60)  # a fragment or destination options: of 8 bytes, in all that are here
    upper = frame[54] if extended else frame[20]
    return None if upper == 58 else 54 + 8 * extended + _CHECKSUM.get(upper, 0)


_S = Setting
ALWAYS = frozenset(Setting)
NEVER: frozenset[Setting] = frozenset()
UNFILTERED = frozenset({_S.DISABLED})
ANY_ADDRESS = frozenset({_S.DISABLED, _S.OWN_MAC, _S.ROLES})
BY_ROLE = frozenset({_S.DISABLED, _S.ROLES, _S.ADDRESSES_ROLES})


@dataclass(frozen=True)
class Kind:
    """One line of the table.

    ``passes``: the settings in which it leaves the VM's port; in all others it comes out nowhere.
    ``but`` are the backends of which this is not true, with the settings in which it passes there.
    ``neutron`` and ``clean_traffic`` are what these do, read in their sources.
    """

    name: str
    build: Build
    passes: frozenset[Setting]
    neutron: str
    clean_traffic: str
    but: Mapping[Backend, frozenset[Setting]] = field(default_factory=dict)
    #: Of a VF that a VM has (``sriov``) with ``port_security`` enabled.
    sriov: str = "passed"

    def passes_on(self, backend: Backend, setting: Setting) -> bool:
        return setting in self.but.get(backend, self.passes)


def _ether(sender: Sender, to: str = NOBODY, **fields: Any) -> Packet:
    return Ether(src=sender.mac, dst=to, **fields)


def _udp(sender: Sender, source: str = OWN_IP, to: str = "10.0.0.99") -> Packet:
    return IP(src=source, dst=to) / UDP(sport=4000, dport=4001)


def _udp6(source: str = OWN_IP6) -> Packet:
    return IPv6(src=source, dst="fd00:1::99") / UDP(sport=4000, dport=4001)


def _arp(sender: Sender, **fields: Any) -> Packet:
    values: dict[str, Any] = {
        "op": 1,
        "hwsrc": sender.mac,
        "psrc": OWN_IP,
        "pdst": "10.0.0.99",
    } | fields
    return _ether(sender, BROADCAST) / ARP(**values)


def _solicitation(sender: Sender, source: str, target: str) -> Packet:
    head = _ether(sender, "33:33:ff:00:00:99") / IPv6(src=source, dst="ff02::1:ff00:99")
    return head / ICMPv6ND_NS(tgt=target)


def _advertisement(sender: Sender, source: str, target: str, mac: str | None = None) -> Packet:
    head = _ether(sender, "33:33:00:00:00:01") / IPv6(src=source, dst=_ALL_NODES)
    return head / ICMPv6ND_NA(tgt=target, R=0, S=0, O=1) / ICMPv6NDOptDstLLAddr(lladdr=mac or sender.mac)


def _router_message(sender: Sender, *between: Packet, source: str | None = None) -> Packet:
    head = _ether(sender, "33:33:00:00:00:01")
    head = head / IPv6(src=source or sender.link_local, dst=_ALL_NODES)
    for part in between:
        head = head / part
    return head / ICMPv6ND_RA() / ICMPv6NDOptPrefixInfo(prefix="fd00:bad::", prefixlen=64)


def _headless_fragment(sender: Sender, source: str) -> Packet:
    """RFC 7113, section 2: the kind of the message is in the second fragment alone."""
    head = _ether(sender, "33:33:00:00:00:01") / IPv6(src=source, dst=_ALL_NODES)
    # A destination options header that says it is longer than the fragment.
    return head / IPv6ExtHdrFragment(nh=60, m=1, id=7) / Raw(bytes([58, 30, 1, 4, 0, 0, 0, 0]))


def _options_alone(sender: Sender) -> list[Packet]:
    """First fragments that end behind their options, of which the mark of the test is a part: the header that
    these announce is in the second."""
    found = []
    for upper in (58, 17, 6):  # ICMPv6, UDP, TCP
        for source in (sender.link_local, OWN_IP6):
            head = _ether(sender, "33:33:00:00:00:01") / IPv6(src=source, dst=_ALL_NODES)
            options = Raw(bytes([upper, (2 + MARK_BYTES) // 8 - 1]))
            found.append(head / IPv6ExtHdrFragment(nh=60, m=1, id=7) / options)
    return found


def _redirect(sender: Sender) -> Packet:
    head = _ether(sender) / IPv6(src=sender.link_local, dst="fd00:1::99")
    return head / ICMPv6ND_Redirect(tgt=sender.link_local, dst=FOREIGN_IP6)


def _dhcp(sender: Sender) -> Packet:
    head = _ether(sender, BROADCAST) / IP(src="0.0.0.0", dst="255.255.255.255")
    ask = BOOTP(chaddr=bytes.fromhex(sender.mac.replace(":", "")))
    return head / UDP(sport=68, dport=67) / ask / DHCP(options=[("message-type", "discover"), "end"])


def _dhcp_answer(sender: Sender) -> Packet:
    head = _ether(sender, BROADCAST) / IP(src=OWN_IP, dst="255.255.255.255")
    offer = BOOTP(op=2, yiaddr=FOREIGN_IP, siaddr=OWN_IP)
    return head / UDP(sport=67, dport=68) / offer / DHCP(options=[("message-type", "offer"), "end"])


def _dhcp6(sender: Sender) -> Packet:
    head = _ether(sender, "33:33:00:01:00:02") / IPv6(src=sender.link_local, dst=_DHCP_SERVERS)
    return head / UDP(sport=546, dport=547) / DHCP6_Solicit()


def _dhcp6_answer(sender: Sender) -> Packet:
    head = _ether(sender) / IPv6(src=sender.link_local, dst="fe80::99")
    return head / UDP(sport=547, dport=546) / DHCP6_Advertise()


def _link_local_groups(sender: Sender, payload: Packet, ethertype: int) -> list[Packet]:
    """To each of the addresses that no bridge forwards (IEEE 802.1Q, table 8-1)."""
    return [_ether(sender, f"01:80:c2:00:00:{last:02x}", type=ethertype) / payload for last in range(16)]


def _ask_for_host(sender: Sender) -> Packet:
    return ARP(op=1, hwsrc=sender.mac, psrc=OWN_IP, pdst=sender.host_ip)


def _tunnelled(sender: Sender) -> Packet:
    """What a VXLAN peer would send to the host: a broadcast in another network."""
    return IP(src=OWN_IP, dst=sender.host_ip) / UDP(sport=5000, dport=4789) / _vxlan(sender)


def _vxlan(sender: Sender) -> Packet:
    inner = Ether(src=FOREIGN_MAC, dst=BROADCAST) / _udp(sender)
    return VXLAN(vni=OTHER_VNI, flags="Instance") / inner


def _snap(sender: Sender, to: str, organization: int, code: int) -> Packet:
    return (
        Dot3(src=sender.mac, dst=to) / LLC(dsap=0xAA, ssap=0xAA, ctrl=3) / SNAP(OUI=organization, code=code)
    )


def _tagged(*tags: tuple[type[Packet], int]) -> Build:
    """One frame with these tags, the outermost first, and a broadcast of the VM's own behind."""

    def build(sender: Sender) -> list[Packet]:
        frame: Packet = _ether(sender, BROADCAST)
        for layer, number in tags:
            frame = frame / layer(vlan=number or 0)
        return [frame / _udp(sender)]

    return build


def _own_tagged(*numbers: int | None) -> Build:
    """As ``_tagged``; None is the VLAN of the VM's own network."""
    return lambda sender: _tagged(
        *((Dot1Q, sender.vlan if number is None else number) for number in numbers)
    )(sender)


_STP_TO = "01:80:c2:00:00:00"
_CISCO = 0x00000C
#: The kernel's bridges take no frame from a group address (``br_handle_frame``, net/bridge/br_input.c).
_NOT_A_SOURCE = {Backend.LINUXBRIDGE: NEVER}
#: OVS's bridges drop Cisco's groups as they do 01:80:c2 (``eth_addr_is_reserved``, lib/packets.c).
_CISCO_ON_OVS = {Backend.DPDKVHOSTUSER: NEVER}
#: OVS knows the tags of 802.1Q and 802.1ad (``eth_type_vlan``, lib/packets.h): others are protocols.
_NO_TAG_OF_OVS = {Backend.DPDKVHOSTUSER: ANY_ADDRESS, Backend.RELAY: ANY_ADDRESS}
#: There all frames with a length in place of a type (IEEE 802.3) are dropped with those of switches.
_NO_802_3 = {Backend.LINUXBRIDGE: UNFILTERED}
#: What a relay's port sends leaves by the VF and comes to no bridge of this host.
_NO_HOST = {Backend.RELAY: ALWAYS}
_PASSED, _DROPPED, _NIC = "passed", "dropped", "by the NIC"
_IF_RULES = "passed if a rule lets it"
_GROUPS = "passed (00); reaches the host (02 to 0f)"

KINDS: tuple[Kind, ...] = (
    # -- what a VM needs -----------------------------------------------------------------------
    Kind("IPv4 from the port's MAC and address", lambda s: [_ether(s) / _udp(s)], ALWAYS, _IF_RULES, _PASSED),
    Kind(
        "IPv6 from the port's MAC and address", lambda s: [_ether(s) / _udp6()], ALWAYS, _IF_RULES, _DROPPED
    ),
    Kind(
        "IPv4 broadcast",
        lambda s: [_ether(s, BROADCAST) / _udp(s, to="255.255.255.255")],
        ALWAYS,
        _IF_RULES,
        _PASSED,
    ),
    Kind(
        "fragments of IPv4 from its address",
        lambda s: [
            _ether(s) / IP(src=OWN_IP, dst="10.0.0.99", proto=17, id=9, flags="MF") / Raw(b"." * 16),
            _ether(s) / IP(src=OWN_IP, dst="10.0.0.99", proto=17, id=9, frag=6),
        ],
        ALWAYS,
        _IF_RULES,
        _PASSED,
    ),
    Kind("ARP request and answer, its own", lambda s: [_arp(s), _arp(s, op=2)], ALWAYS, _PASSED, _PASSED),
    Kind(
        "ARP probe from 0.0.0.0 for its address (RFC 5227)",
        lambda s: [_arp(s, psrc="0.0.0.0", pdst=OWN_IP)],
        ALWAYS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "ARP request for an address of the host",
        lambda s: [_arp(s, pdst=s.host_ip)],
        ALWAYS,
        _PASSED,
        _PASSED,
    ),
    Kind(
        "neighbour solicitation from its addresses",
        lambda s: [_solicitation(s, s.link_local, "fd00:1::99"), _solicitation(s, OWN_IP6, "fd00:1::99")],
        ALWAYS,
        _PASSED,
        _DROPPED,
    ),
    Kind(
        "neighbour solicitation from :: for its address (RFC 4862)",
        lambda s: [_solicitation(s, "::", OWN_IP6), _solicitation(s, "::", s.link_local)],
        ALWAYS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "neighbour advertisement of its addresses",
        lambda s: [_advertisement(s, OWN_IP6, OWN_IP6), _advertisement(s, s.link_local, s.link_local)],
        ALWAYS,
        _PASSED,
        _DROPPED,
    ),
    Kind(
        "router solicitation",
        lambda s: [
            _ether(s, "33:33:00:00:00:02")
            / IPv6(src=s.link_local, dst=_ALL_ROUTERS)
            / ICMPv6ND_RS()
            / ICMPv6NDOptSrcLLAddr(lladdr=s.mac)
        ],
        ALWAYS,
        _PASSED,
        _DROPPED,
    ),
    Kind("DHCPv4 client", lambda s: [_dhcp(s)], ALWAYS, _PASSED, _PASSED),
    Kind("DHCPv6 client", lambda s: [_dhcp6(s)], ALWAYS, "passed from allowed addresses", _DROPPED),
    # -- what is another's ---------------------------------------------------------------------
    Kind(
        "from another's MAC",
        lambda s: [
            Ether(src=FOREIGN_MAC, dst=NOBODY) / _udp(s),
            Ether(src=FOREIGN_MAC, dst=NOBODY) / _udp6(),
        ],
        UNFILTERED,
        _DROPPED,
        _DROPPED,
        sriov="dropped by the NIC (spoofchk)",
    ),
    Kind(
        "from a group MAC",
        lambda s: [Ether(src="03:00:00:00:00:01", dst=NOBODY) / _udp(s)],
        UNFILTERED,
        _DROPPED,
        _DROPPED,
        but=_NOT_A_SOURCE,
        sriov=_NIC,
    ),
    Kind(
        "IPv4 from another's address",
        lambda s: [_ether(s) / _udp(s, FOREIGN_IP)],
        ANY_ADDRESS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "IPv6 from another's address",
        lambda s: [_ether(s) / _udp6(FOREIGN_IP6)],
        ANY_ADDRESS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "fragments of IPv4 from another's address",
        lambda s: [_ether(s) / IP(src=FOREIGN_IP, dst="10.0.0.99", proto=17, id=9, frag=6)],
        ANY_ADDRESS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "ARP with another's MAC inside",
        lambda s: [_arp(s, hwsrc=FOREIGN_MAC), _arp(s, op=2, hwsrc=FOREIGN_MAC)],
        UNFILTERED,
        _PASSED,
        _DROPPED,
    ),
    Kind(
        "ARP with another's IPv4 address as the sender's",
        lambda s: [
            _arp(s, psrc=FOREIGN_IP),
            _arp(s, op=2, psrc=FOREIGN_IP),
            _arp(s, psrc=FOREIGN_IP, pdst=FOREIGN_IP),
        ],
        ANY_ADDRESS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "ARP probe from 0.0.0.0 for another's address",
        lambda s: [_arp(s, psrc="0.0.0.0", pdst=FOREIGN_IP)],
        ANY_ADDRESS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "neighbour solicitation from another's address",
        lambda s: [_solicitation(s, FOREIGN_IP6, "fd00:1::99")],
        ANY_ADDRESS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "neighbour solicitation from :: for another's address",
        lambda s: [_solicitation(s, "::", FOREIGN_IP6)],
        ANY_ADDRESS,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "neighbour advertisement of another's address",
        lambda s: [
            _advertisement(s, OWN_IP6, FOREIGN_IP6),
            _advertisement(s, s.link_local, FOREIGN_IP6),
            _advertisement(s, FOREIGN_IP6, FOREIGN_IP6),
        ],
        ANY_ADDRESS,
        "passed from an allowed address if a rule lets it",
        _DROPPED,
    ),
    Kind(
        "neighbour advertisement of its address with another's MAC inside",
        lambda s: [_advertisement(s, OWN_IP6, OWN_IP6, FOREIGN_MAC)],
        ALWAYS,
        _PASSED,
        _DROPPED,
    ),
    # -- what routers and DHCP servers send ----------------------------------------------------
    Kind("router advertisement", lambda s: [_router_message(s)], BY_ROLE, _DROPPED, _DROPPED),
    Kind(
        "router advertisement from its global address",
        lambda s: [_router_message(s, source=OWN_IP6)],
        BY_ROLE,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "router advertisement behind an extension header (RFC 7113)",
        lambda s: [_router_message(s, IPv6ExtHdrDestOpt()), _router_message(s, IPv6ExtHdrFragment(id=5))],
        BY_ROLE,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "first fragment of IPv6 that hides what follows (RFC 7112, 7113)",
        lambda s: [_headless_fragment(s, s.link_local), _headless_fragment(s, OWN_IP6)],
        UNFILTERED,
        "unknown",
        _DROPPED,
    ),
    Kind(
        "first fragment of IPv6 that ends behind its options (RFC 7112)",
        _options_alone,
        UNFILTERED,
        "unknown",
        _DROPPED,
    ),
    Kind("IPv6 redirect", lambda s: [_redirect(s)], BY_ROLE, "unknown", _DROPPED),
    Kind(
        "IPv4 redirect",
        lambda s: [
            _ether(s)
            / IP(src=OWN_IP, dst="10.0.0.99")
            / ICMP(type=5, code=1, gw=OWN_IP)
            / IP(src="10.0.0.99", dst=FOREIGN_IP)
        ],
        ALWAYS,
        _IF_RULES,
        _PASSED,
    ),
    Kind("DHCPv4 server", lambda s: [_dhcp_answer(s)], BY_ROLE, _DROPPED, _PASSED),
    Kind("DHCPv6 server", lambda s: [_dhcp6_answer(s)], BY_ROLE, _DROPPED, _DROPPED),
    # -- what is between bridges ---------------------------------------------------------------
    Kind(
        "ARP for the host to 01:80:c2:00:00:00 to 0f",
        lambda s: _link_local_groups(s, _ask_for_host(s), 0x0806),
        NEVER,
        _DROPPED,
        _GROUPS,
        sriov=_NIC,
    ),
    Kind(
        "VXLAN for the host to 01:80:c2:00:00:00 to 0f",
        lambda s: _link_local_groups(s, _tunnelled(s), 0x0800),
        NEVER,
        _DROPPED,
        _GROUPS,
        sriov=_NIC,
    ),
    Kind(
        "STP, LACP, LLDP, 802.1X",
        lambda s: [
            Dot3(src=s.mac, dst=_STP_TO) / LLC(dsap=0x42, ssap=0x42, ctrl=3) / STP(),
            _ether(s, "01:80:c2:00:00:02") / SlowProtocol() / LACP(),
            _ether(s, "01:80:c2:00:00:0e", type=0x88CC) / LLDPDU(),
            _ether(s, "01:80:c2:00:00:03", type=0x888E),
        ],
        NEVER,
        _DROPPED,
        "dropped (00); reaches the host (02 to 0f)",
        sriov=_NIC,
    ),
    Kind(
        "to 01:80:c2:00:00:10 to 3f (MRP, GARP, CFM)",
        lambda s: [
            _ether(s, f"01:80:c2:00:00:{last:02x}", type=0x8902)
            for last in (0x10, 0x20, 0x21, 0x2F, 0x30, 0x3F)
        ],
        UNFILTERED,
        _DROPPED,
        _DROPPED,
    ),
    Kind(
        "PVST+, CDP",
        lambda s: [
            _snap(s, "01:00:0c:cc:cc:cd", _CISCO, 0x010B),
            _snap(s, "01:00:0c:cc:cc:cc", _CISCO, 0x2000),
        ],
        UNFILTERED,
        _DROPPED,
        _DROPPED,
        but=_CISCO_ON_OVS,
    ),
    # -- tags ----------------------------------------------------------------------------------
    Kind("802.1Q tag of its network", _own_tagged(None), NEVER, _DROPPED, _DROPPED, sriov=_NIC),
    Kind("802.1Q tag of another network", _own_tagged(OTHER_VLAN), NEVER, _DROPPED, _DROPPED, sriov=_NIC),
    Kind("802.1Q tag of priority alone (VLAN 0)", _own_tagged(0), NEVER, "unknown", _DROPPED, sriov=_NIC),
    Kind("two tags, the outer VLAN 0", _own_tagged(0, OTHER_VLAN), NEVER, "unknown", _DROPPED, sriov=_NIC),
    Kind(
        "two tags, the outer of its network",
        _own_tagged(None, OTHER_VLAN),
        NEVER,
        "unknown",
        _DROPPED,
        sriov=_NIC,
    ),
    Kind(
        "802.1ad tag, alone and around another",
        lambda s: [
            *_tagged((Dot1AD, OTHER_VLAN))(s),
            *_tagged((Dot1AD, 0))(s),
            *_tagged((Dot1AD, OTHER_VLAN), (Dot1Q, OTHER_VLAN))(s),
            *_tagged((Dot1AD, s.vlan), (Dot1Q, OTHER_VLAN))(s),
            *_tagged((Dot1AD, 0), (Dot1Q, OTHER_VLAN))(s),
        ],
        NEVER,
        "unknown",
        _DROPPED,
        sriov=_NIC,
    ),
    Kind(
        "tag of an older kind (EtherTypes 0x9100, 0x9200, 0x9300)",
        lambda s: [
            _ether(s, BROADCAST, type=kind) / Raw(OTHER_VLAN.to_bytes(2, "big") + b"\x08\x00") / _udp(s)
            for kind in (0x9100, 0x9200, 0x9300)
        ],
        NEVER,
        _DROPPED,
        _DROPPED,
        but=_NO_TAG_OF_OVS,
        sriov=_NIC,
    ),
    # -- other protocols, and the host ---------------------------------------------------------
    Kind(
        "RARP, as QEMU announces a VM that has moved",
        lambda s: [
            _ether(s, BROADCAST, type=_RARP)
            / ARP(op=3, hwsrc=s.mac, hwdst=s.mac, psrc="0.0.0.0", pdst="0.0.0.0")
        ],
        ALWAYS,
        _PASSED,
        _PASSED,
    ),
    Kind(
        "RARP with another's MAC inside",
        lambda s: [
            _ether(s, BROADCAST, type=_RARP)
            / ARP(op=3, hwsrc=FOREIGN_MAC, hwdst=FOREIGN_MAC, psrc="0.0.0.0", pdst="0.0.0.0")
        ],
        UNFILTERED,
        _PASSED,
        _DROPPED,
    ),
    Kind(
        "another protocol (EtherType 0x88b5)",
        lambda s: [_ether(s, type=_EXPERIMENTAL)],
        ANY_ADDRESS,
        "dropped unless permitted",
        _DROPPED,
    ),
    Kind(
        "LLC and SNAP to a unicast address",
        lambda s: [
            Dot3(src=s.mac, dst=NOBODY) / LLC(dsap=0xE0, ssap=0xE0, ctrl=3),
            _snap(s, NOBODY, 0, 0x0800),
        ],
        ANY_ADDRESS,
        _DROPPED,
        _DROPPED,
        but=_NO_802_3,
    ),
    Kind(
        "SNAP with the type of a tag (0x8100, 0x88a8)",
        lambda s: [_snap(s, NOBODY, 0, 0x8100), _snap(s, NOBODY, 0, 0x88A8)],
        NEVER,
        "unknown",
        _DROPPED,
        but=_NO_802_3,
    ),
    Kind(
        "VXLAN to another VM of its network",
        lambda s: [
            _ether(s) / IP(src=OWN_IP, dst="10.0.0.99") / UDP(sport=5000, dport=port) / _vxlan(s)
            for port in (4789, 8472)
        ],
        ALWAYS,
        _IF_RULES,
        _PASSED,
    ),
    Kind(
        "VXLAN to the host's own MAC and address",
        lambda s: [_ether(s, s.host_mac) / _tunnelled(s)],
        NEVER,
        _IF_RULES,
        "reaches the host",
        but=_NO_HOST,
    ),
)

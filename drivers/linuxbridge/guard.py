"""The ingress guard of a tap: a classic BPF program that drops frames no VM may send.

tc runs it before everything else on the host. In particular it runs

- before the bridge, which learns, and which delivers frames for the reserved group addresses
  01:80:c2:00:00:00-0f to the host without consulting any bridge rule (``br_handle_frame`` in
  net/bridge/br_input.c);
- before the redirect of a rate limit. nftables rules at the same hook would be bypassed, because a
  frame that returns from an ifb is not classified again (``skb_skip_tc_classify`` in net/core/dev.c).

A flush of all nftables rules does not remove a tc filter.

The program drops:

- on every port: frames with a VLAN tag, including priority tags (VLAN 0), or with another EtherType that
  switches may be configured to accept as an outer tag; frames to reserved group addresses;
- on ports with port security: frames to group addresses up to 01:80:c2:00:00:3f, which switches use
  among themselves; source MACs other than the port's; frames with a length in place of an EtherType (LLC
  and SNAP: STP, PVST+, CDP, and encapsulated IP); ARP and RARP that is not for Ethernet and IPv4, or whose
  sender MAC differs from the frame's; RARP replies; without the matching role, router advertisements and
  redirects (RFC 4861) and packets to the ports of DHCP clients;
- on ports with allowed addresses: protocols other than ARP, RARP, IPv4 and IPv6, and other source
  addresses, also in ARP and neighbour advertisements. The link-local addresses of the port's MACs are
  allowed, and so is what a host needs to obtain an address.

The nftables rules (see ``filters``) are stricter: they tie each address to its own MAC.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from netplugin.api.models import PortSecurity, PortSpec
from netplugin.host.cbpf import VLAN_TAG_PRESENT, Assembler, BpfProgram, Op
from netplugin.host.names import link_local

# include/uapi/linux/pkt_cls.h: TC_ACT_UNSPEC continues with the next filter, possibly a redirect.
_GO_ON, _SHOT = -1, 2

# 802.1Q, 802.1ad and its predecessors: a switch may be configured to accept any of them as a tag.
_TAGS = (0x8100, 0x88A8, 0x9100, 0x9200, 0x9300)
_LEAST_TYPE = 0x0600  # smaller values are a length (IEEE 802.3, clause 3.2.6)
_ARP, _RARP, _IPV4, _IPV6 = 0x0806, 0x8035, 0x0800, 0x86DD
_ARP_REQUEST, _RARP_REQUEST = 1, 3  # RFC 826, RFC 903
_UDP, _ICMPV6 = 17, 58
_DHCP_CLIENT, _DHCPV6_CLIENT = 68, 546
_DHCP_SERVER = 67
_ADVERTISEMENT, _REDIRECT = 134, 137
_NEIGHBOUR_SOLICITATION, _NEIGHBOUR_ADVERTISEMENT = 135, 136
# IPv6 extension headers (RFC 8200) that are followed: hop-by-hop, routing and destination options; and
# two with a different layout, fragment and authentication (RFC 4302).
_OPTIONS, _FRAGMENT, _AUTHENTICATION = (0, 43, 60), 44, 51
_HEADERS = 8  # packets with more headers are dropped (RFC 7113, section 2)

# 01:80:c2:00:00:00-0f, which no bridge forwards (IEEE 802.1Q, table 8-1), and up to 3f, which includes
# MRP, GARP and CFM (tables 10-1 and 8-9).
_OF_THE_NEXT_BRIDGE, _OF_SWITCHES = 0xFFF0, 0xFFC0

_UNSPECIFIED = ipaddress.IPv6Network("::/128")

# Offsets in the frame.
_DESTINATION, _SOURCE, _TYPE, _PAYLOAD = 0, 6, 12, 14
_ARP_OPERATION, _ARP_SENDER_MAC = _PAYLOAD + 6, _PAYLOAD + 8
_ARP_SENDER_IP, _ARP_TARGET_IP = _PAYLOAD + 14, _PAYLOAD + 24
_IPV4_SOURCE, _IPV4_DESTINATION, _IPV6_SOURCE = _PAYLOAD + 12, _PAYLOAD + 16, _PAYLOAD + 8
_NEXT = 0  # the memory slot with the number of the next header


@dataclass(frozen=True)
class _Own:
    """The addresses that a VM may use. ``of`` returns None if it may use any."""

    four: tuple[ipaddress.IPv4Network, ...]
    six: tuple[ipaddress.IPv6Network, ...]

    @classmethod
    def of(cls, mac: str, security: PortSecurity) -> Self | None:
        if not security.allowed_addresses:
            return None
        networks = [ipaddress.ip_network(a.ip) for a in security.allowed_addresses]
        four = {n for n in networks if isinstance(n, ipaddress.IPv4Network)}
        six = {n for n in networks if isinstance(n, ipaddress.IPv6Network)}
        if six or security.roles:
            macs = {mac, *(a.mac for a in security.allowed_addresses if a.mac)}
            six |= {ipaddress.IPv6Network(link_local(mac)) for mac in macs}
        return cls(tuple(sorted(four)), tuple(sorted(six)))


def port_guard(spec: PortSpec) -> BpfProgram:
    """Return the program of one port."""
    return _port_guard(spec.mac, spec.port_security)


# Each look compares the programs of all ports in scope. One takes 1 ms to make, and has about 4 KB.
@lru_cache(maxsize=8192)
def _port_guard(mac: str, security: PortSecurity) -> BpfProgram:
    own = _Own.of(mac, security)
    code = Assembler()
    _no_tags(code)
    _no_reserved_groups(code, _OF_SWITCHES if security.enabled else _OF_THE_NEXT_BRIDGE)
    if security.enabled:
        _own_macs(code, {mac, *(a.mac for a in security.allowed_addresses if a.mac)})
        code.load(_TYPE, 2)
        code.below(_LEAST_TYPE, "drop")
        code.equal(_ARP, "arp")
        code.equal(_RARP, "rarp")
        code.equal(_IPV4, "ipv4")
        code.equal(_IPV6, "ipv6")
        code.go("pass" if own is None else "drop")
        _rarp(code)
        _arp(code, own)
        _ipv4(code, own, answers="dhcp_server" in security.roles)
        _ipv6(code, own, routes="router" in security.roles, answers="dhcp_server" in security.roles)
    code.label("pass")
    code.end(_GO_ON)
    code.label("drop")
    code.end(_SHOT)
    return code.program()


def _nothing() -> BpfProgram:
    code = Assembler()
    code.end(_SHOT)
    return code.program()


#: The program of our bridges: frames must not go up to the host, which is no member of the network.
NOTHING = _nothing()


def _no_tags(code: Assembler) -> None:
    """Drop tagged frames. The kernel strips tags first (``skb_vlan_untag``), except for some drivers."""
    code.load(VLAN_TAG_PRESENT, 4)
    code.unequal(0, "drop")
    code.load(_TYPE, 2)
    code.equal(_TAGS, "drop")


def _no_reserved_groups(code: Assembler, mask: int) -> None:
    """Drop frames to reserved group addresses; ``mask`` applies to the last 16 bits."""
    code.load(_DESTINATION, 4)
    code.unequal(0x0180C200, "forwardable")
    code.load(_DESTINATION + 4, 2)
    code.mask(mask)
    code.equal(0, "drop")
    code.label("forwardable")


def _own_macs(code: Assembler, macs: Iterable[str]) -> None:
    for mac in sorted(macs):
        value = bytes.fromhex(mac.replace(":", ""))
        code.load(_SOURCE, 4)
        code.unequal(int.from_bytes(value[:4], "big"), f"not {mac}")
        code.load(_SOURCE + 4, 2)
        code.equal(int.from_bytes(value[4:], "big"), "own")
        code.label(f"not {mac}")
    code.go("drop")
    code.label("own")


def _rarp(code: Assembler) -> None:
    """Accept RARP requests, which QEMU sends as announcements, but no replies: these assign addresses."""
    code.label("rarp")
    _own_message(code)
    code.load(_ARP_OPERATION, 2)
    code.unequal(_RARP_REQUEST, "drop")
    code.load(_ARP_SENDER_IP, 4)
    code.unequal(0, "drop")
    code.go("pass")


def _arp(code: Assembler, own: _Own | None) -> None:
    code.label("arp")
    _own_message(code)
    if own is None:
        code.go("pass")
        return
    _among_ipv4(code, own, _ARP_SENDER_IP, "pass")
    # RFC 5227: before a host uses an address, it probes for it from 0.0.0.0.
    code.load(_ARP_OPERATION, 2)
    code.unequal(_ARP_REQUEST, "drop")
    code.load(_ARP_SENDER_IP, 4)
    code.unequal(0, "drop")
    _among_ipv4(code, own, _ARP_TARGET_IP, "pass")
    code.go("drop")


def _own_message(code: Assembler) -> None:
    """Require Ethernet and IPv4, and a sender MAC equal to the source MAC of the frame."""
    code.need(_PAYLOAD + 28, "drop")
    code.load(_PAYLOAD, 4)
    code.unequal(0x0001_0800, "drop")
    code.load(_PAYLOAD + 4, 2)
    code.unequal(0x0604, "drop")
    for offset, size in ((0, 4), (4, 2)):
        code.load(_SOURCE + offset, size)
        code.add(Op.X_IS_A)
        code.load(_ARP_SENDER_MAC + offset, size)
        code.unequal_x("drop")


def _ipv4(code: Assembler, own: _Own | None, *, answers: bool) -> None:
    """Check IPv4. Ports are always in the first fragment, which has at least eight bytes of payload."""
    code.label("ipv4")
    code.need(_PAYLOAD + 20, "drop")
    code.load(_PAYLOAD, 1)
    code.mask(0xF0)
    code.unequal(0x40, "drop")
    code.load(_PAYLOAD, 1)
    code.mask(0x0F)
    code.below(5, "drop")
    if own is not None:
        _among_ipv4(code, own, _IPV4_SOURCE, "own ipv4")
        _dhcp_client(code)
        code.label("own ipv4")
    if answers:
        code.go("pass")
        return
    _udp_over_ipv4(code, "pass")
    code.load(_PAYLOAD + 2, 2, behind_x=True)
    code.equal(_DHCP_CLIENT, "drop")
    code.go("pass")


def _udp_over_ipv4(code: Assembler, otherwise: str) -> None:
    """Go on with a first fragment of UDP, with the length of the IPv4 header in X; else to this label."""
    code.load(_PAYLOAD + 9, 1)
    code.unequal(_UDP, otherwise)
    code.load(_PAYLOAD + 6, 2)
    code.mask(0x1FFF)
    code.unequal(0, otherwise)
    code.add(Op.LOAD_X_IPV4_LENGTH, _PAYLOAD)
    code.need(_PAYLOAD + 8, "drop", behind_x=True)


def _dhcp_client(code: Assembler) -> None:
    """Accept a DHCP client's request, which is sent before it has an address (RFC 2131, section 4.1)."""
    for offset, value in ((_IPV4_SOURCE, 0), (_IPV4_DESTINATION, 0xFFFFFFFF)):
        code.load(offset, 4)
        code.unequal(value, "drop")
    _udp_over_ipv4(code, "drop")
    for offset, port in ((0, _DHCP_CLIENT), (2, _DHCP_SERVER)):
        code.load(_PAYLOAD + offset, 2, behind_x=True)
        code.unequal(port, "drop")
    code.go("pass")


def _ipv6(code: Assembler, own: _Own | None, *, routes: bool, answers: bool) -> None:
    """Check IPv6. Follow the extension headers, and drop a packet whose chain cannot be followed.

    A further header behind a fragment header is dropped. Otherwise the first fragment could end before
    the upper-layer header begins, which RFC 7112 forbids.
    """
    code.label("ipv6")
    code.need(_PAYLOAD + 40, "drop")
    code.load(_PAYLOAD, 1)
    code.mask(0xF0)
    code.unequal(0x60, "drop")
    if own is not None:
        _among_ipv6(code, (*own.six, _UNSPECIFIED) if own.six else (), "own ipv6", _IPV6_SOURCE)
        code.go("drop")
        code.label("own ipv6")
    code.load(_PAYLOAD + 6, 1)
    code.add(Op.STORE_SLOT, _NEXT)
    code.add(Op.LOAD_X, _PAYLOAD + 40)
    for number in range(_HEADERS):
        code.add(Op.LOAD_SLOT, _NEXT)
        code.equal(_OPTIONS, f"options {number}")
        code.equal(_AUTHENTICATION, f"authentication {number}")
        code.equal(_FRAGMENT, "fragment")
        code.go("message")
        for name, unit, more in (("options", 3, 1), ("authentication", 2, 2)):
            code.label(f"{name} {number}")
            code.need(8, "drop", behind_x=True)
            code.load(0, 1, behind_x=True)
            code.add(Op.STORE_SLOT, _NEXT)
            code.load(1, 1, behind_x=True)
            code.add(Op.PLUS, more)
            code.add(Op.SHIFT_LEFT, unit)
            code.add(Op.PLUS_X)
            code.add(Op.X_IS_A)
            code.go(f"header {number + 1}")
        code.label(f"header {number + 1}")
    code.go("drop")
    code.label("fragment")
    code.need(8, "drop", behind_x=True)
    code.load(0, 1, behind_x=True)
    code.equal((*_OPTIONS, _FRAGMENT, _AUTHENTICATION), "drop")
    code.add(Op.STORE_SLOT, _NEXT)
    code.load(2, 2, behind_x=True)
    code.mask(0xFFF8)
    code.unequal(0, "pass")
    code.add(Op.A_IS_X)
    code.add(Op.PLUS, 8)
    code.add(Op.X_IS_A)
    code.label("message")
    code.add(Op.LOAD_SLOT, _NEXT)
    code.equal(_ICMPV6, "icmpv6")
    code.equal(_UDP, "udp over ipv6")
    code.go("pass")
    code.label("icmpv6")
    code.need(1, "drop", behind_x=True)
    code.load(0, 1, behind_x=True)
    if not routes:
        code.equal((_ADVERTISEMENT, _REDIRECT), "drop")
    if own is not None:
        _neighbour(code, own)
    code.go("pass")
    code.label("udp over ipv6")
    code.need(8, "drop", behind_x=True)
    code.load(2, 2, behind_x=True)
    if not answers:
        code.equal(_DHCPV6_CLIENT, "drop")


def _neighbour(code: Assembler, own: _Own) -> None:
    """Accept an advertisement, or a solicitation from the unspecified address (RFC 4862, section 5.4),
    only if its target is the VM's own. The target is at byte 8 (RFC 4861, section 4.3)."""
    code.equal(_NEIGHBOUR_ADVERTISEMENT, "target")
    code.unequal(_NEIGHBOUR_SOLICITATION, "pass")
    for offset in range(0, 16, 4):
        code.load(_IPV6_SOURCE + offset, 4)
        code.unequal(0, "pass")
    code.label("target")
    code.need(24, "drop", behind_x=True)
    _among_ipv6(code, own.six, "pass", 8, behind_x=True)
    code.go("drop")


def _among_ipv4(code: Assembler, own: _Own, offset: int, label: str) -> None:
    for network in own.four:
        code.load(offset, 4)
        if network.prefixlen < network.max_prefixlen:
            code.mask(int(network.netmask))
        code.equal(int(network.network_address), label)


def _among_ipv6(
    code: Assembler,
    networks: Iterable[ipaddress.IPv6Network],
    label: str,
    offset: int,
    *,
    behind_x: bool = False,
) -> None:
    """Jump to ``label`` if the address is in a network. Networks share the test of an equal upper half."""
    halves: dict[int | ipaddress.IPv6Network, list[ipaddress.IPv6Network]] = {}
    for network in networks:
        long = network.prefixlen >= 64
        key = int(network.network_address) >> 64 if long else network
        halves.setdefault(key, []).append(network)
    for key, members in halves.items():
        other = f"not {key} at {offset}"
        first = min(64, members[0].prefixlen)
        _bits(code, members[0], range(0, first, 32), offset, other, behind_x=behind_x)
        for network in members:
            no = f"not {network} at {offset}, all of it"
            _bits(code, network, range(64, network.prefixlen, 32), offset, no, behind_x=behind_x)
            code.go(label)
            code.label(no)
        code.label(other)


def _bits(
    code: Assembler,
    network: ipaddress.IPv6Network,
    starts: range,
    offset: int,
    other: str,
    *,
    behind_x: bool,
) -> None:
    """Jump to ``other`` unless the 32-bit words that start at these bits match the network."""
    for start in starts:
        shift = 128 - start - 32
        mask = int(network.netmask) >> shift & 0xFFFFFFFF
        code.load(offset + start // 8, 4, behind_x=behind_x)
        if mask != 0xFFFFFFFF:
            code.mask(mask)
        code.unequal(int(network.network_address) >> shift & 0xFFFFFFFF, other)

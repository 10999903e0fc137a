"""Port security as nftables rules: only allowed addresses pass, everything else is dropped.

The BPF program of ``guard`` drops most of it earlier, and survives a flush of all rules. These rules
additionally tie each address to its MAC.

There is one table, of the bridge family. A verdict map leads from the name of a tap, or of a service
port's device, to the port's chain. Frames from a tap of ours (by its name, or its group if the caller
chose the name) that is not in the map are dropped, so a port without its filter passes no traffic. The map
also drops the frames of devices that others have put on a bridge of ours. Frames of unmanaged bridges and
interfaces are accepted. A second map has the devices of service ports, which no pattern and no group
matches, for the rules that drop what reaches the host and what has a tag.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType

from netplugin.api.counter_models import Place
from netplugin.api.models import PortSpec
from netplugin.host import nft_rules as nft
from netplugin.host.names import TAP, TAP_GROUP, link_local
from netplugin.host.nft_rules import ACCEPT, COUNTER, DROP, Match, Payload, Rule, verdict_map
from netplugin.host.nftables import Chain, base_chain

FAMILY, TABLE, PORTS, SERVICES = "bridge", "netplugin", "ports", "services"
MAPS = (PORTS, SERVICES)
MARK, _MAC_MARK = "netplugin-port=", "netplugin-mac="
#: A chain that no rule jumps to. The comment of its rule is the mark of the store that last changed
#: the table.
STORE, STORE_MARK = "store", "netplugin-store="

_COUNTED_DROP = (COUNTER, DROP)
_ARP_TYPE, _RARP_TYPE, _IPV4_TYPE, _IPV6_TYPE = (
    struct.pack(">H", t) for t in (0x0806, 0x8035, 0x0800, 0x86DD)
)
_UDP, _ICMPV6 = b"\x11", b"\x3a"
_WORD = 4  # bytes per comparison in an ICMPv6 message, see _target

# Before rules of the operator (dstnat is -300 in this family) and before the bridge learns.
_PRIORITY = -350

# Fields of headers.
_SENDER, _TYPE = Payload(nft.LINK, 6, 6), Payload(nft.LINK, 12, 2)
_ARP_HTYPE, _ARP_PTYPE = Payload(nft.NETWORK, 0, 2), Payload(nft.NETWORK, 2, 2)
_ARP_HLEN, _ARP_PLEN = Payload(nft.NETWORK, 4, 1), Payload(nft.NETWORK, 5, 1)
_ARP_OPERATION, _ARP_SENDER = Payload(nft.NETWORK, 6, 2), Payload(nft.NETWORK, 8, 6)
_ARP_FROM, _ARP_TO = Payload(nft.NETWORK, 14, 4), Payload(nft.NETWORK, 24, 4)
_IPV4_FROM, _IPV4_TO = Payload(nft.NETWORK, 12, 4), Payload(nft.NETWORK, 16, 4)
_IPV6_FROM = Payload(nft.NETWORK, 8, 16)
_FROM_PORT, _TO_PORT = Payload(nft.TRANSPORT, 0, 2), Payload(nft.TRANSPORT, 2, 2)
_ICMPV6_TYPE, _ICMPV6_TARGET = Payload(nft.TRANSPORT, 0, 1), 8

_IPV4 = Match(nft.PROTOCOL, _IPV4_TYPE)
_IPV6 = Match(nft.PROTOCOL, _IPV6_TYPE)
_OVER_UDP, _OVER_ICMPV6 = Match(nft.L4PROTO, _UDP), Match(nft.L4PROTO, _ICMPV6)
#: Types of ICMPv6 messages: RFC 4861, section 4; RFC 3810, section 5.2.
_ROUTER_SOLICIT, _ROUTER_ADVERT, _SOLICIT, _ADVERT, _REDIRECT, _MLD2_REPORT = 133, 134, 135, 136, 137, 143


def _taps(name: nft.Meta, group: nft.Meta) -> tuple[Match, Match]:
    """Match a tap of ours, by its name or its group."""
    return Match(name, TAP.encode()), Match(group, struct.pack("=I", TAP_GROUP))


_FROM_A_TAP = _taps(nft.IIFNAME, nft.IIFGROUP)
_TO_A_TAP = _taps(nft.OIFNAME, nft.OIFGROUP)
_TAGS = tuple(Match(_TYPE, struct.pack(">H", tag)) for tag in (0x8100, 0x88A8))


BASE: Mapping[str, Chain] = MappingProxyType(
    {
        "prerouting": base_chain(
            "prerouting",
            _PRIORITY,
            Rule.make(verdict_map(nft.IIFNAME, PORTS)),
            *(Rule.make(tap, *_COUNTED_DROP) for tap in _FROM_A_TAP),
        ),
        # A VM's frames must not reach the host, which would answer ARP for any of its addresses:
        # drop the copy that goes up to the bridge device.
        "input": base_chain(
            "input",
            _PRIORITY,
            *(Rule.make(tap, DROP) for tap in _FROM_A_TAP),
            Rule.make(verdict_map(nft.IIFNAME, SERVICES)),
        ),
        # An access port in both directions: the wire may carry other networks in tagged frames.
        "postrouting": base_chain(
            "postrouting",
            _PRIORITY,
            *(Rule.make(tap, tag, DROP) for tap in _TO_A_TAP for tag in _TAGS),
            *(Rule.make(tag, verdict_map(nft.OIFNAME, SERVICES)) for tag in _TAGS),
        ),
    }
)

#: The chains that belong to no port.
SHARED = frozenset({*BASE, STORE})

# ARP for IPv4 on Ethernet. With other lengths, the addresses are at other offsets.
_ARP = (
    Match(_TYPE, _ARP_TYPE),
    Match(_ARP_HTYPE, b"\0\1"),
    Match(_ARP_PTYPE, _IPV4_TYPE),
    Match(_ARP_HLEN, b"\6"),
    Match(_ARP_PLEN, b"\4"),
)


def port_chain(port_id: str, spec: PortSpec) -> Chain:
    """Return the port's chain. The comments of its first rules name the port, and the MAC that is fixed."""
    security = spec.port_security
    mac = fixed_mac(spec)
    marks = f"{MARK}{port_id}", f"{_MAC_MARK}{mac}" if mac else None
    rules = [Rule.make(tag, *_COUNTED_DROP, comment=mark) for tag, mark in zip(_TAGS, marks, strict=True)]
    if not security.enabled:
        rules.append(Rule.make(ACCEPT))
    elif not security.allowed_addresses:
        rules += _own_mac(spec.mac)
    else:
        pairs = [(a.mac or spec.mac, a.ip) for a in security.allowed_addresses]
        rules += [rule for pair in pairs for rule in _advertisements(*pair)]
        rules.append(_ANY_ADVERTISEMENT)
        rules += [rule for pair in pairs for rule in _address(*pair)]
        rules += _roles(spec)
        rules.append(_dhcp(spec.mac))
        rules.append(_announcement(spec.mac))
        rules.append(_ANYTHING)
    return Chain(tuple(dict.fromkeys(rules)))


def counted_rules(spec: PortSpec) -> Iterator[tuple[Place, bytes]]:
    """The rules of a port's chain that count what they drop, each with its place.

    The last one of a chain with addresses drops what is not tied to the right MAC: the guard has dropped the
    frames of other MACs, and those of other addresses.
    """
    security = spec.port_security
    yield from ((Place.FILTER_VLAN_TAG, Rule.make(tag, *_COUNTED_DROP).code) for tag in _TAGS)
    if security.enabled and not security.allowed_addresses:
        yield Place.FILTER_SOURCE_MAC, _another_mac(spec.mac).code
        yield Place.FILTER_ARP, _ANY_ARP.code
    elif security.enabled:
        yield Place.FILTER_NEIGHBOUR, _ANY_ADVERTISEMENT.code
        yield Place.FILTER_SOURCE_IP, _ANYTHING.code


def store_chain(mark: str) -> Chain:
    """Return the chain that carries the mark of the store."""
    return Chain((Rule.make(ACCEPT, comment=f"{STORE_MARK}{mark}"),))


def store_mark(chains: Mapping[str, Chain]) -> str:
    """Return the mark of the store; empty if there is none."""
    return _marked(chains.get(STORE, Chain()), 0, STORE_MARK) or ""


def owner(chain: Chain) -> str | None:
    """Return the port that a chain's first rule names."""
    return _marked(chain, 0, MARK)


def fixed_mac(spec: PortSpec) -> str:
    """Return the port's MAC if it is the only allowed one; otherwise empty, and the bridge learns.

    Another MAC of the list may belong, or move, to another port, so the bridge must not fix it."""
    security = spec.port_security
    macs = {spec.mac, *(a.mac for a in security.allowed_addresses if a.mac)}
    return spec.mac if security.enabled and macs == {spec.mac} else ""


def only_mac(chain: Chain) -> str:
    """Return the MAC that a port's chain says the bridge must fix; empty if there is none."""
    return _marked(chain, 1, _MAC_MARK) or ""


def _marked(chain: Chain, at: int, mark: str) -> str | None:
    comment = chain.rules[at].comment if len(chain.rules) > at else None
    return comment.removeprefix(mark) if comment and comment.startswith(mark) else None


def versions(chain: Chain | None) -> frozenset[int]:
    """Return the versions of IP that a port's chain lets its VM send; both if there is no chain."""
    if chain is None or not chain.rules or chain.rules[-1] != _ANYTHING:
        return frozenset({4, 6})
    accepted = [rule.code for rule in chain.rules if rule.code.endswith(Rule.make(ACCEPT).code)]
    dhcp = Rule.make(_OVER_UDP).code  # anyone may ask for an address
    four, six = Rule.make(_IPV4).code, Rule.make(_IPV6).code
    found = {4: any(four in code and dhcp not in code for code in accepted)}
    found[6] = any(six in code for code in accepted)
    return frozenset(version for version, is_there in found.items() if is_there)


def _own_mac(mac: str) -> Iterator[Rule]:
    yield _another_mac(mac)
    # ARP carries the sender's MAC in its payload too; a forged one would poison neighbours.
    yield Rule.make(*_ARP, Match(_ARP_SENDER, _mac(mac)), ACCEPT)
    yield _ANY_ARP
    yield Rule.make(ACCEPT)


def _another_mac(mac: str) -> Rule:
    return Rule.make(Match(_SENDER, _mac(mac), equal=False), *_COUNTED_DROP)


@lru_cache(maxsize=4096)
def _advertisements(mac: str, ip: str) -> tuple[Rule, ...]:
    """Accept neighbour advertisements for an allowed address (RFC 4861)."""
    network = ipaddress.ip_network(ip)
    if network.version == 4:
        return ()
    own = link_local(mac)
    ways = ((ip, ip), (own, ip), (own, own))
    return tuple(_neighbour(mac, source, _ADVERT, target) for source, target in ways)


@lru_cache(maxsize=4096)
def _address(mac: str, ip: str) -> tuple[Rule, ...]:
    if ipaddress.ip_network(ip).version == 4:
        return tuple(_ipv4(mac, ip))
    return tuple(_ipv6(mac, ip))


def _ipv4(mac: str, ip: str) -> Iterator[Rule]:
    sender, claimed = Match(_SENDER, _mac(mac)), Match(_ARP_SENDER, _mac(mac))
    yield Rule.make(sender, _IPV4, *_within(_IPV4_FROM, ip), ACCEPT)
    yield Rule.make(sender, *_ARP, claimed, *_within(_ARP_FROM, ip), ACCEPT)
    # RFC 5227: before a host uses an address, it probes for it from 0.0.0.0.
    probe = Match(_ARP_OPERATION, b"\0\1"), claimed, Match(_ARP_FROM, bytes(4))
    yield Rule.make(sender, *_ARP, *probe, *_within(_ARP_TO, ip), ACCEPT)


def _ipv6(mac: str, ip: str) -> Iterator[Rule]:
    own = link_local(mac)
    yield Rule.make(*_from(mac, ip), ACCEPT)
    # RFC 4862: a host probes for an address from the unspecified address before it uses it.
    for target in (ip, own):
        yield _neighbour(mac, "::", _SOLICIT, target)
    for kind in (_ROUTER_SOLICIT, _SOLICIT, _MLD2_REPORT):
        yield Rule.make(*_from(mac, own), *_icmpv6(kind), ACCEPT)
    # RFC 8415, section 7.2: the ports of a DHCPv6 client's request.
    yield Rule.make(*_from(mac, own), *_udp(546, 547), ACCEPT)
    yield Rule.make(*_from(mac, "::"), *_icmpv6(_MLD2_REPORT), ACCEPT)


def _roles(spec: PortSpec) -> Iterator[Rule]:
    """Accept messages of routers and DHCPv6 servers from their link-local address (RFC 4861, 4.2)."""
    roles = spec.port_security.roles
    sender = _from(spec.mac, link_local(spec.mac))
    if "router" in roles:
        for kind in (_ROUTER_ADVERT, _REDIRECT):
            yield Rule.make(*sender, *_icmpv6(kind), ACCEPT)
    if "dhcp_server" in roles:
        yield Rule.make(*sender, *_udp(547, 546), ACCEPT)


def _neighbour(mac: str, source: str, kind: int, target: str) -> Rule:
    return Rule.make(*_from(mac, source), *_icmpv6(kind), *_target(target), ACCEPT)


def _target(ip: str) -> Iterator[Match]:
    """Match the target of a neighbour message, 16 bytes from byte 8 (RFC 4861, section 4.3).

    In words: nft 1.0.6 has no name for the field, and prints longer comparisons in a form that it
    cannot read.
    """
    network = ipaddress.IPv6Network(ip)
    packed, mask = network.network_address.packed, network.netmask.packed
    for at in range(0, 16, _WORD):
        if not any(here := mask[at : at + _WORD]):
            return
        load = Payload(nft.TRANSPORT, _ICMPV6_TARGET + at, _WORD)
        yield Match(load, packed[at : at + _WORD], b"" if all(b == 255 for b in here) else here, whole=False)


def _dhcp(mac: str) -> Rule:
    """Accept a DHCP client's request, which is sent before it has an address (RFC 2131, section 4.1)."""
    addresses = Match(_IPV4_FROM, bytes(4)), Match(_IPV4_TO, b"\xff" * 4)
    return Rule.make(Match(_SENDER, _mac(mac)), _IPV4, *addresses, *_udp(68, 67), ACCEPT)


def _announcement(mac: str) -> Rule:
    """Accept QEMU's announcement after live migration (``qemu_announce_self``); ``guard`` checks it."""
    return Rule.make(Match(_SENDER, _mac(mac)), Match(_TYPE, _RARP_TYPE), ACCEPT)


def _from(mac: str, ip: str) -> tuple[Match, ...]:
    """Match packets of an IPv6 address or prefix, in frames of this MAC."""
    return Match(_SENDER, _mac(mac)), _IPV6, *_within(_IPV6_FROM, ip)


def _icmpv6(kind: int) -> tuple[Match, Match]:
    return _OVER_ICMPV6, Match(_ICMPV6_TYPE, bytes((kind,)))


def _udp(source: int, destination: int) -> tuple[Match, ...]:
    ports = Match(_FROM_PORT, struct.pack(">H", source)), Match(_TO_PORT, struct.pack(">H", destination))
    return _OVER_UDP, *ports


def _within(field: Payload, ip: str) -> tuple[Match, ...]:
    """Match an address or a prefix: of a prefix, whole bytes if it ends with one, as nft has it."""
    network = ipaddress.ip_network(ip)
    packed, length = network.network_address.packed, network.prefixlen
    if length == network.max_prefixlen:
        return (Match(field, packed),)
    if length % 8:
        return (Match(field, packed, network.netmask.packed, whole=False),)
    part = Payload(field.base, field.offset, length // 8)
    return (Match(part, packed[: part.length], whole=False),) if part.length else ()


def _mac(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


#: The rules that end what is allowed of a kind, and of all.
_ANY_ARP = Rule.make(Match(_TYPE, _ARP_TYPE), *_COUNTED_DROP)
_ANY_ADVERTISEMENT = Rule.make(_IPV6, *_icmpv6(_ADVERT), *_COUNTED_DROP)
_ANYTHING = Rule.make(*_COUNTED_DROP)

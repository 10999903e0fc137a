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
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from netplugin.api.models import PortSpec
from netplugin.host.names import TAP, TAP_GROUP, link_local
from netplugin.host.nftables import Chain, Rule

FAMILY, TABLE, PORTS, SERVICES = "bridge", "netplugin", "ports", "services"
MAPS = (PORTS, SERVICES)
MARK = "netplugin-port="
#: A chain that no rule jumps to. The comment of its rule is the mark of the store that last changed
#: the table.
STORE, STORE_MARK = "store", "netplugin-store="

Match = dict[str, Any]
_ACCEPT: Match = {"accept": None}
_DROP: tuple[Match, Match] = ({"counter": None}, {"drop": None})
_RARP = 0x8035  # an EtherType without a name in nft
_WORD = 32  # bits per comparison in an ICMPv6 message, see _target

# Before rules of the operator (dstnat is -300 in this family) and before the bridge learns.
_PRIORITY = -350


def _match(left: Match, right: Any, operator: str = "==") -> Match:
    return {"match": {"op": operator, "left": left, "right": right}}


def _field(protocol: str, name: str, right: Any, operator: str = "==") -> Match:
    return _match({"payload": {"protocol": protocol, "field": name}}, right, operator)


_FROM: Match = {"meta": {"key": "iifname"}}
_TO: Match = {"meta": {"key": "oifname"}}
_FROM_A_TAP = (_match(_FROM, f"{TAP}*"), _match({"meta": {"key": "iifgroup"}}, TAP_GROUP))
_TO_A_TAP = (_match(_TO, f"{TAP}*"), _match({"meta": {"key": "oifgroup"}}, TAP_GROUP))


def _looked_up(key: Match, name: str) -> Match:
    return {"vmap": {"key": key, "data": f"@{name}"}}


_TAGS = tuple(_field("ether", "type", tag) for tag in ("8021q", "8021ad"))


def _hook(name: str, *rules: Rule) -> Chain:
    return Chain(rules, "filter", name, _PRIORITY, "accept")


BASE: Mapping[str, Chain] = MappingProxyType(
    {
        "prerouting": _hook(
            "prerouting",
            Rule.make(_looked_up(_FROM, PORTS)),
            *(Rule.make(tap, *_DROP) for tap in _FROM_A_TAP),
        ),
        # A VM's frames must not reach the host, which would answer ARP for any of its addresses:
        # drop the copy that goes up to the bridge device.
        "input": _hook(
            "input",
            *(Rule.make(tap, {"drop": None}) for tap in _FROM_A_TAP),
            Rule.make(_looked_up(_FROM, SERVICES)),
        ),
        # An access port in both directions: the wire may carry other networks in tagged frames.
        "postrouting": _hook(
            "postrouting",
            *(Rule.make(tap, tag, {"drop": None}) for tap in _TO_A_TAP for tag in _TAGS),
            *(Rule.make(tag, _looked_up(_TO, SERVICES)) for tag in _TAGS),
        ),
    }
)

#: The chains that belong to no port.
SHARED = frozenset({*BASE, STORE})

# ARP for IPv4 on Ethernet. With other lengths, the addresses are at other offsets.
_ARP = (
    _field("arp", "htype", 1),
    _field("arp", "ptype", "ip"),
    _field("arp", "hlen", 6),
    _field("arp", "plen", 4),
)


def port_chain(port_id: str, spec: PortSpec) -> Chain:
    """Return the port's chain. The comment of its first rule names the port."""
    security = spec.port_security
    first, *others = (Rule.make(tag, *_DROP) for tag in _TAGS)
    rules = [first.said(f"{MARK}{port_id}"), *others]
    if not security.enabled:
        rules.append(Rule.make(_ACCEPT))
    elif not security.allowed_addresses:
        rules += _own_mac(spec.mac)
    else:
        pairs = [(a.mac or spec.mac, a.ip) for a in security.allowed_addresses]
        rules += [rule for pair in pairs for rule in _advertisements(*pair)]
        rules.append(Rule.make(_field("icmpv6", "type", "nd-neighbor-advert"), *_DROP))
        rules += [rule for pair in pairs for rule in _address(*pair)]
        rules += _roles(spec)
        rules.append(_dhcp(spec.mac))
        rules.append(_announcement(spec.mac))
        rules.append(Rule.make(*_DROP))
    return Chain(tuple(dict.fromkeys(rules)))


def store_chain(mark: str) -> Chain:
    """Return the chain that carries the mark of the store."""
    return Chain((Rule.make(_ACCEPT, comment=f"{STORE_MARK}{mark}"),))


def store_mark(chains: Mapping[str, Chain]) -> str:
    """Return the mark of the store; empty if there is none."""
    rules = chains[STORE].rules if STORE in chains else ()
    comment = rules[0].comment if rules else None
    return comment.removeprefix(STORE_MARK) if comment and comment.startswith(STORE_MARK) else ""


def owner(chain: Chain) -> str | None:
    """Return the port that a chain's first rule names."""
    comment = chain.rules[0].comment if chain.rules else None
    return comment.removeprefix(MARK) if comment and comment.startswith(MARK) else None


def _own_mac(mac: str) -> Iterator[Rule]:
    yield Rule.make(_field("ether", "saddr", mac, "!="), *_DROP)
    # ARP carries the sender's MAC in its payload too; a forged one would poison neighbours.
    yield Rule.make(*_ARP, _field("arp", "saddr ether", mac), _ACCEPT)
    yield Rule.make(_field("ether", "type", "arp"), *_DROP)
    yield Rule.make(_ACCEPT)


def _advertisements(mac: str, ip: str) -> Iterator[Rule]:
    """Accept neighbour advertisements for an allowed address (RFC 4861)."""
    network = ipaddress.ip_network(ip)
    if network.version == 4:
        return
    own = link_local(mac)
    for source, target in ((ip, ip), (own, ip), (own, own)):
        yield _neighbour(mac, source, "nd-neighbor-advert", target)


def _address(mac: str, ip: str) -> Iterator[Rule]:
    sender = _field("ether", "saddr", mac)
    if ipaddress.ip_network(ip).version == 4:
        arp = (sender, *_ARP)
        claimed = _field("arp", "saddr ether", mac)
        yield Rule.make(sender, _field("ip", "saddr", _prefix(ip)), _ACCEPT)
        yield Rule.make(*arp, claimed, _field("arp", "saddr ip", _prefix(ip)), _ACCEPT)
        # RFC 5227: before a host uses an address, it probes for it from 0.0.0.0.
        probe = (
            _field("arp", "operation", "request"),
            claimed,
            _field("arp", "saddr ip", "0.0.0.0"),
            _field("arp", "daddr ip", _prefix(ip)),
        )
        yield Rule.make(*arp, *probe, _ACCEPT)
        return
    own = link_local(mac)
    yield Rule.make(sender, _field("ip6", "saddr", _prefix(ip)), _ACCEPT)
    # RFC 4862: a host probes for an address from the unspecified address before it uses it.
    for target in (ip, own):
        yield _neighbour(mac, "::", "nd-neighbor-solicit", target)
    for kind in ("nd-router-solicit", "nd-neighbor-solicit", "mld2-listener-report"):
        yield Rule.make(sender, _field("ip6", "saddr", own), _field("icmpv6", "type", kind), _ACCEPT)
    # RFC 8415, section 7.2: the ports of a DHCPv6 client's request.
    yield Rule.make(
        sender,
        _field("ip6", "saddr", own),
        _field("udp", "sport", 546),
        _field("udp", "dport", 547),
        _ACCEPT,
    )
    yield Rule.make(
        sender,
        _field("ip6", "saddr", "::"),
        _field("icmpv6", "type", "mld2-listener-report"),
        _ACCEPT,
    )


def _roles(spec: PortSpec) -> Iterator[Rule]:
    """Accept messages of routers and DHCPv6 servers from their link-local address (RFC 4861, 4.2)."""
    roles = spec.port_security.roles
    sender = _field("ether", "saddr", spec.mac), _field("ip6", "saddr", link_local(spec.mac))
    if "router" in roles:
        for kind in ("nd-router-advert", "nd-redirect"):
            yield Rule.make(*sender, _field("icmpv6", "type", kind), _ACCEPT)
    if "dhcp_server" in roles:
        ports = _field("udp", "sport", 547), _field("udp", "dport", 546)
        yield Rule.make(*sender, *ports, _ACCEPT)


def _neighbour(mac: str, source: str, kind: str, target: str) -> Rule:
    return Rule.make(
        _field("ether", "saddr", mac),
        _field("ip6", "saddr", _prefix(source)),
        _field("icmpv6", "type", kind),
        *_target(target),
        _ACCEPT,
    )


def _target(ip: str) -> Iterator[Match]:
    """Match the target of a neighbour message, 16 bytes from byte 8 (RFC 4861, section 4.3).

    nft 1.0.6 has no name for the field, and nft's JSON does not support 128-bit numbers.
    """
    network = ipaddress.IPv6Network(ip)
    for start in range(0, network.prefixlen, _WORD):
        bits = min(_WORD, network.prefixlen - start)
        value = int(network.network_address) >> (128 - start - _WORD) & 0xFFFFFFFF
        left: Match = {"payload": {"base": "th", "offset": 64 + start, "len": _WORD}}
        if bits < _WORD:
            left = {"&": [left, (0xFFFFFFFF << (_WORD - bits)) & 0xFFFFFFFF]}
        yield _match(left, value)


def _dhcp(mac: str) -> Rule:
    """Accept a DHCP client's request, which is sent before it has an address (RFC 2131, section 4.1)."""
    return Rule.make(
        _field("ether", "saddr", mac),
        _field("ip", "saddr", "0.0.0.0"),
        _field("ip", "daddr", "255.255.255.255"),
        _field("udp", "sport", 68),
        _field("udp", "dport", 67),
        _ACCEPT,
    )


def _announcement(mac: str) -> Rule:
    """Accept QEMU's announcement after live migration (``qemu_announce_self``); ``guard`` checks it."""
    return Rule.make(_field("ether", "saddr", mac), _field("ether", "type", _RARP), _ACCEPT)


def _prefix(ip: str) -> Any:
    network = ipaddress.ip_network(ip)
    address = str(network.network_address)
    if network.prefixlen == network.max_prefixlen:
        return address
    return {"prefix": {"addr": address, "len": network.prefixlen}}

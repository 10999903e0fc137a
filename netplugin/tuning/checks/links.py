"""Rules of links: one MTU on every hop, and bonds whose hash policy spreads flows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.scopes import Bond, Bridge, Hop, Link, Nic

_ONE = "one MTU end to end"


def below(link: Link) -> Iterator[Finding]:
    """A larger MTU above means fragments or drops; a smaller one may be deliberate."""
    for hop in (*link.below, *((link.way,) if link.way else ())):
        found = f"{link.own.name} has MTU {link.own.mtu}, {hop.name} below it {hop.mtu + hop.header}"
        expected = f"{_ONE}, and {hop.header} bytes for headers" if hop.header else _ONE
        if link.own.mtu > hop.mtu:
            yield fail("mtu", found, expected, _either(_ip, link.own, hop))
        elif link.own.mtu < hop.mtu - hop.spare and hop != link.way:
            yield warn("mtu", found, expected, _ip(link.own.name, hop.mtu - hop.spare))


def _ip(name: str, mtu: int) -> str:
    return f"ip link set {name} mtu {mtu}"


def _vsctl(name: str, mtu: int) -> str:
    return f"ovs-vsctl set Interface {name} mtu_request={mtu}"


def _either(command: Callable[[str, int], str], upper: Hop, lower: Hop) -> str:
    """A NIC may not have the larger MTU; the smaller one is always accepted."""
    smaller = command(upper.name, lower.mtu - lower.spare)
    return f"{command(lower.name, upper.mtu + lower.header + lower.spare)}; where a NIC cannot, {smaller}"


def peer(link: Link) -> Iterator[Finding]:
    """What is larger than the MTU of a veth's other end is dropped there (is_skb_forwardable)."""
    if link.peer and link.own.mtu > link.peer.mtu:
        found = f"{link.own.name} has MTU {link.own.mtu}, its other end {link.peer.name} {link.peer.mtu}"
        yield fail("mtu", found, _ONE, _either(_ip, link.own, link.peer))


def carries(nic: Nic) -> Iterator[Finding]:
    """The plan's NICs carry the largest MTU in use."""
    for hop in nic.interfaces:
        if hop.mtu < nic.desired:
            yield fail(
                "mtu",
                f"{hop.name} has MTU {hop.mtu}",
                f"{nic.desired}, the largest MTU in use",
                f"ip link set {hop.name} mtu {nic.desired}, or for a port of OVS "
                f"ovs-vsctl set Interface NAME mtu_request={nic.desired}",
            )


def ports(bridge: Bridge) -> Iterator[Finding]:
    """A port of a VM sends nothing that the way out of its bridge does not carry."""
    for port in bridge.ports:
        if bridge.out is not None and port.mtu > bridge.out.mtu:
            header = f" and {bridge.out.header} bytes for headers" if bridge.out.header else ""
            yield fail(
                "mtu",
                f"port {port.name} of {bridge.name} has MTU {port.mtu}, its uplink {bridge.out.name} "
                f"{bridge.out.mtu + bridge.out.header}",
                _ONE + header,
                _either(_ip if bridge.own else _vsctl, port, bridge.out),
            )


def bridge_mtu(bridge: Bridge) -> Iterator[Finding]:
    """It is the least of its ports unless it is set (br_mtu_auto_adjust)."""
    own, least = bridge.own, bridge.least
    if own and least and own.mtu != least.mtu:
        found = f"bridge {own.name} has MTU {own.mtu}, its port {least.name} {least.mtu}"
        yield (fail if own.mtu > least.mtu else warn)("mtu", found, _ONE, _ip(own.name, least.mtu))


def spreads(bond: Bond) -> Iterator[Finding]:
    if bond.coarse:
        yield warn(
            "bond-hash",
            f"{bond.name} is {bond.what}: all between two MAC addresses, as of two routers or tunnels, is on "
            "one link",
            "a hash that heeds ports: an aggregation is as good as its hash",
            bond.fix,
        )


def members(bond: Bond) -> Iterator[Finding]:
    if bond.down:
        yield warn(
            "bond-links",
            f"{len(bond.down)} of {bond.members} members of {bond.name} have no link: {some(bond.down)}",
            "a link on each member",
            "look at cable and switch port; ip link set MEMBER up",
        )

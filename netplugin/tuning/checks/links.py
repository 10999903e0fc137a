"""Rules of links: one MTU on every hop, and bonds whose hash policy spreads flows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.link_scopes import AT_MOST, BELOW, Bond, Bridge, Hop, Link


def _ip(name: str, mtu: int) -> str:
    return f"ip link set {name} mtu {mtu}"


def _vsctl(name: str, mtu: int) -> str:
    return f"ovs-vsctl set Interface {name} mtu_request={mtu}"


def _either(command: Callable[[str, int], str], upper: Hop, lower: Hop) -> str:
    """A NIC may not have the larger MTU; the smaller one is always accepted."""
    raises = lower.raises or ((lower.name, upper.mtu + lower.header + lower.spare),)
    larger = "; ".join(command(name, mtu) for name, mtu in dict.fromkeys(raises))
    return f"{larger}; where a NIC cannot, {command(upper.name, lower.mtu - lower.spare)}"


def _room(hop: Hop) -> str:
    return "one MTU end to end" + (f", and {hop.header} bytes for headers" if hop.header else "")


def next_hops(link: Link) -> Iterator[Finding]:
    """A larger MTU means fragments or drops below (is_skb_forwardable); a smaller one may be deliberate."""
    own = link.own
    for hop in link.next_hops:
        found = f"{own.name} has MTU {own.mtu}, {hop.where.format(hop.name)} {hop.mtu + hop.header}"
        expected = _room(hop)
        if own.mtu > hop.mtu:
            # Where a tunnel is on no device, its routes may have a smaller MTU, as Cilium's do.
            yield (warn if hop.where == AT_MOST else fail)("mtu", found, expected, _either(_ip, own, hop))
        elif own.mtu < hop.mtu - hop.spare and hop.where == BELOW and not hop.filled:
            yield warn("mtu", found, expected, _ip(own.name, hop.mtu - hop.spare))


def carries(link: Link) -> Iterator[Finding]:
    """The plan's NICs carry the largest MTU in use."""
    name, mtu, desired = link.own.name, link.own.mtu, link.desired
    if mtu < desired:
        fix = f"{_ip(name, desired)}, or for a port of OVS {_vsctl('NAME', desired)}"
        yield fail("mtu", f"{name} has MTU {mtu}", f"{desired}, the largest MTU in use", fix)


def ports(bridge: Bridge) -> Iterator[Finding]:
    """A port of a VM sends nothing that the way out of its bridge does not carry."""
    out = bridge.out
    for port in bridge.ports:
        if out is not None and port.mtu > out.mtu:
            up = f"its uplink {out.name} {out.mtu + out.header}"
            found = f"port {port.name} of {bridge.name} has MTU {port.mtu}, {up}"
            fix = _either(_ip if bridge.own else _vsctl, port, out)
            yield fail("mtu", found, _room(out), fix)


def bridge_mtu(bridge: Bridge) -> Iterator[Finding]:
    """It is the least of its ports unless it is set (br_mtu_auto_adjust): then at most what leads out has."""
    own, by_mtu = bridge.own, sorted(bridge.all_ports, key=lambda hop: hop.mtu)
    if own and by_mtu:
        least, most = by_mtu[0], bridge.out or by_mtu[-1]
        say, port = (fail, most) if own.mtu > most.mtu else (warn, least)
        if own.mtu > most.mtu or own.mtu < least.mtu:
            found = f"bridge {own.name} has MTU {own.mtu}, its port {port.name} {port.mtu}"
            yield say("mtu", found, _room(port), _ip(own.name, port.mtu))


def spreads(bond: Bond) -> Iterator[Finding]:
    if bond.coarse:
        what = "all between two MAC addresses, as of two routers or tunnels, is on one link"
        expected = "a hash that heeds ports: an aggregation is as good as its hash"
        yield warn("bond-hash", f"{bond.name} is {bond.what}: {what}", expected, bond.fix)


def members(bond: Bond) -> Iterator[Finding]:
    if bond.down:
        found = f"{len(bond.down)} of {bond.members} members of {bond.name} have no link: {some(bond.down)}"
        fix = "look at cable and switch port; ip link set MEMBER up"
        yield warn("bond-links", found, "a link on each member", fix)

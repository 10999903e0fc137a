"""Rules of links: one MTU on every hop, and bonds whose hash policy spreads flows."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.scopes import Bond, Bridge, Link, Nic

_ONE = "one MTU end to end"


def below(link: Link) -> Iterator[Finding]:
    """A larger MTU above means fragments or drops; a smaller one may be deliberate (tunnel, VLAN)."""
    for hop in link.below:
        if hop.mtu != link.own.mtu:
            larger, smaller = (link.own, hop) if link.own.mtu > hop.mtu else (hop, link.own)
            yield (fail if larger == link.own else warn)(
                "mtu",
                f"{link.own.name} has MTU {link.own.mtu}, {hop.name} below it {hop.mtu}",
                _ONE,
                f"ip link set {smaller.name} mtu {larger.mtu}",
            )


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
            yield fail(
                "mtu",
                f"port {port.name} of OVS has MTU {port.mtu}, its uplink {bridge.out.mtu}",
                _ONE,
                f"ovs-vsctl set Interface {bridge.out.name} mtu_request={port.mtu}",
            )


def spreads(bond: Bond) -> Iterator[Finding]:
    if bond.coarse:
        yield warn(
            "bond-hash",
            f"{bond.name} is {bond.what}: all between two MAC addresses, as of two routers or tunnels, is on "
            "one link",
            "a hash that heeds ports: an aggregation is as good as its hash",
            bond.fix,
        )

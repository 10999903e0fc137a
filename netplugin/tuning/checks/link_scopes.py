"""Links as rules see them: an interface, a bond, a bridge, each with what is next to it (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import InterfaceFacts, OvsPortLive
from netplugin.tuning.root import Unknown, known

#: Bytes that a device adds to what its MTU counts, at least and at most: over IPv4 and IPv6, where it can be
#: over both. VXLAN_HEADROOM in include/net/vxlan.h; drivers/net/geneve.c; gre_calc_hlen, and Ethernet's 14
#: for gretap; net/ipv4/ipip.c and sit.c; net/ipv6/ip6_tunnel.c, whose encapsulation limit is an option;
#: MESSAGE_MINIMUM_LENGTH and UDP in drivers/net/wireguard/device.c; macsec_change_mtu; hsr_get_max_mtu; the
#: tags in net/dsa, for which the kernel makes the device below wider if it can. The tag of a VLAN is
#: outside the MTU (vlan_dev_change_mtu), but above macsec (netif_reduces_vlan_mtu).
HEADERS = {
    **dict.fromkeys(("vxlan", "geneve"), (50, 70)),
    **{"gretap": (38, 58), "gre": (24, 24), "ip6gre": (44, 44), "ipip": (20, 20), "sit": (20, 20)},
    **{"ip6tnl": (40, 48), "wireguard": (60, 80), "macsec": (32, 32), "hsr": (6, 6), "dsa": (0, 32)},
}


_OVS = "ovs-system"
#: Devices to which the kernel gives no more than what is below them has (vlan_dev_change_mtu and the like); a
#: bond sets its members. It nests devices as deep as this (MAX_NEST_DEV in include/linux/netdevice.h).
_HELD, _DEEPEST = {*HEADERS, "vlan", "macvlan", "macvtap"}, 8
#: Where the next hop is: below for sure, the widest that a tunnel could take, or the other end of a veth.
BELOW, AT_MOST, PEER = "{} below it", "{}, the widest that may be below it,", "its other end {}"


@dataclass(frozen=True)
class Hop:
    """An interface that frames pass, and its MTU without what is added to them: at least ``header`` bytes, at
    most ``header + spare``. ``filled``: a device above it has its whole MTU. ``raises``: what to set for the
    MTU of the interface above, the lowest device first."""

    name: str
    mtu: int
    header: int = 0
    spare: int = 0
    where: str = BELOW
    filled: bool = False
    raises: tuple[tuple[str, int], ...] = ()


def _by_name(scene: Scene) -> dict[str, InterfaceFacts]:
    """The interfaces of the kernel whose MTU is known."""
    interfaces = known(scene.facts.network.interfaces, ())
    return {one.name: one for one in interfaces if not isinstance(one.mtu, Unknown)}


def _hop(one: InterfaceFacts, header: int = 0, spare: int = 0, where: str = BELOW) -> Hop:
    return Hop(one.name, known(one.mtu, 0) - header, header, spare, where)


@dataclass(frozen=True)
class Link:
    """A kernel interface and those next to it: the NIC of a VLAN, the members of a bond, the end of a veth.

    ``desired`` is the largest MTU that is planned, for the NICs of the plan.
    """

    own: Hop
    next_hops: tuple[Hop, ...]
    desired: int


def links(scene: Scene) -> Iterator[Link]:
    """Without bridges, and those whose MTU says nothing of what they are made of: the kernel's device of OVS,
    and a VRF, which has more than any packet."""
    named, plan = _by_name(scene), scene.plan
    planned = {name for nic in plan.nics for name in nic.interfaces} if plan else set()
    indices = {one.index: one for one in named.values()}
    lowers = {name: set(one.lowers) for name, one in named.items()}
    for name, one in named.items():
        lowers.get(one.master or "", set()).add(name)
    filled = {
        low
        for name in named
        for low in lowers[name] & named.keys()
        if known(named[name].mtu, 0) >= known(named[low].mtu, 0)
    }
    real = [one for one in named.values() if one.kind not in {*HEADERS, "tun"} and not one.lowers]
    grounds = [one for one in real if one.state != "down"]
    below: dict[str, list[Hop]] = {}

    def raised(name: str, mtu: int, deepest: int = _DEEPEST) -> Iterator[tuple[str, int]]:
        for hop in below.get(name, ()) if named[name].kind in _HELD and deepest else ():
            if hop.mtu < mtu:
                yield from raised(hop.name, mtu + hop.header + hop.spare, deepest - 1)
        yield name, mtu

    for name, one in named.items():
        if one.kind == "bridge" or name == _OVS or known(one.mtu, 0) > 65535:
            continue
        header, most = HEADERS.get(one.kind or "", (0, 0))
        other = indices.get(one.link) if one.link and one.link != one.index else None
        if other and header:
            lowers[name].add(other.name)
        hops = []
        for lower in (named[lower] for lower in sorted(lowers[name] & named.keys())):
            tag = 4 if (one.kind, lower.kind) == ("vlan", "macsec") else 0
            hop = _hop(lower, header + tag, most - header)
            hops.append(replace(hop, filled=lower.name in filled or lower.kind == "bridge"))
        if other and (other.link, other.kind, one.kind) == (one.index, None, None):
            hops.append(_hop(other, where=PEER))
        if header and grounds and not (hops or one.master == _OVS or one.state == "down"):
            widest = max(grounds, key=lambda ground: known(ground.mtu, 0))
            hops.append(_hop(widest, header, most - header, AT_MOST))
        below[name] = hops
    for name, hops in below.items():
        own, desired = _hop(named[name]), max(plan.intent.mtus) if plan and name in planned else 0
        needs = ((hop, raised(hop.name, own.mtu + hop.header + hop.spare)) for hop in hops)
        yield Link(own, tuple(replace(hop, raises=tuple(raises)) for hop, raises in needs), desired)


@dataclass(frozen=True)
class Bond:
    """``coarse``: it spreads flows by a hash of layer 2 alone; ``down`` are the members without link."""

    name: str
    what: str
    coarse: bool
    fix: str
    members: int
    down: tuple[str, ...]


def bonds(scene: Scene) -> Iterator[Bond]:
    named = _by_name(scene)
    for bond in scene.facts.network.bonds:
        mode, policy, members = known(bond.mode, "?"), known(bond.hash_policy, "?"), known(bond.members, ())
        coarse = mode in ("balance-xor", "802.3ad") and policy in ("layer2", "vlan+srcmac")
        fix = f"ip link set {bond.name} type bond xmit_hash_policy layer3+4"
        down = tuple(name for name in members if name in named and named[name].state == "down")
        yield Bond(bond.name, f"{mode} with xmit_hash_policy {policy}", coarse, fix, len(members), down)
    for name, ports in _grouped(_ovs_ports(scene), "port").items():
        if how := ports[0].bond_mode:
            fix = f"ovs-vsctl set Port {name} bond_mode=balance-tcp lacp=active, with LACP on the switch"
            down = tuple(port.name for port in ports if port.link is False)
            what = f"{how}, which spreads by MAC and VLAN"
            yield Bond(name, what, how == "balance-slb", fix, len(ports), down)


@dataclass(frozen=True)
class Bridge:
    """``ports`` are those of VMs; ``out`` is the widest way out of the bridge for them, None without one.

    A bridge of the kernel has an MTU of its own (``own``), next to those of ``all_ports``.
    """

    name: str
    ports: tuple[Hop, ...]
    out: Hop | None
    own: Hop | None = None
    all_ports: tuple[Hop, ...] = ()


def bridges(scene: Scene) -> Iterator[Bridge]:
    named = _by_name(scene)
    devices = {name for nic in known(scene.facts.network.nics, ()) for name in nic.interfaces}
    leading = {name for name, one in named.items() if one.kind in HEADERS} | (devices & named.keys())
    uppers, count = {name: one.lowers for name, one in named.items() if one.kind != "bridge"}, -1
    while count != len(leading):
        count, leading = len(leading), leading | {n for n, low in uppers.items() if leading.intersection(low)}
    for name, one in named.items():
        if one.kind == "bridge":
            hops = [_hop(port) for port in named.values() if port.master == name]
            ways = [hop for hop in hops if hop.name in leading]
            ports = tuple(hop for hop in hops if hop.name not in leading)
            yield Bridge(name, ports, _least(ways), _hop(one), tuple(hops))
    yield from _ovs_bridges(_ovs_ports(scene), leading)


def _ovs_bridges(ports: Collection[OvsPortLive], leading: Collection[str]) -> Iterator[Bridge]:
    """The ways out of a bridge are its uplinks, its tunnels, and those of the bridges that patch ports reach:
    which of them a port's frames take, only flows say."""
    grouped, home = _grouped(ports, "bridge"), {port.name: port.bridge or "" for port in ports}
    uplinks = [port for port in ports if port.mtu and (port.type == "dpdk" or port.name in leading)]
    least = {
        name: _least(Hop(p.name, p.mtu or 0) for p in own)
        for name, own in _grouped(uplinks, "bridge").items()
    }
    wide = max((hop for hop in least.values() if hop), key=lambda hop: hop.mtu, default=None)
    for name, own in grouped.items():
        reached, ways = [name], []
        for at in reached:
            ways += [hop for hop in (least.get(at),) if hop]
            for port in grouped.get(at, ()):
                if port.header is not None and wide:
                    ways.append(Hop(wide.name, wide.mtu - port.header, port.header))
                if port.peer in home and home[port.peer] not in reached:
                    reached.append(home[port.peer])
        vms = tuple(Hop(port.name, port.mtu) for port in own if port.mtu and port not in uplinks)
        yield Bridge(name, vms, max(ways, key=lambda hop: hop.mtu, default=None))


def _ovs_ports(scene: Scene) -> tuple[OvsPortLive, ...]:
    ovs = known(scene.live.ovs, None)
    return ovs.ports if ovs else ()


def _grouped(ports: Collection[OvsPortLive], by: Literal["port", "bridge"]) -> dict[str, list[OvsPortLive]]:
    found: dict[str, list[OvsPortLive]] = defaultdict(list)
    for port in ports:
        found[getattr(port, by) or ""].append(port)
    return found


def _least(hops: Iterable[Hop]) -> Hop | None:
    return min(hops, key=lambda hop: hop.mtu, default=None)

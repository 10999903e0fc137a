"""Which packet filters of other programs drop frames of our ports.

The frames of a port are judged as those of a new connection, by kind and direction. Addresses are not known.
A filter that drops all of a kind cuts the port off. One that may drop some is reported.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from drivers.linuxbridge import filters
from drivers.linuxbridge.model import BridgeObservation, ObservedBridge, Obstacle
from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.host import vxlan_filter
from netplugin.host.foreign_filters import SWITCHES, ForeignFilters, ForeignReader
from netplugin.host.frame_filters import BaseChain, Frame, Key, Then, device, judge
from netplugin.host.link_values import Bridge, Link, Vlan, Vxlan
from netplugin.host.names import TAP, device_name

#: The tables of the agent, by family and name.
OURS = frozenset({(filters.FAMILY, filters.TABLE), (vxlan_filter.FAMILY, vxlan_filter.TABLE)})
#: How many peers of a VXLAN network are judged one by one, and how many rules a finding names.
_MOST_PEERS, _MOST_NAMES = 32, 5
#: Devices and networks whose answers are kept while the filters stay the same.
_KEPT = 4096
#: The hooks between two ports of a bridge; those where only the device is known that a frame leaves by, or
#: came by.
_FORWARDED = ("prerouting", "forward", "postrouting")
_LEAVING, _COMING = ("output", "postrouting", "egress"), ("input", "prerouting", "ingress")

# What rules ask for, by the numbers of include/uapi/linux/netfilter: nf_tables.h (nft_meta_keys, nft_ct_keys,
# nft_payload_bases) and xt_physdev.h. Of devices: where a frame came by, and where it leaves by.
_INDICES: tuple[Key, Key] = ("meta", 4), ("meta", 5)
_NAMES: tuple[Key, Key] = ("meta", 6), ("meta", 7)
_BRIDGE_NAMES: tuple[Key, Key] = ("meta", 17), ("meta", 18)
_PORT_NAMES: tuple[Key, Key] = ("physdev", 1), ("physdev", 2)
_BRIDGED: Frame = {("physdev", flag): b"\1" for flag in (4, 8, 16)}
_NEW: Frame = {("ct", 0): struct.pack("=I", 1 << 3), ("ct", 1): b"\0", ("ct", 2): bytes(4)}


class FrameKind(NamedTuple):
    """A kind of frames. ``version``: of IP; 0 for ARP."""

    version: int
    protocol: str


def _ethertype(number: bytes) -> Frame:
    return {("meta", 1): number, ("payload", 0, 12, 2): number}


def _ip(version: int, protocol: int) -> Frame:
    ethertype, family, at = (
        (b"\x08\0", socket.AF_INET, 9) if version == 4 else (b"\x86\xdd", socket.AF_INET6, 6)
    )
    number = bytes((protocol,))
    known: Frame = {("meta", 15): bytes((family,)), ("meta", 16): number, ("payload", 1, at, 1): number}
    return _ethertype(ethertype) | _NEW | known


_ARP = FrameKind(0, "ARP")
_KNOWN: Mapping[FrameKind, Frame] = {
    FrameKind(version, name): _ip(version, number)
    for version, icmp in ((4, 1), (6, 58))
    for name, number in (("TCP", 6), ("UDP", 17), ("ICMP", icmp))
} | {_ARP: _ethertype(b"\x08\x06")}
#: The family whose rules see a version of IP, as nft names it; those of IP also pass the rules of ``inet``.
_FAMILIES = {0: "arp", 4: "ip", 6: "ip6"}


@dataclass(frozen=True)
class PortPath:
    """Where the frames of a port pass: its device, its bridge, the uplink there, and what that is stacked on.

    ``families``: those that br_netfilter adds to the rules of IP and ARP. ``versions`` of IP that the port's
    own filter lets through.
    """

    tap: Link
    bridge: Link
    uplink: Link | None
    below: Link | None
    families: frozenset[str]
    versions: frozenset[int]


class Tunnels(NamedTuple):
    """Where VXLAN packets of a network pass: the device with the host's address, the UDP port, the peers."""

    underlay: Link
    local_ip: str
    udp_port: int
    peers: tuple[str, ...]


class ObstacleReader:
    """Reads the filters of other programs. What was judged is kept while they stay the same."""

    def __init__(self) -> None:
        self.reader = ForeignReader(OURS)
        self._last: Obstacles | None = None

    def read(self, deadline: float, *, fresh: bool) -> Obstacles:
        """``fresh`` False: what was read last will do."""
        found = self.reader.read(deadline, fresh=fresh)
        if self._last is None or self._last.filters != found:
            self._last = Obstacles(found)
        return self._last


class Obstacles:
    """Finds the obstacles of ports. Ports that no rule tells apart are judged once. Not thread-safe."""

    def __init__(self, filters: ForeignFilters) -> None:
        self.filters = filters
        self._judged: dict[Hashable, Mapping[tuple[BaseChain, bool, str], Collection[FrameKind]]] = {}
        keys = {*_INDICES, *_NAMES, *_BRIDGE_NAMES, *_PORT_NAMES}
        conditions = {each for chain in filters.chains for each in chain.table.conditions()}
        self._of_devices = [each for each in conditions if each.key in keys]
        self._cached_answers = lru_cache(_KEPT)(self._answers)
        self.of_tunnels = lru_cache(_KEPT)(self._of_tunnels)

    def of_port(self, path: PortPath) -> tuple[Obstacle, ...]:
        """Return the obstacles on the port's bridge, those that are sure first."""
        devices = (path.tap, path.bridge, path.uplink, path.below)
        answers = (each and self._cached_answers(each.name, each.index) for each in devices)
        same = (*answers, path.families, path.versions)
        if same not in self._judged:
            self._judged[same] = self._drops(path)
        found = [
            Obstacle(sure, where, _frames(kinds), self._fix(chain, path, kinds), path.bridge.name)
            for (chain, sure, where), kinds in self._judged[same].items()
        ]
        return tuple(sorted(found, key=lambda each: not each.sure))

    def _answers(self, name: str, index: int) -> Hashable:
        """What rules tell of a device."""
        known = dict.fromkeys((*_NAMES, *_BRIDGE_NAMES, *_PORT_NAMES), device(name))
        known |= dict.fromkeys(_INDICES, struct.pack("=I", index))
        listed = tuple(name in chain.devices for chain in self.filters.chains)
        return listed, tuple(each.holds(known) for each in self._of_devices)

    def _drops(self, path: PortPath) -> Mapping[tuple[BaseChain, bool, str], Collection[FrameKind]]:
        found = defaultdict[tuple[BaseChain, bool, str], list[FrameKind]](list)
        kinds = [each for each in _KNOWN if each is _ARP or each.version in path.versions]
        # To and from the uplink, and other ports of the bridge.
        others = dict.fromkeys((path.uplink, None))
        ends = [end for other in others for end in ((path.tap, other), (other, path.tap))]
        for chain, kind, (into, out) in product(self.filters.chains, kinds, ends):
            then, where = judge(chain, _frame(chain, kind, path, into, out))
            if then is not Then.ACCEPT:
                found[chain, then is Then.DROP, where].append(kind)
        return found

    def _of_tunnels(self, tunnels: Tunnels) -> tuple[Obstacle, ...]:
        """Return the filters that surely drop VXLAN packets of the network, of all peers or of some."""
        found = defaultdict[tuple[BaseChain, str], set[str]](set)
        for chain, incoming in product(self.filters.chains, (True, False)):
            of_any, _ = judge(chain, _tunnel_frame(chain, tunnels, "", incoming))
            for peer in tunnels.peers[:_MOST_PEERS] if of_any is Then.OTHER else ("",):
                then, where = judge(chain, _tunnel_frame(chain, tunnels, peer, incoming))
                if then is Then.DROP:
                    found[chain, where].add(peer)
        port = tunnels.udp_port
        obstacles = []
        for (chain, where), peers in found.items():
            of_peers = "" if "" in peers else f" of {', '.join(sorted(peers))}"
            fix = _insert(chain, f"udp dport {port}", f"-p udp --dport {port}")
            what = f"VXLAN packets (UDP port {port}){of_peers}"
            obstacles.append(Obstacle(True, where, what, fix, tunnels.underlay.name))
        return tuple(obstacles)

    def _fix(self, chain: BaseChain, path: PortPath, kinds: Collection[FrameKind]) -> str:
        bridge = path.bridge.name
        if chain.devices:
            return f"delete the rule, or take the device out of {chain}"
        # What rules of the chain see: where a frame comes in, and where it goes.
        sides = [side for side, without in (("i", _LEAVING), ("o", _COMING)) if chain.hook not in without]
        if chain.table.family == "bridge":
            taps = f"{TAP}*" if path.tap.name.startswith(TAP) else path.tap.name
            return " && ".join(_insert(chain, f'{side}ifname "{taps}"', "") for side in sides)
        if chain.table.name == "firewalld":  # nobody else may change its table
            zone = f"firewall-cmd --permanent --zone=trusted --add-interface={bridge}"
            return f"{zone} && firewall-cmd --reload"
        names, options = (
            " ".join(each.format(side, bridge) for side in sides) for each in ('{}ifname "{}"', "-{} {}")
        )
        rule = _insert(chain, names, options)
        families = sorted({_FAMILIES[kind.version] for kind in kinds})
        switches = [SWITCHES[family] for family in families]
        on = [
            f"net.bridge.{switch}=0"
            for f, switch in zip(families, switches, strict=True)
            if f in self.filters.bridged
        ]
        if on:
            unless = "if nothing else on this host needs it (container engines may)"
            return f"{rule}; or, {unless}, sysctl -w {' '.join(on)}"
        off = [f"{switch.removeprefix('bridge-').replace('-', '_')} 0" for switch in switches]
        return f"ip link set {bridge} type bridge {' '.join(off)}; or {rule}"


# -- What is known of a frame in a chain; None if it does not pass it. -----------------------------


def _frame(
    chain: BaseChain, kind: FrameKind, path: PortPath, into: Link | None, out: Link | None
) -> Frame | None:
    known, family, hook = _KNOWN[kind], _FAMILIES[kind.version], chain.hook
    if chain.devices:
        own = out if hook in _LEAVING else into
        if own is not None and own.name in chain.devices:
            return known | _devices(hook, own, own)
        # What the uplink is stacked on has tagged frames: only the device is known.
        below = path.below if own is not None and own == path.uplink else None
        return _devices(hook, below, below) if below and below.name in chain.devices else None
    if chain.table.family == "bridge" and hook in _FORWARDED:
        return known | _devices(hook, into, out) | dict.fromkeys(_BRIDGE_NAMES, device(path.bridge.name))
    if family not in path.families or hook not in _FORWARDED:
        return None
    if kind is _ARP:
        return known | _devices(hook, into, out) if (chain.table.family, hook) == ("arp", "forward") else None
    if chain.table.family not in (family, "inet"):
        return None
    # To the rules of IP, the bridge is the device on both sides (``br_nf_forward_ip``).
    ports = {key: device(each.name) for key, each in zip(_PORT_NAMES, (into, out), strict=True) if each}
    return known | _devices(hook, path.bridge, path.bridge) | _BRIDGED | ports


def _tunnel_frame(chain: BaseChain, tunnels: Tunnels, peer: str, incoming: bool) -> Frame | None:
    """What is known of a VXLAN packet of a peer, or with "" of any."""
    local, own = ipaddress.ip_address(tunnels.local_ip), tunnels.underlay
    of_host = not chain.devices and chain.table.family in (_FAMILIES[local.version], "inet")
    if chain.hook not in (_COMING if incoming else _LEAVING) or not (of_host or own.name in chain.devices):
        return None
    at, length = (12, 4) if local.version == 4 else (8, 16)
    ends = (peer and ipaddress.ip_address(peer).packed, local.packed)
    addresses = zip((at, at + length), ends if incoming else ends[::-1], strict=True)
    known = {("payload", 1, where, length): address for where, address in addresses if address}
    known |= {("payload", 2, 2, 2): struct.pack(">H", tunnels.udp_port)}
    return _KNOWN[FrameKind(local.version, "UDP")] | _devices(chain.hook, own, own) | known


def _devices(hook: str, into: Link | None, out: Link | None) -> Frame:
    found: Frame = {}
    for side, (each, without) in enumerate(((into, _LEAVING), (out, _COMING))):
        if each is not None and hook not in without:
            found |= {_NAMES[side]: device(each.name), _INDICES[side]: struct.pack("=I", each.index)}
    return found


# -- The paths of our ports ------------------------------------------------------------------------


def obstacles_of(obstacles: Obstacles, seen: BridgeObservation) -> Mapping[str, tuple[Obstacle, ...]]:
    """Return the obstacles of each port that has some (pure)."""
    found = {}
    for port_id, tap in seen.taps.items() if obstacles.filters.chains else ():
        bridge = seen.bridges.get(tap.master or "")
        if bridge is None:
            continue
        made = seen.uplinks.get(bridge.segment.device) if bridge.segment else None
        met = obstacles.of_port(_path(port_id, tap, bridge, made, seen, obstacles.filters.bridged))
        if made and isinstance(made.data, Vxlan) and seen.underlay:
            peers = tuple(sorted(seen.peers.get(made.name, ())))
            tunnels = Tunnels(seen.underlay.link, seen.settings.local_ip, made.data.port, peers)
            met = (*obstacles.of_tunnels(tunnels), *met)
        if met:
            found[port_id] = met
    return found


def _path(
    port_id: str,
    tap: Link,
    bridge: ObservedBridge,
    made: Link | None,
    seen: BridgeObservation,
    bridged: frozenset[str],
) -> PortPath:
    """``made``: the uplink that we made."""
    whole = seen.interfaces.get(bridge.uplink)
    parent = seen.interfaces.get(made.data.parent) if made and isinstance(made.data, Vlan) else None
    options = bridge.link.data
    return PortPath(
        tap,
        replace(bridge.link, name=bridge.given or bridge.link.name),
        made or (whole.link if whole else None),
        parent.link if parent else None,
        bridged | (options.nf_call if isinstance(options, Bridge) else frozenset()),
        filters.versions(seen.table.chains.get(device_name(TAP, port_id)) if seen.table else None),
    )


# -- What is reported ------------------------------------------------------------------------------


def _insert(chain: BaseChain, nft: str, iptables: str) -> str:
    """The command that adds a rule in front, which accepts what matches."""
    table = chain.table
    if table.legacy:
        program = {"ip": "iptables-legacy", "ip6": "ip6tables-legacy"}[table.family]
        return f"{program} -t {table.name} -I {chain.chain} {iptables} -j ACCEPT"
    return f"nft insert rule {table.family} {table.name} {chain.chain} {nft} accept"


def _frames(kinds: Collection[FrameKind]) -> str:
    names: list[str] = []
    for version in (4, 6):
        of_version = [kind for kind in _KNOWN if kind.version == version]
        found = [f"{kind.protocol} over IPv{version}" for kind in of_version if kind in kinds]
        names += [f"IPv{version}"] if len(found) == len(of_version) else found
    return f"frames with {', '.join([*names, *(['ARP'] if _ARP in kinds else [])])}"


def findings(filters: ForeignFilters, obstacles: Collection[Obstacle]) -> Iterator[Finding]:
    """Return the findings: one for each filter that drops, and one for all that may."""
    drops, may_drop = defaultdict[str, list[Obstacle]](list), dict[str, Obstacle]()
    for each in obstacles:
        if each.sure:
            drops[str(each)].append(each)
        else:
            may_drop.setdefault(each.where, each)
    expected = "the packet filters of other programs let the frames of our bridges pass"
    for what, found in drops.items():
        yield Finding(
            id="foreign-filter",
            status="fail",
            found=f"{what}, on {some(sorted({each.device for each in found}))}",
            expected=expected,
            fix=found[0].fix,
        )
    if may_drop:
        yield Finding(
            id="foreign-filter-unsure",
            status="warn",
            found="; ".join(str(each) for each in list(may_drop.values())[:_MOST_NAMES]),
            expected=expected,
            fix=next(iter(may_drop.values())).fix,
        )
    if filters.unread:
        yield Finding(
            id="foreign-filter-unread",
            status="warn",
            found=f"not all packet filters of other programs are known: {filters.unread}",
            expected="the agent can read them, to tell whether they drop frames of VMs",
            fix="if they are of arptables-legacy, use arptables-nft: update-alternatives --config arptables",
        )

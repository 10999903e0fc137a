"""What other programs' packet filters do with the frames of our ports (pure).

The frames of a port are judged as those of a new connection, by kind and direction. Addresses are not known.
A filter that drops all of a kind cuts the port off. One that may drop some is reported.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from netplugin.api.models import Finding
from netplugin.host.foreign_filters import SWITCHES, ForeignFilters
from netplugin.host.frame_filters import (
    BaseChain,
    Frame,
    Judgement,
    Key,
    Then,
    connection,
    device,
    judge,
    meta,
    payload,
    told_apart,
)
from netplugin.host.names import TAP

# include/uapi/linux/netfilter/nf_tables.h: nft_meta_keys, nft_ct_keys
_PROTOCOL, _IIF, _OIF, _IIFNAME, _OIFNAME, _NFPROTO, _L4PROTO = 1, 4, 5, 6, 7, 15, 16
_BRIDGE_IN, _BRIDGE_OUT = 17, 18
_STATE, _DIRECTION, _STATUS = 0, 1, 2
_NEW = struct.pack("=I", 1 << 3)
_LINK, _NETWORK, _TRANSPORT = 0, 1, 2
_TCP, _UDP, _ICMP, _ICMPV6 = (bytes((number,)) for number in (6, 17, 1, 58))
_OVER = {_TCP: "TCP over ", _UDP: "UDP over ", _ICMP: "ICMP over ", _ICMPV6: "ICMP over "}
#: How many peers of a VXLAN network are judged one by one, and how many bridges a finding names.
_MOST_PEERS, _MOST_NAMES = 32, 5


@dataclass(frozen=True)
class Kind:
    """A kind of frames. ``version``: of IP; 0 for ARP."""

    version: int
    protocol: bytes = b""

    @property
    def family(self) -> str:
        """The family whose rules see it, as nft names it; those of IP also pass the rules of ``inet``."""
        return {4: "ip", 6: "ip6"}.get(self.version, "arp")

    @property
    def known(self) -> dict[Key, bytes]:
        ethertype = {4: b"\x08\0", 6: b"\x86\xdd"}.get(self.version, b"\x08\x06")
        found = {meta(_PROTOCOL): ethertype, payload(_LINK, 12, 2): ethertype}
        if self.version:
            family = socket.AF_INET if self.version == 4 else socket.AF_INET6
            found |= {meta(_NFPROTO): bytes((family,)), meta(_L4PROTO): self.protocol}
            found |= {payload(_NETWORK, 9 if self.version == 4 else 6, 1): self.protocol}
            found |= {connection(_STATE): _NEW, connection(_DIRECTION): b"\0", connection(_STATUS): bytes(4)}
        return found


_IPV4 = tuple(Kind(4, each) for each in (_TCP, _UDP, _ICMP))
_IPV6 = tuple(Kind(6, each) for each in (_TCP, _UDP, _ICMPV6))
_ARP = Kind(0)


@dataclass(frozen=True)
class Device:
    name: str
    index: int


@dataclass(frozen=True)
class PortPath:
    """Where the frames of a port pass: its device, its bridge, the uplink there, and what that is stacked on.

    ``families``: those that the bridge's own options add to ``ForeignFilters.bridged``. ``versions`` of IP
    that the port's own filter lets through.
    """

    tap: Device
    bridge: Device
    uplink: Device | None = None
    below: Device | None = None
    families: frozenset[str] = frozenset()
    versions: frozenset[int] = frozenset({4, 6})


@dataclass(frozen=True)
class Tunnels:
    """Where VXLAN packets of a network pass: the device with the host's address, the UDP port, the peers."""

    underlay: Device
    local_ip: str
    udp_port: int
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Obstacle:
    """A filter of others that drops ``frames``: all of them if ``sure``, otherwise it may drop some."""

    sure: bool
    where: str
    frames: str
    fix: str
    #: The bridge, or the device of tunnels.
    device: str

    def __str__(self) -> str:
        return f"{self.where} {'drops' if self.sure else 'may drop some'} {self.frames}"


@dataclass(frozen=True)
class _Drop:
    chain: str
    sure: bool
    where: str


class Obstacles:
    """Finds the obstacles of ports. Ports that no rule tells apart are judged once. Not thread-safe."""

    def __init__(self, filters: ForeignFilters) -> None:
        self.filters = filters
        self._chains = {str(chain): chain for chain in filters.chains}
        self._told_apart = told_apart(filters.chains)
        self._judged: dict[object, Mapping[_Drop, Collection[Kind]]] = {}

    def of_port(self, path: PortPath) -> tuple[Obstacle, ...]:
        """Return the obstacles on the port's bridge, those that are sure first."""
        devices = path.tap, path.bridge, path.uplink, path.below
        names = (each and self._told_apart(each.name, each.index) for each in devices)
        same = (*names, path.families, path.versions)
        if same not in self._judged:
            self._judged[same] = self._drops(path)
        found = [
            Obstacle(
                drop.sure,
                drop.where,
                _frames(kinds),
                self._fix(self._chains[drop.chain], path, kinds),
                path.bridge.name,
            )
            for drop, kinds in self._judged[same].items()
        ]
        return tuple(sorted(found, key=lambda each: not each.sure))

    def of_tunnels(self, tunnels: Tunnels) -> tuple[Obstacle, ...]:
        """Return the filters that surely drop VXLAN packets of the network, of all peers or of some."""
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for name, chain in self._chains.items():
            for incoming in (True, False):
                if (frame := _tunnel_frame(chain, tunnels, "", incoming)) is None:
                    continue
                judged = judge(chain, frame)
                if judged.then is Then.DROP:
                    found[name, judged.where].add("")
                for peer in tunnels.peers[:_MOST_PEERS] if judged.then is Then.OTHER else ():
                    of_peer = _tunnel_frame(chain, tunnels, peer, incoming)
                    if of_peer and (one := judge(chain, of_peer)).then is Then.DROP:
                        found[name, one.where].add(peer)
        port, device_ = tunnels.udp_port, tunnels.underlay.name
        what = f"VXLAN packets (UDP port {port})"
        return tuple(
            Obstacle(
                True,
                where,
                what if "" in peers else f"{what} of {', '.join(sorted(peers))}",
                _insert(self._chains[name], f"udp dport {port}", f"-p udp --dport {port}"),
                device_,
            )
            for (name, where), peers in found.items()
        )

    def _drops(self, path: PortPath) -> Mapping[_Drop, Collection[Kind]]:
        found: dict[_Drop, list[Kind]] = defaultdict(list)
        # To and from the uplink, and other ports of the bridge.
        others = dict.fromkeys((path.uplink, None))
        ends = [each for other in others for each in ((path.tap, other), (other, path.tap))]
        ip = (*(_IPV4 if 4 in path.versions else ()), *(_IPV6 if 6 in path.versions else ()))
        for chain in self.filters.chains:
            for kind in (*ip, _ARP):
                for into, out in ends:
                    frame = self._frame(chain, kind, path, into, out)
                    judged = judge(chain, frame) if frame else Judgement(Then.ACCEPT)
                    if judged.then is not Then.ACCEPT:
                        found[_Drop(str(chain), judged.then is Then.DROP, judged.where)].append(kind)
        return found

    def _frame(
        self, chain: BaseChain, kind: Kind, path: PortPath, into: Device | None, out: Device | None
    ) -> Frame | None:
        """What is known of a frame in this chain; None if it does not pass it."""
        if chain.devices:
            return _on_device(chain, kind, path, into, out)
        if chain.hook not in ("prerouting", "forward", "postrouting"):
            return None
        before, after = chain.hook == "prerouting", chain.hook == "postrouting"
        if chain.table.family == "bridge":
            known = kind.known | _names(None if after else into, None if before else out)
            bridge = device(path.bridge.name)
            return Frame(known | {meta(_BRIDGE_IN): bridge, meta(_BRIDGE_OUT): bridge})
        if kind.family not in self.filters.bridged | path.families:
            return None
        if kind is _ARP:
            there = chain.table.family == "arp" and chain.hook == "forward"
            return Frame(kind.known | _names(into, out)) if there else None
        if chain.table.family not in (kind.family, "inet"):
            return None
        # To the rules of IP, the bridge is the device on both sides (``br_nf_forward_ip``).
        known = kind.known | _names(None if after else path.bridge, None if before else path.bridge)
        return Frame(known, True, into.name if into else None, out.name if out else None)

    def _fix(self, chain: BaseChain, path: PortPath, kinds: Collection[Kind]) -> str:
        bridge = path.bridge.name
        if chain.devices:
            return f"delete the rule, or take the device out of {chain}"
        if chain.table.family == "bridge":
            taps = f"{TAP}*" if path.tap.name.startswith(TAP) else path.tap.name
            rules = [_insert(chain, f'{side}ifname "{taps}"', "") for side in _sides(chain)]
            return " && ".join(rules)
        if chain.table.name == "firewalld":  # nobody else may change its table
            zone = f"firewall-cmd --permanent --zone=trusted --add-interface={bridge}"
            return f"{zone} && firewall-cmd --reload"
        sides = _sides(chain)
        rule = _insert(
            chain,
            " ".join(f'{side}ifname "{bridge}"' for side in sides),
            " ".join(f"-{side} {bridge}" for side in sides),
        )
        families = sorted({kind.family for kind in kinds})
        switches = " ".join(f"net.bridge.{SWITCHES[f]}=0" for f in families if f in self.filters.bridged)
        if not switches:
            options = {"ip": "nf_call_iptables", "ip6": "nf_call_ip6tables", "arp": "nf_call_arptables"}
            off = " ".join(f"{options[family]} 0" for family in families)
            return f"ip link set {bridge} type bridge {off}; or {rule}"
        return (
            f"{rule}; or, if nothing else on this host needs it (container engines may), sysctl -w {switches}"
        )


def _sides(chain: BaseChain) -> list[str]:
    """The devices that rules of the chain see: where a frame comes in (``i``), and where it goes (``o``)."""
    return [side for side, hook in (("i", "postrouting"), ("o", "prerouting")) if chain.hook != hook]


def _names(into: Device | None, out: Device | None) -> dict[Key, bytes]:
    found: dict[Key, bytes] = {}
    for each, name, index in ((into, _IIFNAME, _IIF), (out, _OIFNAME, _OIF)):
        if each is not None:
            found |= {meta(name): device(each.name), meta(index): struct.pack("=I", each.index)}
    return found


def _on_device(
    chain: BaseChain, kind: Kind, path: PortPath, into: Device | None, out: Device | None
) -> Frame | None:
    """In a chain of devices. What the uplink is stacked on has tagged frames: only the device is known."""
    comes = chain.hook == "ingress"
    own = into if comes else out
    below = path.below if own is not None and own == path.uplink else None
    for each, known in ((own, kind.known), (below, {})):
        if each is not None and each.name in chain.devices:
            return Frame(known | (_names(each, None) if comes else _names(None, each)))
    return None


def _tunnel_frame(chain: BaseChain, tunnels: Tunnels, peer: str, incoming: bool) -> Frame | None:
    """What is known of a VXLAN packet in this chain; None if it does not pass it."""
    local = ipaddress.ip_address(tunnels.local_ip)
    kind = Kind(local.version, _UDP)
    own = tunnels.underlay
    hooks = ("prerouting", "input", "ingress") if incoming else ("output", "postrouting", "egress")
    on_device = bool(chain.devices) and own.name in chain.devices
    of_host = not chain.devices and chain.table.family in (kind.family, "inet")
    if chain.hook not in hooks or not (on_device or of_host):
        return None
    ends = [peer and ipaddress.ip_address(peer).packed, local.packed]
    sender, receiver = ends if incoming else reversed(ends)
    at, length = (12, 4) if local.version == 4 else (8, 16)
    addresses = {payload(_NETWORK, at, length): sender, payload(_NETWORK, at + length, length): receiver}
    known = kind.known | {key: value for key, value in addresses.items() if value}
    known |= {payload(_TRANSPORT, 2, 2): struct.pack(">H", tunnels.udp_port)}
    return Frame(known | (_names(own, None) if incoming else _names(None, own)))


def _insert(chain: BaseChain, nft: str, iptables: str) -> str:
    """The command that adds a rule in front, which accepts what matches."""
    table = chain.table
    if table.legacy:
        program = {"ip": "iptables-legacy", "ip6": "ip6tables-legacy"}[table.family]
        return f"{program} -t {table.name} -I {chain.chain} {iptables} -j ACCEPT"
    return f"nft insert rule {table.family} {table.name} {chain.chain} {nft} accept"


def _frames(kinds: Collection[Kind]) -> str:
    names = []
    for of_version, name in ((_IPV4, "IPv4"), (_IPV6, "IPv6")):
        found = [kind for kind in of_version if kind in kinds]
        names += [name] if len(found) == len(of_version) else [_OVER[k.protocol] + name for k in found]
    return f"frames with {', '.join([*names, *(['ARP'] if _ARP in kinds else [])])}"


def findings(filters: ForeignFilters, obstacles: Collection[Obstacle]) -> Iterator[Finding]:
    """Return the findings: one for each filter that drops, and one for all that may."""
    by_place: dict[Obstacle, list[str]] = defaultdict(list)
    unsure: dict[str, Obstacle] = {}
    for each in obstacles:
        if each.sure:
            by_place[replace(each, device="", fix="")].append(each.device)
        else:
            unsure.setdefault(each.where, each)
    fixes = {(each.where, each.frames): each.fix for each in obstacles if each.sure}
    expected = "the packet filters of other programs let the frames of our bridges pass"
    for each, devices in by_place.items():
        names = sorted(set(devices))
        some = ", ".join(names[:_MOST_NAMES]) + (" and others" if len(names) > _MOST_NAMES else "")
        yield Finding(
            id="foreign-filter",
            status="fail",
            found=f"{each}, on {some}",
            expected=expected,
            fix=fixes[each.where, each.frames],
        )
    if unsure:
        yield Finding(
            id="foreign-filter-unsure",
            status="warn",
            found="; ".join(str(each) for each in list(unsure.values())[:_MOST_NAMES]),
            expected=expected,
            fix=next(iter(unsure.values())).fix,
        )
    if filters.unread:
        yield Finding(
            id="foreign-filter-unread",
            status="warn",
            found=f"not all packet filters of other programs are known: {filters.unread}",
            expected="the agent can read them, to tell whether they drop frames of VMs",
        )

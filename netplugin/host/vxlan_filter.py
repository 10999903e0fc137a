"""Who may send into VXLAN networks: nftables rules at the host's input hook.

The kernel's VXLAN device accepts packets from any sender (``vxlan_rcv`` in drivers/net/vxlan) and learns
from them; RFC 7348 has no authentication. The rule is at the hook ``input``, where IPv4 fragments are
reassembled; otherwise a sender could hide the VNI in the second fragment. IPv6 is reassembled after that
hook. A VTEP never fragments (RFC 7348, section 4.3), so IPv6 fragments to our ports are dropped. So is a
fragment whose first header hides the upper-layer header, which RFC 7112 forbids.

Other UDP ports, and other VNIs on the same port, are not filtered: the operator owns them.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from netplugin.host import nft_rules as nft
from netplugin.host import nft_sets, nftables
from netplugin.host.nfnetlink import Nfnetlink
from netplugin.host.nft_rules import COUNTER, DROP, Extension, Match, Payload, Rule, member
from netplugin.host.nft_sets import KeyType, concatenation

FAMILY, TABLE = "inet", "netplugin"
_NETWORKS, _PORTS, _PEERS4, _PEERS6, _CHAIN = "networks", "ports", "peers4", "peers6", "input"
_NETWORK_BYTES = 8
_COUNTED_DROP = (COUNTER, DROP)

# The VNI: after 8 bytes of UDP and 4 of VXLAN.
_TO_PORT, _VNI = Payload(nft.TRANSPORT, 2, 2), Payload(nft.TRANSPORT, 12, 3)
_IPV4_FROM, _IPV6_FROM = Payload(nft.NETWORK, 12, 4), Payload(nft.NETWORK, 8, 16)
_IPV6_TO = Payload(nft.NETWORK, 24, 16)
_OVER_IPV4, _OVER_IPV6 = (Match(nft.NFPROTO, bytes((f,))) for f in (socket.AF_INET, socket.AF_INET6))
_OVER_UDP = Match(nft.L4PROTO, bytes((socket.IPPROTO_UDP,)))
#: RFC 8200: the fragment header, and the extension headers that may follow it (options, routing, another
#: fragment header, authentication, destination options).
_FRAGMENT, _EXTENSIONS = 44, (0, 43, 44, 51, 60)


@dataclass(frozen=True, order=True)
class VxlanKey:
    """A VXLAN network on the wire: UDP port and VNI."""

    udp_port: int
    vni: int

    def __str__(self) -> str:
        return f"{self.udp_port} . {self.vni}"


@dataclass(frozen=True)
class VxlanSources:
    """The contents of the table. ``sound``: the chain and rules are as intended."""

    sound: bool
    networks: frozenset[VxlanKey] = frozenset()
    peers: frozenset[tuple[VxlanKey, str]] = frozenset()

    def peers_of(self, key: VxlanKey) -> frozenset[str]:
        return frozenset(address for network, address in self.peers if network == key)


class VxlanFilter:
    """The nftables table for tunnels that end at one address of this host.

    What has a deadline raises BackendUnavailable, HostError and OperationTimeout.
    """

    def __init__(self, local_ip: str, kernel: Nfnetlink | None = None) -> None:
        """``kernel``: see ``Nftables``."""
        six = ":" in local_ip
        self._table = nftables.Nftables(FAMILY, TABLE, kernel, "vxlan-filter")
        #: The sets that were listed last, and what is in them.
        self._known: tuple[object, VxlanSources] = None, VxlanSources(sound=False)
        self._peers = _PEERS6 if six else _PEERS4
        rules = [*(_no_fragments(local_ip) if six else ()), _from_peers_only(six)]
        self._chain = nftables.base_chain("input", -350, *rules)
        sender = nft_sets.IPV6_FROM if six else nft_sets.IPV4_FROM
        self._sets: dict[str, KeyType] = {
            _PORTS: nft_sets.PORT,
            _NETWORKS: concatenation(nft_sets.UDP_TO, nft_sets.VNI),
            self._peers: concatenation(nft_sets.UDP_TO, nft_sets.VNI, sender),
        }

    def read(self, deadline: float) -> VxlanSources | None:
        """Read the table; None if it does not exist. Its sets are listed once, see ``Nftables``."""
        table = self._table.read([_CHAIN], deadline)
        if table is None:
            return None
        sound = self._sets.keys() <= table.sets.keys() and table.chains.get(_CHAIN) == self._chain
        if self._known[0] is not table.sets:
            networks = filter(None, map(_network, table.sets.get(_NETWORKS, ())))
            peers = filter(None, map(_peer, table.sets.get(self._peers, ())))
            self._known = table.sets, VxlanSources(sound, frozenset(networks), frozenset(peers))
        return replace(self._known[1], sound=sound)

    def allow(
        self, key: VxlanKey, peers: Collection[str], gone: Collection[str], deadline: float, *, base: bool
    ) -> None:
        """Let only these peers send into the network; ``gone`` are peers to remove.

        One transaction. ``base``: it also creates the table, or corrects it.
        """
        sets = [nftables.AddSet(name, keys) for name, keys in self._sets.items()]
        commands: list[nftables.Command] = [
            *([nftables.AddTable(), *sets, nftables.SetChain(_CHAIN, self._chain)] if base else ()),
            *(nftables.DeleteElement(self._peers, peer) for peer in _keys(key, gone)),
            nftables.AddElement(_PORTS, _packed(key.udp_port)),
            nftables.AddElement(_NETWORKS, _key(key)),
            *(nftables.AddElement(self._peers, peer) for peer in _keys(key, peers)),
        ]
        self._table.commit(commands, deadline)

    def forget(self, key: VxlanKey, peers: Collection[str], deadline: float) -> None:
        """Remove a network and its peers."""
        of_peers = (nftables.DeleteElement(self._peers, peer) for peer in _keys(key, peers))
        self._table.commit([nftables.DeleteElement(_NETWORKS, _key(key)), *of_peers], deadline)

    def remove(self, deadline: float) -> None:
        """Delete the table."""
        self._table.commit([nftables.DeleteTable()], deadline)


def _from_peers_only(six: bool) -> Rule:
    version, address, peers = (_OVER_IPV6, _IPV6_FROM, _PEERS6) if six else (_OVER_IPV4, _IPV4_FROM, _PEERS4)
    to_a_network = _OVER_UDP, member((_TO_PORT, _VNI), _NETWORKS)
    sender = member((_TO_PORT, _VNI, address), peers, inside=False)
    return Rule.make(*to_a_network, version, sender, *_COUNTED_DROP)


def _no_fragments(local_ip: str) -> list[Rule]:
    to_us = _OVER_IPV6, Match(_IPV6_TO, ipaddress.ip_address(local_ip).packed)
    hidden = (Match(Extension(_FRAGMENT), bytes((header,))) for header in _EXTENSIONS)
    fragment = Match(Extension(_FRAGMENT, present=True), b"\1")
    return [
        *(Rule.make(*to_us, each, *_COUNTED_DROP) for each in hidden),
        Rule.make(*to_us, fragment, _OVER_UDP, member((_TO_PORT,), _PORTS), *_COUNTED_DROP),
    ]


def _key(network: VxlanKey) -> bytes:
    """The key of a network in the kernel: each part begins at a multiple of 4 bytes."""
    return _packed(network.udp_port).ljust(4, b"\0") + struct.pack(">I", network.vni << 8)


def _packed(port: int) -> bytes:
    return struct.pack(">H", port)


def _keys(network: VxlanKey, peers: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(_key(network) + ipaddress.ip_address(peer).packed for peer in sorted(peers))


def _network(key: bytes) -> VxlanKey | None:
    """Parse the key of a network; None if another program has made the set, with other keys."""
    if len(key) != _NETWORK_BYTES:
        return None
    port, vni = struct.unpack(">HxxI", key)
    return VxlanKey(port, vni >> 8)


def _peer(key: bytes) -> tuple[VxlanKey, str] | None:
    network, address = _network(key[:_NETWORK_BYTES]), key[_NETWORK_BYTES:]
    if network is None or len(address) not in (4, 16):
        return None
    return network, str(ipaddress.ip_address(address))

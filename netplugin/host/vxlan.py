"""VXLAN on this host: its overhead, and nftables rules that restrict the senders of each network."""

from __future__ import annotations

import hashlib
import ipaddress
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from netplugin.host.netlink import Channel, Interrupted
from netplugin.host.nfnetlink import FAMILIES, Nfnetlink
from netplugin.host.nftables import Chain, DeleteTable, TableReader, add_keys, delete_keys
from netplugin.host.processes import remaining, run

# -- The overhead of VXLAN encapsulation. ---------------------------------------------------------


# RFC 7348, section 5: the VM's layer-3 packet is preceded by its Ethernet header (without a tag),
# the VXLAN header, UDP and the outer IP header. The MTU of the underlay minus these is the MTU of
# the VM.
_ETHERNET, _VXLAN, _UDP = 14, 8, 8
_IP = {4: 20, 6: 40}


def overhead(local_ip: str) -> int:
    """The bytes of encapsulation that count against the MTU of the underlay: 50 (IPv4) or 70 (IPv6)."""
    return _ETHERNET + _VXLAN + _UDP + _IP[ipaddress.ip_address(local_ip).version]


# -- nftables rules that restrict the senders of each VXLAN network, at the host's input hook. ----
# The kernel's VXLAN device accepts packets from any sender (``vxlan_rcv`` in drivers/net/vxlan) and
# learns from them; RFC 7348 has no authentication. The rule is at the hook ``input``, where IPv4
# fragments are reassembled; otherwise a sender could hide the VNI in the second fragment. IPv6 is
# reassembled after that hook. A VTEP never fragments (RFC 7348, section 4.3), so IPv6 fragments to
# our ports are dropped. So is a fragment whose first header hides the upper-layer header, which RFC
# 7112 forbids.
# Other UDP ports, and other VNIs on the same port, are not filtered: the operator owns them. ``nft`` writes
# the rules and the sets, once: it can list a set with a VNI only if it has its own description of the keys
# in it (``typeof``). Elements are written and read without it.


FAMILY, TABLE = "inet", "netplugin"
_STEP = "vxlan-filter"
_WHERE = f"{FAMILY} {TABLE}"
_NETWORKS, _PORTS, _CHAIN = "networks", "ports", "input"
_HOOK = ("input", -350, "accept")
_NETWORK_BYTES = 8
_NETWORK_KEY = "udp dport . @th,96,24"  # the VNI: after 8 bytes of UDP and 4 of VXLAN


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
    """The nftables table for tunnels that end at one address of this host."""

    def __init__(self, local_ip: str, kernel: Nfnetlink | None = None) -> None:
        """``kernel``: see ``Nftables``."""
        six = ":" in local_ip
        self._kernel = kernel or Nfnetlink()
        self._table = TableReader(FAMILY, TABLE)
        #: What was read last, with its stamp (``Nfnetlink.stamp``).
        self._known: tuple[int, VxlanSources | None] | None = None
        self._peers = "peers6" if six else "peers4"
        self._peer_key = f"{_NETWORK_KEY} . {'ip6' if six else 'ip'} saddr"
        unmanaged = f"{_NETWORK_KEY} @{_NETWORKS} {self._peer_key} != @{self._peers}"
        fragments = (
            f"ip6 daddr {local_ip} frag nexthdr {{ 0, 43, 44, 51, 60 }}",
            f"ip6 daddr {local_ip} exthdr frag exists udp dport @{_PORTS}",
        )
        #: Each rule by its comment, which identifies it: nft prints rules in a normalized form.
        self._rules = {_known_by(rule): rule for rule in (*fragments[: 2 * six], unmanaged)}

    def read(self, deadline: float) -> VxlanSources | None:
        """Read the table; None if it does not exist. Nothing is listed again while nobody changes nf_tables.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        with self._kernel.reading(_STEP, deadline) as channel:
            while True:
                stamp = self._kernel.stamp(channel)
                if self._known is not None and self._known[0] == stamp:
                    return self._known[1]
                try:
                    found = self._sources(channel)
                except (Interrupted, FileNotFoundError):  # others change what is listed
                    if not remaining(deadline):
                        raise
                    continue
                self._known = (stamp, found) if self._kernel.stamp(channel) == stamp else None
                return found

    def _sources(self, channel: Channel) -> VxlanSources | None:
        table = self._table.read_all(channel)
        if table is None:
            return None
        hook = table.chains.get(_CHAIN, Chain())
        sound = (
            {_NETWORKS, _PORTS, self._peers} <= table.sets.keys()
            and (hook.hook, hook.prio, hook.policy) == _HOOK
            and [rule.comment for rule in hook.rules] == list(self._rules)
        )
        networks = filter(None, map(_network, table.sets.get(_NETWORKS, ())))
        peers = filter(None, map(_peer, table.sets.get(self._peers, ())))
        return VxlanSources(sound, frozenset(networks), frozenset(peers))

    def allow(
        self, key: VxlanKey, peers: Collection[str], gone: Collection[str], deadline: float, *, base: bool
    ) -> None:
        """Let only these peers send into the network; ``gone`` are peers to remove.

        One transaction. ``base``: it also creates the table, or corrects it. Raises: BackendUnavailable,
        HostError, OperationTimeout.
        """
        if not base:
            added = [
                (_PORTS, [_packed(key.udp_port)]),
                (_NETWORKS, [_key(key)]),
                (self._peers, _keys(key, peers)),
            ]
            self._commit([(self._peers, _keys(key, gone))], added, deadline)
            return
        commands = [
            *self._base(),
            f"add element {_WHERE} {_PORTS} {{ {key.udp_port} }}",
            f"add element {_WHERE} {_NETWORKS} {{ {key} }}",
            *self._elements("delete", key, gone),
            *self._elements("add", key, peers),
        ]
        self._known = None
        run(["nft", "-f", "-"], step=_STEP, deadline=deadline, stdin="\n".join(commands) + "\n")

    def forget(self, key: VxlanKey, peers: Collection[str], deadline: float) -> None:
        """Remove a network and its peers. Raises: BackendUnavailable, HostError, OperationTimeout."""
        self._commit([(_NETWORKS, [_key(key)]), (self._peers, _keys(key, peers))], [], deadline)

    def remove(self, deadline: float) -> None:
        """Delete the table. Raises: BackendUnavailable, HostError, OperationTimeout."""
        self._known = None
        self._kernel.commit(FAMILIES[FAMILY], [*DeleteTable().messages(TABLE)], _STEP, deadline)

    def _commit(
        self,
        gone: Sequence[tuple[str, Sequence[bytes]]],
        added: Sequence[tuple[str, Sequence[bytes]]],
        deadline: float,
    ) -> None:
        """Remove and add keys of sets, each with the name of its set."""
        messages = [m for name, keys in gone for m in delete_keys(TABLE, name, keys)]
        messages += [m for name, keys in added for m in add_keys(TABLE, name, keys)]
        self._known = None
        self._kernel.commit(FAMILIES[FAMILY], messages, _STEP, deadline)

    def _elements(self, verb: str, key: VxlanKey, peers: Iterable[str]) -> list[str]:
        elements = ", ".join(f"{key} . {peer}" for peer in sorted(peers))
        return [f"{verb} element {_WHERE} {self._peers} {{ {elements} }}"] * bool(elements)

    def _base(self) -> list[str]:
        hook, priority, policy = _HOOK
        return [
            f"add table {_WHERE}",
            f"add set {_WHERE} {_PORTS} {{ type inet_service; }}",
            f"add set {_WHERE} {_NETWORKS} {{ typeof {_NETWORK_KEY}; }}",
            f"add set {_WHERE} {self._peers} {{ typeof {self._peer_key}; }}",
            f"add chain {_WHERE} {_CHAIN} "
            f"{{ type filter hook {hook} priority {priority}; policy {policy}; }}",
            f"flush chain {_WHERE} {_CHAIN}",
            *(
                f'add rule {_WHERE} {_CHAIN} {rule} counter drop comment "{comment}"'
                for comment, rule in self._rules.items()
            ),
        ]


def _known_by(rule: str) -> str:
    return f"netplugin-{hashlib.sha256(rule.encode()).hexdigest()[:16]}"


def _key(network: VxlanKey) -> bytes:
    """The key of a network in the kernel: each part begins at a multiple of 4 bytes."""
    return _packed(network.udp_port).ljust(4, b"\0") + struct.pack(">I", network.vni << 8)


def _packed(port: int) -> bytes:
    return struct.pack(">H", port)


def _keys(network: VxlanKey, peers: Iterable[str]) -> list[bytes]:
    return [_key(network) + ipaddress.ip_address(peer).packed for peer in sorted(peers)]


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

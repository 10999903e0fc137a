"""VXLAN on this host: its overhead, and nftables rules that restrict the senders of each network."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from netplugin.api.errors import HostError
from netplugin.host.nftables import format_errors, parse_answer, set_element
from netplugin.host.processes import run

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
# Other UDP ports, and other VNIs on the same port, are not filtered: the operator owns them. The sets
# are written in nft's own language, because its JSON has no ``typeof``, and read as JSON.


FAMILY, TABLE = "inet", "netplugin"
_STEP = "vxlan-filter"
_WHERE = f"{FAMILY} {TABLE}"
_NETWORKS, _PORTS, _CHAIN = "networks", "ports", "input"
_HOOK = ("input", -350, "accept")
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

    def __init__(self, local_ip: str) -> None:
        six = ":" in local_ip
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
        """Read the table; None if it does not exist.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        try:
            text = run(["nft", "-j", "list", "table", FAMILY, TABLE], step=_STEP, deadline=deadline)
        except HostError as error:
            if os.strerror(errno.ENOENT) in error.detail:
                return None
            raise
        with format_errors(_STEP):
            return self._sources(list(parse_answer(text, _STEP)))
        raise AssertionError

    def _sources(self, found: Sequence[tuple[str, Any]]) -> VxlanSources:
        sets = {value["name"]: value.get("elem", []) for kind, value in found if kind == "set"}
        hooks = [value for kind, value in found if kind == "chain" and value["name"] == _CHAIN]
        rules = [value.get("comment") for kind, value in found if kind == "rule"]
        sound = (
            {_NETWORKS, _PORTS, self._peers} <= sets.keys()
            and [(h.get("hook"), h.get("prio"), h.get("policy")) for h in hooks] == [_HOOK]
            and rules == list(self._rules)
        )
        networks = [set_element(element) for element in sets.get(_NETWORKS, [])]
        peers = [set_element(element) for element in sets.get(self._peers, [])]
        return VxlanSources(
            sound,
            frozenset(VxlanKey(port, vni) for port, vni in networks),
            frozenset((VxlanKey(port, vni), address) for port, vni, address in peers),
        )

    def allow(self, key: VxlanKey, peers: Iterable[str], gone: Iterable[str], deadline: float) -> None:
        """Let only these peers send into the network; ``gone`` are peers to remove.

        One transaction, which also creates the table. Raises: BackendUnavailable, HostError,
        OperationTimeout.
        """
        commands = [
            *self._base(),
            f"add element {_WHERE} {_PORTS} {{ {key.udp_port} }}",
            f"add element {_WHERE} {_NETWORKS} {{ {key} }}",
            *self._elements("delete", key, gone),
            *self._elements("add", key, peers),
        ]
        _commit(commands, deadline)

    def forget(self, key: VxlanKey, peers: Iterable[str], deadline: float) -> None:
        """Remove a network and its peers. Raises: BackendUnavailable, HostError, OperationTimeout."""
        gone = f"delete element {_WHERE} {_NETWORKS} {{ {key} }}"
        _commit([gone, *self._elements("delete", key, peers)], deadline)

    def remove(self, deadline: float) -> None:
        """Delete the table. Raises: BackendUnavailable, HostError, OperationTimeout."""
        _commit([f"delete table {_WHERE}"], deadline)

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


def _commit(commands: Iterable[str], deadline: float) -> None:
    run(["nft", "-f", "-"], step=_STEP, deadline=deadline, stdin="\n".join(commands) + "\n")

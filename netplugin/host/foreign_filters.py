"""The packet filters of other programs in this network namespace, and br_netfilter, which adds bridges.

With br_netfilter, frames that a bridge forwards pass the rules of IPv4, IPv6 and ARP as packets do that the
host forwards (net/bridge/br_netfilter_hooks.c). Nothing here changes any of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from netplugin.api.errors import NetpluginError
from netplugin.host.frame_filters import BaseChain
from netplugin.host.netlink import Channel
from netplugin.host.nfnetlink import Nfnetlink
from netplugin.host.nft_foreign import read_foreign

_PROC, _PROC_BRIDGE = Path("/proc/net"), Path("/proc/sys/net/bridge")
#: The switches of br_netfilter, by nft's name of the family whose rules they add bridged frames to.
SWITCHES: Mapping[str, str] = MappingProxyType(
    {"ip": "bridge-nf-call-iptables", "ip6": "bridge-nf-call-ip6tables", "arp": "bridge-nf-call-arptables"}
)


@dataclass(frozen=True)
class ForeignFilters:
    """What other programs have set up.

    ``bridged`` are the families to which br_netfilter adds the frames of all bridges. ``unread``: why not
    all is known; empty if it is.
    """

    chains: tuple[BaseChain, ...] = ()
    bridged: frozenset[str] = frozenset()
    unread: str = ""


class ForeignReader:
    """Reads them. The rules are read again only if others have changed nftables. Not thread-safe."""

    def __init__(self, ours: frozenset[tuple[str, str]], kernel: Nfnetlink) -> None:
        """``ours``: the tables of the agent, by family and name. ``kernel``: what it writes them with."""
        self._ours = ours
        self._kernel = kernel
        self._chains: tuple[BaseChain, ...] = ()
        self._stamp: int | None = None

    def read(self, deadline: float) -> ForeignFilters:
        """An error is returned in ``unread``."""
        chains, unread = tuple[BaseChain, ...](), list[str]()
        try:
            chains = self._kernel.read("foreign-filters", deadline, self._read)
        except NetpluginError as error:
            self._stamp = None
            unread.append(error.detail)
        if legacy := legacy_tables():
            unread.append(f"{', '.join(legacy)} of iptables-legacy or arptables-legacy are not judged")
        return ForeignFilters(chains, bridged_families(), "; ".join(unread))

    def _read(self, channel: Channel, stamp: int) -> tuple[BaseChain, ...]:
        if stamp != self._stamp:
            self._chains, self._stamp = read_foreign(channel, self._ours), stamp
        return self._chains


def bridged_families() -> frozenset[str]:
    """Return the families to which br_netfilter adds the frames of all bridges."""
    found = set()
    for family, name in SWITCHES.items():
        with contextlib.suppress(OSError):  # without br_netfilter
            if int((_PROC_BRIDGE / name).read_text()):
                found.add(family)
    return frozenset(found)


def legacy_tables() -> list[str]:
    """Return the tables for filters of the programs before nftables, each with its family: ``ip filter``."""
    found = []
    for family in ("ip", "ip6", "arp"):
        with contextlib.suppress(OSError):  # the kernel has no such tables
            names = (_PROC / f"{family}_tables_names").read_text().split()
            found += [f"{family} {each}" for each in sorted(names) if each != "nat"]
    return found

"""The packet filters of other programs in this network namespace, and br_netfilter, which adds bridges.

With br_netfilter, frames that a bridge forwards pass the rules of IPv4, IPv6 and ARP as packets do that the
host forwards (net/bridge/br_netfilter_hooks.c). Nothing here changes any of it.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pyroute2.netlink import NETLINK_NETFILTER
from pyroute2.netlink.nfnetlink import NFNLGRP_NFTABLES

from netplugin.api.errors import NetpluginError
from netplugin.host.frame_filters import BaseChain
from netplugin.host.kernel_events import KernelEventListener, queued, subscribed
from netplugin.host.netlink import Channel
from netplugin.host.nfnetlink import Nfnetlink, changed_tables
from netplugin.host.nft_foreign import read_foreign
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake
from netplugin.host.xtables import legacy_tables, read_legacy

_PROC = Path("/proc/sys/net/bridge")
#: The switches of br_netfilter, by nft's name of the family whose rules they add bridged frames to.
SWITCHES: Mapping[str, str] = MappingProxyType(
    {"ip": "bridge-nf-call-iptables", "ip6": "bridge-nf-call-ip6tables", "arp": "bridge-nf-call-arptables"}
)
#: How often the switches of br_netfilter are read, and the tables of iptables-legacy: the kernel reports
#: no change of them.
_SWITCHES_S, _LEGACY_S = 1.0, 10.0
_READ_S = 30.0
#: Reading takes one part of this of the watch's time at most, however often others change their rules.
_PAUSE = 10


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
    """Reads them. What is known is used again while nothing of nftables has changed. Thread-safe."""

    def __init__(self, ours: frozenset[tuple[str, str]]) -> None:
        """``ours``: the tables of the agent, by family and name."""
        self.ours = ours
        self._lock = threading.Lock()
        self._kernel = Nfnetlink()
        self._chains: tuple[BaseChain, ...] = ()
        self._stamp: int | None = None
        self._last: ForeignFilters | None = None

    def read(self, deadline: float, *, fresh: bool = True) -> ForeignFilters:
        """``fresh`` False: what was read last will do. An error is returned in ``unread``."""
        with self._lock:
            if self._last is None or fresh:
                self._last = self._read(deadline)
            return self._last

    def _read(self, deadline: float) -> ForeignFilters:
        chains, unread = tuple[BaseChain, ...](), list[str]()
        try:
            chains = self._nftables(deadline)
        except NetpluginError as error:
            self._stamp = None
            unread.append(error.detail)
        try:
            chains += read_legacy()
        except (OSError, LookupError, ValueError, struct.error) as error:
            unread.append(f"the tables of iptables-legacy: {error}")
        arp = [name for family, name in legacy_tables() if family == "arp"]
        unread += [f"arp {name} of arptables-legacy is not judged" for name in arp]
        return ForeignFilters(chains, bridged_families(), "; ".join(unread))

    def _nftables(self, deadline: float) -> tuple[BaseChain, ...]:
        def look(channel: Channel, stamp: int) -> tuple[BaseChain, ...]:
            if stamp != self._stamp:
                self._chains, self._stamp = read_foreign(channel, self.ours), stamp
            return self._chains

        return self._kernel.read("foreign-filters", deadline, look)


def bridged_families() -> frozenset[str]:
    """Return the families to which br_netfilter adds the frames of all bridges."""
    found = set()
    for family, name in SWITCHES.items():
        with contextlib.suppress(OSError):  # without br_netfilter
            if int((_PROC / name).read_text()):
                found.add(family)
    return frozenset(found)


class ForeignWatch(KernelEventListener):
    """Wakes the agent when other programs change what a frame meets.

    The kernel reports changes of nftables. The rest is read again and again.
    """

    def __init__(self, wake: Callable[[Wake], None], reader: ForeignReader, supervisor: Supervisor) -> None:
        """Raises: OSError if the kernel refuses the socket."""
        self._reader = reader
        self._known: ForeignFilters | None = None
        #: When it is read again at the latest, and at the earliest.
        self._due = self._rested = 0.0
        self._changes = subscribed(NETLINK_NETFILTER, NFNLGRP_NFTABLES)
        super().__init__("foreign-filters", wake, [self._changes], supervisor, _SWITCHES_S)

    def decode(self, own: frozenset[str] | None) -> list[Wake]:
        changed = self._is_changed() or bridged_families() != (self._known and self._known.bridged)
        if not changed and time.monotonic() < self._due:
            return []
        if self._stopped.wait(self._rested - time.monotonic()):
            return []
        begun = time.monotonic()
        before = self._known or self._reader.read(begun + _READ_S, fresh=False)
        self._known = self._reader.read(begun + _READ_S)
        ended = time.monotonic()
        self._due, self._rested = ended + _LEGACY_S, ended + _PAUSE * (ended - begun)
        return [Wake("the packet filters of other programs have changed")] if before != self._known else []

    def _is_changed(self) -> bool:
        """Whether another program has changed nftables, or it is not known."""
        changed = False
        for data in queued(self._changes):
            changed |= not data or not self._reader.ours.issuperset(changed_tables(data))
        return changed

"""Wake the agent when another process changes our links, static FDB entries, rate limits or nftables rules.

Without it, a flushed table (a reload of the system's own rules begins with ``nft flush ruleset``) would
leave every VM without its nftables rules until the next periodic check of the whole host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from pyroute2.netlink import (
    NETLINK_ADD_MEMBERSHIP,
    NETLINK_DROP_MEMBERSHIP,
    NETLINK_NETFILTER,
    NETLINK_ROUTE,
    SOL_NETLINK,
)
from pyroute2.netlink.nfnetlink import NFNLGRP_NFTABLES
from pyroute2.netlink.rtnl import (
    RTM_DELLINK,
    RTM_DELNEIGH,
    RTM_DELQDISC,
    RTM_DELTFILTER,
    RTM_NEWLINK,
    RTM_NEWNEIGH,
    RTNLGRP_LINK,
    RTNLGRP_NEIGH,
    RTNLGRP_TC,
)

from drivers.linuxbridge import filters
from drivers.linuxbridge.obstacles import OURS
from drivers.linuxbridge.segments import (
    PORT_MARK,
    SERVICE_MARK,
    SHAPER_MARK,
    UPLINK_MARK,
    bridge_mark,
    is_ours,
    marked_port,
    port_of,
    service_of,
)
from netplugin.host import fdb
from netplugin.host.kernel_events import KernelEventListener, queued, subscribed
from netplugin.host.link_messages import link_event, name_of, port_event
from netplugin.host.link_values import Bridge, Link, LinkEvent, PortOptions
from netplugin.host.links import Links
from netplugin.host.names import provisional_mac
from netplugin.host.nfnetlink import changed_tables
from netplugin.host.rtnetlink_messages import Message, received
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake

#: The messages that are received. The kernel reports a qdisc when one is read, too.
_OF_LINKS = (RTM_NEWLINK, RTM_DELLINK, RTM_DELQDISC, RTM_DELTFILTER)
_OF_ENTRIES = (RTM_NEWNEIGH, RTM_DELNEIGH)

LOST = Wake("events of links were lost")
#: Number of events that are kept for the observations under way: enough for some hundred new devices.
_MOST_PASSED = 1024


class LinkNews:
    """Decides which events of links matter, by what was observed last. Not thread-safe."""

    def __init__(self, interfaces: Callable[[], frozenset[str]], devices: Links) -> None:
        """``interfaces`` returns the uplinks."""
        self._interfaces = interfaces
        self._devices = devices
        #: The devices that our rules name, and the names of our bridges, by the last observation.
        self._services: frozenset[str] = frozenset()
        self._bridges: frozenset[str] = frozenset()
        #: Taps whose carrier matters too.
        self.followed: frozenset[str] = frozenset()
        self._known: dict[str, Link] = {}
        # The last events that woke nobody, numbered, and whether only the carrier changed: an observation
        # under way can make them matter.
        self._passed: deque[tuple[int, LinkEvent, bool]] = deque(maxlen=_MOST_PASSED)
        #: The number of the last event that woke nobody.
        self.number = 0

    def observed(self, since: int, services: frozenset[str], bridges: frozenset[str]) -> list[Wake]:
        """Use what was observed. Events after number ``since`` may be later than that: decide them again."""
        self._services, self._bridges = services, bridges
        if self.number - since > _MOST_PASSED:
            return [LOST]
        late = [(event, only_carrier) for number, event, only_carrier in self._passed if number > since]
        return [wake for event, only_carrier in late for wake in self._wakes(event, only_carrier)]

    def wakes_of(self, event: LinkEvent, own: frozenset[str]) -> list[Wake]:
        """Decide an event. ``own``: names of the devices that we have just changed."""
        link = event.link
        before = self._known.pop(link.name, None)
        if not event.gone:
            self._known[link.name] = link
        only_carrier = before is not None and _settings(before) == _settings(link)
        if before is not None and only_carrier and before.carrier == link.carrier:
            return []  # nothing that is compared has changed
        if _names(link) & own:
            return []
        wakes = self._wakes(event, only_carrier)
        if not (wakes or only_carrier or before is None) and bridge_mark(before.alias):
            wakes = [Wake(f"bridge {link.name} has changed")]
        if not wakes:
            self.number += 1
            self._passed.append((self.number, event, only_carrier))
        return wakes

    def wakes_of_port(self, name: str, options: PortOptions, own: frozenset[str]) -> list[Wake]:
        """Decide what a bridge says of its port. ``own``: see ``wakes_of``."""
        known = self._known.get(name)
        if known is not None:
            return self.wakes_of(LinkEvent(replace(known, port=options)), own)
        link = self._devices.get(name) if name not in own else None
        return self._wakes(LinkEvent(link), only_carrier=False) if link else []

    def is_on_bridge(self, bridge: str) -> bool:
        return bridge in self._bridges

    def _wakes(self, event: LinkEvent, only_carrier: bool) -> list[Wake]:
        link, gone = event.link, event.gone
        # Who may open a tap is set right when no process has it open any more.
        matters = link.kind == "tun" and not link.use.is_for_root
        listened_to = self._interfaces() | self._services | self.followed
        if only_carrier and not matters and link.name not in listened_to:
            return []
        alias = link.alias or ""
        for mark in (PORT_MARK, SHAPER_MARK, SERVICE_MARK):
            if alias.startswith(mark):
                return [Wake(f"device {link.name} changed", frozenset({marked_port(alias, mark)}))]
        if alias.startswith(UPLINK_MARK) or link.name in self._interfaces():
            return [Wake(f"uplink {link.name} changed")]
        if link.name in self._services:
            return [Wake(f"device {link.name} changed")]
        if link.master in self._bridges and not gone:
            return [Wake(f"{link.name} is on a bridge of netplugin")]
        # A bridge changes with every member; these changes affect all of its ports.
        of_bridge = bridge_mark(link.alias)
        if of_bridge is None:
            return []
        if gone or not link.up:
            return [Wake(f"bridge {link.name} is {'gone' if gone else 'down'}")]
        same_mac = link.address == provisional_mac(of_bridge[0].bridge)
        if not same_mac or (isinstance(link.data, Bridge) and Bridge().differences(link.data)):
            return [Wake(f"bridge {link.name} has changed")]
        return []


def _settings(link: Link) -> Link:
    """What is compared: without what changes when a VM starts or stops."""
    return replace(link, carrier=False, qdisc="")


class BridgeWatch(KernelEventListener):
    """Listener for events of links, FDBs, tc and nftables.

    Own changes are given as links; rule changes within ``suppress_own_events`` count as own. Events that the
    kernel dropped count as changes by others.
    """

    def __init__(
        self, wake: Callable[[Wake], None], interfaces: Callable[[], frozenset[str]], supervisor: Supervisor
    ) -> None:
        """``interfaces`` returns the uplinks. Raises: OSError if the kernel refuses the sockets."""
        self._devices = Links()
        self._news = LinkNews(interfaces, self._devices)
        self._links = subscribed(NETLINK_ROUTE, RTNLGRP_LINK, RTNLGRP_TC)
        self._rules = subscribed(NETLINK_NETFILTER, NFNLGRP_NFTABLES)
        #: Bridges report the MACs that they learn; it listens while the agent waits for a guest.
        self._learned = subscribed(NETLINK_ROUTE)
        self._entries = subscribed(NETLINK_ROUTE, RTNLGRP_NEIGH, only=fdb.of_static_entries())
        #: By the index of its tap: the ports whose guests the agent waits for, with the name of the tap.
        self._waiting: dict[int, tuple[str, str]] = {}
        sources = (self._links, self._entries, self._rules, self._learned)
        super().__init__("linuxbridge-watch", wake, sources, supervisor)

    def follow(self, waiting: Mapping[int, tuple[str, str]]) -> None:
        """Wake for the first frame and the carrier of these taps: their ports and names, by index."""
        with self._lock:
            if bool(waiting) != bool(self._waiting):
                change = NETLINK_ADD_MEMBERSHIP if waiting else NETLINK_DROP_MEMBERSHIP
                self._learned.setsockopt(SOL_NETLINK, change, RTNLGRP_NEIGH)
            self._waiting = dict(waiting)
            self._news.followed = frozenset(name for _, name in waiting.values())

    def number(self) -> int:
        """Return the number to give ``observed``; read it before the observation."""
        return self._news.number

    def observed(self, since: int, services: frozenset[str], bridges: frozenset[str]) -> None:
        """Use what was observed: the devices that our rules name, and the names of our bridges."""
        with self._lock:
            self._tell(self._news.observed(since, services, bridges))

    def decode(self, own: frozenset[str] | None) -> Iterator[Wake]:
        for message in received(queued(self._links), _OF_LINKS):
            if message is None:
                yield LOST
            elif message.kind in (RTM_DELQDISC, RTM_DELTFILTER):
                yield from self._of_rate(message["index"], own or frozenset())
            elif (event := link_event(message)) is not None:
                yield from self._news.wakes_of(event, own or frozenset())
            elif (of_port := port_event(message)) is not None:
                yield from self._news.wakes_of_port(*of_port, own or frozenset())
        for message in received(queued(self._entries), _OF_ENTRIES):
            yield from self._of_entry(message, own or frozenset()) if message is not None else [LOST]
        for message in received(queued(self._learned), (RTM_NEWNEIGH,)):
            ports = {port_id for port_id, _ in self._waiting.values()}
            if message is not None:
                ports &= {self._waiting.get(fdb.changed_port(message) or 0, ("",))[0]}
            if ports:
                yield Wake("a VM that comes sends frames", frozenset(ports))
        for data in queued(self._rules):
            if not data:  # also after a change of our own: those of others may be among the lost
                yield Wake("events of nftables were lost")
            elif own is None and not OURS.isdisjoint(changed_tables(data)):
                yield Wake(f"nftables tables named {filters.TABLE} were changed")

    def _of_entry(self, entry: Message, own: frozenset[str]) -> list[Wake]:
        """Report a static entry that others have made or removed, of a bridge or a VXLAN device.

        Each device has one of its own MAC. If another port had an entry of that, it is removed.
        """
        name, gone = name_of(entry["ifindex"]), entry.kind == RTM_DELNEIGH
        link = self._devices.get(name) if name not in own else None
        if link is None or entry.attributes.mac("NDA_LLADDR") == link.address:
            return []  # a device that is removed has an event of its own
        if not (is_ours(link) or self._news.is_on_bridge(name_of(entry.attributes.number("NDA_MASTER")))):
            return []
        ports = _ports_of(link) if gone else None
        return [Wake(f"a static entry of {name} was {'removed' if gone else 'made'}", ports)]

    def _of_rate(self, index: int, own: frozenset[str]) -> list[Wake]:
        """Report a removed qdisc or filter. Additions are ignored, because the kernel also sends them when
        one is read."""
        name = name_of(index)
        link = self._devices.get(name) if name not in own else None
        if link is None or not is_ours(link):
            return []  # also if it was removed with its device, which has an event of its own
        return [Wake(f"a guard or a rate of {name} was removed", _ports_of(link))]


def _ports_of(link: Link) -> frozenset[str] | None:
    """The port that a device of ours is for; None if it is for several."""
    mark = service_of(link)
    port_id = mark.port_id if mark else port_of(link)
    return frozenset({port_id}) if port_id else None


def _names(link: Link) -> frozenset[str]:
    """The names by which a change knows the device: a bridge by its derived one too."""
    mark = bridge_mark(link.alias)
    return frozenset({link.name, *((mark[0].bridge,) if mark else ())})

"""What was seen of the host: the observation that a plan is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivers.linuxbridge.changes import SeenMacs
from drivers.linuxbridge.segments import Segment, bridge_mark
from netplugin.backend import Observation
from netplugin.host.link_messages import Bond, BondMember, Link
from netplugin.host.nftables import Table
from netplugin.host.tc import Queueing
from netplugin.host.vxlan_filter import VxlanSources


@dataclass(frozen=True)
class SeenBridge:
    """One bridge of ours, with its members by name and the MTU of each."""

    link: Link
    members: Mapping[str, int] = field(default_factory=dict)

    @property
    def segment(self) -> Segment | None:
        """As its mark tells; None for one that was made and not yet marked."""
        mark = bridge_mark(self.link.alias)
        return mark[0] if mark else None

    @property
    def uplink(self) -> str:
        """What we put on it, as its mark tells."""
        mark = bridge_mark(self.link.alias)
        return mark[1] if mark else ""


@dataclass(frozen=True)
class SeenBond:
    """A bond that the operator made."""

    name: str
    bond: Bond
    members: tuple[BondMember, ...] = ()


@dataclass(frozen=True)
class SeenInterface:
    """An interface of the operator; not ours but for its master. ``bond``: what it is or stands on."""

    link: Link
    addresses: tuple[str, ...] = ()
    bond: SeenBond | None = None


@dataclass(frozen=True)
class Seen(Observation):
    """What the kernel has of the ports in question, of all segments and of the filters."""

    #: Links with a port's mark, by port id.
    taps: Mapping[str, Link] = field(default_factory=dict)
    #: Ours by name: bridges, uplinks that we made, devices that shape what the ports send.
    bridges: Mapping[str, SeenBridge] = field(default_factory=dict)
    uplinks: Mapping[str, Link] = field(default_factory=dict)
    shapers: Mapping[str, Link] = field(default_factory=dict)
    #: By device, of all taps and shapers in question and of the bridges that those are on.
    queueing: Mapping[str, Queueing] = field(default_factory=dict)
    #: By VXLAN device of ours; of those only whose segment has ports in question.
    peers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: By tap that is on a bridge.
    macs: Mapping[str, SeenMacs] = field(default_factory=dict)
    #: Who may send into VXLAN networks: None if no rule says, or if no such network is in question.
    sources: VxlanSources | None = None
    #: VLAN and VXLAN devices of others, by name.
    others: Mapping[str, Link] = field(default_factory=dict)
    #: Those of ``physical_interfaces``, and those that segments leave by.
    interfaces: Mapping[str, SeenInterface] = field(default_factory=dict)
    #: The interface that has ``local_ip``; None too if that is not set.
    underlay: SeenInterface | None = None
    #: Names of ours that links without our mark have.
    taken_names: frozenset[str] = frozenset()
    #: Our nftables table; of its port chains, those of the ports in question, or all.
    table: Table | None = None
    #: Chains (or entries of the map) in our table that belong to no port that was seen.
    stray_chains: frozenset[str] = frozenset()
    vhost_net: bool = True
    #: What flushes all rules when it starts: a file of the host's own firewall.
    flushing: str = ""

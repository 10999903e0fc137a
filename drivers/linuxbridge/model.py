"""What the linuxbridge backend observes of a host, and what it desires for an intent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from drivers.linuxbridge.commands import ObservedMacs, Tap
from drivers.linuxbridge.segments import Segment, bridge_mark
from netplugin.api.models import PortSpec
from netplugin.backend import Intent, Observation, Overlay
from netplugin.host.link_messages import BondMember, Link, LinuxBond
from netplugin.host.nftables import Table
from netplugin.host.tc import Queueing
from netplugin.host.vxlan import VxlanSources

# -- The observed state of the host for the linuxbridge backend, as ``plan`` needs it. ------------


@dataclass(frozen=True)
class ObservedBridge:
    """One bridge of ours, with its members by name and their MTU in bytes."""

    link: Link
    members: Mapping[str, int] = field(default_factory=dict)

    @property
    def segment(self) -> Segment | None:
        """The segment in the bridge's mark; None if the bridge was created but not marked yet."""
        mark = bridge_mark(self.link.alias)
        return mark[0] if mark else None

    @property
    def uplink(self) -> str:
        """The uplink that we attached, from the bridge's mark; empty if none."""
        mark = bridge_mark(self.link.alias)
        return mark[1] if mark else ""


@dataclass(frozen=True)
class ObservedBond:
    """A bond made by the operator."""

    name: str
    bond: LinuxBond
    members: tuple[BondMember, ...] = ()


@dataclass(frozen=True)
class ObservedInterface:
    """An interface of the operator; we change only its master. ``bond``: the bond it is or is stacked on."""

    link: Link
    addresses: tuple[str, ...] = ()
    bond: ObservedBond | None = None


@dataclass(frozen=True)
class BridgeObservation(Observation):
    """The observed state of the ports in scope, of all segments, and of the filters."""

    #: Links with a port's mark, by port ID.
    taps: Mapping[str, Link] = field(default_factory=dict)
    #: Our devices by name: bridges, uplinks that we made, and shapers (ifb) for what ports send.
    bridges: Mapping[str, ObservedBridge] = field(default_factory=dict)
    uplinks: Mapping[str, Link] = field(default_factory=dict)
    shapers: Mapping[str, Link] = field(default_factory=dict)
    #: By device: the taps and shapers in scope, and the bridges of these taps.
    queueing: Mapping[str, Queueing] = field(default_factory=dict)
    #: By VXLAN device of ours, only for segments that have ports in scope.
    peers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: By tap, for taps that are on a bridge.
    macs: Mapping[str, ObservedMacs] = field(default_factory=dict)
    #: The allowed senders of VXLAN networks; None if there is no table or no such network in scope.
    sources: VxlanSources | None = None
    #: VLAN and VXLAN devices that are not ours, by name.
    others: Mapping[str, Link] = field(default_factory=dict)
    #: The interfaces of ``physical_interfaces``, and those that segments use as uplinks.
    interfaces: Mapping[str, ObservedInterface] = field(default_factory=dict)
    #: The interface with the address ``local_ip``; None also if that is not set.
    underlay: ObservedInterface | None = None
    #: Names with our prefixes that links without our mark have.
    taken_names: frozenset[str] = frozenset()
    #: Our nftables table, with the port chains in scope.
    table: Table | None = None
    #: Chains or map entries in our table that belong to no observed port.
    stray_chains: frozenset[str] = frozenset()
    vhost_net: bool = True
    #: The configuration file of a host firewall that flushes all rules when it starts; empty if none.
    flushing: str = ""


# -- The desired state that an intent describes, as values for ``plan``. --------------------------


@dataclass(frozen=True)
class DesiredPort:
    tap: Tap
    spec: PortSpec
    segment: Segment
    overlay: Overlay | None

    @classmethod
    def of(cls, intent: Intent) -> Self:
        assert intent.spec is not None
        tap = Tap.of(intent.port_id, intent.spec, intent.stamp)
        return cls(tap, intent.spec, Segment.of(intent.spec.network), intent.overlay)

"""What the linuxbridge backend observes of a host, and what it desires for an intent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from drivers.linuxbridge.filters import fixed_mac
from drivers.linuxbridge.guard import NOTHING, port_guard
from drivers.linuxbridge.options import Settings
from drivers.linuxbridge.segments import (
    PORT_MARK,
    Segment,
    ServiceMark,
    bridge_mark,
    service_of,
    stamp_of,
    with_stamp,
    without_stamp,
)
from netplugin.api.models import PortSpec
from netplugin.backend import Intent, Observation, Overlay, TeamVf
from netplugin.host.cbpf import BpfProgram
from netplugin.host.foreign_filters import ForeignFilters
from netplugin.host.link_values import BondMember, Link, LinuxBond
from netplugin.host.names import TAP, TAP_GROUP, device_name, provisional_mac
from netplugin.host.nftables import Table
from netplugin.host.tc import Queueing, Tbf
from netplugin.host.vxlan_filter import VxlanSources

# -- The observed state of the host for the linuxbridge backend, as ``plan`` needs it. ------------


@dataclass(frozen=True)
class ObservedBridge:
    """One bridge of ours, with its members by name and their MTU in bytes."""

    link: Link
    members: Mapping[str, int] = field(default_factory=dict)
    #: The name of the bridge on the host, if it is another than the derived one, which ``link`` has.
    given: str = ""

    @property
    def is_found(self) -> bool:
        """Whether the kernel finds the bridge by its derived name."""
        return not self.given or self.link.name in self.link.altnames

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
class ObservedMacs:
    """Static MACs that a bridge has on a tap (``netplugin.host.fdb``).

    ``elsewhere``: the MAC of the port, if the bridge has it on another one.
    """

    here: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ObservedDevice:
    """A device of the host that is a service port, or was one when its rules were written.

    ``port_id`` is None if neither the device nor its rules name a port; ``link`` is None if there is
    no such device.
    """

    port_id: str | None
    link: Link | None

    @property
    def mark(self) -> ServiceMark | None:
        return service_of(self.link) if self.link else None


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
class BridgeObservation(Observation):
    """The observed state of the ports in scope, of all segments, and of the filters."""

    #: The options and physical networks that there were when it was made: those that a plan goes by.
    settings: Settings = field(default_factory=lambda: Settings({}))

    #: Links with a port's mark, by port ID: taps, and devices of service ports.
    taps: Mapping[str, Link] = field(default_factory=dict)
    #: By name, the devices of all service ports of the host, also of those that are not in scope.
    services: Mapping[str, ObservedDevice] = field(default_factory=dict)
    #: Names of taps that callers chose, also of ports that are not in scope.
    named_taps: frozenset[str] = frozenset()
    #: By port ID, names that we did not derive and that devices of the port have, or have in the rules.
    given_names: Mapping[str, frozenset[str]] = field(default_factory=dict)
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
    #: Ports whose taps' MACs are changed again and again.
    abused: frozenset[str] = frozenset()
    #: By port ID: the packet filters of other programs that drop frames of the port.
    obstacles: Mapping[str, tuple[Obstacle, ...]] = field(default_factory=dict)
    foreign_filters: ForeignFilters = field(default_factory=ForeignFilters)
    #: By uplink: the programs of others that see its frames.
    programs: Mapping[str, str] = field(default_factory=dict)
    #: By network manager of the host: our devices that it configures.
    managers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    vhost_net: bool = True
    #: The configuration file of a host firewall that flushes all rules when it starts; empty if none.
    flushing: str = ""

    def needed_mtu(self, member: str, mtu: int) -> int | None:
        """Return the MTU that a member of a bridge of ours needs there; None if it is no port of ours.

        ``mtu``: that of the device.
        """
        if member.startswith(TAP) or member in self.named_taps:
            return mtu
        device = self.services.get(member)
        return device.mark.mtu if device and device.mark else None

    def is_absent(self, tap: Tap) -> bool:
        """Whether a service port's device is known, by the rules of its port, and not on the host."""
        found = self.services.get(tap.name)
        return tap.service and found is not None and found.link is None

    def foreign(self) -> frozenset[str]:
        """Return the members of our bridges that are neither ports of ours nor uplinks."""
        members = {m: mtu for bridge in self.bridges.values() for m, mtu in bridge.members.items()}
        uplinks = {*self.uplinks, *self.interfaces, *(bridge.uplink for bridge in self.bridges.values())}
        return frozenset(name for name, mtu in members.items() if not self.needed_mtu(name, mtu)) - uplinks

    def names_of(self, port_id: str) -> frozenset[str]:
        """Return the names that devices of a port have, or can have."""
        return self.given_names.get(port_id, frozenset()) | {device_name(TAP, port_id)}


# -- The desired state that an intent describes, as values for ``plan``. --------------------------


# The maximum frame is the payload plus two MAC addresses, the EtherType and one VLAN tag, in bytes.
_FRAME_HEADER = 18


def tap_name(port_id: str, spec: PortSpec) -> str:
    """Return the name of a port's device."""
    return spec.device or spec.port_name or device_name(TAP, port_id)


@dataclass(frozen=True)
class Tap:
    """The desired state of one port's device, with its rate limits: a tap that the agent makes.

    Of a service port (``service``): a device of the host. It keeps its state, MTU and addresses, and
    stays when the port is deleted. ``mtu`` is the least that it needs.
    """

    port_id: str
    name: str
    bridge: str
    mtu: int
    multi_queue: bool
    #: The classic BPF program that filters frames entering from the VM.
    guard: BpfProgram
    #: The only MAC that the VM may use; empty if it may use others: the bridge then learns.
    mac: str = ""
    #: The MAC that the bridge leaves to a VF of the VM: neither fixed nor learned here; empty: none.
    left_to_vf: str = ""
    #: Whether it is not known yet if the VM has a VF: the bridge then has its MAC where it had it.
    vf_unknown: bool = False
    #: Rate limits of what the VM receives (ingress) and sends (egress).
    ingress: Tbf | None = None
    egress: Tbf | None = None
    #: The mark of the store; empty: leave the existing mark.
    stamp: str = ""
    service: bool = False
    #: Whether the bridge gives no frames to it but those that it has learned to be there.
    shut: bool = False

    @classmethod
    def of(cls, intent: Intent, team_vf: TeamVf) -> Tap:
        """Make the desired tap of a port that stays.

        Nothing passes one that is closed. While it waits for its guest, what the VM sends does, so its first
        frame shows the bridge that it runs here, and then what is sent to its MAC. It does not run yet, so
        nothing comes.
        """
        spec = intent.spec
        assert spec is not None
        mtu, is_open = spec.network.mtu, not intent.closed
        # The guest drops what comes to the standby then (``net_failover_handle_frame`` in
        # drivers/net/net_failover.c). What it sends there until it has the VF must not be learned.
        is_left = is_open and team_vf is TeamVf.IN_USE

        def rate(kbps: int | None) -> Tbf | None:
            return Tbf.of(kbps, mtu + _FRAME_HEADER) if kbps else None

        return cls(
            port_id=intent.port_id,
            name=tap_name(intent.port_id, spec),
            bridge=Segment.of(spec.network).bridge,
            mtu=mtu,
            multi_queue=spec.queues > 1,
            guard=port_guard(spec) if is_open or intent.follows_guest else NOTHING,
            mac=fixed_mac(spec) if is_open and not is_left else "",
            left_to_vf=spec.mac if is_left else "",
            vf_unknown=is_open and team_vf is TeamVf.UNKNOWN,
            shut=not is_open,
            ingress=rate(spec.qos.ingress_kbps),
            egress=rate(spec.qos.egress_kbps),
            stamp=intent.stamp,
            service=spec.device is not None,
        )

    @property
    def derived(self) -> str:
        """The name that the port's ID gives: of the tap, or its alternative one; and of its chain."""
        return device_name(TAP, self.port_id)

    @property
    def is_named(self) -> bool:
        """Whether the caller chose the name of the tap, so that nothing in it says that it is ours."""
        return not self.service and self.name != self.derived

    @property
    def group(self) -> int | None:
        """The interface group by which nftables knows the tap; None: any, the name says it."""
        return TAP_GROUP if self.is_named else None

    @property
    def address(self) -> str:
        """The tap's own MAC, which the bridge gives to the host: no VM has it."""
        return provisional_mac(self.derived)

    @property
    def mark(self) -> str:
        if self.service:
            return ServiceMark(self.port_id, self.name, self.mtu).alias
        return PORT_MARK + self.port_id

    @property
    def alias(self) -> str:
        return with_stamp(self.mark, self.stamp)

    def in_place(self, link: Link) -> bool:
        """Whether the device is on its bridge for frames of its MTU."""
        fits = without_stamp(link.alias) == self.mark if self.service else link.mtu == self.mtu
        return fits and link.master == self.bridge

    def must_be_remade(self, link: Link) -> bool:
        """Whether the tap must be recreated: the kernel cannot change its kind or multi-queue mode, and
        the name of a live port is never chosen again."""
        renamed = link.name != self.name and not (self.is_named and self.derived in link.altnames)
        other_use = self.service != (service_of(link) is not None)
        other_kind = link.kind != "tun" or link.multi_queue != self.multi_queue
        return renamed or other_use or (other_kind and not self.service)

    def learns(self, fixed: Collection[str]) -> bool:
        """Whether the bridge learns MACs at the tap, where these are fixed."""
        return not fixed and not self.left_to_vf

    def differs(self, link: Link) -> bool:
        """Whether anything that can be changed on a live tap differs from the desired state.

        ``vnet_hdr`` is ignored: the process that opens the tap sets it.
        """
        stamped = not self.stamp or stamp_of(link) == self.stamp
        grouped = self.group in (None, link.group)
        up = self.service or (link.up and not link.ipv6)
        return not (stamped and grouped and self.in_place(link) and up)

    def macs_differ(self, link: Link, macs: ObservedMacs) -> bool:
        """Whether the bridge has other MACs at the tap than it should, or sends it other frames."""
        # If two ports of a network have the same MAC, the bridge keeps the entry of the first.
        fixed = frozenset({self.mac} - {""} - macs.elsewhere)
        with_macs = self.vf_unknown or (link.port.learning, macs.here) == (self.learns(fixed), fixed)
        return not with_macs or link.port.flooding != (not self.shut)


@dataclass(frozen=True)
class DesiredPort:
    tap: Tap
    spec: PortSpec
    segment: Segment
    overlay: Overlay | None
    #: Of a standby: the tap if its VM had given its VF back, or taken it.
    otherwise: Tap | None = None

    @classmethod
    def of(cls, intent: Intent) -> Self:
        assert intent.spec is not None
        other = {TeamVf.IN_USE: TeamVf.FREE, TeamVf.FREE: TeamVf.IN_USE}.get(intent.team_vf)
        return cls(
            Tap.of(intent, intent.team_vf),
            intent.spec,
            Segment.of(intent.spec.network),
            intent.overlay,
            Tap.of(intent, other) if other else None,
        )

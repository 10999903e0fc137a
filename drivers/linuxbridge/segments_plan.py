"""Plan bridges, their uplinks and the peers of VXLAN networks (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from drivers.linuxbridge.bridge_names import NameBridge
from drivers.linuxbridge.commands import (
    AddPeer,
    AddUplink,
    CreateDevice,
    RemoveDevice,
    RemovePeer,
    RemoveUplink,
    ResetPort,
    SetAddress,
    SetBridge,
    SetDevice,
    SetGuard,
)
from drivers.linuxbridge.filter_commands import AllowPeers, ForgetPeers, RemoveVxlanTable
from drivers.linuxbridge.guard import NOTHING
from drivers.linuxbridge.model import BridgeObservation, DesiredPort, ObservedBridge
from drivers.linuxbridge.segments import UPLINK_MARK, Segment, SegmentDevice, bridge_of, is_ours
from drivers.linuxbridge.uplink_path import in_the_way, uplink_problem, way_out, wrong_family
from netplugin.backend import Change, Overlay
from netplugin.host.link_values import Bridge, Vlan, Vxlan
from netplugin.host.names import provisional_mac
from netplugin.host.vxlan_filter import VxlanKey, VxlanSources


@dataclass(frozen=True)
class DesiredUplink:
    """The desired uplink of a bridge: an interface name, with ``device`` if the agent makes it.

    ``fit`` false: keep the current uplink, because the desired one is not available.
    """

    name: str = ""
    fit: bool = True
    device: SegmentDevice | None = None
    #: None: unknown, so the existing peers stay.
    peers: frozenset[str] | None = None


@dataclass
class SegmentsPlan:
    """The changes to segments: ``closing``, ``gone`` and then ``made``, all before the changes to ports."""

    seen: BridgeObservation
    desired: Mapping[str, DesiredPort]
    leaving: Sequence[str]
    closing: list[Change] = field(default_factory=list)
    gone: list[Change] = field(default_factory=list)
    made: list[Change] = field(default_factory=list)
    #: VXLAN networks that are desired, or whose device stays.
    _networks: set[VxlanKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        used: dict[str, list[DesiredPort]] = {}
        for _, one in sorted(self.desired.items()):
            used.setdefault(one.segment.bridge, []).append(one)
        staying = {name: self._staying(bridge) for name, bridge in self.seen.bridges.items()}
        kept = {*used, *(name for name, members in staying.items() if members)}
        flat = {Segment(network).bridge: Segment(network) for network in self.seen.settings.kept}
        kept |= flat.keys() - self.seen.taken_names
        devices = {users[0].segment.device for users in used.values()}
        for name in sorted(kept):
            seen = self.seen.bridges.get(name)
            if seen is not None and seen.segment is not None:
                devices.add(seen.segment.device)
            self._keep(seen, used.get(name, ()), staying.get(name, {}), flat.get(name))
        for name in sorted(set(self.seen.bridges) - kept):
            self.gone.append(RemoveDevice(self._going(name), name, physical_network=self._network_of(name)))
        for name, link in sorted(self.seen.uplinks.items()):
            if name not in devices and link.master not in kept:
                network = self._network_of(link.master)
                self.gone.append(RemoveDevice(self._going(link.master), name, physical_network=network))
            elif isinstance(link.data, Vxlan):
                self._networks.add(_key(link.data))
        self.gone += self._unneeded_sources()

    def _keep(
        self,
        seen: ObservedBridge | None,
        users: Sequence[DesiredPort],
        staying: Mapping[str, int],
        kept: Segment | None,
    ) -> None:
        segment = kept or (users[0].segment if users else seen.segment if seen else None)
        mtus = [one.tap.mtu for one in users]
        mtus += [mtu for member in staying.items() if (mtu := self.seen.needed_mtu(*member))]
        mtus += [self.seen.settings.kept[kept.physical_network]] if kept else []
        if segment is None or not mtus:
            return  # no port of ours is left, and other members keep the bridge
        given = self.seen.settings.bridge_names.get(segment.bridge, "")
        if seen is not None and seen.given != given and not users and not staying:
            self.gone.append(RemoveDevice((), segment.bridge, physical_network=segment.physical_network))
            return  # the next round makes it again, with its name
        ids = tuple(one.tap.port_id for one in users)
        overlay = users[0].overlay if users else None
        uplink = self._uplink(segment, overlay, mtus, seen)
        bridge = bridge_of(segment, uplink.name, max(mtus), given)
        others, closing = len(self.made), len(self.closing)
        if seen is None:
            self.made.append(CreateDevice(ids, bridge))
            self.made.append(SetGuard(ids, bridge.name, NOTHING))
        else:
            queueing = self.seen.queueing.get(bridge.name)  # None: outside the observed scope
            if queueing is not None and queueing.guard != NOTHING:
                self.closing.append(SetGuard(ids, bridge.name, NOTHING))
            self._set_options(ids, bridge, seen)
            if given and not (seen.given == given and seen.is_found):
                self.made.append(NameBridge(ids, bridge, seen.given or bridge.name))
            self._take_off(ids, segment, seen, uplink)
            if bridge.differs(seen.link):
                self.made.append(SetDevice(ids, bridge))
        if uplink.device is not None:
            self._make(ids, bridge.name, uplink.device, uplink.peers)
        elif uplink.fit and uplink.name:
            if self.seen.interfaces[uplink.name].link.master != bridge.name:
                self.made.append(AddUplink(ids, uplink.name, bridge.name))
        for changes, start in ((self.closing, closing), (self.made, others)):
            network = segment.physical_network
            changes[start:] = [replace(change, physical_network=network) for change in changes[start:]]

    def _set_options(self, ids: tuple[str, ...], bridge: SegmentDevice, seen: ObservedBridge) -> None:
        """Set the options that a bridge and the port of its uplink have otherwise, each by itself."""
        made, has = bridge.made, seen.link.data
        if isinstance(made, Bridge) and isinstance(has, Bridge):
            self.closing += [SetBridge(ids, bridge.name, made, each) for each in made.differences(has)]
        there = self.seen.interfaces.get(seen.uplink)
        uplink = self.seen.uplinks.get(seen.uplink) or (there.link if there else None)
        for link in [seen.link, *([uplink] if uplink and is_ours(uplink) else [])]:
            if link.address != (own := provisional_mac(link.name)):
                self.closing.append(SetAddress(ids, link.name, own))
        if uplink is not None and uplink.master == bridge.name:
            options = uplink.port.deviations()
            self.closing += [ResetPort(ids, uplink.name, bridge.name, each) for each in options]

    def _uplink(
        self, segment: Segment, overlay: Overlay | None, mtus: Collection[int], seen: ObservedBridge | None
    ) -> DesiredUplink:
        """Return the uplink to use: the desired one if it is available, otherwise the current one.

        It is available if the smallest of these MTUs fits: ports with a larger one report that as their
        fault, and do not keep the uplink of the others from repair.
        """
        right = self._right_uplink(segment, overlay, max(mtus))
        if right is not None and self._fit(segment, overlay, min(mtus)):
            return right
        return DesiredUplink(seen.uplink if seen else "", fit=False)

    def _right_uplink(self, segment: Segment, overlay: Overlay | None, mtu: int) -> DesiredUplink | None:
        """Return the desired uplink; None if the network is not configured or not known here."""
        mark = UPLINK_MARK + segment.key
        if segment.network_id:
            if overlay is None:
                return None
            spec, own = overlay.spec, self.seen.settings.local_ip
            made = Vxlan(spec.vni, own, spec.udp_port)
            device = SegmentDevice(segment.device, mark, made, spec.mtu)
            # ``plan`` reports peers that the tunnel cannot have; the existing peers stay.
            fit = wrong_family(overlay, own) is None
            peers = frozenset(spec.peers) - {own} if fit else None
            return DesiredUplink(device.name, device=device, peers=peers)
        interface = way_out(segment, self.seen)
        if not interface:
            return None if interface is None else DesiredUplink()
        if segment.vlan_id is None:
            return DesiredUplink(interface)
        if (below := self.seen.interfaces.get(interface)) is not None:
            mtu = min(mtu, below.link.mtu)  # the kernel allows no more
        device = SegmentDevice(segment.device, mark, Vlan(interface, segment.vlan_id), mtu)
        return DesiredUplink(device.name, device=device)

    def _fit(self, segment: Segment, overlay: Overlay | None, mtu: int) -> bool:
        problems = (
            uplink_problem(segment, mtu, self.seen),
            in_the_way(segment, overlay, self.seen),
        )
        return problems == (None, None) and segment.device not in self.seen.taken_names

    def _take_off(
        self, ids: tuple[str, ...], segment: Segment, seen: ObservedBridge, uplink: DesiredUplink
    ) -> None:
        """Remove the current uplink if it is wrong."""
        if uplink.name == seen.uplink:
            return
        if segment.device in self.seen.uplinks and uplink.device is None:
            self.made.append(RemoveDevice(ids, segment.device))
        elif seen.uplink and seen.uplink in seen.members and seen.uplink != segment.device:
            self.made.append(RemoveUplink(ids, seen.uplink, seen.link.name))

    def _make(
        self, ids: tuple[str, ...], bridge: str, device: SegmentDevice, peers: frozenset[str] | None
    ) -> None:
        """Create the uplink device. It joins its bridge before it is up, so the host never answers on it."""
        link = self.seen.uplinks.get(device.name)
        if link is not None and device.must_be_remade(link):
            self.made.append(RemoveDevice(ids, device.name))
            link = None
        if peers is not None and isinstance(device.made, Vxlan):
            self._allow(ids, _key(device.made), peers)
        if link is None:
            self.made.append(CreateDevice(ids, device))
        has = self.seen.peers.get(device.name) if link else frozenset()
        if peers is not None and has is not None:
            self.made += [AddPeer(ids, device.name, peer) for peer in sorted(peers - has)]
            self.made += [RemovePeer(ids, device.name, peer) for peer in sorted(has - peers)]
        if link is None or link.master != bridge:
            self.made.append(AddUplink(ids, device.name, bridge))
        if link is None or device.differs(link):
            self.made.append(SetDevice(ids, device))

    def _allow(self, ids: tuple[str, ...], key: VxlanKey, peers: frozenset[str]) -> None:
        """Allow the peers before the device exists, so no other host can send into it meanwhile."""
        self._networks.add(key)
        sources = self.seen.sources or VxlanSources(sound=False)
        has = sources.peers_of(key)
        if not sources.sound or key not in sources.networks or has != peers:
            self.closing.append(AllowPeers(ids, key, peers, has - peers, base=not sources.sound))

    def _unneeded_sources(self) -> list[Change]:
        """Remove the allowed peers of networks that are no longer on this host."""
        sources = self.seen.sources
        if sources is None:
            return []
        if not self._networks:
            return [RemoveVxlanTable(())]
        return [
            ForgetPeers((), key, sources.peers_of(key)) for key in sorted(sources.networks - self._networks)
        ]

    def _staying(self, seen: ObservedBridge) -> dict[str, int]:
        """Return the members that neither this plan nor the uplink accounts for: they keep the bridge."""
        known = self.seen.settings.physical_interfaces.items()
        # A bridge without a mark (lost, or not written yet) is still recognized by its name.
        interfaces = {i for network, i in known if Segment(network).bridge == seen.link.name}
        placed = frozenset[str]().union(*(self.seen.names_of(i) for i in (*self.leaving, *self.desired)))
        gone = {*placed, seen.uplink, *interfaces, *self.seen.uplinks}
        return {name: mtu for name, mtu in seen.members.items() if name not in gone}

    def _network_of(self, bridge: str | None) -> str:
        """Return the physical network of a bridge that is there; empty if it has none."""
        seen = self.seen.bridges.get(bridge or "")
        return seen.segment.physical_network if seen and seen.segment else ""

    def _going(self, bridge: str | None) -> tuple[str, ...]:
        """Return the ports being removed that are on this bridge."""
        taps = self.seen.taps
        return tuple(i for i in self.leaving if i in taps and taps[i].master == bridge)


def _key(device: Vxlan) -> VxlanKey:
    return VxlanKey(device.port, device.vni)

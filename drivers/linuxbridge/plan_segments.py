"""Which bridges, uplinks and peers: from what is wanted and seen of the segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivers.linuxbridge.changes import (
    AddPeer,
    AddUplink,
    AllowPeers,
    CreateDevice,
    ForgetPeers,
    RemoveDevice,
    RemovePeer,
    RemoveUplink,
    RemoveVxlanTable,
    SetDevice,
    SetGuard,
)
from drivers.linuxbridge.guard import NOTHING
from drivers.linuxbridge.hops import in_the_way, uplink_problem, way_out, wrong_family
from drivers.linuxbridge.options import Settings
from drivers.linuxbridge.seen import Seen, SeenBridge
from drivers.linuxbridge.segments import UPLINK_MARK, Device, Segment, bridge_of
from drivers.linuxbridge.wanted import Wanted
from netplugin.backend import Change, Overlay
from netplugin.host.link_messages import Vlan, Vxlan
from netplugin.host.names import TAP, device_name
from netplugin.host.vxlan_filter import VxlanKey, VxlanSources


@dataclass(frozen=True)
class Uplink:
    """What a bridge should have: an interface by name; ``device`` if it is of our making.

    ``fit`` false: it is what the bridge has, whether that is right or not.
    """

    name: str = ""
    fit: bool = True
    device: Device | None = None
    #: None: not known, so they stay as they are.
    peers: frozenset[str] | None = None


@dataclass
class SegmentsPlan:
    """What must be done to segments: what goes, and then what is made, all before the ports."""

    settings: Settings
    seen: Seen
    wanted: Mapping[str, Wanted]
    leaving: Sequence[str]
    gone: list[Change] = field(default_factory=list)
    made: list[Change] = field(default_factory=list)
    #: Those that are wanted, or whose device stays.
    _networks: set[VxlanKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        used: dict[str, list[Wanted]] = {}
        for _, one in sorted(self.wanted.items()):
            used.setdefault(one.segment.bridge, []).append(one)
        staying = {name: self._staying(bridge) for name, bridge in self.seen.bridges.items()}
        kept = {*used, *(name for name, members in staying.items() if members)}
        devices = {users[0].segment.device for users in used.values()}
        for name in sorted(kept):
            seen = self.seen.bridges.get(name)
            if seen is not None and seen.segment is not None:
                devices.add(seen.segment.device)
            self._keep(seen, used.get(name, ()), staying.get(name, {}))
        for name in sorted(set(self.seen.bridges) - kept):
            self.gone.append(RemoveDevice(self._going(name), name))
        for name, link in sorted(self.seen.uplinks.items()):
            if name not in devices and link.master not in kept:
                self.gone.append(RemoveDevice(self._going(link.master), name))
            elif isinstance(link.data, Vxlan):
                self._networks.add(_key(link.data))
        self.gone += self._unneeded_sources()

    def _keep(
        self,
        seen: SeenBridge | None,
        users: Sequence[Wanted],
        staying: Mapping[str, int],
    ) -> None:
        segment = users[0].segment if users else seen.segment if seen else None
        mtus = [one.tap.mtu for one in users]
        mtus += [mtu for member, mtu in staying.items() if member.startswith(TAP)]
        if segment is None or not mtus:
            return  # none of ours is left on it, and the others hold it
        ids = tuple(one.tap.port_id for one in users)
        overlay = users[0].overlay if users else None
        uplink = self._uplink(segment, overlay, max(mtus), seen)
        bridge = bridge_of(segment, uplink.name, max(mtus))
        if seen is None:
            self.made.append(CreateDevice(ids, bridge))
            self.made.append(SetGuard(ids, bridge.name, NOTHING))
        else:
            queueing = self.seen.queueing.get(bridge.name)  # None: not in question
            if queueing is not None and queueing.guard != NOTHING:
                self.made.append(SetGuard(ids, bridge.name, NOTHING))
            self._take_off(ids, segment, seen, uplink)
            if bridge.differs(seen.link):
                self.made.append(SetDevice(ids, bridge))
        if uplink.device is not None:
            self._make(ids, bridge.name, uplink.device, uplink.peers)
        elif uplink.fit and uplink.name:
            if self.seen.interfaces[uplink.name].link.master != bridge.name:
                self.made.append(AddUplink(ids, bridge.name, uplink.name))

    def _uplink(
        self, segment: Segment, overlay: Overlay | None, mtu: int, seen: SeenBridge | None
    ) -> Uplink:
        """The uplink the bridge should have: the one that it has, until the right one can be had."""
        right = self._right_uplink(segment, overlay, mtu)
        if right is not None and self._fit(segment, overlay, mtu):
            return right
        return Uplink(seen.uplink if seen else "", fit=False)

    def _right_uplink(self, segment: Segment, overlay: Overlay | None, mtu: int) -> Uplink | None:
        """None if it is not known: the network is none of the configuration, or of these ports."""
        mark = UPLINK_MARK + segment.key
        if segment.network_id:
            if overlay is None:
                return None
            spec, own = overlay.spec, self.settings.local_ip
            made = Vxlan(spec.vni, own, spec.udp_port)
            device = Device(segment.device, mark, made, spec.mtu)
            # Peers that the tunnel cannot have are told (see ``plan``), and those there are stay.
            fit = wrong_family(self.settings, overlay) is None
            peers = frozenset(spec.peers) - {own} if fit else None
            return Uplink(device.name, device=device, peers=peers)
        interface = way_out(self.settings, segment, self.seen)
        if not interface:
            return None if interface is None else Uplink()
        if segment.vlan_id is None:
            return Uplink(interface)
        device = Device(segment.device, mark, Vlan(interface, segment.vlan_id), mtu)
        return Uplink(device.name, device=device)

    def _fit(self, segment: Segment, overlay: Overlay | None, mtu: int) -> bool:
        problems = (
            uplink_problem(self.settings, segment, mtu, self.seen),
            in_the_way(self.settings, segment, overlay, self.seen),
        )
        return problems == (None, None) and segment.device not in self.seen.taken_names

    def _take_off(
        self, ids: tuple[str, ...], segment: Segment, seen: SeenBridge, uplink: Uplink
    ) -> None:
        """What is on the bridge and should not be, or not as it is."""
        if uplink.name == seen.uplink:
            return
        if segment.device in self.seen.uplinks and uplink.device is None:
            self.made.append(RemoveDevice(ids, segment.device))
        elif seen.uplink and seen.uplink in seen.members and seen.uplink != segment.device:
            self.made.append(RemoveUplink(ids, seen.link.name, seen.uplink))

    def _make(
        self, ids: tuple[str, ...], bridge: str, device: Device, peers: frozenset[str] | None
    ) -> None:
        """On its bridge before it is up, so that the host itself never answers on it."""
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
            self.made.append(AddUplink(ids, bridge, device.name))
        if link is None or device.differs(link):
            self.made.append(SetDevice(ids, device))

    def _allow(self, ids: tuple[str, ...], key: VxlanKey, peers: frozenset[str]) -> None:
        """Before the device is there, and with it whoever sends to it."""
        self._networks.add(key)
        sources = self.seen.sources or VxlanSources(sound=False)
        has = sources.peers_of(key)
        if not sources.sound or key not in sources.networks or has != peers:
            self.made.append(AllowPeers(ids, key, peers, has - peers))

    def _unneeded_sources(self) -> list[Change]:
        """Of networks that are on this host no more."""
        sources = self.seen.sources
        if sources is None:
            return []
        if not self._networks:
            return [RemoveVxlanTable(())]
        return [
            ForgetPeers((), key, sources.peers_of(key))
            for key in sorted(sources.networks - self._networks)
        ]

    def _staying(self, seen: SeenBridge) -> dict[str, int]:
        """Members that are neither ours to place now nor the uplink: they keep the bridge."""
        known = self.settings.physical_interfaces.items()
        # A bridge that lost its mark, or has none yet, still has its name.
        interfaces = {i for network, i in known if Segment(network).bridge == seen.link.name}
        placed = {device_name(TAP, i) for i in (*self.leaving, *self.wanted)}
        gone = {*placed, seen.uplink, *interfaces, *self.seen.uplinks}
        return {name: mtu for name, mtu in seen.members.items() if name not in gone}

    def _going(self, bridge: str | None) -> tuple[str, ...]:
        """The ports that leave with it."""
        taps = self.seen.taps
        return tuple(i for i in self.leaving if i in taps and taps[i].master == bridge)


def _key(device: Vxlan) -> VxlanKey:
    return VxlanKey(device.port, device.vni)

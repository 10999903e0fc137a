"""Plan the changes of the kernel: taps, bridges, uplinks, VXLAN peers and rate limits (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from drivers.linuxbridge import filters
from drivers.linuxbridge.bridge_names import NameBridge
from drivers.linuxbridge.commands import (
    AddPeer,
    AddUplink,
    CreateDevice,
    CreateTap,
    RemoveDevice,
    RemoveFilter,
    RemovePeer,
    RemoveTable,
    RemoveTap,
    RemoveUplink,
    RenameTap,
    SetBase,
    SetDevice,
    SetFilter,
    SetGuard,
    SetTap,
    ShutOut,
    device_in_the_way,
)
from drivers.linuxbridge.guard import NOTHING
from drivers.linuxbridge.model import BridgeObservation, DesiredPort, ObservedBridge, ObservedMacs, Tap
from drivers.linuxbridge.options import Settings
from drivers.linuxbridge.rates import set_rates, unneeded_shapers
from drivers.linuxbridge.segments import (
    UPLINK_MARK,
    Segment,
    SegmentDevice,
    bridge_of,
    service_of,
)
from drivers.linuxbridge.service_ports import PlaceDevice, ReleaseDevice
from drivers.linuxbridge.uplink_path import (
    in_the_way,
    interface_conflict,
    no_local_ip,
    uplink_problem,
    way_out,
    wrong_family,
)
from drivers.linuxbridge.vxlan_senders import AllowPeers, ForgetPeers, RemoveVxlanTable
from netplugin.api.errors import BackendUnavailable, NetpluginError
from netplugin.backend import Change, Intent, Overlay, Plan
from netplugin.host.link_messages import Link, Vlan, Vxlan
from netplugin.host.names import SHAPER, TAP, device_name
from netplugin.host.nftables import Chain, Table
from netplugin.host.tc import Queueing
from netplugin.host.vxlan_filter import VxlanKey, VxlanSources

# -- Plan the bridges, uplinks and VXLAN peers of segments. ---------------------------------------


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
    """The changes to segments: ``gone`` and then ``made``, both before the changes to ports."""

    settings: Settings
    seen: BridgeObservation
    wanted: Mapping[str, DesiredPort]
    leaving: Sequence[str]
    gone: list[Change] = field(default_factory=list)
    made: list[Change] = field(default_factory=list)
    #: VXLAN networks that are desired, or whose device stays.
    _networks: set[VxlanKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        used: dict[str, list[DesiredPort]] = {}
        for _, one in sorted(self.wanted.items()):
            used.setdefault(one.segment.bridge, []).append(one)
        staying = {name: self._staying(bridge) for name, bridge in self.seen.bridges.items()}
        kept = {*used, *(name for name, members in staying.items() if members)}
        flat = {Segment(network).bridge: Segment(network) for network in self.settings.kept}
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
        mtus += [self.settings.kept[kept.physical_network]] if kept else []
        if segment is None or not mtus:
            return  # no port of ours is left, and other members keep the bridge
        given = self.settings.bridge_names.get(segment.bridge, "")
        if seen is not None and seen.given != given and not users and not staying:
            self.gone.append(RemoveDevice((), segment.bridge, physical_network=segment.physical_network))
            return  # the next round makes it again, with its name
        ids = tuple(one.tap.port_id for one in users)
        overlay = users[0].overlay if users else None
        uplink = self._uplink(segment, overlay, mtus, seen)
        bridge = bridge_of(segment, uplink.name, max(mtus), given)
        others = len(self.made)
        if seen is None:
            self.made.append(CreateDevice(ids, bridge))
            self.made.append(SetGuard(ids, bridge.name, NOTHING))
        else:
            queueing = self.seen.queueing.get(bridge.name)  # None: outside the observed scope
            if queueing is not None and queueing.guard != NOTHING:
                self.made.append(SetGuard(ids, bridge.name, NOTHING))
            if given and not (seen.given == given and seen.is_found):
                self.made.append(NameBridge(ids, bridge, seen.given or bridge.name))
            self._take_off(ids, segment, seen, uplink)
            if bridge.differs(seen.link):
                self.made.append(SetDevice(ids, bridge))
        if uplink.device is not None:
            self._make(ids, bridge.name, uplink.device, uplink.peers)
        elif uplink.fit and uplink.name:
            if self.seen.interfaces[uplink.name].link.master != bridge.name:
                self.made.append(AddUplink(ids, bridge.name, uplink.name))
        own = [replace(change, physical_network=segment.physical_network) for change in self.made[others:]]
        self.made[others:] = own

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
            spec, own = overlay.spec, self.settings.local_ip
            made = Vxlan(spec.vni, own, spec.udp_port)
            device = SegmentDevice(segment.device, mark, made, spec.mtu)
            # ``plan`` reports peers that the tunnel cannot have; the existing peers stay.
            fit = wrong_family(self.settings, overlay) is None
            peers = frozenset(spec.peers) - {own} if fit else None
            return DesiredUplink(device.name, device=device, peers=peers)
        interface = way_out(self.settings, segment, self.seen)
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
            uplink_problem(self.settings, segment, mtu, self.seen),
            in_the_way(self.settings, segment, overlay, self.seen),
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
            self.made.append(RemoveUplink(ids, seen.link.name, seen.uplink))

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
            self.made.append(AddUplink(ids, bridge, device.name))
        if link is None or device.differs(link):
            self.made.append(SetDevice(ids, device))

    def _allow(self, ids: tuple[str, ...], key: VxlanKey, peers: frozenset[str]) -> None:
        """Allow the peers before the device exists, so no other host can send into it meanwhile."""
        self._networks.add(key)
        sources = self.seen.sources or VxlanSources(sound=False)
        has = sources.peers_of(key)
        if not sources.sound or key not in sources.networks or has != peers:
            self.made.append(AllowPeers(ids, key, peers, has - peers, base=not sources.sound))

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
        known = self.settings.physical_interfaces.items()
        # A bridge without a mark (lost, or not written yet) is still recognized by its name.
        interfaces = {i for network, i in known if Segment(network).bridge == seen.link.name}
        placed = frozenset[str]().union(*(self.seen.names_of(i) for i in (*self.leaving, *self.wanted)))
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


# -- Plan the changes from the observed to the desired state of the kernel. Pure. -----------------


def make_plan(settings: Settings, intents: Sequence[Intent], seen: BridgeObservation) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    wanted: dict[str, DesiredPort] = {}
    refused: dict[str, NetpluginError] = {}
    kept: dict[str, NetpluginError] = {}
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        one = DesiredPort.of(intent)
        error = _refusal(settings, one, seen)
        if error:
            refused[intent.port_id] = error
            continue
        wanted[intent.port_id] = one
        if error := _unconfigured(settings, one, seen):
            kept[intent.port_id] = error
    leaving = tuple(sorted(i.port_id for i in intents if i.spec is None))
    # A service port whose device is gone needs no bridge until the device is there again.
    here = {i: one for i, one in wanted.items() if not seen.is_absent(one.tap)}
    segments = SegmentsPlan(settings, seen, here, leaving)
    # A tap joins its bridge only after its guard, filter and rates are set, and stays there until
    # the whole tap is removed.
    ports = _Ports(seen, wanted, leaving)
    changes = (*segments.gone, *segments.made, *ports.changes())
    return Plan(changes, refused, kept)


def _refusal(settings: Settings, wanted: DesiredPort, seen: BridgeObservation) -> NetpluginError | None:
    tap, segment, overlay = wanted.tap, wanted.segment, wanted.overlay
    names = (tap.name, tap.bridge, segment.device, *([tap.derived] if tap.is_named else []))
    for name in (*names, *([device_name(SHAPER, tap.port_id)] if tap.egress else [])):
        if name in seen.taken_names:
            return device_in_the_way(settings.bridge_names.get(name, name))
    link = seen.taps.get(tap.port_id)
    if link is not None and tap.in_place(link):
        # A port that is in place stays; problems of its uplink are reported as a fault.
        return _new_peers_of_the_wrong_family(settings, wanted, seen)
    if error := _unconfigured(settings, wanted, seen):
        return error
    return uplink_problem(settings, segment, tap.mtu, seen) or in_the_way(settings, segment, overlay, seen)


def _new_peers_of_the_wrong_family(
    settings: Settings, wanted: DesiredPort, seen: BridgeObservation
) -> NetpluginError | None:
    """Refuse new peers of the wrong family. If the peers are unchanged, ``local_ip`` was changed."""
    has, overlay = seen.peers.get(wanted.segment.device), wanted.overlay
    if has is None or overlay is None or has == set(overlay.spec.peers) - {settings.local_ip}:
        return None
    return wrong_family(settings, overlay)


def _unconfigured(settings: Settings, wanted: DesiredPort, seen: BridgeObservation) -> NetpluginError | None:
    """Return the error if the configuration or the network's definition does not allow a new port."""
    network, network_id = wanted.segment.physical_network, wanted.segment.network_id
    if network_id and wanted.overlay is None:
        return BackendUnavailable(
            f"network {network_id} is not known on this host",
            step="plan",
            fix=f"PUT /v1/networks/{network_id}",
        )
    if network and network not in settings.physical_interfaces:
        return BackendUnavailable(
            f"{network} is not in [linuxbridge] physical_interfaces any more",
            step="plan",
            fix=f"add {network} to it again",
        )
    if network_id and not settings.local_ip:
        return no_local_ip()
    return wrong_family(settings, wanted.overlay) or interface_conflict(settings, wanted.segment, seen)


@dataclass(frozen=True)
class _Ports:
    """Plan the taps with their filters and rates; each method plans one part."""

    seen: BridgeObservation
    wanted: Mapping[str, DesiredPort]
    leaving: tuple[str, ...]

    def changes(self) -> list[Change]:
        gone: list[Change] = []
        made: list[Change] = []
        guards: list[Change] = []
        rates: list[Change] = []
        plugged: list[Change] = []
        for port_id in self.leaving:
            if port_id in self.seen.taps:
                gone.append(_removal(port_id, self.seen.taps[port_id]))
        for port_id, one in sorted(self.wanted.items()):
            tap, link = one.tap, self.seen.taps.get(port_id)
            if link is not None and tap.must_be_remade(link):
                gone.append(_removal(port_id, link))
                link = None
            elif link is not None and link.name != tap.name:
                gone.append(RenameTap((port_id,), tap, link.name))
                continue  # the next round has it by its name
            if tap.service:
                plugged += self._place(tap, link)
                continue
            if link is None:
                made.append(CreateTap((port_id,), tap))
            found = self.seen.queueing.get(tap.name, Queueing()) if link else Queueing()
            if found.guard != tap.guard:
                guards.append(SetGuard((port_id,), tap.name, tap.guard))
            rates += set_rates(tap, link, self.seen)
            if link is None or tap.differs(link, self.seen.macs.get(tap.name, ObservedMacs())):
                plugged.append(SetTap((port_id,), tap))
        rates += unneeded_shapers(self.wanted, self.leaving, self.seen)
        return [*gone, *made, *guards, *self.filters(), *rates, *plugged]

    def _place(self, tap: Tap, link: Link | None) -> list[Change]:
        """Plan a service port's device. One that is gone is reported as the port's fault."""
        if self.seen.is_absent(tap):
            return []
        guarded = self.seen.queueing.get(tap.name, Queueing()).guard == tap.guard
        if link and guarded and not tap.differs(link, self.seen.macs.get(tap.name, ObservedMacs())):
            return []
        return [PlaceDevice((tap.port_id,), tap)]

    def filters(self) -> list[Change]:
        table = self.seen.table
        chains = table.chains if table else {}
        maps = table.maps if table else {}
        linked = maps.get(filters.PORTS, {})
        names = table.names if table else frozenset()
        gone = {device_name(TAP, i): i for i in self.leaving}
        mine = {name for i, one in self.wanted.items() for name in (one.tap.name, device_name(TAP, i))}
        foreign = self.seen.foreign() - mine
        strays = self.seen.stray_chains - mine - gone.keys() - foreign
        if not self._needed(names - filters.SHARED - gone.keys() - strays):
            ports = tuple(i for name, i in gone.items() if name in names)
            return [RemoveTable(ports)] if table else []
        changes: list[Change] = []
        remake = _wrong_hooks(chains)
        if remake or _base_differs(table, chains):
            changes.append(SetBase(tuple(sorted(self.wanted)), remake))
        for port_id, one in sorted(self.wanted.items()):
            name, key = device_name(TAP, port_id), one.tap.name
            target = linked.get(key, "")
            listed = not one.tap.service or key in maps.get(filters.SERVICES, {})
            if chains.get(name) != filters.port_chain(port_id, one.spec) or target != name or not listed:
                relink = key in linked and target != name
                changes.append(SetFilter((port_id,), name, port_id, one.spec, key, relink))
        shut = {name for name in foreign & linked.keys() if linked[name] is None}
        changes += [ShutOut((), name, name in linked) for name in sorted(foreign - shut)]
        return changes + self._unneeded(strays, foreign)

    def _unneeded(self, strays: frozenset[str], foreign: frozenset[str]) -> list[Change]:
        """Remove chains that no port needs, and entries of other devices than the ports have now."""
        maps = self.seen.table.maps if self.seen.table else {}
        names = self.seen.table.names if self.seen.table else frozenset()
        leading: dict[str | None, set[str]] = {}
        for key, target in maps.get(filters.PORTS, {}).items():
            leading.setdefault(target, set()).add(key)
        # An entry that leads from another device to the chain of a port that stays goes, too.
        ends: list[tuple[tuple[str, ...], str, frozenset[str]]] = []
        ends += [((i,), device_name(TAP, i), self.seen.names_of(i)) for i in (*self.wanted, *self.leaving)]
        ends += [((), name, frozenset({name})) for name in strays]
        staying = {device_name(TAP, i) for i in self.wanted}
        kept = {
            filters.PORTS: {one.tap.name for one in self.wanted.values()} | foreign,
            filters.SERVICES: {one.tap.name for one in self.wanted.values() if one.tap.service},
        }
        changes: list[Change] = []
        for ports, chain, devices in sorted(ends):
            keys = devices | leading.get(chain, set())
            found = {name: keys & maps.get(name, {}).keys() - kept[name] for name in filters.MAPS}
            entries = tuple((name, key) for name in filters.MAPS for key in sorted(found[name]))
            for name, key in entries:
                kept[name].add(key)  # it goes once
            gone = chain if chain in names - staying else ""
            if gone or entries:
                changes.append(RemoveFilter(ports, gone, entries))
        return changes

    def _needed(self, staying: frozenset[str]) -> bool:
        """Whether any port needs the table: a desired one, or one outside this plan that stays."""
        on_bridges = {m for b in self.seen.bridges.values() for m in b.members.items()}
        gone = frozenset[str]().union(*(self.seen.names_of(i) for i in self.leaving))
        there = {member[0] for member in on_bridges if self.seen.needed_mtu(*member)} - gone
        return bool(self.wanted or staying or there)


def _removal(port_id: str, link: Link) -> Change:
    if service_of(link):
        return ReleaseDevice((port_id,), link.name)
    return RemoveTap((port_id,), link.name)


def _wrong_hooks(chains: Mapping[str, Chain]) -> tuple[str, ...]:
    """Return base chains with a wrong hook, which cannot be changed on an existing chain."""
    return tuple(
        name
        for name, base in sorted(filters.BASE.items())
        if name in chains and chains[name].definition() != base.definition()
    )


def _base_differs(table: Table | None, chains: Mapping[str, Chain]) -> bool:
    if table is None or not table.maps.keys() >= set(filters.MAPS):
        return True
    return any(chains.get(name) != base for name, base in filters.BASE.items())

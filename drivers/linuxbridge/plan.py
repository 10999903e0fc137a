"""Plan the changes of the kernel for ports: taps, service ports, filters and rate limits (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from drivers.linuxbridge import filters
from drivers.linuxbridge.commands import ResetPort, SetGuard, SetTapAddress, device_in_the_way
from drivers.linuxbridge.filter_commands import RemoveFilter, RemoveTable, SetBase, SetFilter, ShutOut
from drivers.linuxbridge.model import BridgeObservation, DesiredPort, ObservedMacs, Tap
from drivers.linuxbridge.rates import set_rates, unneeded_shapers
from drivers.linuxbridge.segments import service_of
from drivers.linuxbridge.segments_plan import SegmentsPlan
from drivers.linuxbridge.tap_commands import (
    CreateTap,
    CutOff,
    KeepForRoot,
    MoveMac,
    PlaceDevice,
    ReleaseDevice,
    RemoveTap,
    RenameTap,
    SetMacs,
    SetTap,
)
from drivers.linuxbridge.uplink_path import (
    in_the_way,
    interface_conflict,
    no_local_ip,
    uplink_problem,
    wrong_family,
)
from netplugin.api.errors import BackendUnavailable, NetpluginError
from netplugin.backend import Change, Intent, Plan
from netplugin.host.link_values import Link
from netplugin.host.names import SHAPER, TAP, device_name
from netplugin.host.nftables import Chain, Table
from netplugin.host.tc import Queueing


def make_plan(intents: Sequence[Intent], seen: BridgeObservation) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    desired: dict[str, DesiredPort] = {}
    refused: dict[str, NetpluginError] = {}
    kept: dict[str, NetpluginError] = {}
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        one = DesiredPort.of(intent)
        error = _refusal(one, seen)
        if error:
            refused[intent.port_id] = error
            continue
        desired[intent.port_id] = one
        if error := _unconfigured(one, seen):
            kept[intent.port_id] = error
    leaving = tuple(sorted(i.port_id for i in intents if i.spec is None))
    # A service port whose device is gone needs no bridge until the device is there again.
    here = {i: one for i, one in desired.items() if not seen.is_absent(one.tap)}
    segments = SegmentsPlan(seen, here, leaving)
    # What keeps frames in is first, and waits for nothing else. A tap joins its bridge only after its guard,
    # filter and rates are set, and stays there until the whole tap is removed.
    ports = _Ports(seen, desired, leaving)
    closing = [*ports.guards(), *ports.filters(), *segments.closing, *ports.on_bridges()]
    changes = (*closing, *segments.gone, *segments.made, *ports.changes())
    return Plan(changes, refused, kept)


def _refusal(desired: DesiredPort, seen: BridgeObservation) -> NetpluginError | None:
    tap, segment, overlay = desired.tap, desired.segment, desired.overlay
    names = (tap.name, tap.bridge, segment.device, *([tap.derived] if tap.is_named else []))
    for name in (*names, *([device_name(SHAPER, tap.port_id)] if tap.egress else [])):
        if name in seen.taken_names:
            return device_in_the_way(seen.settings.bridge_names.get(name, name))
    link = seen.taps.get(tap.port_id)
    if link is not None and tap.in_place(link):
        # A port that is in place stays; problems of its uplink are reported as a fault.
        return _new_peers_of_the_wrong_family(desired, seen)
    if error := _unconfigured(desired, seen):
        return error
    return uplink_problem(segment, tap.mtu, seen) or in_the_way(segment, overlay, seen)


def _new_peers_of_the_wrong_family(desired: DesiredPort, seen: BridgeObservation) -> NetpluginError | None:
    """Refuse new peers of the wrong family. If the peers are unchanged, ``local_ip`` was changed."""
    has, overlay = seen.peers.get(desired.segment.device), desired.overlay
    if has is None or overlay is None or has == set(overlay.spec.peers) - {seen.settings.local_ip}:
        return None
    return wrong_family(overlay, seen.settings.local_ip)


def _unconfigured(desired: DesiredPort, seen: BridgeObservation) -> NetpluginError | None:
    """Return the error if the configuration or the network's definition does not allow a new port."""
    network, network_id = desired.segment.physical_network, desired.segment.network_id
    if network_id and desired.overlay is None:
        return BackendUnavailable(
            f"network {network_id} is not known on this host",
            step="plan",
            fix=f"PUT /v1/networks/{network_id}",
        )
    if network and network not in seen.settings.physical_interfaces:
        return BackendUnavailable(
            f"{network} is not in [linuxbridge] physical_interfaces any more",
            step="plan",
            fix=f"add {network} to it again",
        )
    if network_id and not seen.settings.local_ip:
        return no_local_ip()
    return wrong_family(desired.overlay, seen.settings.local_ip) or interface_conflict(desired.segment, seen)


@dataclass(frozen=True)
class _Ports:
    """Plan the taps with their filters and rates; each method plans one part."""

    seen: BridgeObservation
    desired: Mapping[str, DesiredPort]
    leaving: tuple[str, ...]

    def guards(self) -> list[Change]:
        """The guards of devices that are there, by the names that they have now."""
        return [
            SetGuard((port_id,), link.name, one.tap.guard)
            for port_id, one in sorted(self.desired.items())
            if (link := self.seen.taps.get(port_id)) is not None
            and self.seen.queueing.get(link.name, Queueing()).guard != one.tap.guard
        ]

    def on_bridges(self) -> list[Change]:
        """What the bridges have of the ports that are on them."""
        changes: list[Change] = []
        for port_id, one in sorted(self.desired.items()):
            tap, link = one.tap, self.seen.taps.get(port_id)
            if link is None or link.name != tap.name or tap.must_be_remade(link):
                continue
            if port_id in self.seen.abused:
                changes.append(CutOff((port_id,), link.name))
                continue
            if not tap.service and link.address != tap.address:
                changes.append(SetTapAddress((port_id,), tap.name, tap.address))
            if link.master != tap.bridge:
                continue
            options = sorted(link.port.others)
            changes += [ResetPort((port_id,), tap.name, tap.bridge, option) for option in options]
            macs = self.seen.macs.get(tap.name, ObservedMacs())
            tap = self._known(tap, link)
            if tap.macs_differ(link, macs):
                moved = one.otherwise is not None and not one.otherwise.macs_differ(link, macs)
                changes.append((MoveMac if moved else SetMacs)((port_id,), tap))
        return changes

    @staticmethod
    def _known(tap: Tap, link: Link | None) -> Tap:
        """The tap without doubt about its VF if the bridge does not have it yet."""
        there = link is not None and link.master == tap.bridge and link.port.flooding
        return tap if there else replace(tap, vf_unknown=False)

    def changes(self) -> list[Change]:
        gone: list[Change] = []
        made: list[Change] = []
        rates: list[Change] = []
        plugged: list[Change] = []
        for port_id in self.leaving:
            if port_id in self.seen.taps:
                gone.append(_removal(port_id, self.seen.taps[port_id]))
        for port_id, one in sorted(self.desired.items()):
            tap, link = one.tap, self.seen.taps.get(port_id)
            if link is not None and tap.must_be_remade(link):
                gone.append(_removal(port_id, link))
                link = None
            elif port_id in self.seen.abused:
                link = None  # the tap is cut off
            elif link is not None and link.name != tap.name:
                gone.append(RenameTap((port_id,), tap, link.name))
                continue  # the next round has it by its name
            if tap.service:
                plugged += self._place(tap, link)
                continue
            if link is None:
                made += [CreateTap((port_id,), tap), SetGuard((port_id,), tap.name, tap.guard)]
            if link is None or tap.differs(link):
                plugged.append(SetTap((port_id,), self._known(tap, link)))
            if link is not None and not link.use.is_for_root and not link.carrier:
                made.append(KeepForRoot((port_id,), tap))
            rates += set_rates(tap, link, self.seen)
        rates += unneeded_shapers(self.desired, self.leaving, self.seen)
        return [*gone, *made, *self.unneeded_filters(), *rates, *plugged]

    def _place(self, tap: Tap, link: Link | None) -> list[Change]:
        """Plan a service port's device. One that is gone is reported as the port's fault."""
        if self.seen.is_absent(tap):
            return []
        if link and not tap.differs(link):
            return []
        return [PlaceDevice((tap.port_id,), tap)]

    def filters(self) -> list[Change]:
        """The rules that the ports need; those of devices that are yet to be made, too."""
        table = self.seen.table
        if not self._needed:
            return []
        chains = table.chains if table else {}
        maps = table.maps if table else {}
        linked = maps.get(filters.PORTS, {})
        changes: list[Change] = []
        remake = _wrong_hooks(chains)
        if remake or _base_differs(table, chains):
            changes.append(SetBase(tuple(sorted(self.desired)), remake))
        for port_id, one in sorted(self.desired.items()):
            name, key = device_name(TAP, port_id), one.tap.name
            target = linked.get(key, "")
            listed = not one.tap.service or key in maps.get(filters.SERVICES, {})
            if chains.get(name) != filters.port_chain(port_id, one.spec) or target != name or not listed:
                relink = key in linked and target != name
                changes.append(SetFilter((port_id,), name, port_id, one.spec, key, relink))
        shut = {name for name in self._foreign & linked.keys() if linked[name] is None}
        return changes + [ShutOut((), name, name in linked) for name in sorted(self._foreign - shut)]

    def unneeded_filters(self) -> list[Change]:
        """Remove chains that no port needs, and entries of other devices than the ports have now."""
        if self.seen.table is None:
            return []
        maps, names = self.seen.table.maps, self.seen.table.names
        if not self._needed:
            return [RemoveTable(tuple(i for i in self.leaving if device_name(TAP, i) in names))]
        leading: dict[str | None, set[str]] = {}
        for key, target in maps.get(filters.PORTS, {}).items():
            leading.setdefault(target, set()).add(key)
        # An entry that leads from another device to the chain of a port that stays goes, too.
        ends: list[tuple[tuple[str, ...], str, frozenset[str]]] = []
        ends += [((i,), device_name(TAP, i), self.seen.names_of(i)) for i in (*self.desired, *self.leaving)]
        ends += [((), name, frozenset({name})) for name in self._strays]
        staying = {device_name(TAP, i) for i in self.desired}
        kept = {
            filters.PORTS: {one.tap.name for one in self.desired.values()} | self._foreign,
            filters.SERVICES: {one.tap.name for one in self.desired.values() if one.tap.service},
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

    @cached_property
    def _mine(self) -> frozenset[str]:
        """The names that desired ports have in the table."""
        return frozenset(
            name for i, one in self.desired.items() for name in (one.tap.name, device_name(TAP, i))
        )

    @cached_property
    def _foreign(self) -> frozenset[str]:
        return self.seen.foreign() - self._mine

    @cached_property
    def _strays(self) -> frozenset[str]:
        gone = {device_name(TAP, i) for i in self.leaving}
        return self.seen.stray_chains - self._mine - gone - self._foreign

    @cached_property
    def _needed(self) -> bool:
        """Whether any port needs the table: a desired one, or one outside this plan that stays."""
        names = self.seen.table.names if self.seen.table else frozenset()
        staying = names - filters.SHARED - {device_name(TAP, i) for i in self.leaving} - self._strays
        on_bridges = {m for b in self.seen.bridges.values() for m in b.members.items()}
        going = frozenset[str]().union(*(self.seen.names_of(i) for i in self.leaving))
        there = {member[0] for member in on_bridges if self.seen.needed_mtu(*member)} - going
        return bool(self.desired or staying or there)


def _removal(port_id: str, link: Link) -> Change:
    if service_of(link):
        return ReleaseDevice((port_id,), link.name)
    return RemoveTap((port_id,), link.name)


def _wrong_hooks(chains: Mapping[str, Chain]) -> tuple[str, ...]:
    """Return base chains with a wrong hook, which cannot be changed on an existing chain."""
    return tuple(
        name
        for name, base in sorted(filters.BASE.items())
        if name in chains and chains[name].base != base.base
    )


def _base_differs(table: Table | None, chains: Mapping[str, Chain]) -> bool:
    if table is None or not table.maps.keys() >= set(filters.MAPS):
        return True
    return any(chains.get(name) != base for name, base in filters.BASE.items())

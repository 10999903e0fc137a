"""Plan the changes of the kernel for ports: taps, service ports, filters and rate limits (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drivers.linuxbridge import filters
from drivers.linuxbridge.commands import (
    CreateTap,
    MoveMac,
    RemoveFilter,
    RemoveTable,
    RemoveTap,
    RenameTap,
    SetBase,
    SetFilter,
    SetGuard,
    SetTap,
    ShutOut,
    device_in_the_way,
)
from drivers.linuxbridge.model import BridgeObservation, DesiredPort, ObservedMacs, Tap
from drivers.linuxbridge.options import Settings
from drivers.linuxbridge.rates import set_rates, unneeded_shapers
from drivers.linuxbridge.segments import service_of
from drivers.linuxbridge.segments_plan import SegmentsPlan
from drivers.linuxbridge.service_ports import PlaceDevice, ReleaseDevice
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
            macs = self.seen.macs.get(tap.name, ObservedMacs())
            if tap.vf_unknown and not (link and link.master == tap.bridge and link.flooding):
                tap = replace(tap, vf_unknown=False)  # the bridge does not have it yet
            if link is None or tap.differs(link, macs):
                moved = (
                    link is not None and one.otherwise is not None and not one.otherwise.differs(link, macs)
                )
                plugged.append((MoveMac if moved else SetTap)((port_id,), tap))
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

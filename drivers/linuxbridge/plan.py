"""Plan the changes from the observed to the desired state of the kernel. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivers.linuxbridge import filters
from drivers.linuxbridge.changes import (
    CreateTap,
    RemoveFilter,
    RemoveTable,
    RemoveTap,
    SeenMacs,
    SetBase,
    SetFilter,
    SetGuard,
    SetTap,
)
from drivers.linuxbridge.hops import (
    in_the_way,
    interface_conflict,
    no_local_ip,
    uplink_problem,
    wrong_family,
)
from drivers.linuxbridge.options import Settings
from drivers.linuxbridge.plan_segments import SegmentsPlan
from drivers.linuxbridge.seen import Seen
from drivers.linuxbridge.shaping import set_rates, unneeded_shapers
from drivers.linuxbridge.wanted import Wanted
from netplugin.backend import Change, Intent, Plan
from netplugin.errors import BackendUnavailable, Conflict, NetpluginError
from netplugin.host.names import SHAPER, TAP, device_name
from netplugin.host.nftables import Chain, Table
from netplugin.host.tc import Queueing


def make_plan(settings: Settings, intents: Sequence[Intent], seen: Seen) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    wanted: dict[str, Wanted] = {}
    refused: dict[str, NetpluginError] = {}
    kept: dict[str, NetpluginError] = {}
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        one = Wanted.of(intent)
        error = _refusal(settings, one, seen)
        if error:
            refused[intent.port_id] = error
            continue
        wanted[intent.port_id] = one
        if error := _unconfigured(settings, one, seen):
            kept[intent.port_id] = error
    leaving = tuple(sorted(i.port_id for i in intents if i.spec is None))
    segments = SegmentsPlan(settings, seen, wanted, leaving)
    # A tap joins its bridge only after its guard, filter and rates are set, and stays there until
    # the whole tap is removed.
    ports = _Ports(seen, wanted, leaving)
    changes = (*segments.gone, *segments.made, *ports.changes())
    return Plan(changes, refused, kept)


def _refusal(settings: Settings, wanted: Wanted, seen: Seen) -> NetpluginError | None:
    tap, segment, overlay = wanted.tap, wanted.segment, wanted.overlay
    names = (tap.name, tap.bridge, segment.device)
    for name in (*names, *([device_name(SHAPER, tap.port_id)] if tap.egress else [])):
        if name in seen.taken_names:
            return Conflict(
                f"a device named {name} exists and is not ours", step="plan",
                fix=f"rename or remove it: ip link delete {name}",
            )  # fmt: skip
    link = seen.taps.get(tap.port_id)
    if link is not None and (link.master, link.mtu) == (tap.bridge, tap.mtu):
        # A port that is in place stays; problems of its uplink are reported as a fault.
        return _new_peers_of_the_wrong_family(settings, wanted, seen)
    if error := _unconfigured(settings, wanted, seen):
        return error
    return uplink_problem(settings, segment, tap.mtu, seen) or in_the_way(
        settings, segment, overlay, seen
    )


def _new_peers_of_the_wrong_family(
    settings: Settings, wanted: Wanted, seen: Seen
) -> NetpluginError | None:
    """Refuse new peers of the wrong family. If the peers are unchanged, ``local_ip`` was changed."""
    has, overlay = seen.peers.get(wanted.segment.device), wanted.overlay
    if has is None or overlay is None or has == set(overlay.spec.peers) - {settings.local_ip}:
        return None
    return wrong_family(settings, overlay)


def _unconfigured(settings: Settings, wanted: Wanted, seen: Seen) -> NetpluginError | None:
    """Return the error if the configuration or the network's definition does not allow a new port."""
    network, network_id = wanted.segment.physical_network, wanted.segment.network_id
    if network_id and wanted.overlay is None:
        return BackendUnavailable(
            f"network {network_id} is not known on this host", step="plan",
            fix=f"PUT /v1/networks/{network_id}",
        )  # fmt: skip
    if network and network not in settings.physical_interfaces:
        return BackendUnavailable(
            f"{network} is not in [linuxbridge] physical_interfaces any more", step="plan",
            fix=f"add {network} to it again",
        )  # fmt: skip
    if network_id and not settings.local_ip:
        return no_local_ip()
    return wrong_family(settings, wanted.overlay) or interface_conflict(
        settings, wanted.segment, seen
    )


@dataclass(frozen=True)
class _Ports:
    """Plan the taps with their filters and rates; each method plans one part."""

    seen: Seen
    wanted: Mapping[str, Wanted]
    leaving: tuple[str, ...]

    def changes(self) -> list[Change]:
        gone: list[Change] = []
        made: list[Change] = []
        guards: list[Change] = []
        rates: list[Change] = []
        plugged: list[Change] = []
        for port_id in self.leaving:
            if port_id in self.seen.taps:
                gone.append(RemoveTap((port_id,), self.seen.taps[port_id].name, port_id))
        for port_id, one in sorted(self.wanted.items()):
            tap, link = one.tap, self.seen.taps.get(port_id)
            if link is not None and tap.must_be_remade(link):
                gone.append(RemoveTap((port_id,), link.name, port_id))
                link = None
            if link is None:
                made.append(CreateTap((port_id,), tap))
            found = self.seen.queueing.get(tap.name, Queueing()) if link else Queueing()
            if found.guard != tap.guard:
                guards.append(SetGuard((port_id,), tap.name, tap.guard))
            rates += set_rates(tap, link, self.seen)
            if link is None or tap.differs(link, self.seen.macs.get(tap.name, SeenMacs())):
                plugged.append(SetTap((port_id,), tap))
        rates += unneeded_shapers(self.wanted, self.leaving, self.seen)
        return [*gone, *made, *guards, *self.filters(), *rates, *plugged]

    def filters(self) -> list[Change]:
        table = self.seen.table
        chains = table.chains if table else {}
        linked = table.maps.get(filters.PORTS, {}) if table else {}
        names = table.names if table else frozenset()
        out: dict[str, tuple[str, ...]] = {device_name(TAP, i): (i,) for i in self.leaving}
        mine = {one.tap.name for one in self.wanted.values()}
        out |= dict.fromkeys(self.seen.stray_chains - mine - set(out), ())
        if not self._needed(names - filters.SHARED - set(out)):
            ports = tuple(i for i in self.leaving if device_name(TAP, i) in names)
            return [RemoveTable(ports)] if table else []
        changes: list[Change] = []
        remake = _wrong_hooks(chains)
        if remake or _base_differs(table, chains):
            changes.append(SetBase(tuple(sorted(self.wanted)), remake))
        for port_id, one in sorted(self.wanted.items()):
            name, target = one.tap.name, linked.get(one.tap.name, "")
            chain = filters.port_chain(port_id, one.spec)
            if chains.get(name) != chain or target != name:
                relink = name in linked and target != name
                changes.append(SetFilter((port_id,), name, port_id, one.spec, relink))
        for name, ports in sorted(out.items()):
            if name in names or name in linked:
                changes.append(RemoveFilter(ports, name, name in names, name in linked))
        return changes

    def _needed(self, staying: frozenset[str]) -> bool:
        """Whether any port needs the table: a desired one, or one outside this plan that stays."""
        on_bridges = {name for b in self.seen.bridges.values() for name in b.members}
        gone = {device_name(TAP, i) for i in self.leaving}
        taps = {name for name in on_bridges if name.startswith(TAP)} - gone
        return bool(self.wanted or staying or taps)


def _wrong_hooks(chains: Mapping[str, Chain]) -> tuple[str, ...]:
    """Return base chains with a wrong hook, which cannot be changed on an existing chain."""
    return tuple(
        name
        for name, base in sorted(filters.BASE.items())
        if name in chains and chains[name].definition() != base.definition()
    )


def _base_differs(table: Table | None, chains: Mapping[str, Chain]) -> bool:
    if table is None or filters.PORTS not in table.maps:
        return True
    return any(chains.get(name) != base for name, base in filters.BASE.items())

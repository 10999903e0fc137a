"""From what is wanted and what the kernel has to the changes between them: without a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivers.linuxbridge import filters
from drivers.linuxbridge.changes import (
    PORT_MARK,
    AddUplink,
    Bridge,
    CreateBridge,
    CreateTap,
    RemoveBridge,
    RemoveFilter,
    RemoveTable,
    RemoveTap,
    RemoveUplink,
    SetBase,
    SetBridge,
    SetFilter,
    SetTap,
    Tap,
    bridge_mark,
)
from drivers.linuxbridge.options import Settings
from netplugin.backend import Change, Intent, Observation, Plan
from netplugin.errors import BackendUnavailable, Conflict, NetpluginError
from netplugin.host.links import Link
from netplugin.host.names import BRIDGE, TAP, device_name
from netplugin.host.nftables import Chain, Table
from netplugin.models import PortSpec


@dataclass(frozen=True)
class SeenBridge:
    """One bridge of ours, with its members by name and the MTU of each."""

    physical_network: str
    link: Link
    members: Mapping[str, int] = field(default_factory=dict)

    @property
    def uplink(self) -> str:
        """The interface that we put on it, as its mark tells."""
        mark = bridge_mark(self.link.alias)
        return mark[1] if mark else ""


@dataclass(frozen=True)
class SeenInterface:
    """A network interface of ``physical_interfaces``; not ours but for its master."""

    link: Link
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen(Observation):
    """What the kernel has of the ports in question, of all our bridges and of the filters."""

    #: Links with a port's mark, by port id.
    taps: Mapping[str, Link] = field(default_factory=dict)
    #: Bridges with our mark, by physical network.
    bridges: Mapping[str, SeenBridge] = field(default_factory=dict)
    interfaces: Mapping[str, SeenInterface] = field(default_factory=dict)
    #: Names of ours that links without our mark have.
    taken_names: frozenset[str] = frozenset()
    #: Our nftables table; of its port chains, those of the ports in question, or all.
    table: Table | None = None
    #: Chains (or entries of the map) in our table that belong to no port that was seen.
    stray_chains: frozenset[str] = frozenset()


def wanted_tap(port_id: str, spec: PortSpec) -> Tap:
    """The tap a port should have (pure)."""
    return Tap(
        port_id=port_id,
        name=device_name(TAP, port_id),
        bridge=device_name(BRIDGE, str(spec.network.physical_network)),
        mtu=spec.network.mtu,
        multi_queue=spec.queues > 1,
    )


def is_our_tap(link: Link, port_id: str) -> bool:
    return link.alias == PORT_MARK + port_id


def is_our_bridge(link: Link, physical_network: str) -> bool:
    """By its mark, or (made by an agent that died before it could mark it) by its address."""
    mark = bridge_mark(link.alias)
    if mark is not None:
        return mark[0] == physical_network
    born = Bridge(link.name, physical_network, "", link.mtu)
    return link.kind == "bridge" and link.alias is None and link.address == born.address


def make_plan(settings: Settings, intents: Sequence[Intent], seen: Seen) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    wanted: dict[str, tuple[Tap, PortSpec]] = {}
    refused: dict[str, NetpluginError] = {}
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        tap = wanted_tap(intent.port_id, intent.spec)
        error = _refusal(settings, tap, intent.spec, seen)
        if error:
            refused[intent.port_id] = error
        else:
            wanted[intent.port_id] = (tap, intent.spec)
    leaving = tuple(sorted(i.port_id for i in intents if i.spec is None))
    scene = _Scene(settings, seen, wanted, leaving, frozenset(refused))
    before, after = scene.bridges()
    # A tap is on its bridge from after its filter is there until it is removed as a whole.
    gone, made, plugged = scene.taps()
    return Plan((*before, *gone, *made, *scene.filters(), *plugged, *after), refused)


def uplink_problem(
    settings: Settings, physical_network: str, mtu: int, seen: Seen
) -> NetpluginError | None:
    """Why frames of this size cannot take the network's interface; None if they can or need not."""
    name = settings.physical_interfaces.get(physical_network, "")
    if not name:
        return None
    bridge = device_name(BRIDGE, physical_network)
    interface = seen.interfaces.get(name)
    if interface is None:
        return BackendUnavailable(
            f"interface {name} of {physical_network} is not there", step="uplink",
            fix=f"bring {name} back, or correct [linuxbridge] physical_interfaces",
        )  # fmt: skip
    link = interface.link
    if link.master not in (None, bridge):
        return Conflict(
            f"interface {name} of {physical_network} is on {link.master} already", step="uplink",
            fix=f"ip link set {name} nomaster, or name another interface for {physical_network}",
        )  # fmt: skip
    if link.master is None and interface.addresses:
        return Conflict(
            f"interface {name} of {physical_network} has addresses "
            f"({', '.join(interface.addresses)}) that would stop working on a bridge", step="uplink",
            fix=f"ip addr flush dev {name}, or name another interface for {physical_network}",
        )  # fmt: skip
    if not link.up:
        return BackendUnavailable(
            f"interface {name} of {physical_network} is down", step="uplink",
            fix=f"ip link set {name} up",
        )  # fmt: skip
    if link.mtu < mtu:
        return Conflict(
            f"interface {name} of {physical_network} has MTU {link.mtu}, and the network wants {mtu}",
            step="uplink", fix=f"ip link set {name} mtu {mtu}, or ask for a smaller network.mtu",
        )  # fmt: skip
    return None


def _refusal(settings: Settings, tap: Tap, spec: PortSpec, seen: Seen) -> NetpluginError | None:
    network = str(spec.network.physical_network)
    if network not in settings.physical_interfaces:
        return BackendUnavailable(
            f"{network} is not in [linuxbridge] physical_interfaces any more", step="plan",
            fix=f"add {network} to it again",
        )  # fmt: skip
    for name in (tap.name, tap.bridge):
        if name in seen.taken_names:
            return Conflict(
                f"a device named {name} exists and is not ours", step="plan",
                fix=f"rename or remove it: ip link delete {name}",
            )  # fmt: skip
    link = seen.taps.get(tap.port_id)
    if link is not None and (link.master, link.mtu) == (tap.bridge, tap.mtu):
        return None  # what is in place stays so; what its uplink lacks is told as a fault
    return uplink_problem(settings, network, tap.mtu, seen)


@dataclass(frozen=True)
class _Scene:
    """What one plan is made from; each method makes a part of it."""

    settings: Settings
    seen: Seen
    wanted: Mapping[str, tuple[Tap, PortSpec]]
    leaving: tuple[str, ...]
    refused: frozenset[str]

    # -- taps ------------------------------------------------------------------------------------

    def taps(self) -> tuple[list[Change], list[Change], list[Change]]:
        """Those to remove, those to make, and those to put in their place."""
        gone: list[Change] = []
        made: list[Change] = []
        plugged: list[Change] = []
        for port_id in self.leaving:
            if port_id in self.seen.taps:
                gone.append(RemoveTap((port_id,), self.seen.taps[port_id].name, port_id))
        for port_id, (tap, _) in sorted(self.wanted.items()):
            link = self.seen.taps.get(port_id)
            if link is not None and tap.must_be_remade(link):
                gone.append(RemoveTap((port_id,), link.name, port_id))
                link = None
            if link is None:
                made.append(CreateTap((port_id,), tap))
            if link is None or tap.differs(link):
                plugged.append(SetTap((port_id,), tap))
        return gone, made, plugged

    # -- filters ---------------------------------------------------------------------------------

    def filters(self) -> list[Change]:
        table = self.seen.table
        chains = table.chains if table else {}
        linked = table.maps.get(filters.PORTS, {}) if table else {}
        names = table.names if table else frozenset()
        out: dict[str, tuple[str, ...]] = {device_name(TAP, i): (i,) for i in self.leaving}
        mine = {tap.name for tap, _ in self.wanted.values()}
        out |= dict.fromkeys(self.seen.stray_chains - mine - set(out), ())
        if not self._needed(names - set(filters.BASE) - set(out)):
            ports = tuple(i for i in self.leaving if device_name(TAP, i) in names)
            return [RemoveTable(ports)] if table else []
        changes: list[Change] = []
        remake = _wrong_hooks(chains)
        if remake or _base_differs(table, chains):
            changes.append(SetBase(tuple(sorted(self.wanted)), remake))
        for port_id, (tap, spec) in sorted(self.wanted.items()):
            target = linked.get(tap.name, "")
            chain = filters.port_chain(port_id, spec)
            if chains.get(tap.name) != chain or target != tap.name:
                relink = tap.name in linked and target != tap.name
                changes.append(SetFilter((port_id,), tap.name, port_id, spec, relink))
        for name, ports in sorted(out.items()):
            if name in names or name in linked:
                changes.append(RemoveFilter(ports, name, name in names, name in linked))
        return changes

    def _needed(self, staying: frozenset[str]) -> bool:
        """Whether the table has work: for a port that is wanted, or for one that merely stays."""
        on_bridges = {name for b in self.seen.bridges.values() for name in b.members}
        gone = {device_name(TAP, i) for i in self.leaving}
        taps = {name for name in on_bridges if name.startswith(TAP)} - gone
        return bool(self.wanted or staying or taps)

    # -- bridges ---------------------------------------------------------------------------------

    def bridges(self) -> tuple[list[Change], list[Change]]:
        """What must be done to bridges before the ports, and what after them."""
        before: list[Change] = []
        after: list[Change] = []
        used = {str(spec.network.physical_network) for _, spec in self.wanted.values()}
        for network in sorted({*self.seen.bridges, *used}):
            self._bridge(network, before, after)
        return before, after

    def _bridge(self, network: str, before: list[Change], after: list[Change]) -> None:
        name = device_name(BRIDGE, network)
        seen = self.seen.bridges.get(network)
        users = [tap for tap, _ in self.wanted.values() if tap.bridge == name]
        ids = tuple(sorted(tap.port_id for tap in users))
        staying = self._staying(name, seen)
        if seen is not None and not users and not staying:
            going = tuple(i for i in self.leaving if self._was_on(i, name))
            after.append(RemoveBridge(going, name, network))
            return
        mtus = [tap.mtu for tap in users]
        mtus += [mtu for member, mtu in staying.items() if member.startswith(TAP)]
        if not mtus:
            return  # none of ours is left on it, and the others hold it
        mtu = max(mtus)
        fit = uplink_problem(self.settings, network, mtu, self.seen) is None
        uplink = self._uplink(network, seen, fit=fit)
        bridge = Bridge(name, network, uplink, mtu)
        if seen is None:
            before.append(CreateBridge(ids, bridge))
        else:
            if seen.uplink and seen.uplink != uplink and seen.uplink in seen.members:
                before.append(RemoveUplink(ids, name, seen.uplink))
            if bridge.differs(seen.link):
                before.append(SetBridge(ids, bridge))
        interface = self.seen.interfaces.get(uplink)
        if fit and uplink and interface is not None and interface.link.master != name:
            before.append(AddUplink(ids, name, uplink))

    def _uplink(self, network: str, seen: SeenBridge | None, *, fit: bool) -> str:
        """The interface the bridge should have: the old one, until the new one can be had."""
        wanted = self.settings.physical_interfaces.get(network)
        if seen is not None and (wanted is None or not fit):
            return seen.uplink
        return wanted or ""

    def _staying(self, name: str, seen: SeenBridge | None) -> dict[str, int]:
        """Members that are neither ours to place now nor the uplink: they keep the bridge."""
        if seen is None:
            return {}
        placed = {device_name(TAP, i) for i in (*self.leaving, *self.wanted)}
        members = {m: mtu for m, mtu in seen.members.items() if m not in placed}
        uplinks = {seen.uplink, self.settings.physical_interfaces.get(seen.physical_network)}
        return {m: mtu for m, mtu in members.items() if m not in uplinks}

    def _was_on(self, port_id: str, bridge: str) -> bool:
        link = self.seen.taps.get(port_id)
        return link is not None and link.master == bridge


def _wrong_hooks(chains: Mapping[str, Chain]) -> tuple[str, ...]:
    """Base chains that hang elsewhere: the hook of a chain that exists cannot be changed."""
    return tuple(
        name
        for name, base in sorted(filters.BASE.items())
        if name in chains and chains[name].definition() != base.definition()
    )


def _base_differs(table: Table | None, chains: Mapping[str, Chain]) -> bool:
    if table is None or filters.PORTS not in table.maps:
        return True
    return any(chains.get(name) != base for name, base in filters.BASE.items())

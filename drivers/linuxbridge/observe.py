"""Read the kernel's state as values: for the given ports only what is needed, or everything of ours."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from drivers.linuxbridge import filters
from drivers.linuxbridge.bridge_names import BridgeNames
from drivers.linuxbridge.commands import BridgeKernel
from drivers.linuxbridge.findings import flushing_file, observed_port
from drivers.linuxbridge.model import (
    BridgeObservation,
    ObservedBond,
    ObservedBridge,
    ObservedDevice,
    ObservedInterface,
    ObservedMacs,
)
from drivers.linuxbridge.obstacles import obstacles_of
from drivers.linuxbridge.options import Settings
from drivers.linuxbridge.segments import BRIDGE_MARK, PORT_MARK, SERVICE_MARK, is_ours, port_of, service_of
from netplugin.host.link_managers import managers
from netplugin.host.link_values import Link, LinuxBond, Vlan
from netplugin.host.names import BRIDGE, SHAPER, TAP, UPLINK, VXLAN, device_name, is_our_device
from netplugin.host.nftables import Table
from netplugin.host.tc import Queueing

VHOST_NET = Path("/dev/vhost-net")
_PREFIXES = (TAP, BRIDGE, UPLINK, VXLAN, SHAPER)
_STACKED = 4  # the search depth for a bond below stacked VLAN devices


@dataclass(frozen=True)
class BridgeReader:
    """One observation, of these ports or (None) of everything that is ours.

    For some ports, it reads their own devices and all segments, and uses what is known of the members of
    bridges. VXLAN peers are read only for the segments of these ports.
    """

    settings: Settings
    kernel: BridgeKernel
    ports: Collection[str] | None

    def read(self, deadline: float) -> BridgeObservation:
        start = time.monotonic()
        names = [device_name(TAP, i) for i in self.ports or ()]
        table = self.kernel.nft.read(None if self.ports is None else [*filters.BASE, *names], deadline)
        first_read = time.monotonic()
        seen = self._devices(table)
        links_read = time.monotonic()
        bridges = [seen.bridges.get(tap.master or "") for tap in seen.taps.values()]
        on_vxlan = any(bridge and bridge.segment and bridge.segment.network_id for bridge in bridges)
        sources = self.kernel.vxlan.read(deadline) if self.ports is None or on_vxlan else None
        rules_read = time.monotonic()
        filtered = _filtered_ports(table)
        seen = replace(
            seen,
            table=table,
            sources=sources,
            stray_chains=_strays(table, {*seen.taps, *filtered}, seen.given_names)
            if self.ports is None
            else frozenset(),
            store_mark=filters.store_mark(table.chains) if table and self.ports is None else "",
            timings_ms={
                "netlink": (links_read - first_read) * 1e3,
                "nftables": (first_read - start + rules_read - links_read) * 1e3,
            },
        )
        shaped = {i for link in seen.shapers.values() if (i := port_of(link)) is not None}
        there = {*seen.taps, *filtered, *shaped}
        obstacles = self.kernel.obstacles.read(deadline, fresh=self.ports is None)
        seen = replace(seen, foreign_filters=obstacles.filters, obstacles=obstacles_of(obstacles, seen))
        return replace(seen, ports={i: observed_port(seen, i) for i in there})

    def _devices(self, table: Table | None) -> BridgeObservation:
        owners = _owners(table, self.ports)
        # Of the taps of other ports, the rules tell enough.
        far = frozenset(_rules_of_taps(table) - owners.keys())
        links = self._links(owners)
        names = BridgeNames.among(links, self.settings.bridge_names)
        members = names.members(self.kernel.members.read(whole=self.ports is None))
        found = {link.name: link for link in map(names.link, links)}
        found |= {n: names.link(link) for n, link in self._other_members({*found, *far}, members).items()}
        ours = {name: link for name, link in found.items() if is_ours(link)}
        marked = {
            name: port_id
            for name, link in ours.items()
            if (link.alias or "").startswith(PORT_MARK) and (port_id := port_of(link)) is not None
        }
        services = self._services(table, owners, found)
        taps = {i: found[name] for name, i in marked.items() if self._is_in_scope(i)}
        for name, device in services.items():
            if device.link and device.mark and self._is_in_scope(device.mark.port_id):
                taps.setdefault(device.mark.port_id, found[name])
        shapers = _named(ours, SHAPER)
        uplinks = _named(ours, UPLINK, VXLAN)
        bridges = {
            name: ObservedBridge(link, members.get(name, {}), names.on_host.get(name, ""))
            for name, link in _named(ours, BRIDGE).items()
        }
        used = {tap.master for tap in taps.values()}
        guarded = [b.link for n, b in bridges.items() if self.ports is None or n in used]
        interfaces, underlay = self._interfaces(_left_by(bridges, uplinks), names)
        whole = self.ports is None
        return BridgeObservation(
            ports={},
            settings=self.settings,
            taps=taps,
            services=services,
            named_taps=far | {name for name in marked if not is_our_device(name)},
            given_names=_by_port({**owners, **marked, **{n: d.port_id for n, d in services.items()}}),
            bridges=bridges,
            uplinks=uplinks,
            shapers=shapers,
            queueing=self._queueing([*taps.values(), *shapers.values(), *guarded]),
            peers=self._peers(used, bridges, uplinks),
            macs=self._macs(table, taps, bridges),
            others={
                name: link
                for name, link in found.items()
                if name not in ours and link.kind in ("vlan", "vxlan")
            },
            interfaces=interfaces,
            underlay=underlay,
            taken_names=frozenset(n for n in found if n.startswith(_PREFIXES) and n not in ours)
            | self._taken(bridges),
            programs=self._programs([*interfaces.values(), *([underlay] if underlay else [])]),
            managers=managers({link.index: link.name for link in ours.values()}) if whole else {},
            vhost_net=VHOST_NET.exists(),
            flushing=flushing_file() if whole else "",
        )

    def _services(
        self, table: Table | None, owners: Mapping[str, str | None], found: Mapping[str, Link]
    ) -> dict[str, ObservedDevice]:
        """Return the devices of service ports, by their marks or the rules."""
        listed = owners.keys() - _rules_of_taps(table)
        services: dict[str, ObservedDevice] = {}
        for name in sorted({*listed, *(name for name, link in found.items() if service_of(link))}):
            link = found.get(name)
            mark = service_of(link) if link else None
            if mark or link is None or port_of(link) is None:
                services[name] = ObservedDevice(mark.port_id if mark else owners[name], link)
        return services

    def _taken(self, bridges: Collection[str]) -> frozenset[str]:
        """Return the bridges that are not there, and whose chosen names other devices have."""
        chosen = self.settings.bridge_names.items()
        return frozenset(
            own for own, name in chosen if own not in bridges and self.kernel.links.get(name) is not None
        )

    def _is_in_scope(self, port_id: str) -> bool:
        return self.ports is None or port_id in self.ports

    def _links(self, named: Collection[str]) -> list[Link]:
        """Return the links that are ours by mark or name, and those that could conflict with them."""
        links, chosen = self.kernel.links, frozenset(self.settings.bridge_names.values())
        if self.ports is None:
            return links.find(
                lambda name, alias, kind: (
                    name.startswith(_PREFIXES)
                    or kind in ("vlan", "vxlan")
                    or name in named
                    or name in chosen
                    or alias.startswith((PORT_MARK, SERVICE_MARK, BRIDGE_MARK))
                )
            )
        names = [*named, *(device_name(prefix, i) for i in self.ports for prefix in (TAP, SHAPER))]
        found = [link for name in names if (link := links.get(name)) is not None]
        return found + [link for kind in ("bridge", "vlan", "vxlan") for link in links.of_kind(kind)]

    def _other_members(
        self, known: Collection[str], members: Mapping[str, Mapping[str, int]]
    ) -> dict[str, Link]:
        """Return the members of our bridges whose names the agent did not choose, if they are not known.

        The rules do not name them after a flush.
        """
        bridges = (name for name in known if name.startswith(BRIDGE))
        names = {member for name in bridges for member in members.get(name, ())} - set(known)
        links = (self.kernel.links.get(name) for name in sorted(names) if not is_our_device(name))
        return {link.name: link for link in links if link is not None}

    def _peers(
        self,
        used: Collection[str | None],
        bridges: Mapping[str, ObservedBridge],
        uplinks: Mapping[str, Link],
    ) -> dict[str, frozenset[str]]:
        segments = [b.segment for name, b in bridges.items() if name in used]
        names = {segment.device for segment in segments if segment is not None}
        return {
            name: self.kernel.fdb.peers(link.index)
            for name, link in uplinks.items()
            if link.kind == "vxlan" and (self.ports is None or name in names)
        }

    def _macs(
        self, table: Table | None, taps: Mapping[str, Link], bridges: Mapping[str, ObservedBridge]
    ) -> dict[str, ObservedMacs]:
        """Return where MACs are fixed.

        The rules of a port name the MAC that is to be fixed: only if it is not, it is looked up elsewhere.
        """
        fdb = self.kernel.fdb
        found: dict[str, ObservedMacs] = {}
        for port_id, tap in taps.items():
            if tap.master not in bridges:
                continue
            here, elsewhere = fdb.fixed(tap.index), frozenset[str]()
            chain = table.chains.get(device_name(TAP, port_id)) if table else None
            mac = filters.only_mac(chain) if chain else ""
            if mac and not here and fdb.holder(tap.index, mac) not in (None, tap.index):
                elsewhere = frozenset({mac})
            found[tap.name] = ObservedMacs(here, elsewhere)
        return found

    def _queueing(self, devices: Iterable[Link]) -> dict[str, Queueing]:
        tc = self.kernel.tc
        if self.ports is None:
            found = tc.read_all()
            return {link.name: found.get(link.index, Queueing()) for link in devices}
        return {link.name: tc.read(link.index, link.qdisc) for link in devices}

    def _interfaces(
        self, used: Collection[str], bridges: BridgeNames
    ) -> tuple[dict[str, ObservedInterface], ObservedInterface | None]:
        """Return the interfaces of the physical networks (and ``used``), and the one with ``local_ip``."""
        names = {*filter(None, self.settings.physical_interfaces.values()), *used}
        own = self.settings.local_ip
        addresses = self.kernel.links.addresses() if names or own else {}
        holders = [n for n, all_ in sorted(addresses.items()) if own in {a.partition("/")[0] for a in all_}]
        found: dict[str, ObservedInterface] = {}
        for name in sorted({*names, *holders}):
            link = self.kernel.links.get(name)
            if link is not None:
                seen = bridges.link(link)
                found[name] = ObservedInterface(seen, addresses.get(name, ()), self._bond(link))
        underlay = next((found[n] for n in holders if n in found), None)
        return {n: interface for n, interface in found.items() if n in names}, underlay

    def _programs(self, interfaces: Iterable[ObservedInterface]) -> dict[str, str]:
        """Return the XDP programs and tc filters of uplinks, which are read with the whole host."""
        found = {}
        for link in (each.link for each in interfaces if self.ports is None):
            filtered = ["tc filters"] if self.kernel.tc.is_filtered(link.index) else []
            if what := [*(["an XDP program"] if link.xdp else []), *filtered]:
                found[link.name] = " and ".join(what)
        return found

    def _bond(self, link: Link) -> ObservedBond | None:
        """Return the bond that an interface is, or is stacked on."""
        links = self.kernel.links
        for _ in range(_STACKED):
            if isinstance(link.data, LinuxBond):
                return ObservedBond(link.name, link.data, links.bond_members(link))
            under = links.get(link.data.parent) if isinstance(link.data, Vlan) else None
            if under is None:
                return None
            link = under
        return None


def _named(links: Mapping[str, Link], *prefixes: str) -> dict[str, Link]:
    return {name: link for name, link in links.items() if name.startswith(prefixes)}


def _left_by(bridges: Mapping[str, ObservedBridge], uplinks: Mapping[str, Link]) -> set[str]:
    """Return the operator's interfaces that segments use as uplinks."""
    whole = {bridge.uplink for bridge in bridges.values()} - uplinks.keys() - {""}
    return whole | {link.data.parent for link in uplinks.values() if isinstance(link.data, Vlan)}


def _owners(table: Table | None, ports: Collection[str] | None) -> dict[str, str | None]:
    """Return the names in the rules that we did not derive, with the port if it is one of ``ports``.

    The port is known by its chain, which is read only for these ports (None: all). Taps of other ports are
    left out.
    """
    if table is None:
        return {}
    chains = {device_name(TAP, i): i for i in (_filtered_ports(table) if ports is None else ports)}
    linked = table.maps.get(filters.PORTS, {})
    found = {name: chains.get(linked.get(name) or "") for name in _keys(table) if not is_our_device(name)}
    far = set() if ports is None else {n for n in _rules_of_taps(table) if found[n] is None}
    return {name: port_id for name, port_id in found.items() if name not in far}


def _rules_of_taps(table: Table | None) -> set[str]:
    """Return the names that we did not derive and that the rules have as those of taps."""
    maps = table.maps if table else {}
    listed = maps.get(filters.SERVICES, {})
    linked = maps.get(filters.PORTS, {}).items()
    return {name for name, chain in linked if chain and name not in listed and not is_our_device(name)}


def _by_port(owners: Mapping[str, str | None]) -> dict[str, frozenset[str]]:
    names: dict[str, set[str]] = {}
    for name, port_id in owners.items():
        if port_id is not None and not is_our_device(name):
            names.setdefault(port_id, set()).add(name)
    return {port_id: frozenset(each) for port_id, each in names.items()}


def _keys(table: Table) -> frozenset[str]:
    return frozenset(name for each in filters.MAPS for name in table.maps.get(each, {}))


def _filtered_ports(table: Table | None) -> set[str]:
    """Return the ports whose chains exist, by the mark in the chains."""
    owners = {n: filters.owner(chain) for n, chain in (table.chains if table else {}).items()}
    return {i for name, i in owners.items() if i is not None and name == device_name(TAP, i)}


def _strays(table: Table | None, ports: Iterable[str], given: Mapping[str, Iterable[str]]) -> frozenset[str]:
    if table is None:
        return frozenset()
    known = {device_name(TAP, i) for i in ports}
    known |= {name for names in given.values() for name in names}
    return (table.names | _keys(table)) - known - filters.SHARED

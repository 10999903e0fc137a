"""Read the state that all OVS backends need: rows of the database, flows by OpenFlow."""

from __future__ import annotations

import time
from collections import ChainMap, Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from drivers.ovs import filters, sockets, tunnels, usability
from drivers.ovs.model import Layout, ObservedOvsBridge, OvsObservation, base_flows, doors, shut_ports
from drivers.ovs.overlays import HOMES, OVERLAY, SHARED_NAMES, TUNNELS, ObservedTunnels
from netplugin.api.errors import HostError, OperationTimeout
from netplugin.host import cpus
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.links import Links
from netplugin.host.names import device_name
from netplugin.host.openflow import BridgeSettings
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.ovs_bonds import BondUse, OvsBond, parse_bonds
from netplugin.host.ovs_rows import (
    BRIDGE_MARK,
    INTERNAL_TYPE,
    TUNNEL_MARK,
    UPLINK_MARK,
    VF_PORT_MARK,
    OvsBridge,
    OvsPort,
)
from netplugin.host.ovs_underlay import Underlay, read_underlay
from netplugin.host.ovs_view import OvsView
from netplugin.host.vswitchd import appctl
from netplugin.pmd.read import parse_threads
from netplugin.pmd.settings import MASK, threads_by_node

_READ_S = 5.0  # per read, in seconds
#: More for the flows of each port in scope: 200 of them, of 64 addresses, take 2 ms of CPU time.
_READ_PORT_S = 0.01
#: The interface types of devices that can have an address.
_OF_KERNEL = ("", "system", INTERNAL_TYPE, "tap")


@dataclass(frozen=True)
class Scope:
    """The scope of an observation: these ports (None: the whole host), and their rows."""

    ports: Collection[str] | None
    rows: Mapping[str, OvsPort]
    vf_ports: Mapping[str, OvsPort]
    deadline: float

    @property
    def whole(self) -> bool:
        """Whether the scope is the whole host."""
        return self.ports is None

    @cached_property
    def network_cookies(self) -> frozenset[int]:
        """The cookies of the VXLAN networks that the ports are on."""
        rows = [row for row in self.rows.values() if row.bridge == OVERLAY]
        return frozenset(tunnels.network_cookie(row.network[0]) for row in rows if row.network)

    @cached_property
    def on(self) -> Counter[str | None]:
        """How many of the ports are on each bridge."""
        return Counter(row.bridge for row in self.rows.values())

    def until(self) -> float:
        """The deadline of one read (``time.monotonic``)."""
        return min(self.deadline, time.monotonic() + _READ_S + _READ_PORT_S * len(self.rows))


#: All flows of some cookies, by bridge and cookie.
ReadFlows = Mapping[str, Mapping[int, Sequence[Flow]]]
NOT_READ: ReadFlows = {}


class OvsReader:
    """Reads the state of OVS. Not thread-safe."""

    def __init__(self, ovs: OvsHost, layout: Layout) -> None:
        self._ovs = ovs
        self._layout = layout

    @property
    def _view(self) -> OvsView:
        return self._ovs.view

    @property
    def _settings(self) -> OvsSettings:
        return self._ovs.settings

    def scope(self, ports: Collection[str] | None, deadline: float) -> Scope:
        """The scope for these ports.

        Raises: BackendUnavailable; OperationTimeout if a transaction is pending, so the rows may be
        about to change.
        """
        self._ovs.db.require_certain()
        view, backend = self._view, self._layout.backend
        if ports is None:
            return Scope(None, view.all_owned(backend), view.vf_ports(backend), deadline)
        rows = {port_id: view.owned(backend, port_id) for port_id in ports}
        vf_ports = {port_id: view.vf_port(backend, port_id) for port_id in ports}
        return Scope(
            ports,
            {port_id: row for port_id, row in rows.items() if row is not None},
            {port_id: row for port_id, row in vf_ports.items() if row is not None},
            deadline,
        )

    def observe(
        self,
        ports: Collection[str] | None,
        deadline: float,
        read: ReadFlows = NOT_READ,
        *,
        networks: bool = True,
    ) -> OvsObservation:
        """The observed state of these ports (None: of the whole host), without ``ports``.

        ``read``: flows that were read when the last changes were applied. ``networks``: with the bridges of
        all physical networks; else only if a port in scope is on one.
        """
        scope = self.scope(ports, deadline)
        return self.seen(scope, self.bridges(scope, networks), read)

    def bridges(self, scope: Scope, mapped: bool = True) -> dict[str, OvsBridge]:
        """The bridges in scope: our own, those of the ports, and (``mapped``, or if a port is on one) those
        of physical networks."""
        of_ports = {str(row.bridge) for row in scope.rows.values()}
        mapped |= not of_ports <= self._layout.marks.keys()
        known = {*self._layout.marks, *of_ports}
        if mapped:
            known |= {*self._settings.bridge_mappings.values()}
        return {
            b.name: b
            for b in self._view.bridges()
            if b.name in known
            or (mapped and BRIDGE_MARK in b.external_ids and not self._layout.is_foreign(b))
        }

    def seen(
        self, scope: Scope, bridges: Mapping[str, OvsBridge], read: ReadFlows = NOT_READ
    ) -> OvsObservation:
        """See ``observe``."""
        start = time.monotonic()
        flows = self._flows(bridges, scope, read)
        flows_ms = (time.monotonic() - start) * 1e3
        view, backend = self._view, self._layout.backend
        rows, claimed = scope.rows, self._ovs.claimed(sockets.KIND)
        # The row of a port goes before its directory: only the claim tells of a removal that was cut off.
        ids = {*rows, *claimed} if scope.ports is None else scope.ports
        qos = (
            view.all_qos(backend)
            if scope.ports is None
            else [row for port_id in scope.ports for row in view.qos_of(backend, port_id)]
        )
        addressed = self._addressed(scope, bridges)
        of_ports = self._by_port(rows, flows)
        settings = self._bridge_settings(bridges, of_ports, scope)
        shared = view.ports_named(SHARED_NAMES)
        seen = {
            name: self._bridge(b, flows, settings.get(name), scope, name in addressed)
            for name, b in bridges.items()
        }
        of_tunnels = self._tunnels(bridges, flows, scope, shared)
        reports = scope.whole and self._layout.keeps
        return OvsObservation(
            ports={},
            rows=rows,
            vf_ports=scope.vf_ports,
            flows=of_ports,
            shut=frozenset(i for i, row in rows.items() if _is_shut(row, settings.get(str(row.bridge)))),
            bridges=seen,
            tunnels=of_tunnels,
            qos=tuple(qos),
            names=ChainMap(self._derived_names(scope.ports, shared), view.given_names()),
            vhost_sockets=view.count_interfaces("dpdkvhostuser", "dpdkvhostuserclient"),
            root=view.root,
            starved=self._starved(scope),
            cannot_segment=self._cannot_segment(scope, seen),
            purge_failed=self._ovs.purge_failed,
            sockets=sockets.look_at_chosen(sockets.look(self._settings, ids, rows), claimed, scope.ports),
            bonds=self._bonds(bridges, of_tunnels.underlay, scope) if reports else (),
            pmd_threads=threads_by_node(view.root.other_config.get(MASK), cpus.by_node()) if reports else {},
            timings_ms={"openflow": flows_ms},
            store_mark=view.root.store_mark if scope.whole else "",
        )

    def _cannot_segment(self, scope: Scope, bridges: Mapping[str, ObservedOvsBridge]) -> frozenset[str]:
        """NICs that would drop large segments of VMs."""
        nics = scope.vf_ports or any(bridge.uplinks for bridge in bridges.values())
        if not (nics and scope.rows and usability.nic_must_segment(self._view.root)):
            return frozenset()
        return usability.cannot_segment(self.appctl(scope, "dpctl/show"))

    def _starved(self, scope: Scope) -> frozenset[str]:
        """Ports that have no mbufs according to the database and that indeed no PMD thread polls.

        After a restart with a connected VM, vswitchd 3.1 may set up a device and never update its
        row (``mtu`` 0, link down).
        """
        rows = scope.rows.values()
        suspects = {row.name for row in rows if row.interface and row.interface.starved}
        if not suspects:
            return frozenset()
        shown = self.appctl(scope, "dpif-netdev/pmd-rxq-show")
        polled = {q.port for thread in parse_threads(shown).threads for q in thread.queues}
        return frozenset(suspects - polled)

    def appctl(self, scope: Scope, command: str) -> str:
        """Run a command in vswitchd. Raises: BackendUnavailable, HostError, OperationTimeout."""
        return appctl(self._settings.sockets, command, deadline=scope.until())

    def _bonds(
        self, bridges: Mapping[str, OvsBridge], underlay: Underlay | None, scope: Scope
    ) -> tuple[BondUse, ...]:
        """The bonds that ports or tunnels use as uplinks, including the operator's own."""
        tunnels_by = underlay.device if underlay else None
        tunnel_bridge = self._view.bridge(tunnels_by) if tunnels_by else None
        where: dict[str, OvsBridge] = {}
        for bridge in (*bridges.values(), *((tunnel_bridge,) if tunnel_bridge else ())):
            ports = self._view.unmanaged_on(bridge)
            where |= {port.name: bridge for port in ports if len(port.interfaces) > 1}
        shown = parse_bonds(self.appctl(scope, "bond/show")) if where else ()
        return tuple(self._use(bond, where[bond.name], tunnels_by) for bond in shown if bond.name in where)

    def _use(self, bond: OvsBond, bridge: OvsBridge, tunnels_by: str | None) -> BondUse:
        senders = {
            (port.interface.external_ids.get("attached-mac"), port.tag)
            for port in self._view.owned_on(bridge)
            if port.interface
        }
        return BondUse(bond, bridge.name, len(senders), bridge.name == tunnels_by)

    # -- rows ------------------------------------------------------------------------------------

    def _addressed(self, scope: Scope, bridges: Mapping[str, OvsBridge]) -> Collection[str]:
        """Those of these bridges whose internal port has an address; all if addresses cannot be read.

        An address decides whether a bridge stays. One that stays for other ports is left out, and one
        that is kept counts as one with an address: then it stays too if a plan does not know that yet.
        """
        settings = self._settings
        kept = {n for n, b in bridges.items() if settings.keeps(n, b.external_ids.get(BRIDGE_MARK, ""))}
        homes = {name: self._view.bridge(HOMES.get(name, name)) for name in bridges.keys() - kept}
        asked = {n for n, home in homes.items() if home is None or not self._neighbours(home, scope)}
        if not asked:
            return kept
        try:
            return kept | (asked & Links().addresses().keys())
        except (HostError, OperationTimeout):
            return kept | asked

    def _neighbours(self, bridge: OvsBridge, scope: Scope) -> int:
        """The number of VMs' ports on a bridge that are not in scope."""
        return self._view.count_owned_on(bridge) - scope.on[bridge.name]

    def _bridge(
        self,
        bridge: OvsBridge,
        flows: Mapping[str, list[Flow]],
        settings: BridgeSettings | None,
        scope: Scope,
        addressed: bool,
    ) -> ObservedOvsBridge:
        view, name, layout = self._view, bridge.name, self._layout
        unmanaged = view.unmanaged_on(bridge)
        uplinks = {p.name: p for p in unmanaged if UPLINK_MARK in p.external_ids}
        others = [
            p for p in unmanaged if p.name != name and p.name not in uplinks and not _is_shared(p, scope)
        ]
        read = flows.get(name)
        ours = layout.is_ours(bridge)
        services, fixed = self._settings.service_ports, layout.base.get(name)
        named = [p for p in unmanaged if p.name in services and p.name not in uplinks]
        admitted = doors(view, bridge, services)
        return ObservedOvsBridge(
            name=name,
            ours=ours,
            datapath_type=bridge.datapath_type,
            fail_mode=bridge.fail_mode,
            mark=bridge.external_ids.get(BRIDGE_MARK, "") if ours else "",
            neighbours=self._neighbours(bridge, scope),
            uplinks=uplinks,
            nics=tuple(
                sorted((i.name, i.mtu) for p in others for i in p.interfaces if i.type == "dpdk" and i.mtu)
            ),
            used_by_others=bool(others) or addressed,
            services=tuple(named) if ours and fixed is None else (),
            unmanaged=tuple(p for p in others if fixed is not None or p not in named) if ours else (),
            doors=admitted if ours and fixed is None else (),
            forwards_right=None
            if settings is None or not (scope.whole and ours)
            else settings.shut.isdisjoint(admitted)
            and settings.shut.issuperset(shut_ports(view, bridge, services)),
            tunnel_ends=self._tunnel_ends(named if ours else unmanaged, settings)
            if scope.whole and scope.on[name]
            else (),
            desired_flows=base_flows(view, bridge, fixed, services) if ours else frozenset(),
            flows=None if read is None else frozenset(f for f in read if f.cookie == COOKIE_MARK),
            flows_of_others=self._ovs.flows.count_of_others(name, scope.until())
            if scope.whole and ours
            else 0,
            matches_fragments=settings.matches_fragments if settings else None,
            stray_cookies=self._strays(bridge, read, scope),
        )

    def _tunnel_ends(self, ports: Sequence[OvsPort], settings: BridgeSettings | None) -> tuple[str, ...]:
        """Those of these ports at which OVS ends tunnels: they have an address, at least the link-local one
        of a device that is up. None where there are no tunnels, or if addresses cannot be read."""
        if not self._view.tunnels():
            return ()
        found = [p for p in ports if p.interface and p.interface.type in _OF_KERNEL]
        found = [p for p in found if not _is_shut(p, settings)]
        try:
            addresses = Links().addresses() if found else {}
        except (HostError, OperationTimeout):
            return ()
        ends = [
            p.name for p in found if p.name in addresses or (p.interface and p.interface.link_state == "up")
        ]
        return tuple(sorted(ends))

    def _strays(self, bridge: OvsBridge, read: list[Flow] | None, scope: Scope) -> frozenset[int]:
        if read is None or not scope.whole or bridge.name in HOMES:
            return frozenset()
        owned = self._view.owned_on(bridge)
        known = {filters.port_cookie(p.owner[1]) for p in owned if p.owner}
        return frozenset(f.cookie for f in read) - known - {COOKIE_MARK}

    def _derived_names(
        self, ports: Collection[str] | None, shared: Sequence[OvsPort]
    ) -> dict[str, tuple[str, str] | None]:
        """The names that these ports (None: any) and VXLAN networks derive, if a port has them.

        The name of a service port's device is checked when it is claimed.
        """
        prefixes = self._layout.prefixes
        found = {port.name: port.serves for port in shared if TUNNEL_MARK not in port.external_ids}
        if ports is None:
            return found | {n: serves for n, serves in self._view.names().items() if n.startswith(prefixes)}
        rows = [self._view.port(device_name(prefix, i)) for prefix in prefixes for i in ports]
        return found | {row.name: row.serves for row in rows if row}

    # -- VXLAN networks --------------------------------------------------------------------------

    def _tunnels(
        self,
        bridges: Mapping[str, OvsBridge],
        flows: Mapping[str, list[Flow]],
        scope: Scope,
        shared: Sequence[OvsPort],
    ) -> ObservedTunnels:
        by_cookie: dict[int, set[Flow]] = {}
        if TUNNELS in flows:
            by_cookie = {cookie: set() for cookie in scope.network_cookies}
        for flow in flows.get(TUNNELS, ()):
            if flow.cookie != COOKIE_MARK and (scope.whole or flow.cookie in by_cookie):
                by_cookie.setdefault(flow.cookie, set()).add(flow)
        overlay, local_ip, backend = bridges.get(OVERLAY), self._settings.local_ip, self._layout.backend
        users = self._view.networks_on(overlay) if overlay else Counter()
        own = self._view.networks_on(overlay, backend) if overlay else Counter()
        here = Counter(row.network for row in scope.rows.values() if row.network)
        return ObservedTunnels(
            ports={p.name: p for p in shared if TUNNEL_MARK in p.external_ids},
            flows={cookie: frozenset(found) for cookie, found in by_cookie.items()},
            neighbours=dict((users - here).keys()),
            of_others=frozenset(network for network, _ in users.keys() - (own - here).keys()),
            underlay=read_underlay(local_ip, self._view) if local_ip else None,
        )

    # -- flows -----------------------------------------------------------------------------------

    def _flows(
        self, bridges: Mapping[str, OvsBridge], scope: Scope, read: ReadFlows
    ) -> dict[str, list[Flow]]:
        """Our flows by bridge, read only from the bridges of ports in scope, and those of their networks
        from the tunnel bridge; ``read`` has been read already. Without flows that vswitchd has learned.

        If only some ports are in scope, a bridge that does not answer in time is left out. ``plan``
        treats its flows as missing, so a port can be removed even while vswitchd hangs.
        """
        cookies: dict[str, list[int]] = defaultdict(list)
        for port_id, row in scope.rows.items():
            cookies[str(row.bridge)].append(filters.port_cookie(port_id))
        cookies[TUNNELS] += scope.network_cookies
        in_scope = {name for name in bridges if scope.whole or cookies[name]}
        flows: dict[str, list[Flow]] = {}
        for bridge in sorted(in_scope):
            those = None if scope.whole else [COOKIE_MARK, *cookies[bridge]]
            if those is not None and (known := read.get(bridge, {})).keys() >= {*those}:
                flows[bridge] = [flow for cookie in sorted({*those}) for flow in known[cookie]]
                continue
            try:
                without = tunnels.LEARNED_BIT if bridge == TUNNELS else 0
                flows[bridge] = self._ovs.flows.dump(bridge, those, scope.until(), without)
            except OperationTimeout:
                if scope.whole:
                    raise
        return flows

    def _bridge_settings(
        self, bridges: Mapping[str, OvsBridge], flows: Mapping[str, frozenset[Flow]], scope: Scope
    ) -> dict[str, BridgeSettings]:
        """The settings of bridges: of ours and those of all ports, or of those with a port that is closed."""
        closed = {str(scope.rows[i].bridge) for i, found in flows.items() if filters.are_closed(found)}
        ours = {n for n, bridge in bridges.items() if scope.on[n] or self._layout.is_ours(bridge)}
        read = ours if scope.whole else closed
        return {bridge: self._ovs.flows.settings(bridge, scope.until()) for bridge in sorted(read)}

    def _by_port(
        self, rows: Mapping[str, OvsPort], flows: Mapping[str, list[Flow]]
    ) -> dict[str, frozenset[Flow]]:
        by_cookie: dict[int, set[Flow]] = defaultdict(set)
        for bridge, found in flows.items():
            for flow in found if bridge not in HOMES else ():
                by_cookie[flow.cookie].add(flow)
        return {i: frozenset(by_cookie.get(filters.port_cookie(i), ())) for i in rows}


def _is_shut(port: OvsPort, settings: BridgeSettings | None) -> bool:
    """Whether the bridge of the port, which has these settings, is known to forward nothing to it."""
    return bool(settings and port.interface and port.interface.works_at in settings.shut)


def _is_shared(port: OvsPort, scope: Scope) -> bool:
    """Whether a port that does not belong to a VM is ours: a tunnel or a relay VF port."""
    port_id = port.external_ids.get(VF_PORT_MARK)
    return TUNNEL_MARK in port.external_ids or (port_id is not None and port_id in scope.vf_ports)

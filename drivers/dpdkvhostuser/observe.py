"""Read the state of OVS as values: the common parts, and tunnels, the underlay and bonds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from drivers.dpdkvhostuser import tunnels
from drivers.dpdkvhostuser.findings import details, fault
from drivers.dpdkvhostuser.model import (
    OVERLAY,
    SHARED_NAMES,
    TUNNELS,
    ObservedTunnels,
    VhostUserObservation,
)
from drivers.dpdkvhostuser.plan import network_of
from drivers.ovs.findings import VswitchdFacts, without_link
from drivers.ovs.observe import NOT_READ, Also, OvsReader, ReadFlows, Scope
from netplugin.backend import ObservedPort
from netplugin.host import cpus
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_bonds import BondUse, OvsBond, parse_bonds
from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovs_rows import TUNNEL_MARK, OvsBridge, OvsPort
from netplugin.host.ovs_underlay import Underlay, read_underlay
from netplugin.pmd.settings import MASK, threads_by_node


class Observer:
    """See ``netplugin.backend.Backend.observe``. Not thread-safe."""

    def __init__(self, ovs: OvsHost) -> None:
        self._ovs = ovs
        self._reader = OvsReader(ovs, tunnels.LAYOUT)

    @property
    def _mirror(self) -> Mirror:
        return self._ovs.mirror

    def observe(
        self, ports: Collection[str] | None, deadline: float, read: ReadFlows = NOT_READ
    ) -> VhostUserObservation:
        """``read``: see ``OvsReader.seen``."""
        scope = self._reader.scope(ports, deadline)
        bridges = self._reader.bridges(scope)
        also = Also({TUNNELS: self._network_cookies(scope)}, {TUNNELS: tunnels.LEARNED_BIT})
        common, flows = self._reader.seen(scope, bridges, also, read)
        local_ip = self._ovs.settings.local_ip
        underlay = read_underlay(local_ip, self._mirror) if local_ip else None
        shared = self._mirror.ports_named(SHARED_NAMES)
        taken = {p.name for p in shared if TUNNEL_MARK not in p.external_ids}
        seen = VhostUserObservation(
            **{**vars(common), "taken_names": common.taken_names | taken},
            tunnels=self._tunnels(bridges, flows, scope, shared, underlay),
            bonds=self._bonds(bridges, underlay, scope) if scope.whole else (),
            pmd_threads=self._pmd_threads() if scope.whole else {},
        )
        word = VswitchdFacts(
            root=self._mirror.root,
            starved=self._reader.starved(scope),
            cannot_segment=self._reader.cannot_segment(seen, scope),
        )
        observed = {
            i: ObservedPort(
                fault(row, seen, word),
                details(row),
                row.stamp,
                without_link(row),
                guest=row.interface.connection if row.interface else None,
            )
            for i, row in scope.rows.items()
        }
        return replace(seen, ports=observed)

    # -- networks --------------------------------------------------------------------------------

    def _tunnels(
        self,
        bridges: Mapping[str, OvsBridge],
        flows: Mapping[str, list[Flow]],
        scope: Scope,
        shared: Sequence[OvsPort],
        underlay: Underlay | None,
    ) -> ObservedTunnels:
        by_cookie: dict[int, set[Flow]] = {c: set() for c in self._network_cookies(scope)}
        if TUNNELS not in flows:
            by_cookie = {}
        for flow in flows.get(TUNNELS, ()):
            if flow.cookie != COOKIE_MARK and (scope.whole or flow.cookie in by_cookie):
                by_cookie.setdefault(flow.cookie, set()).add(flow)
        overlay = bridges.get(OVERLAY)
        users = self._mirror.networks_on(overlay) if overlay else Counter()
        users -= Counter(row.network for row in scope.rows.values() if row.network)
        return ObservedTunnels(
            ports={p.name: p for p in shared if TUNNEL_MARK in p.external_ids},
            flows={cookie: frozenset(found) for cookie, found in by_cookie.items()},
            neighbours=dict(users.keys()),
            underlay=underlay,
        )

    def _network_cookies(self, scope: Scope) -> list[int]:
        """Return the cookies of the networks that the ports in scope are on."""
        ids = (row.external_ids for row in scope.rows.values() if row.bridge == OVERLAY)
        return sorted({tunnels.network_cookie(n) for marks in ids for n in network_of(marks)})

    # -- PMD threads -----------------------------------------------------------------------------

    def _pmd_threads(self) -> dict[int, int]:
        return threads_by_node(self._mirror.root.other_config.get(MASK), cpus.by_node())

    # -- bonds -----------------------------------------------------------------------------------

    def _bonds(
        self, bridges: Mapping[str, OvsBridge], underlay: Underlay | None, scope: Scope
    ) -> tuple[BondUse, ...]:
        """Return the bonds that ports or tunnels use as uplinks, including the operator's own."""
        tunnels_by = underlay.device if underlay else None
        beside = self._mirror.bridge(tunnels_by) if tunnels_by else None
        where: dict[str, OvsBridge] = {}
        for bridge in (*bridges.values(), *((beside,) if beside else ())):
            ports = self._mirror.unmanaged_on(bridge)
            where |= {port.name: bridge for port in ports if len(port.interfaces) > 1}
        if not where:
            return ()
        shown = parse_bonds(self._reader.appctl(scope, "bond/show"))
        return tuple(
            self._bond_use(bond, where[bond.name], tunnels_by) for bond in shown if bond.name in where
        )

    def _bond_use(self, bond: OvsBond, bridge: OvsBridge, tunnels_by: str | None) -> BondUse:
        senders = {
            (port.interface.external_ids.get("attached-mac"), port.tag)
            for port in self._mirror.owned_on(bridge)
            if port.interface
        }
        return BondUse(bond, bridge.name, len(senders), bridge.name == tunnels_by)

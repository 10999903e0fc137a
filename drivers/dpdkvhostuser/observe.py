"""Read the state of OVS as values: the common parts, and bonds and PMD threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from drivers.dpdkvhostuser.findings import fault
from drivers.dpdkvhostuser.model import LAYOUT, VhostUserObservation
from drivers.ovs.findings import details, without_link
from drivers.ovs.observe import NOT_READ, OvsReader, ReadFlows, Scope
from netplugin.backend import ObservedPort
from netplugin.host import cpus
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_bonds import BondUse, OvsBond, parse_bonds
from netplugin.host.ovs_rows import OvsBridge
from netplugin.host.ovs_underlay import Underlay
from netplugin.host.ovs_view import OvsView
from netplugin.pmd.settings import MASK, threads_by_node


class Observer:
    """See ``netplugin.backend.Backend.observe``. Not thread-safe."""

    def __init__(self, ovs: OvsHost) -> None:
        self._ovs = ovs
        self._reader = OvsReader(ovs, LAYOUT)

    @property
    def _view(self) -> OvsView:
        return self._ovs.view

    def observe(
        self, ports: Collection[str] | None, deadline: float, read: ReadFlows = NOT_READ
    ) -> VhostUserObservation:
        """``read``: see ``OvsReader.seen``."""
        scope = self._reader.scope(ports, deadline)
        bridges = self._reader.bridges(scope)
        common = self._reader.seen(scope, bridges, read)
        seen = VhostUserObservation(
            **vars(common),
            bonds=self._bonds(bridges, common.tunnels.underlay, scope) if scope.whole else (),
            pmd_threads=self._pmd_threads() if scope.whole else {},
        )
        word = self._reader.facts(scope, seen)
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

    # -- PMD threads -----------------------------------------------------------------------------

    def _pmd_threads(self) -> dict[int, int]:
        return threads_by_node(self._view.root.other_config.get(MASK), cpus.by_node())

    # -- bonds -----------------------------------------------------------------------------------

    def _bonds(
        self, bridges: Mapping[str, OvsBridge], underlay: Underlay | None, scope: Scope
    ) -> tuple[BondUse, ...]:
        """Return the bonds that ports or tunnels use as uplinks, including the operator's own."""
        tunnels_by = underlay.device if underlay else None
        tunnel_bridge = self._view.bridge(tunnels_by) if tunnels_by else None
        where: dict[str, OvsBridge] = {}
        for bridge in (*bridges.values(), *((tunnel_bridge,) if tunnel_bridge else ())):
            ports = self._view.unmanaged_on(bridge)
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
            for port in self._view.owned_on(bridge)
            if port.interface
        }
        return BondUse(bond, bridge.name, len(senders), bridge.name == tunnels_by)

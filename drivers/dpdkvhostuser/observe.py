"""Reads OVS into values: rows from the mirror of its database, flows and bonds from its programs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from drivers.dpdkvhostuser import filters, offload, tunnels
from drivers.dpdkvhostuser.faults import HostWord, details, fault
from drivers.dpdkvhostuser.plan_networks import network_of
from drivers.dpdkvhostuser.seen import Seen, SeenBridge, SeenTunnels
from drivers.dpdkvhostuser.wanted import (
    BACKEND,
    BRIDGE_MARKS,
    OVERLAY,
    SHARED_NAMES,
    TUNNELS,
)
from netplugin.backend import ObservedPort
from netplugin.errors import OperationTimeout
from netplugin.host import cpus
from netplugin.host.names import VHOST, device_name
from netplugin.host.openflow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_bonds import Bond, BondUse, parse_bonds
from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovs_rows import (
    BRIDGE_MARK,
    PORT_MARK,
    TUNNEL_MARK,
    UPLINK_MARK,
    OvsBridge,
    OvsPort,
    OvsRoot,
)
from netplugin.host.ovs_underlay import Underlay, UnderlayReader
from netplugin.host.vswitchd import appctl, parse_pmd

_READ_S = 2.0  # seconds one read of the flows may take
_MANY = 8  # with more ports than this, one dump of all flows is quicker than one for each


@dataclass(frozen=True)
class _Scope:
    """What a look is at: these ports (``ports`` None: the whole host), and their rows."""

    ports: Collection[str] | None
    rows: Mapping[str, OvsPort]
    deadline: float

    @property
    def whole(self) -> bool:
        return self.ports is None

    def until(self) -> float:
        return min(self.deadline, time.monotonic() + _READ_S)


class Observer:
    """See ``netplugin.backend.Backend.observe``. For one thread."""

    def __init__(self, ovs: OvsHost) -> None:
        self._ovs = ovs
        self._settings = ovs.settings
        local_ip = ovs.settings.local_ip
        self._underlay = UnderlayReader(local_ip) if local_ip else None

    @property
    def _mirror(self) -> Mirror:
        return self._ovs.mirror

    def close(self) -> None:
        if self._underlay is not None:
            self._underlay.close()

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        self._ovs.db.require_certain()
        mirror = self._mirror
        if ports is None:
            rows = mirror.all_owned(BACKEND)
            qos = mirror.all_qos(BACKEND)
        else:
            found = {port_id: mirror.owned(BACKEND, port_id) for port_id in ports}
            rows = {port_id: row for port_id, row in found.items() if row is not None}
            qos = [row for port_id in ports for row in mirror.qos_of(BACKEND, port_id)]
        scope = _Scope(ports, rows, deadline)
        bridges = self._bridges()
        start = time.monotonic()
        flows = self._flows(bridges, scope)
        flows_ms = (time.monotonic() - start) * 1e3
        underlay = self._read_underlay(scope)
        shared = mirror.ports_named(SHARED_NAMES)
        seen = Seen(
            ports={},
            rows=rows,
            flows=_by_port(rows, flows),
            bridges={name: self._bridge(b, flows, scope) for name, b in bridges.items()},
            tunnels=self._tunnels(bridges, flows, scope, shared, underlay),
            qos=tuple(qos),
            taken_names=self._taken_names(ports, shared),
            vhost_sockets=mirror.count_interfaces("dpdkvhostuser", "dpdkvhostuserclient"),
            tso=offload.enabled(mirror.root),
            socket_files=self._socket_files(rows if ports is None else ports),
            bonds=self._bonds(bridges, underlay, scope) if scope.whole else (),
            pmd_threads=_pmd_threads(mirror.root),
            timings_ms={"openflow": flows_ms},
        )
        word = HostWord(
            root=mirror.root,
            starved=self._starved(scope),
            cannot_segment=self._cannot_segment(seen, scope),
        )
        observed = {
            i: ObservedPort(fault(row, seen, word), details(row)) for i, row in rows.items()
        }
        return replace(seen, ports=observed)

    # -- rows ------------------------------------------------------------------------------------

    def _bridges(self) -> dict[str, OvsBridge]:
        """The bridges we may have to do with: those the operator mapped, those that are ours."""
        known = {*self._settings.bridge_mappings.values(), *BRIDGE_MARKS}
        return {
            b.name: b
            for b in self._mirror.bridges()
            if b.name in known or BRIDGE_MARK in b.external_ids
        }

    def _bridge(
        self, bridge: OvsBridge, flows: Mapping[str, list[Flow]], scope: _Scope
    ) -> SeenBridge:
        mirror, ids, name = self._mirror, bridge.external_ids, bridge.name
        strangers = [p for p in mirror.strangers_on(bridge) if p.name != name]
        uplinks = {p.name: p for p in strangers if UPLINK_MARK in p.external_ids}
        others = [
            p for p in strangers if p.name not in uplinks and TUNNEL_MARK not in p.external_ids
        ]
        read = flows.get(name)
        here = {port_id for port_id, row in scope.rows.items() if row.bridge == name}
        neighbours = mirror.count_owned_on(bridge) - len(here)
        ours = ids.get(BRIDGE_MARK) == BRIDGE_MARKS.get(name, ids.get(BRIDGE_MARK, ""))
        return SeenBridge(
            name=name,
            ours=ours,
            datapath_type=bridge.datapath_type,
            fail_mode=bridge.fail_mode,
            neighbours=neighbours,
            neighbours_mtu=self._largest_mtu(bridge, here) if uplinks and neighbours else 0,
            uplinks=uplinks,
            nics=tuple(
                sorted(
                    (i.name, i.mtu)
                    for p in others
                    for i in p.interfaces
                    if i.type == "dpdk" and i.mtu
                )
            ),
            has_strangers=bool(others),
            wanted_flows=self.wanted_bridge_flows(bridge) if ours else frozenset(),
            flows=None if read is None else frozenset(f for f in read if f.cookie == COOKIE_MARK),
            stray_cookies=self._strays(bridge, read, scope),
        )

    def _strays(self, bridge: OvsBridge, read: list[Flow] | None, scope: _Scope) -> frozenset[int]:
        if read is None or not scope.whole or bridge.name == TUNNELS:
            return frozenset()
        owned = self._mirror.owned_on(bridge)
        known = {filters.port_cookie(p.owner[1]) for p in owned if p.owner}
        return frozenset(f.cookie for f in read) - known - {COOKIE_MARK}

    def _largest_mtu(self, bridge: OvsBridge, without: Collection[str]) -> int:
        ports = [p for p in self._mirror.owned_on(bridge) if p.owner and p.owner[1] not in without]
        return max(((p.interface and p.interface.mtu_request) or 0 for p in ports), default=0)

    def wanted_bridge_flows(self, bridge: OvsBridge) -> frozenset[Flow]:
        """The base flows of a bridge of ours, by the ports that are on it now."""
        if bridge.name == TUNNELS:
            return tunnels.base_flows()
        ports = self._mirror.strangers_on(bridge)
        ofports = (i.works_at for port in ports for i in port.interfaces)
        return filters.bridge_flows(ofport for ofport in ofports if ofport)

    def _tunnels(
        self,
        bridges: Mapping[str, OvsBridge],
        flows: Mapping[str, list[Flow]],
        scope: _Scope,
        shared: Sequence[OvsPort],
        underlay: Underlay | None,
    ) -> SeenTunnels:
        by_cookie: dict[int, set[Flow]] = {c: set() for c in self._network_cookies(scope)}
        if TUNNELS not in flows:
            by_cookie = {}
        for flow in flows.get(TUNNELS, ()):
            if flow.cookie != COOKIE_MARK and (scope.whole or flow.cookie in by_cookie):
                by_cookie.setdefault(flow.cookie, set()).add(flow)
        overlay = bridges.get(OVERLAY)
        neighbours: dict[str, int] = {}
        for ids in self._mirror.ids_on(overlay) if overlay else ():
            if ids.get(PORT_MARK) not in scope.rows:
                neighbours |= network_of(ids)
        return SeenTunnels(
            ports={p.name: p for p in shared if TUNNEL_MARK in p.external_ids},
            flows={cookie: frozenset(found) for cookie, found in by_cookie.items()},
            neighbours=neighbours,
            underlay=underlay,
        )

    def _network_cookies(self, scope: _Scope) -> list[int]:
        """Of the networks that the ports in question are on."""
        ids = (row.external_ids for row in scope.rows.values() if row.bridge == OVERLAY)
        return sorted({tunnels.network_cookie(n) for marks in ids for n in network_of(marks)})

    def _read_underlay(self, scope: _Scope) -> Underlay | None:
        """If a port may need to know: one that is on a VXLAN network, or one that is not there yet."""
        on_overlay = any(row.bridge == OVERLAY for row in scope.rows.values())
        if self._underlay is None:
            return None
        if scope.ports is None or on_overlay or len(scope.rows) < len(scope.ports):
            return self._underlay.read(self._mirror)
        return None

    def _taken_names(
        self, ports: Collection[str] | None, shared: Sequence[OvsPort]
    ) -> frozenset[str]:
        """Names of the kind we give that another's port has: of these ports, or all there are."""
        mirror = self._mirror
        taken = {p.name for p in shared if TUNNEL_MARK not in p.external_ids}
        if ports is None:
            found = mirror.names_of_others(BACKEND)
            return frozenset({name for name in found if name.startswith(VHOST)} | taken)
        rows = {port_id: mirror.port(device_name(VHOST, port_id)) for port_id in ports}
        return frozenset({r.name for i, r in rows.items() if r and r.owner != (BACKEND, i)} | taken)

    def _socket_files(self, ports: Collection[str]) -> dict[str, str]:
        directory = self._settings.vhost_socket_dir
        paths = {port_id: directory / device_name(VHOST, port_id) for port_id in ports}
        return {port_id: str(path) for port_id, path in paths.items() if path.exists()}

    # -- programs --------------------------------------------------------------------------------

    def _flows(self, bridges: Mapping[str, OvsBridge], scope: _Scope) -> dict[str, list[Flow]]:
        """Our flows by bridge, read only from bridges that the ports in question need.

        A bridge that does not tell in time is left out when only some ports are in question: then
        their flows are unknown, which ``plan`` takes as not there, and a port can still be removed
        from under a vswitchd that hangs.
        """
        cookies: dict[str, list[int]] = defaultdict(list)
        for port_id, row in scope.rows.items():
            cookies[str(row.bridge)].append(filters.port_cookie(port_id))
        cookies[TUNNELS] = self._network_cookies(scope)
        wanted = {name for name in bridges if scope.whole or cookies[name]}
        flows: dict[str, list[Flow]] = {}
        for bridge in sorted(wanted):
            owners: list[int | None] = [None]
            if not scope.whole and len(cookies[bridge]) <= _MANY:
                owners = list(cookies[bridge])
            try:
                found = [f for owner in owners for f in self._dump(bridge, owner, scope.until())]
            except OperationTimeout:
                if scope.whole:
                    raise
                continue
            flows[bridge] = list(dict.fromkeys(found))
        return flows

    def _dump(self, bridge: str, owner: int | None, until: float) -> list[Flow]:
        if bridge == TUNNELS:
            return self._ovs.flows.dump(bridge, owner, until, without=tunnels.LEARNED_BIT)
        return self._ovs.flows.dump(bridge, owner, until)

    def _starved(self, scope: _Scope) -> frozenset[str]:
        """Ports that look starved in the database and are in truth: no PMD thread polls them.

        After a restart with the VM on the socket, vswitchd 3.1 may set a device up and leave the
        row as it was (``mtu`` 0, link down) for good.
        """
        rows = scope.rows.values()
        suspects = {row.name for row in rows if row.interface and row.interface.starved}
        if not suspects:
            return frozenset()
        shown = self._appctl(scope, "dpif-netdev/pmd-rxq-show")
        return frozenset(suspects - {q.port for core in parse_pmd(shown, "") for q in core.queues})

    def _cannot_segment(self, seen: Seen, scope: _Scope) -> frozenset[str]:
        uplinks = any(bridge.uplinks for bridge in seen.bridges.values())
        if not (uplinks and scope.rows and offload.nic_must_segment(self._mirror.root)):
            return frozenset()
        return offload.cannot_segment(self._appctl(scope, "dpctl/show"))

    def _bonds(
        self, bridges: Mapping[str, OvsBridge], underlay: Underlay | None, scope: _Scope
    ) -> tuple[BondUse, ...]:
        """The bonds by which ports or tunnels leave, the operator's own too."""
        tunnels_by = underlay.device if underlay else None
        beside = self._mirror.bridge(tunnels_by) if tunnels_by else None
        where: dict[str, OvsBridge] = {}
        for bridge in (*bridges.values(), *((beside,) if beside else ())):
            ports = self._mirror.strangers_on(bridge)
            where |= {port.name: bridge for port in ports if len(port.interfaces) > 1}
        if not where:
            return ()
        shown = parse_bonds(self._appctl(scope, "bond/show"))
        return tuple(
            self._bond_use(bond, where[bond.name], tunnels_by)
            for bond in shown
            if bond.name in where
        )

    def _bond_use(self, bond: Bond, bridge: OvsBridge, tunnels_by: str | None) -> BondUse:
        senders = {
            (port.interface.external_ids.get("attached-mac"), port.tag)
            for port in self._mirror.owned_on(bridge)
            if port.interface
        }
        return BondUse(bond, bridge.name, len(senders), bridge.name == tunnels_by)

    def _appctl(self, scope: _Scope, command: str) -> str:
        return appctl(self._settings.rundir, command, deadline=scope.until())


def _pmd_threads(root: OvsRoot) -> int:
    """How many PMD threads vswitchd runs; without a mask it is one for each NUMA node."""
    try:
        return len(cpus.from_mask(root.other_config.get("pmd-cpu-mask", ""))) or 1
    except ValueError:
        return 1  # what OVS cannot read it ignores


def _by_port(
    rows: Mapping[str, OvsPort], flows: Mapping[str, list[Flow]]
) -> dict[str, frozenset[Flow]]:
    by_cookie: dict[int, set[Flow]] = defaultdict(set)
    for bridge, found in flows.items():
        for flow in found if bridge != TUNNELS else ():
            by_cookie[flow.cookie].add(flow)
    return {i: frozenset(by_cookie.get(filters.port_cookie(i), ())) for i in rows}

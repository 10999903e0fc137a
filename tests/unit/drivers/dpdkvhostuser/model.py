"""A model of OVS that carries out changes in memory: enough to plan against what was applied."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from drivers.dpdkvhostuser.plan import LAYOUT
from drivers.ovs import filters, tunnels
from drivers.ovs import flow_changes as f
from drivers.ovs import row_changes as r
from drivers.ovs.model import Layout, ObservedOvsBridge, OvsObservation, forwards
from drivers.ovs.overlays import (
    HOMES,
    OVERLAY,
    PATCHES,
    SHARED_NAMES,
    TO_OVERLAY,
    TUNNELS,
    ObservedTunnels,
    TunnelPort,
    vxlan_name,
)
from drivers.ovs.ports import VhostPort, is_marked
from drivers.ovs.uplinks import OvsUplink
from drivers.vdpa.model import LAYOUT as OF_VDPA
from netplugin.api.errors import TryAgain
from netplugin.backend import Change, ObservedPort
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import (
    TUNNEL_MARK,
    UPLINK_MARK,
    OvsInterface,
    OvsPort,
    OvsQos,
)
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovs_underlay import Underlay
from tests.unit.drivers.dpdkvhostuser import columns
from tests.unit.drivers.dpdkvhostuser.columns import LOCAL_IP

SETTINGS = OvsSettings(
    sockets=OvsSockets("unix:/nowhere", Path("/nowhere")),
    vhost_socket_dir=Path("/run/vhost"),
    vhost_socket_group="qemu",
    bridge_mappings={"net1": "br1", "net2": "br2", "net3": "br3"},
    uplinks={"net2": ("0000:03:00.0",), "net3": ("0000:04:00.0", "0000:04:00.1")},
    bonds={"net3": "lacp"},
    uplink_mtu={"net2": 9000, "net3": 9000},
    local_ip=LOCAL_IP,
    service_ports=frozenset({"foreign-br1"}),
)
#: The base flows of bridges that do not switch, of whichever backend.
BASE = {**LAYOUT.base, **OF_VDPA.base}
UNDERLAY = Underlay(LOCAL_IP, "br-underlay", True, True, (("br-underlay", 9100), ("dpdk0", 9100)))


@dataclass
class Bridge:
    """``ours``: it has our mark, which names ``mark``; ``flows`` has everybody's."""

    ours: bool = True
    mark: str = ""
    datapath_type: str = "netdev"
    fail_mode: str | None = "secure"
    ports: dict[str, OvsPort] = field(default_factory=dict)
    flows: set[Flow] = field(default_factory=set)
    matches_fragments: bool = False


class Model:
    """What OVS holds. Foreign objects are ports without a mark and flows without our cookie."""

    def __init__(self, settings: OvsSettings = SETTINGS, layout: Layout = LAYOUT) -> None:
        self.settings = settings
        self.layout = layout
        self.bridges: dict[str, Bridge] = {}
        self.qos: dict[str, OvsQos] = {}
        self.underlay: Underlay | None = UNDERLAY
        self.nics: tuple[tuple[str, int], ...] = ()
        #: The columns that each port of ours must have, as they were last made or set.
        self.made: dict[str, columns.PortColumns] = {}
        self._next = 1

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def add_port(
        self,
        bridge: str,
        name: str,
        port: Mapping[str, Any] | None = None,
        interfaces: Mapping[str, Mapping[str, Any]] | None = None,
        qos: Mapping[str, Any] | None = None,
    ) -> None:
        assert all(name not in b.ports for b in self.bridges.values()), "a name is taken once"
        empty = OvsPort(name, bridge, None, None, {})
        row = self._set(empty, port or {}, interfaces or {name: {}})
        if qos is not None:
            row = replace(row, qos=self.add_qos(**qos))
        self.bridges[bridge].ports[name] = row

    def add_qos(self, type: str, other_config: Mapping[str, str], external_ids: Mapping[str, str]) -> OvsQos:
        uuid = str(UUID(int=self._number()))
        self.qos[uuid] = OvsQos(uuid, type, other_config, external_ids)
        return self.qos[uuid]

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._apply(change)

    def _apply(self, change: Change) -> None:
        match change:
            case r.CreateBridge():
                self.bridges.setdefault(change.name, Bridge(mark=change.mark))
            case r.SecureBridge():
                self.bridges[change.name].fail_mode = "secure"
            case r.RemoveBridge():
                home = self.bridges.get(HOMES.get(change.name, change.name))
                if home and any(port.owner for port in home.ports.values()):
                    raise TryAgain("a port has come meanwhile", step="plan")
                del self.bridges[change.name]
            case r.AddPort(port=TunnelPort() as desired) if self._has(desired.bridge, desired.name):
                self._apply(r.SetPort(change.ports, desired))
            case r.AddPort(port=desired):
                self.made[desired.name] = columns.of_port(desired)
                qos = columns.of_qos(desired) if isinstance(desired, VhostPort) else None
                self.add_port(desired.bridge, desired.name, *self.made[desired.name], qos)
            case r.SetPort(port=desired):
                ports = self.bridges[desired.bridge].ports
                row = ports[desired.name]
                known = {interface.name for interface in row.interfaces}
                self.made[desired.name] = columns.of_port(desired, known)
                merged = ("external_ids", "options") if isinstance(desired, OvsUplink) else ("external_ids",)
                ports[desired.name] = self._set(row, *self.made[desired.name], merged)
            case r.RemovePort(unless_needed=True) if change.name in self._needed():
                raise TryAgain("a port has come meanwhile", step="plan")
            case r.RemovePort():
                gone = self.bridges[change.bridge].ports.pop(change.name)
                if gone.qos and gone.owner and is_marked(gone.qos.external_ids, gone.owner[0]):
                    del self.qos[gone.qos.uuid]
            case r.SetQos(port=row):
                self._set_qos(row.bridge, row.name, columns.of_qos(row))
            case r.DropQos():
                del self.qos[change.row]
            case _:
                self._apply_flows(change)

    def _apply_flows(self, change: Change) -> None:
        match change:
            case f.SetFilter():
                names = (each.name if each else None for each in (change.port, change.port.vf_port))
                own, other = (self._ofport(change.bridge, name) for name in names)
                self.drop(change.bridge, filters.port_cookie(change.port.port_id))
                self.bridges[change.bridge].flows |= change.flows(own, other, self._doors(change.bridge))
            case f.SetBridgeFlows():
                self.drop(change.bridge, COOKIE_MARK)
                assert change.fixed == BASE.get(change.bridge)
                self.bridges[change.bridge].matches_fragments = True
                self.bridges[change.bridge].flows |= self._desired_flows(change.bridge)
            case f.SetNetwork():
                names = (vxlan_name(change.overlay.spec.udp_port), TO_OVERLAY)
                tunnel, patch = (self._ofport(TUNNELS, name) for name in names)
                if not (tunnel and patch):
                    return
                self.drop(TUNNELS, tunnels.network_cookie(change.overlay.network_id))
                self.bridges[TUNNELS].flows |= tunnels.network_flows(change.overlay, LOCAL_IP, tunnel, patch)
            case f.DropNetwork():
                if change.cookie not in map(tunnels.network_cookie, self._networks()):
                    self.drop(change.bridge, change.cookie)
            case f.DropFlows():
                for cookie in change.cookies:
                    self.drop(change.bridge, cookie)
            case _:
                raise AssertionError(f"a change the model does not know: {change}")

    def observe(self, ports: Collection[str] | None = None) -> OvsObservation:
        """As the dpdkvhostuser backend does."""
        return self.common(ports, LAYOUT)

    def common(self, ports: Collection[str] | None = None, layout: Layout | None = None) -> OvsObservation:
        """As the backends on OVS do."""
        named = self._named()
        backend = (layout or self.layout).backend
        rows, vf_ports = (
            {
                owner[1]: p
                for p in named.values()
                if (owner := whose(p)) and owner[0] == backend and (ports is None or owner[1] in ports)
            }
            for whose in (_owner, _served)
        )
        taken = {
            name
            for name, p in named.items()
            if name.startswith(SHARED_NAMES) and TUNNEL_MARK not in p.external_ids
        }
        known = {*self.settings.bridge_mappings.values(), *self.layout.marks}
        known |= {str(row.bridge) for row in rows.values()}
        return OvsObservation(
            ports={i: ObservedPort() for i in rows},
            rows=rows,
            vf_ports=vf_ports,
            flows={i: self._port_flows(i, row) for i, row in rows.items()},
            bridges={
                name: self._seen_bridge(name, b, rows, whole=ports is None)
                for name, b in self.bridges.items()
                if b.ours or name in known
            },
            tunnels=self._seen_tunnels(rows, named, backend, whole=ports is None),
            qos=tuple(
                q
                for q in self.qos.values()
                if q.owner and q.owner[0] == backend and (ports is None or q.owner[1] in ports)
            ),
            names=dict.fromkeys(taken)
            | {name: p.serves for name, p in named.items() if name.startswith(self.layout.prefixes)},
            vhost_sockets=len(rows),
        )

    def foreign(self) -> dict[str, Any]:
        """All that is not ours, to compare before and after."""
        return {
            name: (
                bridge.ours or (bridge.datapath_type, bridge.fail_mode),
                {n: p for n, p in bridge.ports.items() if _is_unmanaged(p)},
                {f for f in bridge.flows if f.cookie >> 48 != COOKIE_MARK >> 48},
            )
            for name, bridge in self.bridges.items()
            if not bridge.ours or any(_is_unmanaged(p) for p in bridge.ports.values())
        }

    def drop(self, bridge: str, cookie: int) -> None:
        self.bridges[bridge].flows = {f for f in self.bridges[bridge].flows if f.cookie != cookie}

    # -- inside ----------------------------------------------------------------------------------

    def _named(self) -> dict[str, OvsPort]:
        return {name: p for b in self.bridges.values() for name, p in b.ports.items()}

    def _has(self, bridge: str, name: str) -> bool:
        return bridge in self.bridges and name in self.bridges[bridge].ports

    def _networks(self) -> dict[str, int]:
        """Those of the ports of VMs, each with its UDP port."""
        bridge = self.bridges.get(OVERLAY)
        ports = [port for port in bridge.ports.values() if port.owner] if bridge else []
        return dict(port.network for port in ports if port.network)

    def _needed(self) -> set[str]:
        networks = self._networks()
        return {*PATCHES, *map(vxlan_name, networks.values())} if networks else set()

    def _ofport(self, bridge: str, name: str | None) -> int | None:
        port = self.bridges[bridge].ports.get(name or "")
        return port.interface.works_at if port and port.interface else None

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _port_flows(self, port_id: str, row: OvsPort) -> frozenset[Flow]:
        flows = self.bridges[str(row.bridge)].flows
        return frozenset(f for f in flows if f.cookie == filters.port_cookie(port_id))

    def _seen_bridge(
        self, name: str, bridge: Bridge, rows: Mapping[str, OvsPort], *, whole: bool
    ) -> ObservedOvsBridge:
        unmanaged = {n: p for n, p in bridge.ports.items() if not p.owner}
        uplinks = {n: p for n, p in unmanaged.items() if UPLINK_MARK in p.external_ids}
        owned = {
            p.owner[1]: (p.interface and p.interface.mtu_request) or 0
            for p in bridge.ports.values()
            if p.owner
        }
        marked = {f.cookie for f in bridge.flows if f.cookie >> 48 == COOKIE_MARK >> 48}
        strays = marked - {COOKIE_MARK} - {filters.port_cookie(i) for i in owned}
        return ObservedOvsBridge(
            name=name,
            ours=bridge.ours,
            datapath_type=bridge.datapath_type,
            fail_mode=bridge.fail_mode,
            mark=bridge.mark if bridge.ours else "",
            neighbours=len([i for i in owned if i not in rows]),
            uplinks=uplinks,
            nics=self.nics,
            used_by_others=any(_is_unmanaged(p) for p in unmanaged.values())
            or bool(self.underlay and self.underlay.device == name),
            doors=self._doors(name) if bridge.ours else (),
            desired_flows=self._desired_flows(name) if bridge.ours else frozenset(),
            flows=frozenset(f for f in bridge.flows if f.cookie == COOKIE_MARK),
            matches_fragments=bridge.matches_fragments if whole else None,
            stray_cookies=frozenset(strays if whole and name not in HOMES else ()),
        )

    def _seen_tunnels(
        self, rows: Mapping[str, OvsPort], named: Mapping[str, OvsPort], backend: str, *, whole: bool
    ) -> ObservedTunnels:
        here = [row for row in rows.values() if row.bridge == OVERLAY]
        read = {tunnels.network_cookie(row.network[0]) for row in here if row.network}
        flows: dict[int, set[Flow]] = {cookie: set() for cookie in read}
        for flow in self.bridges[TUNNELS].flows if TUNNELS in self.bridges else ():
            ours = flow.cookie >> 48 == COOKIE_MARK >> 48 and not flow.cookie & tunnels.LEARNED_BIT
            if ours and flow.cookie != COOKIE_MARK and (whole or flow.cookie in read):
                flows.setdefault(flow.cookie, set()).add(flow)
        neighbours: dict[str, int] = {}
        own: set[str] = set()
        for port in self.bridges[OVERLAY].ports.values() if OVERLAY in self.bridges else ():
            if port.owner and port.owner[1] not in rows and port.network:
                neighbours |= [port.network]
                own |= {port.network[0]} if port.owner[0] == backend else set()
        return ObservedTunnels(
            ports={n: p for n, p in named.items() if TUNNEL_MARK in p.external_ids},
            flows={cookie: frozenset(found) for cookie, found in flows.items()}
            if TUNNELS in self.bridges
            else {},
            neighbours=neighbours,
            of_others=frozenset(neighbours.keys() - own),
            underlay=self.underlay,
        )

    def _desired_flows(self, name: str) -> frozenset[Flow]:
        return BASE.get(name, filters.bridge_flows(self._doors(name)))

    def _doors(self, name: str) -> tuple[int, ...]:
        if name in BASE:
            return ()
        ports = [p for p in self.bridges[name].ports.values() if not p.owner]
        trusted = [p for p in ports if forwards(p, self.settings.service_ports)]
        return tuple(sorted(i.works_at for p in trusted for i in p.interfaces if i.works_at))

    def _set(
        self,
        row: OvsPort,
        port: Mapping[str, Any],
        interfaces: Mapping[str, Mapping[str, Any]],
        merged: Collection[str] = ("external_ids",),
    ) -> OvsPort:
        """Of the map columns ``merged`` other keys are kept."""
        there = {interface.name: interface for interface in row.interfaces}
        new = []
        for name, values in sorted(interfaces.items()):
            old = there.get(name) or OvsInterface(
                name=name,
                type="",
                options={},
                external_ids={},
                mtu_request=None,
                mtu=None,
                ofport=self._number(),
                error=None,
                link_state=None,
            )
            new.append(replace(old, **_values(values, old, merged)))
        return replace(row, interfaces=tuple(new), **_values(port, row, merged))

    def _set_qos(self, bridge: str, name: str, values: Mapping[str, Any] | None) -> None:
        ports = self.bridges[bridge].ports
        row = ports[name].qos
        ours = row is not None and is_marked(row.external_ids, self.layout.backend)
        if row is not None and ours:
            del self.qos[row.uuid]
        new = self.add_qos(**values) if values else None
        ports[name] = replace(ports[name], qos=new)


def _owner(port: OvsPort) -> tuple[str, str] | None:
    return port.owner


def _served(port: OvsPort) -> tuple[str, str] | None:
    return None if port.owner else port.serves


def _is_unmanaged(port: OvsPort) -> bool:
    return not port.serves and not {UPLINK_MARK, TUNNEL_MARK} & port.external_ids.keys()


def _values(
    columns: Mapping[str, Any], before: OvsPort | OvsInterface, merged: Collection[str]
) -> dict[str, Any]:
    return {k: {**getattr(before, k), **v} if k in merged else v for k, v in columns.items()}

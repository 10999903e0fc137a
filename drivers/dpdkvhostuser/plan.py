"""Plan the changes of OVS: ports, bridges, and the tunnels and flows of VXLAN networks (pure)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace

from drivers.dpdkvhostuser import commands as c
from drivers.dpdkvhostuser import tunnels
from drivers.dpdkvhostuser.model import (
    OVERLAY,
    TO_OVERLAY,
    TO_TUNNELS,
    TUNNELS,
    TunnelPort,
    VhostUserObservation,
    vhost_port,
    vxlan_name,
)
from drivers.dpdkvhostuser.tunnels import LAYOUT
from drivers.ovs.commands import DropFlows
from drivers.ovs.mapping import bridge_of, left_out, unmapped
from drivers.ovs.plan import (
    MAX_VHOST_SOCKETS,
    bridge_changes,
    bridge_refusal,
    name_taken,
    needs_room,
    port_changes,
    port_refusal,
)
from drivers.ovs.ports import VhostPort
from drivers.ovs.sockets import socket_path
from netplugin.api.errors import Conflict, FieldError, InvalidRequest, NetpluginError
from netplugin.backend import Change, Intent, Overlay, Plan
from netplugin.host.flow import COOKIE_MARK
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import NETWORK_MARK, UDP_MARK, OvsPort
from netplugin.host.ovs_underlay import problem

# -- Plan the tunnels and flows of VXLAN networks. A network exists here while it has a port on this host.


def network_changes(
    settings: OvsSettings,
    wanted: Mapping[str, Overlay],
    planned: set[str],
    seen: VhostUserObservation,
) -> tuple[list[Change], list[Change]]:
    """Return the changes to make before the port changes (tunnels) and after them (network flows).

    ``wanted``: the overlays of the desired ports. ``planned``: all ports that this plan changes.
    """
    in_use = {o.network_id: o.spec.udp_port for o in wanted.values()} | dict(seen.tunnels.neighbours)
    for port_id, row in seen.rows.items():
        if row.bridge == OVERLAY and port_id not in planned:
            in_use |= network_of(row.external_ids)
    before = _ports(settings, wanted, in_use, seen)
    users: dict[str, list[str]] = {}
    for port_id, overlay in sorted(wanted.items()):
        users.setdefault(overlay.network_id, []).append(port_id)
    overlays = {overlay.network_id: overlay for overlay in wanted.values()}
    after: list[Change] = [
        c.SetNetwork(tuple(users[network_id]), TUNNELS, overlay, settings.local_ip)
        for network_id, overlay in sorted(overlays.items())
        if settings.local_ip and _flows_differ(overlay, settings.local_ip, seen)
    ]
    bridge = seen.bridges.get(TUNNELS)
    if bridge and (in_use or bridge.used_by_others):  # otherwise the whole bridge is deleted
        after += _forgotten(planned, in_use, seen)
    return before, after


def network_of(external_ids: Mapping[str, str]) -> dict[str, int]:
    """Return the network that a port's marks name, with its UDP port: one entry or none."""
    network_id, udp_port = external_ids.get(NETWORK_MARK), external_ids.get(UDP_MARK, "")
    return {network_id: int(udp_port)} if network_id and udp_port.isdecimal() else {}


def _ports(
    settings: OvsSettings,
    wanted: Mapping[str, Overlay],
    in_use: Mapping[str, int],
    seen: VhostUserObservation,
) -> list[Change]:
    wishes: dict[str, TunnelPort] = {}
    if in_use and settings.local_ip:
        wishes = {name: TunnelPort.patch(name) for name in (TO_TUNNELS, TO_OVERLAY)}
        for udp_port in sorted(set(in_use.values())):
            wishes[vxlan_name(udp_port)] = TunnelPort.vxlan(udp_port, settings.local_ip)
    changes: list[Change] = []
    for name, wish in wishes.items():
        row = seen.tunnels.ports.get(name)
        ids = tuple(
            port_id
            for port_id, overlay in sorted(wanted.items())
            if wish.type == "patch" or vxlan_name(overlay.spec.udp_port) == name
        )
        if row is None and wanted:
            changes.append(c.AddTunnelPort(ids, wish))
        elif row is not None and wish.must_be_remade(row):
            changes.append(c.RemoveTunnelPort(ids, str(row.bridge), name))
        elif row is not None and wish.differs(row):
            changes.append(c.SetTunnelPort(ids, wish))
    if in_use and not settings.local_ip:
        return []  # keep existing tunnels until [ovs] local_ip is set
    for name, row in sorted(seen.tunnels.ports.items()):
        bridge = seen.bridges.get(str(row.bridge))
        if name not in wishes and (in_use or bridge is None or bridge.used_by_others):
            changes.append(c.RemoveTunnelPort((), str(row.bridge), name))
    return changes


def _flows_differ(overlay: Overlay, local_ip: str, seen: VhostUserObservation) -> bool:
    """Whether a network's flows differ from the desired ones, or were not read (its first port)."""
    tunnel = _ofport(seen.tunnels.ports.get(vxlan_name(overlay.spec.udp_port)))
    patch = _ofport(seen.tunnels.ports.get(TO_OVERLAY))
    found = seen.tunnels.flows.get(tunnels.network_cookie(overlay.network_id))
    if found is None or tunnel is None or patch is None:
        # vswitchd failed to create a port (ofport 0): reported as a fault, and no flow can use it.
        return tunnel != 0 and patch != 0
    return 0 not in (tunnel, patch) and found != tunnels.network_flows(overlay, local_ip, tunnel, patch)


def _ofport(row: OvsPort | None) -> int | None:
    """Return the ofport; None if the row does not exist yet, 0 if vswitchd failed to create the port."""
    if row is None:
        return None
    return (row.interface and row.interface.works_at) or 0


def _forgotten(planned: set[str], in_use: Mapping[str, int], seen: VhostUserObservation) -> list[Change]:
    """Drop the flows of networks without ports: the last port leaves, or someone else removed it."""
    kept = {tunnels.network_cookie(network_id) for network_id in in_use} | {COOKIE_MARK}
    users: dict[int, list[str]] = {}
    for port_id in sorted(planned & seen.rows.keys()):
        for network_id in network_of(seen.rows[port_id].external_ids):
            users.setdefault(tunnels.network_cookie(network_id), []).append(port_id)
    gone = (users.keys() | seen.tunnels.flows.keys()) - kept
    return [
        DropFlows(tuple(users.get(cookie, ())), TUNNELS, tunnels.with_learned(cookie))
        for cookie in sorted(gone)
    ]


# -- Plan the changes from the observed to the desired state of OVS. Pure. ------------------------


def make_plan(settings: OvsSettings, intents: Sequence[Intent], seen: VhostUserObservation) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    wanted: dict[str, VhostPort] = {}
    refused: dict[str, NetpluginError] = {}
    kept: dict[str, NetpluginError] = {}
    configured = settings
    if settings.local_ip is None:
        # Existing tunnels and the flows that use them stay as they are.
        settings = replace(settings, local_ip=seen.tunnels.local_ip)
    room = MAX_VHOST_SOCKETS - seen.vhost_sockets
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        row = seen.rows.get(intent.port_id)
        bridge = _bridge_of(settings, intent, row, seen)
        missing = _left_out(configured, intent, bridge, seen)
        if bridge is None or (missing and row is None):
            refused[intent.port_id] = missing or unmapped(intent.spec)
            continue
        socket = "" if intent.spec.device else socket_path(settings, intent, row)
        port = vhost_port(intent, bridge, socket, seen.tso)
        error = _refusal(settings, port, seen, room)
        if error:
            refused[intent.port_id] = error
            continue
        if missing:
            kept[intent.port_id] = missing
        room -= intent.port_id not in seen.rows and not intent.spec.device
        wanted[intent.port_id] = port
    leaving = {i.port_id for i in intents if i.spec is None}
    overlays = {port_id: port.overlay for port_id, port in wanted.items() if port.overlay}
    bridges, after_bridges = bridge_changes(settings, LAYOUT, wanted, leaving, seen)
    tunnels, after_tunnels = network_changes(settings, overlays, leaving | wanted.keys(), seen)
    ports = port_changes(settings, wanted, leaving, seen)
    return Plan((*bridges, *tunnels, *ports, *after_bridges, *after_tunnels), refused, kept)


# -- refusals ----------------------------------------------------------------------------------------


def _bridge_of(
    settings: OvsSettings, intent: Intent, row: OvsPort | None, seen: VhostUserObservation
) -> str | None:
    assert intent.spec is not None
    return OVERLAY if intent.overlay else bridge_of(settings, intent.spec, row, seen.bridges)


def _left_out(
    settings: OvsSettings, intent: Intent, bridge: str | None, seen: VhostUserObservation
) -> NetpluginError | None:
    """Return the error if the configuration does not allow a new port on this network here."""
    assert intent.spec is not None
    if intent.overlay:
        return problem(None) if settings.local_ip is None else None
    return left_out(settings, intent.spec, bridge, seen)


def _refusal(
    settings: OvsSettings, port: VhostPort, seen: VhostUserObservation, room: int
) -> NetpluginError | None:
    refused = port_refusal(port, seen, room)
    if refused:
        return refused
    if port.overlay:
        return _overlay_refusal(settings, port, port.overlay, seen)
    return bridge_refusal(settings, port, seen)


def _overlay_refusal(
    settings: OvsSettings, port: VhostPort, overlay: Overlay, seen: VhostUserObservation
) -> NetpluginError | None:
    if settings.local_ip is None:
        return problem(None)
    for name in (OVERLAY, TUNNELS):
        bridge = seen.bridges.get(name)
        if bridge and not bridge.ours:
            return Conflict(
                f"a bridge named {name} exists in OVS and is not ours",
                step="plan",
                fix=f"remove it: ovs-vsctl del-br {name}",
            )
    for name in (TO_TUNNELS, TO_OVERLAY, vxlan_name(overlay.spec.udp_port)):
        if name in seen.taken_names:
            return name_taken(name)
    version = ipaddress.ip_address(settings.local_ip).version
    others = [p for p in overlay.spec.peers if ipaddress.ip_address(p).version != version]
    if others:
        message = f"{others[0]} is not IPv{version}, as this host's [ovs] local_ip is"
        return InvalidRequest(
            f"peers of network {overlay.network_id}: {message}",
            step="plan",
            errors=[FieldError(field="peers", message=message)],
        )
    return problem(seen.tunnels.underlay, port.mtu) if needs_room(port, seen) else None

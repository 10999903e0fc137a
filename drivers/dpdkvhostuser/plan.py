"""Plan the changes from the observed to the desired state of OVS. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import replace

from drivers.dpdkvhostuser.plan_networks import network_changes
from drivers.dpdkvhostuser.seen import Seen
from drivers.dpdkvhostuser.tunnels import LAYOUT
from drivers.dpdkvhostuser.wanted import (
    OVERLAY,
    TO_OVERLAY,
    TO_TUNNELS,
    TUNNELS,
    vhost_port,
    vxlan_name,
)
from drivers.ovs.mapping import bridge_of, left_out, unmapped
from drivers.ovs.plan_bridges import bridge_changes
from drivers.ovs.plan_ports import (
    MAX_VHOST_SOCKETS,
    Wanted,
    bridge_refusal,
    name_taken,
    needs_room,
    port_changes,
    port_refusal,
)
from drivers.ovs.ports import VhostPort
from drivers.ovs.sockets import socket_path
from netplugin.backend import Intent, Overlay, Plan
from netplugin.errors import Conflict, FieldError, InvalidRequest, NetpluginError
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.ovs_underlay import problem


def make_plan(settings: OvsSettings, intents: Sequence[Intent], seen: Seen) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    wanted: dict[str, Wanted] = {}
    overlays: dict[str, Overlay] = {}
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
        socket = socket_path(settings, intent, row)
        entry = Wanted(vhost_port(intent, bridge, socket, seen.tso), intent.spec)
        error = _refusal(settings, entry, intent.overlay, seen, room)
        if error:
            refused[intent.port_id] = error
            continue
        if missing:
            kept[intent.port_id] = missing
        room -= intent.port_id not in seen.rows
        wanted[intent.port_id] = entry
        if intent.overlay:
            overlays[intent.port_id] = intent.overlay
    leaving = {i.port_id for i in intents if i.spec is None}
    rows = {port_id: entry.port for port_id, entry in wanted.items()}
    bridges, after_bridges = bridge_changes(settings, LAYOUT, rows, leaving, seen)
    tunnels, after_tunnels = network_changes(settings, overlays, leaving | rows.keys(), seen)
    ports = port_changes(settings, wanted, leaving, seen)
    return Plan((*bridges, *tunnels, *ports, *after_bridges, *after_tunnels), refused, kept)


# -- refusals ----------------------------------------------------------------------------------------


def _bridge_of(
    settings: OvsSettings, intent: Intent, row: OvsPort | None, seen: Seen
) -> str | None:
    assert intent.spec is not None
    return OVERLAY if intent.overlay else bridge_of(settings, intent.spec, row, seen.bridges)


def _left_out(
    settings: OvsSettings, intent: Intent, bridge: str | None, seen: Seen
) -> NetpluginError | None:
    """Return the error if the configuration does not allow a new port on this network here."""
    assert intent.spec is not None
    if intent.overlay:
        return problem(None) if settings.local_ip is None else None
    return left_out(settings, intent.spec, bridge, seen)


def _refusal(
    settings: OvsSettings, wanted: Wanted, overlay: Overlay | None, seen: Seen, room: int
) -> NetpluginError | None:
    refused = port_refusal(wanted, seen, room)
    if refused:
        return refused
    if overlay:
        return _overlay_refusal(settings, wanted.port, overlay, seen)
    return bridge_refusal(settings, wanted, seen)


def _overlay_refusal(
    settings: OvsSettings, port: VhostPort, overlay: Overlay, seen: Seen
) -> NetpluginError | None:
    if settings.local_ip is None:
        return problem(None)
    for name in (OVERLAY, TUNNELS):
        bridge = seen.bridges.get(name)
        if bridge and not bridge.ours:
            return Conflict(
                f"a bridge named {name} exists in OVS and is not ours", step="plan",
                fix=f"remove it: ovs-vsctl del-br {name}",
            )  # fmt: skip
    for name in (TO_TUNNELS, TO_OVERLAY, vxlan_name(overlay.spec.udp_port)):
        if name in seen.taken_names:
            return name_taken(name)
    version = ipaddress.ip_address(settings.local_ip).version
    others = [p for p in overlay.spec.peers if ipaddress.ip_address(p).version != version]
    if others:
        message = f"{others[0]} is not IPv{version}, as this host's [ovs] local_ip is"
        return InvalidRequest(
            f"peers of network {overlay.network_id}: {message}", step="plan",
            errors=[FieldError(field="peers", message=message)],
        )  # fmt: skip
    return problem(seen.tunnels.underlay, port.mtu) if needs_room(port, seen) else None

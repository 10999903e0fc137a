"""Plan the changes from the observed to the desired state of OVS (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from drivers.dpdkvhostuser.model import LAYOUT, VhostUserObservation, vhost_port
from drivers.ovs.mapping import bridge_of, left_out, on_bridge, unmapped
from drivers.ovs.plan import MAX_VHOST_SOCKETS, bridge_refusal, ovs_changes, port_refusal
from drivers.ovs.ports import VhostPort
from drivers.ovs.sockets import socket_path
from netplugin.api.errors import NetpluginError
from netplugin.backend import Intent, Plan
from netplugin.host.ovs import OvsSettings


def make_plan(settings: OvsSettings, intents: Sequence[Intent], seen: VhostUserObservation) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    wanted: dict[str, VhostPort] = {}
    refused: dict[str, NetpluginError] = {}
    kept: dict[str, NetpluginError] = {}
    room = MAX_VHOST_SOCKETS - seen.vhost_sockets
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        row = seen.rows.get(intent.port_id)
        bridge = bridge_of(settings, intent, row, seen.bridges)
        missing = left_out(settings, intent, bridge, seen)
        if bridge is None or (missing and row is None):
            refused[intent.port_id] = missing or unmapped(intent.spec)
            continue
        socket = "" if intent.spec.device else socket_path(settings, intent, row)
        port = on_bridge(vhost_port(intent, bridge, socket, seen.tso), seen.bridges)
        error = port_refusal(port, seen, room) or bridge_refusal(settings, port, seen)
        if error:
            refused[intent.port_id] = error
            continue
        if missing:
            kept[intent.port_id] = missing
        room -= intent.port_id not in seen.rows and not intent.spec.device
        wanted[intent.port_id] = port
    leaving = {i.port_id for i in intents if i.spec is None}
    return Plan(tuple(ovs_changes(settings, LAYOUT, wanted, leaving, seen)), refused, kept)

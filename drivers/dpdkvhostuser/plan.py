"""Plan the changes from the observed to the desired state of OVS (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from drivers.ovs.model import Layout, OvsObservation
from drivers.ovs.placing import MAX_VHOST_SOCKETS, place_port
from drivers.ovs.plan import ovs_changes
from drivers.ovs.ports import VhostPort, access_vlan
from drivers.ovs.sockets import socket_path
from drivers.ovs.usability import tso_enabled
from netplugin.api.errors import NetpluginError
from netplugin.backend import Intent, Plan
from netplugin.host.ovs import OvsSettings

BACKEND = "dpdkvhostuser"
LAYOUT = Layout(BACKEND, keeps=True)


def make_plan(settings: OvsSettings, intents: Sequence[Intent], seen: OvsObservation) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    desired: dict[str, VhostPort] = {}
    refused: dict[str, NetpluginError] = {}
    kept: dict[str, NetpluginError] = {}
    room = MAX_VHOST_SOCKETS - seen.vhost_sockets
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        try:
            port, left = place_port(settings, intent, seen, room, partial(_port_on, settings, intent, seen))
        except NetpluginError as error:
            refused[intent.port_id] = error
            continue
        if left:
            kept[intent.port_id] = left
        room -= intent.port_id not in seen.rows and not intent.spec.device
        desired[intent.port_id] = port
    leaving = {i.port_id for i in intents if i.spec is None}
    return Plan(tuple(ovs_changes(settings, LAYOUT, desired, leaving, seen)), refused, kept)


def _port_on(settings: OvsSettings, intent: Intent, seen: OvsObservation, bridge: str) -> VhostPort:
    row, is_service = seen.rows.get(intent.port_id), intent.spec is not None and intent.spec.device
    socket = "" if is_service else socket_path(settings, intent, row)
    return VhostPort.of(
        BACKEND, intent, bridge, access_vlan(intent), socket=socket, tso=tso_enabled(seen.root)
    )

"""From what is wanted and what OVS has to the changes between them: the thinking, without a host."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivers.dpdkvhostuser import changes as c
from drivers.dpdkvhostuser import filters
from drivers.dpdkvhostuser.plan_bridges import bridge_changes
from drivers.dpdkvhostuser.plan_networks import network_changes
from drivers.dpdkvhostuser.seen import Seen, SeenBridge
from drivers.dpdkvhostuser.wanted import (
    OVERLAY,
    TO_OVERLAY,
    TO_TUNNELS,
    TUNNELS,
    VhostPort,
    vxlan_name,
)
from netplugin.backend import Change, Intent, Overlay, Plan
from netplugin.errors import (
    CapacityExhausted,
    Conflict,
    FieldError,
    InvalidRequest,
    NetpluginError,
    Unsupported,
)
from netplugin.host.openflow import Flow
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.ovs_underlay import problem, too_narrow
from netplugin.models import PortSpec

#: MAX_VHOST_SOCKET in DPDK's lib/vhost/socket.c: one more is refused.
MAX_VHOST_SOCKETS = 1024


@dataclass(frozen=True)
class Wanted:
    """A port that can be had: its rows, and what its flows are made from."""

    port: VhostPort
    spec: PortSpec
    overlay: Overlay | None


def make_plan(settings: OvsSettings, intents: Sequence[Intent], seen: Seen) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    wanted: dict[str, Wanted] = {}
    refused: dict[str, NetpluginError] = {}
    room = MAX_VHOST_SOCKETS - seen.vhost_sockets
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        entry = Wanted(VhostPort.of(settings, intent, seen.tso), intent.spec, intent.overlay)
        error = _refusal(settings, entry, seen, room)
        if error:
            refused[intent.port_id] = error
            continue
        room -= intent.port_id not in seen.rows
        wanted[intent.port_id] = entry
    leaving = {i.port_id for i in intents if i.spec is None}
    rows = {port_id: entry.port for port_id, entry in wanted.items()}
    overlays = {port_id: entry.overlay for port_id, entry in wanted.items() if entry.overlay}
    bridges, after_bridges = bridge_changes(settings, rows, leaving, seen)
    tunnels, after_tunnels = network_changes(settings, overlays, leaving | rows.keys(), seen)
    ports = _port_changes(wanted, leaving, seen)
    return Plan((*bridges, *tunnels, *ports, *after_bridges, *after_tunnels), refused)


# -- what cannot be had ------------------------------------------------------------------------------


def _refusal(settings: OvsSettings, wanted: Wanted, seen: Seen, room: int) -> NetpluginError | None:
    port = wanted.port
    if port.name in seen.taken_names:
        return _name_taken(port.name)
    if port.port_id not in seen.rows and room <= 0:
        return CapacityExhausted(
            f"all {MAX_VHOST_SOCKETS} vhost sockets of this vswitchd are taken", step="plan",
            fix="remove ports that are no longer needed",
        )  # fmt: skip
    if wanted.overlay:
        return _overlay_refusal(settings, port, wanted.overlay, seen)
    bridge = seen.bridges.get(port.bridge)
    return _bridge_refusal(port, wanted.spec, bridge, seen) if bridge else None


def _bridge_refusal(
    port: VhostPort, spec: PortSpec, bridge: SeenBridge, seen: Seen
) -> NetpluginError | None:
    if bridge.datapath_type != "netdev":
        return Conflict(
            f"bridge {bridge.name} exists with datapath_type {bridge.datapath_type or 'system'!r}, "
            "which cannot have DPDK ports", step="plan",
            fix="map the network to another bridge in [ovs] bridge_mappings",
        )  # fmt: skip
    if not bridge.ours and spec.port_security.enabled and bridge.fail_mode != "secure":
        return Unsupported(
            f"bridge {bridge.name} is not ours and not fail_mode=secure: a restart of vswitchd "
            "would leave the port without its filter", step="plan",
            fix=f"ovs-vsctl set-fail-mode {bridge.name} secure, with flows of your own for your "
            "own ports; or ask for the port with port_security.enabled false",
        )  # fmt: skip
    return too_narrow(bridge.nics, port.mtu) if _needs_room(port, seen) else None


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
            return _name_taken(name)
    version = ipaddress.ip_address(settings.local_ip).version
    others = [p for p in overlay.spec.peers if ipaddress.ip_address(p).version != version]
    if others:
        message = f"{others[0]} is not IPv{version}, as this host's [ovs] local_ip is"
        return InvalidRequest(
            f"peers of network {overlay.network_id}: {message}", step="plan",
            errors=[FieldError(field="peers", message=message)],
        )  # fmt: skip
    return problem(seen.tunnels.underlay, port.mtu) if _needs_room(port, seen) else None


def _needs_room(port: VhostPort, seen: Seen) -> bool:
    """Whether the MTU on the way matters now: for a port that is there it is told as a fault."""
    row = seen.rows.get(port.port_id)
    return row is None or row.interface is None or (row.interface.mtu_request or 0) < port.mtu


def _name_taken(name: str) -> Conflict:
    return Conflict(
        f"a port named {name} exists in OVS and is not ours", step="plan",
        fix=f"remove it: ovs-vsctl del-port {name}",
    )  # fmt: skip


# -- ports -------------------------------------------------------------------------------------------


def _port_changes(wanted: Mapping[str, Wanted], leaving: set[str], seen: Seen) -> list[Change]:
    changes: list[Change] = []
    for port_id in sorted(leaving):
        row = seen.rows.get(port_id)
        if row is not None:
            changes += _removal(port_id, row)
        if port_id in seen.socket_files:
            changes.append(c.RemoveSocket((port_id,), seen.socket_files[port_id]))
    for port_id, entry in sorted(wanted.items()):
        row, port = seen.rows.get(port_id), entry.port
        if row is None:
            changes.append(c.AddPort((port_id,), port))
            changes += _filter(entry, None, seen)
        elif port.must_be_remade(row):
            # The next round adds it again: OVS must have let go of the old one before.
            changes += _removal(port_id, row)
        else:
            if port.differs(row):
                changes.append(c.SetPort((port_id,), port))
            if port.qos_differs(row):
                changes.append(c.SetQos((port_id,), port))
            changes += _filter(entry, row, seen)
    return changes + _unused_qos(seen)


def _unused_qos(seen: Seen) -> list[Change]:
    """Rows of QoS that somebody took off their port, or whose port somebody deleted."""
    used = {row.qos.uuid for row in seen.rows.values() if row.qos}
    return [
        c.DropQos((qos.owner[1],) if qos.owner else (), qos.uuid)
        for qos in sorted(seen.qos, key=lambda qos: qos.uuid)
        if qos.uuid not in used
    ]


def _removal(port_id: str, row: OvsPort) -> list[Change]:
    bridge = str(row.bridge)
    return [
        c.RemovePort((port_id,), bridge, row.name),
        # Whether or not they could be read: without its port a flow may meet the next one's frames.
        c.DropFlows((port_id,), bridge, (filters.port_cookie(port_id),)),
    ]


def _filter(wanted: Wanted, row: OvsPort | None, seen: Seen) -> list[Change]:
    port, spec = wanted.port, wanted.spec
    bridge = seen.bridges.get(port.bridge)
    if bridge and not bridge.ours and not spec.port_security.enabled:
        # The flows of a bridge that is not ours are its owner's; without a filter we add none.
        flows: frozenset[Flow] = frozenset()
    elif row is None:
        return [c.SetFilter((port.port_id,), port.bridge, port.name, port.port_id, spec)]
    elif row.interface is None or row.interface.works_at is None:
        return []
    else:
        flows = filters.port_flows(port.port_id, row.interface.works_at, spec)
    found = seen.flows.get(port.port_id, frozenset())
    if found == flows:
        return []
    if not flows:
        return [c.DropFlows((port.port_id,), port.bridge, (filters.port_cookie(port.port_id),))]
    return [c.SetFilter((port.port_id,), port.bridge, port.name, port.port_id, spec)]

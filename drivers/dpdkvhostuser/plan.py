"""From what is wanted and what OVS has to the changes between them: the thinking, without a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivers.dpdkvhostuser import filters
from drivers.dpdkvhostuser.changes import (
    AddPort,
    AddUplink,
    CreateBridge,
    DropFlows,
    RemoveBridge,
    RemovePort,
    RemoveSocket,
    RemoveUplink,
    SecureBridge,
    SetBridgeFlows,
    SetFilter,
    SetPort,
    SetUplink,
    Uplink,
    VhostPort,
)
from netplugin.backend import Change, Intent, Observation, Plan
from netplugin.errors import CapacityExhausted, Conflict, NetpluginError, Unsupported
from netplugin.host.names import UPLINK, VHOST, device_name
from netplugin.host.openflow import Flow
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.models import PortSpec

#: MAX_VHOST_SOCKET in DPDK's lib/vhost/socket.c: one more is refused.
MAX_VHOST_SOCKETS = 1024


@dataclass(frozen=True)
class SeenBridge:
    """One bridge of ``bridge_mappings`` or with our mark, as OVS has it."""

    name: str
    ours: bool
    datapath_type: str
    fail_mode: str | None
    #: VMs' ports on it that are not in question (not in ``Seen.rows``): how many, and the largest
    #: MTU they ask for (0 where no uplink makes it matter).
    neighbours: int = 0
    neighbours_mtu: int = 0
    #: Ports with our uplink mark.
    uplinks: Mapping[str, OvsPort] = field(default_factory=dict)
    #: Whether it has ports that are neither ours nor its own internal one.
    has_strangers: bool = False
    #: The base flows it should have, by the ports that are there now.
    wanted_flows: frozenset[Flow] = frozenset()
    #: The base flows it has; None if they were not read.
    flows: frozenset[Flow] | None = None
    #: Cookies of ours on it that belong to no port that is there.
    stray_cookies: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Seen(Observation):
    """What OVS has of the ports in question, of their bridges and flows."""

    rows: Mapping[str, OvsPort] = field(default_factory=dict)
    #: Flows of the ports that have rows.
    flows: Mapping[str, frozenset[Flow]] = field(default_factory=dict)
    bridges: Mapping[str, SeenBridge] = field(default_factory=dict)
    #: Names of our ports that something else has taken.
    taken_names: frozenset[str] = frozenset()
    vhost_sockets: int = 0
    #: Socket files that are there, by port id.
    socket_files: Mapping[str, str] = field(default_factory=dict)


def wanted_port(settings: OvsSettings, port_id: str, spec: PortSpec) -> VhostPort:
    """The rows a port should have (pure)."""
    name = device_name(VHOST, port_id)
    return VhostPort(
        port_id=port_id,
        name=name,
        bridge=settings.bridge_mappings[str(spec.network.physical_network)],
        tag=spec.network.vlan_id or 0,
        socket=str(settings.vhost_socket_dir / name),
        mtu=spec.network.mtu,
        mac=spec.mac,
        vm_id=spec.vm_id,
    )


def make_plan(settings: OvsSettings, intents: Sequence[Intent], seen: Seen) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    wanted: dict[str, tuple[VhostPort, PortSpec]] = {}
    refused: dict[str, NetpluginError] = {}
    room = MAX_VHOST_SOCKETS - seen.vhost_sockets
    for intent in sorted(intents, key=lambda i: i.port_id):
        if intent.spec is None:
            continue
        port = wanted_port(settings, intent.port_id, intent.spec)
        error = _refusal(port, intent.spec, seen, room)
        if error:
            refused[intent.port_id] = error
            continue
        room -= intent.port_id not in seen.rows
        wanted[intent.port_id] = (port, intent.spec)
    leaving = {i.port_id for i in intents if i.spec is None}
    ports = _port_changes(wanted, leaving, seen)
    bridges, after = _bridge_changes(settings, wanted, leaving, seen)
    return Plan((*bridges, *ports, *after), refused)


def _refusal(port: VhostPort, spec: PortSpec, seen: Seen, room: int) -> NetpluginError | None:
    bridge = seen.bridges.get(port.bridge)
    if port.name in seen.taken_names:
        return Conflict(
            f"a port named {port.name} exists in OVS and is not ours", step="plan",
            fix=f"remove it: ovs-vsctl del-port {port.name}",
        )  # fmt: skip
    if bridge and bridge.datapath_type != "netdev":
        return Conflict(
            f"bridge {bridge.name} exists with datapath_type {bridge.datapath_type or 'system'!r}, "
            "which cannot have DPDK ports", step="plan",
            fix="map the network to another bridge in [ovs] bridge_mappings",
        )  # fmt: skip
    filtered = spec.port_security.enabled
    if bridge and not bridge.ours and filtered and bridge.fail_mode != "secure":
        return Unsupported(
            f"bridge {bridge.name} is not ours and not fail_mode=secure: a restart of vswitchd "
            "would leave the port without its filter", step="plan",
            fix=f"ovs-vsctl set-fail-mode {bridge.name} secure, with flows of your own for your "
            "own ports; or ask for the port with port_security.enabled false",
        )  # fmt: skip
    if port.port_id not in seen.rows and room <= 0:
        return CapacityExhausted(
            f"all {MAX_VHOST_SOCKETS} vhost sockets of this vswitchd are taken", step="plan",
            fix="remove ports that are no longer needed",
        )  # fmt: skip
    return None


def _port_changes(
    wanted: Mapping[str, tuple[VhostPort, PortSpec]], leaving: set[str], seen: Seen
) -> list[Change]:
    changes: list[Change] = []
    for port_id in sorted(leaving):
        row = seen.rows.get(port_id)
        if row is not None:
            changes += _removal(port_id, row, seen)
        if port_id in seen.socket_files:
            changes.append(RemoveSocket((port_id,), seen.socket_files[port_id]))
    for port_id, (port, spec) in sorted(wanted.items()):
        row = seen.rows.get(port_id)
        if row is None:
            changes.append(AddPort((port_id,), port))
            changes += _filter(port, spec, None, seen)
        elif port.must_be_remade(row):
            # The next round adds it again: OVS must have let go of the old one before.
            changes += _removal(port_id, row, seen)
        else:
            if port.differs(row):
                changes.append(SetPort((port_id,), port))
            changes += _filter(port, spec, row, seen)
    return changes


def _removal(port_id: str, row: OvsPort, seen: Seen) -> list[Change]:
    bridge = str(row.bridge)
    return [
        RemovePort((port_id,), bridge, row.name),
        # Whether or not they could be read: without its port a flow may meet the next one's frames.
        DropFlows((port_id,), bridge, (filters.port_cookie(port_id),)),
    ]


def _filter(port: VhostPort, spec: PortSpec, row: OvsPort | None, seen: Seen) -> list[Change]:
    bridge = seen.bridges.get(port.bridge)
    if bridge and not bridge.ours and not spec.port_security.enabled:
        # The flows of a bridge that is not ours are its owner's; without a filter we add none.
        flows: frozenset[Flow] = frozenset()
    elif row is None:
        return [SetFilter((port.port_id,), port.bridge, port.name, port.port_id, spec)]
    else:
        ofport = row.interface.ofport if row.interface else None
        if not ofport or ofport < 0:
            return []
        flows = filters.port_flows(port.port_id, ofport, spec)
    found = seen.flows.get(port.port_id, frozenset())
    if found == flows:
        return []
    if not flows:
        return [DropFlows((port.port_id,), port.bridge, (filters.port_cookie(port.port_id),))]
    return [SetFilter((port.port_id,), port.bridge, port.name, port.port_id, spec)]


def _bridge_changes(
    settings: OvsSettings,
    wanted: Mapping[str, tuple[VhostPort, PortSpec]],
    leaving: set[str],
    seen: Seen,
) -> tuple[list[Change], list[Change]]:
    """What must be done to bridges before the ports, and what after them."""
    before: list[Change] = []
    after: list[Change] = []
    networks = {bridge: network for network, bridge in settings.bridge_mappings.items()}
    for name in sorted({*seen.bridges, *(port.bridge for port, _ in wanted.values())}):
        bridge = seen.bridges.get(name)
        users = {i: port for i, (port, _) in wanted.items() if port.bridge == name}
        ids = tuple(sorted(users))
        staying = {
            port_id: row
            for port_id, row in seen.rows.items()
            if row.bridge == name and port_id not in leaving and port_id not in wanted
        }
        if bridge is None:
            before.append(CreateBridge(ids, name, networks[name]))
            after.append(SetBridgeFlows(ids, name))
        elif not bridge.ours:
            continue
        else:
            if not (users or staying or bridge.neighbours):
                if not bridge.has_strangers:
                    after.append(RemoveBridge(tuple(sorted(leaving)), name))
                continue
            if bridge.fail_mode != "secure":
                before.append(SecureBridge(ids, name))
            if bridge.flows is not None and bridge.flows != bridge.wanted_flows:
                after.append(SetBridgeFlows(ids, name))
            if bridge.stray_cookies:
                after.append(DropFlows(ids, name, tuple(sorted(bridge.stray_cookies))))
        mtus = [port.mtu for port in users.values()]
        mtus += [(row.interface and row.interface.mtu_request) or 0 for row in staying.values()]
        mtus += [bridge.neighbours_mtu] if bridge else []
        uplinks = _uplink_changes(settings, name, networks.get(name), max(mtus), ids, bridge)
        before += uplinks
        if uplinks and bridge is not None:
            after.append(SetBridgeFlows(ids, name))
    return before, list(dict.fromkeys(after))


def _uplink_changes(
    settings: OvsSettings,
    bridge_name: str,
    network: str | None,
    mtu: int,
    ids: tuple[str, ...],
    bridge: SeenBridge | None,
) -> list[Change]:
    devices = settings.uplinks.get(network, ()) if network else ()
    found = bridge.uplinks if bridge else {}
    wanted = [
        Uplink(device_name(UPLINK, device), bridge_name, str(network), device, mtu)
        for device in devices
    ]
    names = {uplink.name for uplink in wanted}
    changes: list[Change] = [
        RemoveUplink(ids, bridge_name, name) for name in sorted(found) if name not in names
    ]
    for uplink in wanted:
        row = found.get(uplink.name)
        if row is None:
            changes.append(AddUplink(ids, uplink))
        elif row.interface is None or row.interface.mtu_request != mtu:
            changes.append(SetUplink(ids, uplink))
    return changes

"""Plan the changes of OVS that its backends share: bridges, uplinks, tunnels and the ports of VMs (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from drivers.ovs import filters
from drivers.ovs import flow_changes as f
from drivers.ovs import row_changes as r
from drivers.ovs.model import Layout, ObservedOvsBridge, OvsObservation
from drivers.ovs.overlay_plan import network_changes
from drivers.ovs.overlays import HOMES
from drivers.ovs.placing import uplinks_stay
from drivers.ovs.ports import RelayVfPort, VhostPort
from drivers.ovs.socket_directories import MakeSocketDirectory, RemoveChosenSocket, RemoveSocketDirectory
from drivers.ovs.sockets import MADE, ROOT, ObservedSockets, directory_for, is_own
from drivers.ovs.uplinks import OvsUplink
from netplugin.backend import Change
from netplugin.host.flow import Flow
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort


def ovs_changes(
    settings: OvsSettings,
    layout: Layout,
    desired: Mapping[str, VhostPort],
    leaving: set[str],
    seen: OvsObservation,
) -> list[Change]:
    """All changes for the ports of a backend, in the order to apply them."""
    overlays = {port_id: port.overlay for port_id, port in desired.items() if port.overlay}
    bridges, after_bridges = bridge_changes(settings, layout, desired, leaving, seen)
    tunnels, after_tunnels = network_changes(settings, layout, overlays, leaving | desired.keys(), seen)
    ports = port_changes(desired, leaving, seen)
    return [*bridges, *tunnels, *ports, *after_bridges, *after_tunnels]


# -- Plan bridges and uplinks: create them with the first port, remove them with the last. Those that
# are kept are there without a port.


def bridge_changes(
    settings: OvsSettings,
    layout: Layout,
    desired: Mapping[str, VhostPort],
    leaving: set[str],
    seen: OvsObservation,
) -> tuple[list[Change], list[Change]]:
    """The changes of bridges to apply before those of the ports, and those to apply after."""
    before: list[Change] = []
    after: list[Change] = []
    needed = {port.bridge for port in desired.values()}
    needed |= {name for name, home in HOMES.items() if home in needed}
    networks = {bridge: network for network, bridge in settings.bridge_mappings.items()}
    if layout.keeps:
        needed |= {settings.bridge_mappings[network] for network in settings.kept}
    for name in sorted({*seen.bridges, *needed}):
        first, then = _of_bridge_changes(settings, layout, desired, leaving, seen, name)
        bridge = seen.bridges.get(name)
        mark = bridge.mark if bridge and bridge.ours else networks.get(name, "")
        # The marks of a backend's own bridges are no networks.
        network = "" if ":" in mark else mark
        before += [replace(change, physical_network=network) for change in first]
        after += [replace(change, physical_network=network) for change in then]
    if seen.purge_failed:
        after.append(f.PurgeDatapath(tuple(sorted(desired))))
    return before, list(dict.fromkeys(after))


def _of_bridge_changes(
    settings: OvsSettings,
    layout: Layout,
    desired: Mapping[str, VhostPort],
    leaving: set[str],
    seen: OvsObservation,
    name: str,
) -> tuple[list[Change], list[Change]]:
    """The changes of one bridge, which is there or needed."""
    before: list[Change] = []
    after: list[Change] = []
    networks = {bridge: network for network, bridge in settings.bridge_mappings.items()}
    home, fixed = HOMES.get(name, name), layout.base.get(name)
    users = {i: port for i, port in desired.items() if port.bridge == home}
    ids = tuple(sorted(users))
    bridge = seen.bridges.get(name)
    if bridge and bridge.stray_cookies:
        after.append(f.DropFlows(ids, name, tuple(sorted(bridge.stray_cookies)), strays=True))
    used = bool(users) or seen.is_used(home, leaving | desired.keys())
    # A bridge that was made for another network goes before it can be kept for this one.
    stays = settings.keeps(name, bridge.mark if bridge else networks.get(name, ""))
    if bridge is None:
        before.append(r.CreateBridge(ids, name, layout.marks.get(name) or networks[name]))
        after.append(f.SetBridgeFlows(ids, name, fixed))
    elif not bridge.ours:
        return before, after
    elif not (used or stays or bridge.used_by_others):
        after.append(r.RemoveBridge(tuple(sorted(leaving)), name))
        return before, after
    else:
        # A bridge kept only because others use it is closed to their ports as well.
        if bridge.fail_mode != "secure":
            before.append(r.SecureBridge(ids, name))
        stale = bridge.flows is not None and bridge.flows != bridge.desired_flows
        if stale or bridge.matches_fragments is False or bridge.forwards_right is False:
            after.append(f.SetBridgeFlows(ids, name, fixed))
        if not used and not (stays and layout.keeps):
            return before, after
    network = networks.get(name)
    if bridge is not None and bridge.mark != network:
        return before, after  # the mapping has changed: ports on this bridge keep their uplink
    if bridge is not None and uplinks_stay(settings, bridge, seen):
        return before, after
    desired_uplink = OvsUplink.of(settings, name, network) if network else None
    uplinks = _uplink_changes(desired_uplink, ids, bridge)
    before += uplinks
    if uplinks and bridge is not None:
        after.append(f.SetBridgeFlows(ids, name, fixed))
    return before, after


def _uplink_changes(
    desired_uplink: OvsUplink | None, ids: tuple[str, ...], bridge: ObservedOvsBridge | None
) -> list[Change]:
    """A device becomes a bond, or a bond changes, in the transaction that releases the NIC."""
    found = bridge.uplinks if bridge else {}
    changes: list[Change] = [
        r.RemovePort(ids, str(row.bridge), name)
        for name, row in sorted(found.items())
        if desired_uplink is None or name != desired_uplink.name
    ]
    if desired_uplink is not None:
        row = found.get(desired_uplink.name)
        if row is None:
            changes.append(r.AddPort(ids, desired_uplink))
        elif desired_uplink.differs(row):
            changes.append(r.SetPort(ids, desired_uplink))
    return changes


# -- Plan the ports of VMs.


def port_changes(
    desired: Mapping[str, VhostPort],
    leaving: set[str],
    seen: OvsObservation,
) -> list[Change]:
    """The changes of VMs' ports. If something must be removed first, only that is planned."""
    changes: list[Change] = []
    for port_id in sorted(leaving):
        changes += _removal(port_id, seen)
        changes += departures(port_id, seen.sockets)
    for port_id, port in sorted(desired.items()):
        row, vf_port = seen.rows.get(port_id), seen.vf_ports.get(port_id)
        changes += arrivals(port, seen.sockets)
        if row and port.must_be_remade(row):
            # The next round adds it again, after OVS has released the old one.
            changes += _removal(port_id, seen)
            continue
        if row is None:
            changes.append(r.AddPort((port_id,), port))
        else:
            if port.differs(row):
                changes.append(r.SetPort((port_id,), port))
            if port.qos_differs(row):
                changes.append(r.SetQos((port_id,), port))
        if vf_port and (port.reopen or _is_another(port.vf_port, vf_port)):
            changes += [_remove_vf_port(port_id, vf_port), _drop_flows(port_id, str(vf_port.bridge))]
            continue
        if port.vf_port and vf_port is None:
            changes.append(r.AddPort((port_id,), port.vf_port))
        elif port.vf_port and vf_port and port.vf_port.differs(vf_port):
            changes.append(r.SetPort((port_id,), port.vf_port))
        changes += _filter(port, seen)
    return changes + _unused_qos(seen)


def arrivals(port: VhostPort, seen: ObservedSockets) -> list[Change]:
    """The changes before the row of a port is added."""
    path = str(Path(port.socket).parent)
    if seen.gid is None or (port.chosen is None and not is_own(path, port.port_id)):
        return []  # without the group the backend is unusable; another directory is not ours
    root, made = str(Path(path).parent), (path,)
    if port.chosen is not None:
        root, made = port.chosen.memory[ROOT], tuple(port.chosen.memory[MADE])
    desired, found = directory_for(path, port.spec.qemu_user, seen.gid), seen.directories.get(path)
    if found == desired or (found is not None and path not in made):
        return []
    return [MakeSocketDirectory((port.port_id,), desired, root, made)]


def departures(port_id: str, seen: ObservedSockets) -> list[Change]:
    """The changes after the row of a port is removed."""
    changes: list[Change] = [RemoveSocketDirectory((port_id,), path) for path in seen.own.get(port_id, ())]
    chosen = seen.chosen.get(port_id)
    if chosen is not None and (chosen.is_socket or chosen.empty):
        changes.append(RemoveChosenSocket((port_id,), chosen))
    return changes


def _is_another(desired: RelayVfPort | None, row: OvsPort) -> bool:
    return desired is None or desired.must_be_remade(row)


def _remove_vf_port(port_id: str, row: OvsPort) -> Change:
    device = row.interface.options.get("dpdk-devargs", "") if row.interface else ""
    return r.RemovePort((port_id,), str(row.bridge), row.name, device=device)


def _unused_qos(seen: OvsObservation) -> list[Change]:
    """Remove QoS rows that were detached from their port, or whose port was deleted."""
    used = {row.qos.uuid for row in seen.rows.values() if row.qos}
    return [
        r.DropQos((qos.owner[1],) if qos.owner else (), qos.uuid)
        for qos in sorted(seen.qos, key=lambda qos: qos.uuid)
        if qos.uuid not in used
    ]


def _removal(port_id: str, seen: OvsObservation) -> list[Change]:
    changes: list[Change] = []
    row, vf_port = seen.rows.get(port_id), seen.vf_ports.get(port_id)
    if row is not None:
        bridge, owner = str(row.bridge), row.owner
        assert owner is not None
        changes += [
            r.RemovePort((port_id,), bridge, row.name, owner[0]),
            _drop_flows(port_id, bridge),
        ]
    if vf_port is not None:
        changes.append(_remove_vf_port(port_id, vf_port))
    return changes


def _drop_flows(port_id: str, bridge: str) -> Change:
    """Planned whether or not the flows were read: a stale flow could match frames of a later port."""
    return f.DropFlows((port_id,), bridge, (filters.port_cookie(port_id),))


def has_its_flows(port: VhostPort, seen: OvsObservation) -> bool:
    """Whether the observed flows of the port are exactly the desired ones."""
    flows = _flows(_set_filter(port, seen), seen)
    return bool(flows) and not port.closed and flows == seen.flows.get(port.port_id)


def _flows(change: f.SetFilter, seen: OvsObservation) -> frozenset[Flow]:
    """The flows that the change would make of what was observed."""
    port_id, bridge = change.port.port_id, seen.bridges.get(change.bridge)
    rows = seen.rows.get(port_id), seen.vf_ports.get(port_id)
    own, other = (row.works_at if row else None for row in rows)
    return change.flows(own, other, bridge.doors if bridge else ())


def _set_filter(port: VhostPort, seen: OvsObservation) -> f.SetFilter:
    bridge = seen.bridges.get(port.bridge)
    foreign = bridge is not None and not bridge.ours
    found = seen.flows.get(port.port_id)
    # A port without flows may have been closed before somebody deleted them.
    may_be_shut = not found or filters.are_closed(found) or port.port_id in seen.shut
    reopens = found is not None and not port.closed and may_be_shut
    return f.SetFilter((port.port_id,), port.bridge, port, foreign, reopens)


def _filter(port: VhostPort, seen: OvsObservation) -> list[Change]:
    change = _set_filter(port, seen)
    if port.port_id not in seen.rows or (port.vf_port and port.port_id not in seen.vf_ports):
        return [change]
    flows = _flows(change, seen)
    # No flows: vswitchd could not create the port, which is reported as a fault.
    is_reached = port.vf_port or (port.port_id in seen.shut) == port.closed
    return [change] if flows and (not is_reached or flows != seen.flows.get(port.port_id)) else []

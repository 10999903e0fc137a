"""Plan the changes of OVS that its backends share: bridges, uplinks, tunnels and the ports of VMs (pure)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import replace

from drivers.ovs import commands as c
from drivers.ovs import filters
from drivers.ovs.chosen_sockets import arrivals, departures
from drivers.ovs.mapping import mapping_conflict, uplinks_stay
from drivers.ovs.model import Layout, ObservedOvsBridge, OvsObservation
from drivers.ovs.overlay_plan import network_changes, tunnel_address
from drivers.ovs.overlays import OVERLAY, PATCHES, TUNNELS, vxlan_name
from drivers.ovs.ports import OvsUplink, RelayVfPort, VhostPort
from drivers.ovs.sockets import wanted_directory
from netplugin.api.errors import (
    CapacityExhausted,
    Conflict,
    FieldError,
    InvalidRequest,
    NetpluginError,
    Unsupported,
)
from netplugin.backend import Change, Overlay
from netplugin.host.names import MAX_SOCKET_PATH, fits_socket
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.ovs_underlay import problem, too_narrow


def ovs_changes(
    settings: OvsSettings,
    layout: Layout,
    wanted: Mapping[str, VhostPort],
    leaving: set[str],
    seen: OvsObservation,
) -> list[Change]:
    """All changes for the ports of a backend, in the order to apply them."""
    overlays = {port_id: port.overlay for port_id, port in wanted.items() if port.overlay}
    bridges, after_bridges = bridge_changes(settings, layout, wanted, leaving, seen)
    tunnels, after_tunnels = network_changes(settings, layout, overlays, leaving | wanted.keys(), seen)
    ports = port_changes(settings, wanted, leaving, seen)
    return [*bridges, *tunnels, *ports, *after_bridges, *after_tunnels]


# -- Plan bridges and uplinks: create them with the first port, remove them with the last. Those that
# are kept are there without a port.


def bridge_changes(
    settings: OvsSettings,
    layout: Layout,
    wanted: Mapping[str, VhostPort],
    leaving: set[str],
    seen: OvsObservation,
) -> tuple[list[Change], list[Change]]:
    """The changes of bridges to apply before those of the ports, and those to apply after."""
    before: list[Change] = []
    after: list[Change] = []
    needed = {port.bridge for port in wanted.values()}
    needed |= {name for name, home in layout.homes.items() if home in needed}
    networks = {bridge: network for network, bridge in settings.bridge_mappings.items()}
    if layout.keeps:
        needed |= {settings.bridge_mappings[network] for network in settings.kept}
    for name in sorted({*seen.bridges, *needed}):
        first, then = _of_bridge_changes(settings, layout, wanted, leaving, seen, name)
        bridge = seen.bridges.get(name)
        mark = bridge.mark if bridge and bridge.ours else networks.get(name, "")
        # The marks of a backend's own bridges are no networks.
        network = "" if ":" in mark else mark
        before += [replace(change, physical_network=network) for change in first]
        after += [replace(change, physical_network=network) for change in then]
    if seen.purge_failed:
        after.append(c.PurgeDatapath(tuple(sorted(wanted))))
    return before, list(dict.fromkeys(after))


def _of_bridge_changes(
    settings: OvsSettings,
    layout: Layout,
    wanted: Mapping[str, VhostPort],
    leaving: set[str],
    seen: OvsObservation,
    name: str,
) -> tuple[list[Change], list[Change]]:
    """The changes of one bridge, which is there or needed."""
    before: list[Change] = []
    after: list[Change] = []
    networks = {bridge: network for network, bridge in settings.bridge_mappings.items()}
    home, fixed = layout.home(name), layout.base.get(name)
    users = {i: port for i, port in wanted.items() if port.bridge == home}
    ids = tuple(sorted(users))
    bridge = seen.bridges.get(name)
    if bridge and bridge.stray_cookies:
        after.append(c.DropFlows(ids, name, tuple(sorted(bridge.stray_cookies)), strays=True))
    used = bool(users) or seen.is_used(home, leaving | wanted.keys())
    # A bridge that was made for another network goes before it can be kept for this one.
    stays = settings.keeps(name, bridge.mark if bridge else networks.get(name, ""))
    if bridge is None:
        before.append(c.CreateBridge(ids, name, layout.marks.get(name) or networks[name]))
        after.append(c.SetBridgeFlows(ids, name, fixed))
    elif not bridge.ours:
        return before, after
    elif not (used or stays or bridge.used_by_others):
        after.append(c.RemoveBridge(tuple(sorted(leaving)), name, layout.homes.get(name, "")))
        return before, after
    else:
        # A bridge kept only because others use it is closed to their ports as well.
        if bridge.fail_mode != "secure":
            before.append(c.SecureBridge(ids, name))
        stale = bridge.flows is not None and bridge.flows != bridge.wanted_flows
        if stale or bridge.matches_fragments is False or bridge.forwards_right is False:
            after.append(c.SetBridgeFlows(ids, name, fixed))
        if not used and not (stays and layout.keeps):
            return before, after
    network = networks.get(name)
    if bridge is not None and bridge.mark != network:
        return before, after  # the mapping has changed: ports on this bridge keep their uplink
    if bridge is not None and uplinks_stay(settings, bridge, seen):
        return before, after
    wish = OvsUplink.of(settings, name, network) if network else None
    uplinks = _uplink_changes(wish, ids, bridge)
    before += uplinks
    if uplinks and bridge is not None:
        after.append(c.SetBridgeFlows(ids, name, fixed))
    return before, after


def _uplink_changes(
    wish: OvsUplink | None, ids: tuple[str, ...], bridge: ObservedOvsBridge | None
) -> list[Change]:
    """A device becomes a bond, or a bond changes, in the transaction that releases the NIC."""
    found = bridge.uplinks if bridge else {}
    changes: list[Change] = [
        c.RemoveUplink(ids, str(row.bridge), name)
        for name, row in sorted(found.items())
        if wish is None or name != wish.name
    ]
    if wish is not None:
        row = found.get(wish.name)
        if row is None:
            changes.append(c.AddUplink(ids, wish))
        elif wish.differs(row):
            changes.append(c.SetUplink(ids, wish))
    return changes


# -- Plan the changes from the observed to the desired ports of VMs (pure). -----------------------


#: MAX_VHOST_SOCKET in DPDK's lib/vhost/socket.c: DPDK refuses more.
MAX_VHOST_SOCKETS = 1024


# -- refusals ----------------------------------------------------------------------------------------


def port_refusal(port: VhostPort, seen: OvsObservation, room: int) -> NetpluginError | None:
    """Why the port cannot be created; None if it can. ``room`` is the number of free vhost sockets."""
    names = (port.name, *((port.beside.name,) if port.beside else ()))
    for name in names:
        if name in seen.taken_names:
            return name_taken(name)
    mine = (port.backend, port.port_id)
    if (owner := seen.given_names.get(port.name, mine)) != mine:
        return name_taken(port.name, owner)
    if port.port_id in seen.rows or port.spec.device:
        return None
    if not fits_socket(port.socket):  # a chosen one does, see PortSpec
        return Unsupported(
            f"{port.socket} is longer than the {MAX_SOCKET_PATH} bytes of a UNIX socket's path",
            step="socket-directory",
            fix="shorten [ovs] vhost_socket_dir and restart the agent; then DELETE the port and PUT it "
            "again, since a port keeps its path",
        )
    if room <= 0:
        return CapacityExhausted(
            f"all {MAX_VHOST_SOCKETS} vhost sockets of this vswitchd are taken",
            step="plan",
            fix="remove ports that are no longer needed",
        )
    return None


def bridge_refusal(settings: OvsSettings, port: VhostPort, seen: OvsObservation) -> NetpluginError | None:
    """Why the port cannot be on its bridge as the bridge is now; None if it can."""
    bridge = seen.bridges.get(port.bridge)
    if port.name in settings.bridge_mappings.values():
        return Conflict(
            f"{'device' if port.spec.device else 'port_name'} {port.name} is that of a bridge in "
            "[ovs] bridge_mappings",
            step="plan",
            fix="choose another name",
        )
    if port.overlay:
        return _of_overlay(settings, port, port.overlay, seen)
    refused = _of_bridge(port, bridge) if bridge else None
    refused = refused or mapping_conflict(settings, port, seen)
    if refused or not needs_room(port, seen):
        return refused
    return _of_uplinks(settings, port, bridge) or (too_narrow(bridge.nics, port.mtu) if bridge else None)


def _of_uplinks(
    settings: OvsSettings, port: VhostPort, bridge: ObservedOvsBridge | None
) -> NetpluginError | None:
    """Why the MTU of the uplinks is too small. A port never changes it: that stops the NIC for all users."""
    network, mtu = str(port.spec.network.physical_network), port.mtu
    if settings.bridge_mappings.get(network) != port.bridge:
        return None  # the port does not use these uplinks
    uplinks = bridge.uplinks.values() if bridge else ()
    there = [(i.mtu, i.name) for uplink in uplinks for i in uplink.interfaces if i.mtu]
    least, name = min(there, default=(settings.mtu_of_uplinks(network), ""))
    if not settings.uplinks.get(network) or least >= mtu:
        return None
    live = f"ovs-vsctl set Interface {name} mtu_request={mtu} (which stops the NIC for a moment) and "
    set_it = f"{live if name else ''}set [ovs] uplink_mtu = {network}:{mtu} and restart the agent"
    option = " ([ovs] uplink_mtu)"
    if network in settings.made:
        option = ""
        set_it = f"PUT /v1/physical-networks/{network} with mtu {mtu} (which stops the NIC for a moment)"
    return Unsupported(
        f"network.mtu {mtu} is above the MTU {least} of the uplinks of {network}{option}",
        step="mtu",
        fix=f"{set_it}; or ask for a smaller network.mtu",
    )


def _of_bridge(port: VhostPort, bridge: ObservedOvsBridge) -> NetpluginError | None:
    if bridge.datapath_type != "netdev":
        return Conflict(
            f"bridge {bridge.name} exists with datapath_type {bridge.datapath_type or 'system'!r}, "
            "which cannot have DPDK ports",
            step="plan",
            fix="map the network to another bridge in [ovs] bridge_mappings",
        )
    if not bridge.ours and port.spec.port_security.enabled and bridge.fail_mode != "secure":
        return Unsupported(
            f"bridge {bridge.name} is not ours and not fail_mode=secure: a restart of vswitchd "
            "would leave the port without its filter",
            step="plan",
            fix=f"ovs-vsctl set-fail-mode {bridge.name} secure, with flows of your own for your "
            "own ports; or ask for the port with port_security.enabled false",
        )
    return None


def _of_overlay(
    settings: OvsSettings, port: VhostPort, overlay: Overlay, seen: OvsObservation
) -> NetpluginError | None:
    local_ip = tunnel_address(settings, seen)
    if local_ip is None:
        return problem(None)
    for name in (OVERLAY, TUNNELS):
        bridge = seen.bridges.get(name)
        if bridge and not bridge.ours:
            return Conflict(
                f"a bridge named {name} exists in OVS and is not ours",
                step="plan",
                fix=f"remove it: ovs-vsctl del-br {name}",
            )
    for name in (*PATCHES, vxlan_name(overlay.spec.udp_port)):
        if name in seen.taken_names:
            return name_taken(name)
    version = ipaddress.ip_address(local_ip).version
    others = [p for p in overlay.spec.peers if ipaddress.ip_address(p).version != version]
    if others:
        message = f"{others[0]} is not IPv{version}, as this host's [ovs] local_ip is"
        return InvalidRequest(
            f"peers of network {overlay.network_id}: {message}",
            step="plan",
            errors=[FieldError(field="peers", message=message)],
        )
    return problem(seen.tunnels.underlay, port.mtu) if needs_room(port, seen) else None


def needs_room(port: VhostPort, seen: OvsObservation) -> bool:
    """Whether the MTU of the path must be checked now; for an existing port it is reported as a fault."""
    row = seen.rows.get(port.port_id)
    return row is None or row.interface is None or row.interface.needed_mtu < port.mtu


def name_taken(name: str, owner: tuple[str, str] | None = None) -> Conflict:
    """The error for a port name that a port of others uses, or that of another port of ours (``owner``)."""
    if owner is not None:
        return Conflict(
            f"a port named {name} exists in OVS and is that of port {owner[1]}",
            step="plan",
            fix="choose another port_name; or remove that port",
        )
    return Conflict(
        f"a port named {name} exists in OVS and is not ours",
        step="plan",
        fix=f"remove it: ovs-vsctl del-port {name}",
    )


# -- changes -----------------------------------------------------------------------------------------


def port_changes(
    settings: OvsSettings,
    wanted: Mapping[str, VhostPort],
    leaving: set[str],
    seen: OvsObservation,
) -> list[Change]:
    """The changes of VMs' ports. If something must be removed first, only that is planned."""
    changes: list[Change] = []
    for port_id in sorted(leaving):
        changes += _removal(port_id, seen)
        own = seen.sockets.own.get(port_id, ())
        changes += [c.RemoveSocketDirectory((port_id,), path) for path in own]
        changes += departures(port_id, seen.sockets)
    for port_id, port in sorted(wanted.items()):
        row, beside = seen.rows.get(port_id), seen.beside.get(port_id)
        changes += _directory(port, seen)
        if row and port.must_be_remade(row):
            # The next round adds it again, after OVS has released the old one.
            changes += _removal(port_id, seen)
            continue
        if row is None:
            changes.append(c.AddPort((port_id,), port))
        else:
            if port.differs(row):
                changes.append(c.SetPort((port_id,), port))
            if port.qos_differs(row):
                changes.append(c.SetQos((port_id,), port))
        if beside and (port.reopen or _is_another(port.beside, beside)):
            changes += [_remove_beside(port_id, beside), _drop_flows(port_id, str(beside.bridge))]
            continue
        if port.beside and beside is None:
            changes.append(c.AddBeside((port_id,), port.beside))
        elif port.beside and beside and port.beside.differs(beside):
            changes.append(c.SetBeside((port_id,), port.beside))
        changes += _filter(port, row, beside, seen)
    return changes + _unused_qos(seen)


def _directory(port: VhostPort, seen: OvsObservation) -> list[Change]:
    gid = seen.sockets.gid
    if port.chosen is not None:
        return arrivals(port, seen.sockets)
    if gid is None:
        return []  # the backend reports itself unusable without the group
    user = port.spec.qemu_user
    wish = wanted_directory(port.socket, port.port_id, user, gid)
    if wish is None or seen.sockets.directories.get(wish.path) == wish:
        return []
    return [c.MakeSocketDirectory((port.port_id,), wish)]


def _is_another(wish: RelayVfPort | None, row: OvsPort) -> bool:
    return wish is None or wish.must_be_remade(row)


def _remove_beside(port_id: str, row: OvsPort) -> Change:
    device = row.interface.options.get("dpdk-devargs", "") if row.interface else ""
    return c.RemoveBeside((port_id,), str(row.bridge), row.name, device)


def _unused_qos(seen: OvsObservation) -> list[Change]:
    """Remove QoS rows that were detached from their port, or whose port was deleted."""
    used = {row.qos.uuid for row in seen.rows.values() if row.qos}
    return [
        c.DropQos((qos.owner[1],) if qos.owner else (), qos.uuid)
        for qos in sorted(seen.qos, key=lambda qos: qos.uuid)
        if qos.uuid not in used
    ]


def _removal(port_id: str, seen: OvsObservation) -> list[Change]:
    changes: list[Change] = []
    row, beside = seen.rows.get(port_id), seen.beside.get(port_id)
    if row is not None:
        bridge, owner = str(row.bridge), row.owner
        assert owner is not None
        changes += [
            c.RemovePort((port_id,), bridge, row.name, owner[0]),
            _drop_flows(port_id, bridge),
        ]
    if beside is not None:
        changes.append(_remove_beside(port_id, beside))
    return changes


def _drop_flows(port_id: str, bridge: str) -> Change:
    """Planned whether or not the flows were read: a stale flow could match frames of a later port."""
    return c.DropFlows((port_id,), bridge, (filters.port_cookie(port_id),))


def has_its_flows(port: VhostPort, seen: OvsObservation) -> bool:
    """Whether the observed flows of the port are exactly the desired ones."""
    port_id = port.port_id
    row, beside = seen.rows.get(port_id), seen.beside.get(port_id)
    flows = _set_filter(port, seen).flows(_works_at(row), _works_at(beside), _doors(port, seen))
    return bool(flows) and not port.closed and flows == seen.flows.get(port_id)


def _set_filter(port: VhostPort, seen: OvsObservation) -> c.SetFilter:
    bridge = seen.bridges.get(port.bridge)
    foreign = bridge is not None and not bridge.ours
    found = seen.flows.get(port.port_id)
    # A port without flows may have been closed before somebody deleted them.
    may_be_shut = not found or filters.are_closed(found) or port.port_id in seen.shut
    reopens = found is not None and not port.closed and may_be_shut
    return c.SetFilter((port.port_id,), port.bridge, port, foreign, reopens)


def _filter(
    port: VhostPort, row: OvsPort | None, beside: OvsPort | None, seen: OvsObservation
) -> list[Change]:
    change = _set_filter(port, seen)
    if row is None or (port.beside and beside is None):
        return [change]
    flows = change.flows(_works_at(row), _works_at(beside), _doors(port, seen))
    # No flows: vswitchd could not create the port, which is reported as a fault.
    is_reached = port.beside or (port.port_id in seen.shut) == port.closed
    return [change] if flows and (not is_reached or flows != seen.flows.get(port.port_id)) else []


def _doors(port: VhostPort, seen: OvsObservation) -> tuple[int, ...]:
    bridge = seen.bridges.get(port.bridge)
    return bridge.doors if bridge else ()


def _works_at(row: OvsPort | None) -> int | None:
    return row.interface.works_at if row and row.interface else None

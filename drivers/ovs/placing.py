"""The bridge of a port, and why the port cannot be made or cannot be on that bridge as it is now (pure).

The bridge is that of VXLAN networks, that of ``[ovs] bridge_mappings``, or the one that the port is on: it
cannot move to another one while its VM runs. If the option changes, it stays on the bridge of its network
and reports a conflict. The bridge's mark names its network; a bridge of the operator has no mark, and that of
the port names it. A port that has lost its mark gets it at the next look: until then the option names
the network of its bridge.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import replace

from drivers.ovs.model import ObservedOvsBridge, OvsObservation
from drivers.ovs.overlay_plan import tunnel_address
from drivers.ovs.overlays import OVERLAY, PATCHES, TUNNELS, vxlan_name
from drivers.ovs.ports import VhostPort
from drivers.ovs.uplinks import OvsUplink
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    InvalidRequest,
    NetpluginError,
    Unsupported,
)
from netplugin.api.models import PortSpec
from netplugin.api.problem import FieldError
from netplugin.backend import Intent, Overlay
from netplugin.host.names import MAX_SOCKET_PATH, fits_socket
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.ovs_underlay import problem, too_narrow

#: MAX_VHOST_SOCKET in DPDK's lib/vhost/socket.c: DPDK refuses more.
MAX_VHOST_SOCKETS = 1024


# -- the bridge of a port -----------------------------------------------------------------------------


def mapped_bridge(settings: OvsSettings, intent: Intent) -> str | None:
    """The bridge that a new port of this intent would be on; None if its network has none."""
    assert intent.spec is not None
    return OVERLAY if intent.overlay else settings.bridge_mappings.get(_network(intent.spec))


def bridge_of(
    settings: OvsSettings,
    intent: Intent,
    row: OvsPort | None,
    bridges: Mapping[str, ObservedOvsBridge],
) -> str | None:
    """The bridge of a port; None if the port has no row and its network no bridge."""
    assert intent.spec is not None
    network, mapped = _network(intent.spec), mapped_bridge(settings, intent)
    if intent.overlay:
        return mapped
    here = row.bridge if row else None
    if here is None or mapped in (None, here):
        return here or mapped
    there = bridges.get(here)
    networks = {bridge: name for name, bridge in settings.bridge_mappings.items()}
    marked = (there.mark if there else "") or (row.mapped_network if row else "")
    return here if (marked or networks.get(here)) in (network, None) else mapped


def on_bridge(port: VhostPort, bridges: Mapping[str, ObservedOvsBridge]) -> VhostPort:
    """The port with a mark of its network if its bridge, one of the operator's, has none."""
    there = bridges.get(port.bridge)
    if there is None or there.ours:
        return port
    return replace(port, mapped_network=str(port.spec.network.physical_network))


def left_out(
    settings: OvsSettings, intent: Intent, bridge: str | None, seen: OvsObservation
) -> NetpluginError | None:
    """Why the configuration would not put the port on this bridge as it is; None if it would."""
    assert intent.spec is not None
    network, mapped = _network(intent.spec), mapped_bridge(settings, intent)
    if intent.overlay:
        return problem(None) if settings.local_ip is None else None
    if mapped is None:
        return unmapped(intent.spec)
    if mapped == bridge:
        there, row = seen.bridges.get(mapped), seen.rows.get(intent.port_id)
        conflict = _of_another(there, network) or _other_uplinks(settings, there, seen) if there else None
        is_new = row is None or row.bridge != bridge
        return conflict or (_uplink_elsewhere(settings, mapped, network, seen) if is_new else None)
    return Conflict(
        f"the port is on bridge {bridge}, and [ovs] bridge_mappings has {mapped} for {network} now",
        step="plan",
        fix=f"map {network} to {bridge} again and restart the agent; or, with its VM stopped, DELETE "
        "the port and PUT it again",
    )


def unmapped(spec: PortSpec) -> BackendUnavailable:
    """The error for a port whose network was removed from the configuration."""
    network = spec.network.physical_network
    return BackendUnavailable(
        f"{network} is not in [ovs] bridge_mappings any more",
        step="plan",
        fix=f"add {network} to it again and restart the agent; or delete the port",
    )


def _uplink_elsewhere(
    settings: OvsSettings, bridge: str, network: str, seen: OvsObservation
) -> NetpluginError | None:
    """Why the uplink of a network cannot be added to its bridge: live ports use it on another one."""
    uplink = OvsUplink.of(settings, bridge, network)
    names = uplink.interfaces().keys() if uplink else set()
    for other in seen.bridges.values():
        taken = {i.name for each in other.uplinks.values() for i in each.interfaces}
        if other.name != bridge and not names.isdisjoint(taken):
            return Conflict(
                f"the uplink of {network} is on bridge {other.name}, where [ovs] bridge_mappings had "
                "the network before, and live ports use it",
                step="plan",
                fix=f"map {network} to {other.name} again and restart the agent; or delete the ports "
                "that are there",
            )
    return None


def uplinks_stay(settings: OvsSettings, bridge: ObservedOvsBridge, seen: OvsObservation) -> bool:
    """Whether live ports keep the uplinks of their bridge, none of which ``[ovs] uplinks`` lists.

    Removing these uplinks would disconnect running VMs, and the option may be a mistake.
    """
    return _other_uplinks(settings, bridge, seen) is not None


def _of_another(bridge: ObservedOvsBridge, network: str) -> NetpluginError | None:
    """Why a bridge of ours cannot serve this network: it was created for another. None if it can."""
    if bridge.mark in ("", network):
        return None
    return Conflict(
        f"bridge {bridge.name} was made for {bridge.mark}, and [ovs] bridge_mappings has it for {network}",
        step="plan",
        fix=f"map {network} to another bridge; if it is the same network under another name: "
        f"ovs-vsctl set bridge {bridge.name} external_ids:netplugin-bridge={network}",
    )


def _other_uplinks(
    settings: OvsSettings, bridge: ObservedOvsBridge, seen: OvsObservation
) -> NetpluginError | None:
    uplink = OvsUplink.of(settings, bridge.name, bridge.mark)
    names = uplink.interfaces().keys() if uplink else set()
    found = [i for row in bridge.uplinks.values() for i in row.interfaces]
    if not found or any(interface.name in names for interface in found):
        return None
    if not bridge.neighbours and all(row.bridge != bridge.name for row in seen.rows.values()):
        return None
    devices = ", ".join(sorted(i.options.get("dpdk-devargs", i.name) for i in found))
    now = ", ".join(uplink.devices) if uplink else "no device"
    return Conflict(
        f"the uplink of bridge {bridge.name} is {devices}, and [ovs] uplinks has {now} for "
        f"{bridge.mark}: live ports keep it",
        step="plan",
        fix=f"give {bridge.mark} {devices} in [ovs] uplinks again and restart the agent; or, with the "
        "VMs stopped, DELETE the ports of the bridge and PUT them again",
    )


def _network(spec: PortSpec) -> str:
    return str(spec.network.physical_network)


# -- what prevents a port ---------------------------------------------------------------------------


def place_port(
    settings: OvsSettings, intent: Intent, seen: OvsObservation, room: int, make: Callable[[str], VhostPort]
) -> tuple[VhostPort, NetpluginError | None]:
    """The port that ``make`` returns for the bridge of its network; and why it stays there, if the options
    say otherwise by now. ``room`` is the number of free vhost sockets.

    Raises: the error that prevents it.
    """
    assert intent.spec is not None
    row = seen.rows.get(intent.port_id)
    bridge = bridge_of(settings, intent, row, seen.bridges)
    left = left_out(settings, intent, bridge, seen)
    if bridge is None or (left and (row is None or row.bridge != bridge)):
        raise left or unmapped(intent.spec)
    port = on_bridge(make(bridge), seen.bridges)
    require_place(settings, port, seen, room)
    return port, left


def require_place(settings: OvsSettings, port: VhostPort, seen: OvsObservation, room: int) -> None:
    """Raises: the error that prevents that the port is on its bridge."""
    if error := port_refusal(port, seen, room) or bridge_refusal(settings, port, seen):
        raise error


def port_refusal(port: VhostPort, seen: OvsObservation, room: int) -> NetpluginError | None:
    """Why the port cannot be created; None if it can. ``room`` is the number of free vhost sockets."""
    mine = (port.backend, port.port_id)
    for name in (port.name, *((port.vf_port.name,) if port.vf_port else ())):
        if (owner := seen.names.get(name, mine)) != mine:
            return name_taken(name, owner)
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
        if name in seen.names:
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

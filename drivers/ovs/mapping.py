"""The bridge of a port: that of VXLAN networks, that of ``[ovs] bridge_mappings``, or the one that it is on.

A port cannot move to another bridge while its VM runs. If the option changes, it stays on the
bridge of its network and reports a conflict. The bridge's mark names its network; a bridge of the
operator has no mark, and that of the port names it. A port that has lost its mark gets it at the next
look: until then the option names the network of its bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drivers.ovs.model import ObservedOvsBridge, OvsObservation
from drivers.ovs.overlays import OVERLAY
from drivers.ovs.ports import OvsUplink, VhostPort
from netplugin.api.errors import BackendUnavailable, Conflict, NetpluginError
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.ovs_underlay import problem


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
        there = seen.bridges.get(mapped)
        if there is None:
            return None
        return _of_another(there, network) or _other_uplinks(settings, there, seen)
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


def mapping_conflict(settings: OvsSettings, port: VhostPort, seen: OvsObservation) -> NetpluginError | None:
    """Why a port cannot be added to its bridge; None if it can.

    The bridge or its NIC may still be used by ports that were created before the option was
    changed.
    """
    row, network = seen.rows.get(port.port_id), _network(port.spec)
    if settings.bridge_mappings.get(network) != port.bridge or (row and row.bridge == port.bridge):
        return None
    bridge = seen.bridges.get(port.bridge)
    if bridge and (conflict := _of_another(bridge, network)):
        return conflict
    uplink = OvsUplink.of(settings, port.bridge, network)
    names = uplink.interfaces().keys() if uplink else set()
    for other in seen.bridges.values():
        taken = {i.name for each in other.uplinks.values() for i in each.interfaces}
        if other.name != port.bridge and not names.isdisjoint(taken):
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

"""Plan the tunnels and flows of VXLAN networks (pure). A network exists here while the host has a port on it.

The ports may be of several backends: those of others count as those that are not in scope.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from drivers.ovs import tunnels
from drivers.ovs.flow_changes import DropNetwork, SetBridgeFlows, SetNetwork
from drivers.ovs.model import Layout, OvsObservation
from drivers.ovs.overlays import OVERLAY, PATCHES, TO_OVERLAY, TUNNELS, TunnelPort, vxlan_name
from drivers.ovs.row_changes import AddPort, RemovePort, SetPort
from netplugin.backend import Change, Overlay
from netplugin.host.flow import COOKIE_MARK
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort


def network_changes(
    settings: OvsSettings,
    layout: Layout,
    desired: Mapping[str, Overlay],
    planned: set[str],
    seen: OvsObservation,
) -> tuple[list[Change], list[Change]]:
    """Return the changes to make before the port changes (tunnels that come or change), and after them
    (tunnels that go, network flows).

    ``desired``: the overlays of the desired ports. ``planned``: all ports that this plan changes.
    """
    local_ip = tunnel_address(settings, seen)
    here = {o.network_id: o.spec.udp_port for o in desired.values()}
    rows = [row for port_id, row in seen.rows.items() if port_id not in planned]
    here |= dict(row.network for row in rows if row.bridge == OVERLAY and row.network)
    in_use = {**seen.tunnels.neighbours, **here}
    before, after = _ports(local_ip, desired, in_use, seen)
    if before or after:
        before += _switching(layout, desired, seen)
    users: dict[str, list[str]] = {}
    for port_id, overlay in sorted(desired.items()):
        users.setdefault(overlay.network_id, []).append(port_id)
    overlays = {overlay.network_id: overlay for overlay in desired.values()}
    after += [
        SetNetwork(tuple(users[network_id]), TUNNELS, overlay, local_ip)
        for network_id, overlay in sorted(overlays.items())
        if local_ip and _flows_differ(overlay, local_ip, seen)
    ]
    bridge = seen.bridges.get(TUNNELS)
    if bridge and (in_use or bridge.used_by_others):  # otherwise the whole bridge is deleted
        after += _forgotten(planned, in_use.keys(), seen.tunnels.of_others - here.keys(), seen)
    return before, after


def _switching(layout: Layout, desired: Mapping[str, Overlay], seen: OvsObservation) -> list[Change]:
    """Have the bridges that switch drop what would end in the tunnels that there are then."""
    bridges = [name for name, bridge in seen.bridges.items() if bridge.ours and name not in layout.base]
    return [SetBridgeFlows(tuple(sorted(desired)), name) for name in sorted(bridges)]


def tunnel_address(settings: OvsSettings, seen: OvsObservation) -> str | None:
    """Return the address of tunnels: existing ones, and the flows that use them, stay as they are without
    ``[ovs] local_ip``."""
    return settings.local_ip or seen.tunnels.local_ip


def _ports(
    local_ip: str | None,
    desired: Mapping[str, Overlay],
    in_use: Mapping[str, int],
    seen: OvsObservation,
) -> tuple[list[Change], list[Change]]:
    """Return the changes of the shared ports, and the removals: a VM's port goes before what it needs."""
    tunnel_ports: dict[str, TunnelPort] = {}
    if in_use and local_ip:
        tunnel_ports = {name: TunnelPort.patch(name) for name in PATCHES}
        for udp_port in sorted(set(in_use.values())):
            tunnel_ports[vxlan_name(udp_port)] = TunnelPort.vxlan(udp_port, local_ip)
    changes: list[Change] = []
    for name, port in tunnel_ports.items():
        row = seen.tunnels.ports.get(name)
        ids = tuple(
            port_id
            for port_id, overlay in sorted(desired.items())
            if port.type == "patch" or vxlan_name(overlay.spec.udp_port) == name
        )
        if row is None and desired:
            changes.append(AddPort(ids, port))
        elif row is not None and port.must_be_remade(row):
            changes.append(RemovePort(ids, str(row.bridge), name))
        elif row is not None and port.differs(row):
            changes.append(SetPort(ids, port))
    removals: list[Change] = []
    if in_use and not local_ip:
        return [], []  # keep existing tunnels until [ovs] local_ip is set
    for name, row in sorted(seen.tunnels.ports.items()):
        bridge = seen.bridges.get(str(row.bridge))
        if name not in tunnel_ports and (in_use or bridge is None or bridge.used_by_others):
            removals.append(RemovePort((), str(row.bridge), name, unless_needed=True))
    return changes, removals


def _flows_differ(overlay: Overlay, local_ip: str, seen: OvsObservation) -> bool:
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
    return row.works_at or 0


def _forgotten(
    planned: set[str], in_use: Collection[str], of_others: Collection[str], seen: OvsObservation
) -> list[Change]:
    """Drop the flows of networks without ports: the last port leaves, or someone else removed it.

    That of this backend may be the last one although there are ports ``of_others``: they may leave at the
    same time. The change itself looks whether they have (``DropNetwork``).
    """
    kept = {tunnels.network_cookie(network_id) for network_id in in_use} | {COOKIE_MARK}
    users: dict[int, list[str]] = {}
    for port_id in sorted(planned & seen.rows.keys()):
        if network := seen.rows[port_id].network:
            users.setdefault(tunnels.network_cookie(network[0]), []).append(port_id)
    maybe = users.keys() & {tunnels.network_cookie(network_id) for network_id in of_others}
    gone = (users.keys() | seen.tunnels.flows.keys()) - kept | maybe
    return [DropNetwork(tuple(users.get(cookie, ())), TUNNELS, cookie) for cookie in sorted(gone)]

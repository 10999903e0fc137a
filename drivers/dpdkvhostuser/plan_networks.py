"""Plan the tunnels and flows of VXLAN networks. A network exists here while it has a port on this host."""

from __future__ import annotations

from collections.abc import Mapping

from drivers.dpdkvhostuser import changes as c
from drivers.dpdkvhostuser import tunnels
from drivers.dpdkvhostuser.seen import Seen
from drivers.dpdkvhostuser.wanted import (
    OVERLAY,
    TO_OVERLAY,
    TO_TUNNELS,
    TUNNELS,
    TunnelPort,
    vxlan_name,
)
from drivers.ovs.changes import DropFlows
from netplugin.backend import Change, Overlay
from netplugin.host.openflow import COOKIE_MARK
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import NETWORK_MARK, UDP_MARK, OvsPort


def network_changes(
    settings: OvsSettings, wanted: Mapping[str, Overlay], planned: set[str], seen: Seen
) -> tuple[list[Change], list[Change]]:
    """Return the changes to make before the port changes (tunnels) and after them (network flows).

    ``wanted``: the overlays of the desired ports. ``planned``: all ports that this plan changes.
    """
    in_use = {o.network_id: o.spec.udp_port for o in wanted.values()} | dict(
        seen.tunnels.neighbours
    )
    for port_id, row in seen.rows.items():
        if row.bridge == OVERLAY and port_id not in planned:
            in_use |= network_of(row.external_ids)
    before = _ports(settings, wanted, in_use, seen)
    users: dict[str, list[str]] = {}
    for port_id, overlay in sorted(wanted.items()):
        users.setdefault(overlay.network_id, []).append(port_id)
    overlays = {overlay.network_id: overlay for overlay in wanted.values()}
    after: list[Change] = [
        c.SetNetwork(tuple(users[network_id]), TUNNELS, overlay, settings.local_ip)
        for network_id, overlay in sorted(overlays.items())
        if settings.local_ip and _flows_differ(overlay, settings.local_ip, seen)
    ]
    bridge = seen.bridges.get(TUNNELS)
    if bridge and (in_use or bridge.has_strangers):  # otherwise the whole bridge is deleted
        after += _forgotten(planned, in_use, seen)
    return before, after


def network_of(external_ids: Mapping[str, str]) -> dict[str, int]:
    """Return the network that a port's marks name, with its UDP port: one entry or none."""
    network_id, udp_port = external_ids.get(NETWORK_MARK), external_ids.get(UDP_MARK, "")
    return {network_id: int(udp_port)} if network_id and udp_port.isdigit() else {}


def _ports(
    settings: OvsSettings, wanted: Mapping[str, Overlay], in_use: Mapping[str, int], seen: Seen
) -> list[Change]:
    wishes: dict[str, TunnelPort] = {}
    if in_use and settings.local_ip:
        wishes = {name: TunnelPort.patch(name) for name in (TO_TUNNELS, TO_OVERLAY)}
        for udp_port in sorted(set(in_use.values())):
            wishes[vxlan_name(udp_port)] = TunnelPort.vxlan(udp_port, settings.local_ip)
    changes: list[Change] = []
    for name, wish in wishes.items():
        row = seen.tunnels.ports.get(name)
        ids = tuple(
            port_id
            for port_id, overlay in sorted(wanted.items())
            if wish.type == "patch" or vxlan_name(overlay.spec.udp_port) == name
        )
        if row is None and wanted:
            changes.append(c.AddTunnelPort(ids, wish))
        elif row is not None and wish.must_be_remade(row):
            changes.append(c.RemoveTunnelPort(ids, str(row.bridge), name))
        elif row is not None and wish.differs(row):
            changes.append(c.SetTunnelPort(ids, wish))
    if in_use and not settings.local_ip:
        return []  # keep existing tunnels until [ovs] local_ip is set
    for name, row in sorted(seen.tunnels.ports.items()):
        bridge = seen.bridges.get(str(row.bridge))
        if name not in wishes and (in_use or bridge is None or bridge.has_strangers):
            changes.append(c.RemoveTunnelPort((), str(row.bridge), name))
    return changes


def _flows_differ(overlay: Overlay, local_ip: str, seen: Seen) -> bool:
    """Whether a network's flows differ from the desired ones, or were not read (its first port)."""
    tunnel = _ofport(seen.tunnels.ports.get(vxlan_name(overlay.spec.udp_port)))
    patch = _ofport(seen.tunnels.ports.get(TO_OVERLAY))
    found = seen.tunnels.flows.get(tunnels.network_cookie(overlay.network_id))
    if found is None or tunnel is None or patch is None:
        # vswitchd failed to create a port (ofport 0): reported as a fault, and no flow can use it.
        return tunnel != 0 and patch != 0
    return 0 not in (tunnel, patch) and found != tunnels.network_flows(
        overlay, local_ip, tunnel, patch
    )


def _ofport(row: OvsPort | None) -> int | None:
    """Return the ofport; None if the row does not exist yet, 0 if vswitchd failed to create the port."""
    if row is None:
        return None
    return (row.interface and row.interface.works_at) or 0


def _forgotten(planned: set[str], in_use: Mapping[str, int], seen: Seen) -> list[Change]:
    """Drop the flows of networks without ports: the last port leaves, or someone else removed it."""
    kept = {tunnels.network_cookie(network_id) for network_id in in_use} | {COOKIE_MARK}
    users: dict[int, list[str]] = {}
    for port_id in sorted(planned & seen.rows.keys()):
        for network_id in (
            network_of(seen.rows[port_id].external_ids) if port_id in seen.rows else ()
        ):
            users.setdefault(tunnels.network_cookie(network_id), []).append(port_id)
    gone = (users.keys() | seen.tunnels.flows.keys()) - kept
    return [
        DropFlows(tuple(users.get(cookie, ())), TUNNELS, tunnels.with_learned(cookie))
        for cookie in sorted(gone)
    ]

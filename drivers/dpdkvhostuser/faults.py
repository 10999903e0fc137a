"""Faults that OVS reports for a port whose rows are correct, and for its uplinks, tunnels and bonds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivers.dpdkvhostuser.plan_networks import network_of
from drivers.dpdkvhostuser.seen import Seen
from drivers.dpdkvhostuser.wanted import OVERLAY, vxlan_name
from drivers.ovs import faults, offload
from drivers.ovs.faults import HostWord
from netplugin.host import ovs_bonds
from netplugin.host.ovs_rows import NETWORK_MARK, OvsPort
from netplugin.host.ovs_underlay import problem


def details(row: OvsPort) -> Mapping[str, Any]:
    """Return the details of a port that the API reports."""
    found = faults.details(row)
    if NETWORK_MARK in row.external_ids:
        found["network_id"] = row.external_ids[NETWORK_MARK]
    return found


def fault(row: OvsPort, seen: Seen, word: HostWord) -> str | None:
    """Return why the port does not work; None if OVS reports no fault."""
    bridge = seen.bridges.get(str(row.bridge))
    return (
        faults.of_port(row, word.starved)
        or (faults.of_uplinks(row, bridge, word) if bridge else None)
        or (_of_tunnels(row, seen, word) if row.bridge == OVERLAY else None)
        or _of_bonds(row, seen)
    )


def _of_tunnels(row: OvsPort, seen: Seen, word: HostWord) -> str | None:
    for udp_port in network_of(row.external_ids).values():
        tunnel = seen.tunnels.ports.get(vxlan_name(udp_port))
        broken = faults.of_interface(tunnel.interface) if tunnel and tunnel.interface else None
        if broken:
            return f"{broken} (has somebody else tunnels on UDP port {udp_port}?)"
    mtu = (row.interface and row.interface.mtu_request) or None
    error = problem(seen.tunnels.underlay, mtu) or offload.refuse_tunnels(word.root)
    return f"{error.detail}. Fix: {error.fix}" if error else None


def _of_bonds(row: OvsPort, seen: Seen) -> str | None:
    """Return the fault of a bond that the port depends on.

    ``seen.bonds`` is empty unless the whole host was observed: a new bond may negotiate for a while."""
    for use in seen.bonds:
        if row.bridge == use.bridge or (row.bridge == OVERLAY and use.tunnels):
            dead = ovs_bonds.fault(use.bond)
            if dead:
                return dead
    return None

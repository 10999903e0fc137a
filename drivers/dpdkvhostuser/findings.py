"""Findings of the dpdkvhostuser backend about the host (``HasFindings``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivers.dpdkvhostuser.model import OVERLAY, VhostUserObservation, vxlan_name
from drivers.dpdkvhostuser.plan import network_of
from drivers.ovs import findings as ovs_findings
from drivers.ovs import usability
from drivers.ovs.findings import VswitchdFacts, of_bridges
from drivers.ovs.ports import QUEUES_MARK
from netplugin.api.models import Finding
from netplugin.host import ovs_bonds
from netplugin.host.ovs_rows import NETWORK_MARK, OvsPort
from netplugin.host.ovs_underlay import problem


def findings(seen: VhostUserObservation, local_ip: str | None) -> list[Finding]:
    """Return the findings; ``seen`` must cover the whole host. Pure."""
    found = ovs_bonds.findings(seen.bonds)
    found += of_bridges(seen)
    found += _queues(seen)
    if local_ip is not None or any(row.bridge == OVERLAY for row in seen.rows.values()):
        found.append(_underlay(seen))
    return found


def _queues(seen: VhostUserObservation) -> list[Finding]:
    """Report ports with more queues than PMD threads that may poll them: their queues then share threads."""
    asked = {
        row.name: (int(row.interface.external_ids.get(QUEUES_MARK, "1")), row.interface.numa_node)
        for row in seen.rows.values()
        if row.interface and row.interface.external_ids.get(QUEUES_MARK, "1").isdecimal()
    }
    near = {name: _threads_near(node, seen.pmd_threads) for name, (_, node) in asked.items()}
    many = sorted(name for name, (queues, _) in asked.items() if queues > near[name])
    if not many:
        return []
    some = ", ".join(many[:5]) + (" and others" if len(many) > 5 else "")
    most, fewest = max(asked[name][0] for name in many), min(near[name] for name in many)
    each = " for each NUMA node of NICs and VMs" if len(seen.pmd_threads) > 1 else ""
    return [
        Finding(
            id="pmd-queues",
            status="warn",
            found=f"{len(many)} ports have up to {most} queues, and as few as {fewest} PMD threads on their "
            f"NUMA node: {some}",
            expected=f"{most} PMD threads on the node, so that each queue of a port may have its own",
            fix=f"netplugin pmd set --count {most}{each}, or fewer queues",
        )
    ]


def _threads_near(node: int | None, threads: Mapping[int, int]) -> int:
    """Return the number of PMD threads that may poll a port of this NUMA node.

    OVS assigns all queues of a port to threads on its node, and to those of other nodes only if it has
    none (sched_numa_list_schedule in lib/dpif-netdev.c). The node of a port without a VM is not known
    yet (None): it will have at most as many threads as the node with the most.
    """
    if node is None:
        return max(threads.values(), default=0)
    return threads.get(node, sum(threads.values()))


def _underlay(seen: VhostUserObservation) -> Finding:
    underlay = seen.tunnels.underlay
    mtus = [
        (row.interface and row.interface.needed_mtu) or 0
        for row in seen.rows.values()
        if row.bridge == OVERLAY
    ]
    error = problem(underlay, max(mtus, default=None))
    expected = "[ovs] local_ip is on a netdev bridge that is up, with room for VXLAN on every hop"
    if error is None and underlay is not None:
        hops = ", ".join(f"{name} {mtu}" for name, mtu in underlay.hops)
        found = f"{underlay.local_ip} is on {underlay.device} (MTU: {hops})"
        return Finding(id="underlay", status="ok", found=found, expected=expected)
    found = error.detail if error else "the tunnels' address was not looked for"
    return Finding(
        id="underlay",
        status="fail",
        found=found,
        expected=expected,
        fix=error.fix if error else None,
    )


# -- Faults that OVS reports for a port whose rows are correct, and for its uplinks, tunnels and bonds.


def details(row: OvsPort) -> Mapping[str, Any]:
    """Return the details of a port that the API reports."""
    found = ovs_findings.details(row)
    if NETWORK_MARK in row.external_ids:
        found["network_id"] = row.external_ids[NETWORK_MARK]
    return found


def fault(row: OvsPort, seen: VhostUserObservation, word: VswitchdFacts) -> str | None:
    """Return why the port does not work; None if OVS reports no fault."""
    bridge = seen.bridges.get(str(row.bridge))
    return (
        ovs_findings.of_port(row, word.starved)
        or (ovs_findings.of_uplinks(row, bridge, word) if bridge else None)
        or (_of_tunnels(row, seen, word) if row.bridge == OVERLAY else None)
        or _of_bonds(row, seen)
    )


def _of_tunnels(row: OvsPort, seen: VhostUserObservation, word: VswitchdFacts) -> str | None:
    for udp_port in network_of(row.external_ids).values():
        tunnel = seen.tunnels.ports.get(vxlan_name(udp_port))
        broken = ovs_findings.of_interface(tunnel.interface) if tunnel and tunnel.interface else None
        if broken:
            return f"{broken} (has somebody else tunnels on UDP port {udp_port}?)"
    mtu = (row.interface and row.interface.needed_mtu) or None
    error = problem(seen.tunnels.underlay, mtu) or usability.refuse_tunnels(word.root)
    return f"{error.detail}. Fix: {error.fix}" if error else None


def _of_bonds(row: OvsPort, seen: VhostUserObservation) -> str | None:
    """Return the fault of a bond that the port depends on.

    ``seen.bonds`` is empty unless the whole host was observed: a new bond may negotiate for a while."""
    for use in seen.bonds:
        if row.bridge == use.bridge or (row.bridge == OVERLAY and use.tunnels):
            dead = ovs_bonds.fault(use.bond)
            if dead:
                return dead
    return None

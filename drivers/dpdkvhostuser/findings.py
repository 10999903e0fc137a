"""Findings of the dpdkvhostuser backend about the host (``HasFindings``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drivers.ovs.findings import details, of_bridges, of_path, of_port, of_underlay, without_link
from drivers.ovs.model import OvsObservation
from drivers.ovs.overlays import OVERLAY
from drivers.ovs.ports import QUEUES_MARK
from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.backend import ObservedPort
from netplugin.host import ovs_bonds
from netplugin.host.ovs_rows import OvsPort


def findings(seen: OvsObservation, local_ip: str | None) -> list[Finding]:
    """Return the findings; ``seen`` must cover the whole host. Pure."""
    of_bonds = ovs_bonds.findings(seen.bonds)
    return [*of_bonds, *of_bridges(seen), *_queues(seen), *of_underlay(seen, local_ip)]


def _queues(seen: OvsObservation) -> list[Finding]:
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
    most, fewest = max(asked[name][0] for name in many), min(near[name] for name in many)
    each = " for each NUMA node of NICs and VMs" if len(seen.pmd_threads) > 1 else ""
    return [
        Finding(
            id="pmd-queues",
            status="warn",
            found=f"{len(many)} ports have up to {most} queues, and as few as {fewest} PMD threads on their "
            f"NUMA node: {some(many)}",
            expected=f"{most} PMD threads on the node, so that each queue of a port may have its own",
            fix=f'PUT /v1/pmd {{"count": {most}}}{each}, or fewer queues',
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


# -- Faults that OVS reports for a port whose rows are correct, and for its uplinks, tunnels and bonds.


def with_ports(seen: OvsObservation) -> OvsObservation:
    """Add the state of each port with a row."""
    ports = {
        port_id: ObservedPort(
            fault(row, seen),
            details(row),
            row.stamp,
            without_link(row),
            guest=row.interface.connection if row.interface else None,
        )
        for port_id, row in seen.rows.items()
    }
    return replace(seen, ports=ports)


def fault(row: OvsPort, seen: OvsObservation) -> str | None:
    """Return why the port does not work; None if OVS reports no fault."""
    return of_port(row, seen) or of_path(row, seen) or _of_bonds(row, seen)


def _of_bonds(row: OvsPort, seen: OvsObservation) -> str | None:
    """Return the fault of a bond that the port depends on.

    ``seen.bonds`` is empty unless the whole host was observed: a new bond may negotiate for a while."""
    for use in seen.bonds:
        if row.bridge == use.bridge or (row.bridge == OVERLAY and use.tunnels):
            dead = ovs_bonds.fault(use.bond)
            if dead:
                return dead
    return None

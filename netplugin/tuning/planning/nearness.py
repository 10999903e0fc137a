"""Rank NUMA nodes by distance from the NICs (pure): NUMA distance first, then package.

With SNC (Intel) or NPS (AMD), a package has several nodes, which are nearer to each other than to the other
package. If the firmware reports one distance for all other nodes, the package decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from netplugin.tuning.facts import Core

#: The kernel's distances without a firmware table (LOCAL_DISTANCE and REMOTE_DISTANCE in
#: include/linux/topology.h).
_LOCAL, _REMOTE = 10, 20


def packages_of(cores: Iterable[Core]) -> dict[int, frozenset[int]]:
    """Packages of each node's cores."""
    found: dict[int, frozenset[int]] = {}
    for core in cores:
        found[core.node] = found.get(core.node, frozenset()) | {core.package}
    return found


def ranks(
    cores: tuple[Core, ...], nic_nodes: tuple[int, ...], distances: Mapping[int, Mapping[int, int]]
) -> dict[int, int]:
    """Rank of each node: 0 for NIC nodes, then 1 and up; equally distant nodes share a rank."""
    packages = packages_of(cores)
    near = [node for node in nic_nodes if node in packages]
    home = frozenset(package for node in near for package in packages[node])

    def away(node: int) -> tuple[int, bool]:
        rows = [distances.get(nic, {}).get(node, _REMOTE) for nic in near]
        return min(rows, default=_LOCAL), not packages[node] & home

    rest = {node: away(node) for node in packages if node not in near}
    order = sorted(set(rest.values()))
    return dict.fromkeys(near, 0) | {node: 1 + order.index(far) for node, far in rest.items()}


def nearest_first(
    cores: tuple[Core, ...], nic_nodes: tuple[int, ...], distances: Mapping[int, Mapping[int, int]]
) -> tuple[int, ...]:
    """All nodes with cores, nearest to the NICs first."""
    found = ranks(cores, nic_nodes, distances)
    return tuple(sorted(found, key=lambda node: (found[node], node)))

"""What the dpdkvhostuser backend observes of a host, and its bridges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivers.ovs.model import Layout, OvsObservation
from drivers.ovs.overlays import BRIDGE_MARKS, HOMES, TUNNELS
from drivers.ovs.tunnels import BASE_FLOWS
from netplugin.host.ovs_bonds import BondUse

BACKEND = "dpdkvhostuser"
LAYOUT = Layout(BACKEND, BRIDGE_MARKS, homes=HOMES, base={TUNNELS: BASE_FLOWS}, keeps=True)


@dataclass(frozen=True)
class VhostUserObservation(OvsObservation):
    """The observed state of the ports in scope, and of their bridges, flows and networks."""

    #: Read only when the whole host is observed, as are PMD threads.
    bonds: tuple[BondUse, ...] = ()
    #: The number of PMD threads on each NUMA node that has some.
    pmd_threads: Mapping[int, int] = field(default_factory=dict)

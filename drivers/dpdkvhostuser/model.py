"""What the dpdkvhostuser backend observes of a host, and the OVS rows that it desires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivers.ovs.model import Layout, OvsObservation
from drivers.ovs.overlays import BRIDGE_MARKS, HOMES, TUNNELS
from drivers.ovs.ports import VhostPort, access_vlan
from drivers.ovs.tunnels import BASE_FLOWS
from netplugin.backend import Intent
from netplugin.host.ovs_bonds import BondUse

# -- The observed state of a host for the dpdkvhostuser backend, as ``plan`` and findings need it.


@dataclass(frozen=True)
class VhostUserObservation(OvsObservation):
    """The observed state of the ports in scope, and of their bridges, flows and networks."""

    #: Read only when the whole host is observed, as are PMD threads.
    bonds: tuple[BondUse, ...] = ()
    #: The number of PMD threads on each NUMA node that has some.
    pmd_threads: Mapping[int, int] = field(default_factory=dict)


# -- The OVS rows that the dpdkvhostuser backend desires, derived from the intent only. -----------


BACKEND = "dpdkvhostuser"
LAYOUT = Layout(BACKEND, BRIDGE_MARKS, homes=HOMES, base={TUNNELS: BASE_FLOWS}, keeps=True)


def vhost_port(intent: Intent, bridge: str, socket: str, tso: bool) -> VhostPort:
    """Return the rows of a desired port. ``tso``: its VM may send segments of up to 64 KiB."""
    return VhostPort.of(BACKEND, intent, bridge, access_vlan(intent), socket=socket, tso=tso)

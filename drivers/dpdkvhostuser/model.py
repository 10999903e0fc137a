"""The bridges of the dpdkvhostuser backend."""

from __future__ import annotations

from drivers.ovs.model import Layout
from drivers.ovs.overlays import BRIDGE_MARKS, HOMES, TUNNELS
from drivers.ovs.tunnels import BASE_FLOWS

BACKEND = "dpdkvhostuser"
LAYOUT = Layout(BACKEND, BRIDGE_MARKS, homes=HOMES, base={TUNNELS: BASE_FLOWS}, keeps=True)

"""What the dpdkvhostuser backend sees of a host, as values: all that ``plan`` and findings need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivers.ovs.seen import SeenOvs
from netplugin.host.openflow import Flow
from netplugin.host.ovs_bonds import BondUse
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.ovs_underlay import Underlay


@dataclass(frozen=True)
class SeenTunnels:
    """What the VXLAN networks of the host share."""

    #: Ports with our tunnel mark: the ends of the patch, and one for each UDP port.
    ports: Mapping[str, OvsPort] = field(default_factory=dict)
    #: Their flows by cookie, of the networks that were read; what was learned is not among them.
    flows: Mapping[int, frozenset[Flow]] = field(default_factory=dict)
    #: Networks that ports not in question are on, each with its UDP port.
    neighbours: Mapping[str, int] = field(default_factory=dict)
    #: Where the tunnels leave; None without ``[ovs] local_ip``.
    underlay: Underlay | None = None

    @property
    def local_ip(self) -> str | None:
        """The address that the tunnels which are there leave from."""
        rows = (self.ports[name] for name in sorted(self.ports))
        addresses = (row.interface.options.get("local_ip") for row in rows if row.interface)
        return next((address for address in addresses if address), None)


@dataclass(frozen=True)
class Seen(SeenOvs):
    """What OVS has of the ports in question, of their bridges, flows and networks."""

    tunnels: SeenTunnels = SeenTunnels()
    #: Read in a look at the whole host only.
    bonds: tuple[BondUse, ...] = ()
    pmd_threads: int = 0

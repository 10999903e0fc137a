"""The observed state of a host for the dpdkvhostuser backend, as ``plan`` and findings need it."""

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
    """The observed state that the host's VXLAN networks share."""

    #: Ports with our tunnel mark: the two patch ports, and one VXLAN port per UDP port.
    ports: Mapping[str, OvsPort] = field(default_factory=dict)
    #: The flows of the networks that were read, by cookie, without learned flows.
    flows: Mapping[int, frozenset[Flow]] = field(default_factory=dict)
    #: Networks that have ports outside the observed scope, each with its UDP port.
    neighbours: Mapping[str, int] = field(default_factory=dict)
    #: The uplink path of the tunnels; None without ``[ovs] local_ip``.
    underlay: Underlay | None = None

    @property
    def local_ip(self) -> str | None:
        """The ``local_ip`` of the existing tunnel ports; None if there are none."""
        rows = (self.ports[name] for name in sorted(self.ports))
        addresses = (row.interface.options.get("local_ip") for row in rows if row.interface)
        return next((address for address in addresses if address), None)


@dataclass(frozen=True)
class Seen(SeenOvs):
    """The observed state of the ports in scope, and of their bridges, flows and networks."""

    tunnels: SeenTunnels = SeenTunnels()
    #: Read only when the whole host is observed.
    bonds: tuple[BondUse, ...] = ()
    pmd_threads: int = 0

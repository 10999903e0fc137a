"""What the dpdkvhostuser backend sees of a host, as values: all that ``plan`` and findings need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from netplugin.backend import Observation
from netplugin.host.openflow import Flow
from netplugin.host.ovs_bonds import BondUse
from netplugin.host.ovs_rows import OvsPort, OvsQos
from netplugin.host.ovs_underlay import Underlay


@dataclass(frozen=True)
class SeenBridge:
    """One bridge of ``bridge_mappings`` or of our own, as OVS has it."""

    name: str
    ours: bool
    datapath_type: str
    fail_mode: str | None
    #: VMs' ports on it that are not in question (not in ``Seen.rows``): how many, and the largest
    #: MTU they ask for (0 where no uplink makes it matter).
    neighbours: int = 0
    neighbours_mtu: int = 0
    #: Ports with our uplink mark.
    uplinks: Mapping[str, OvsPort] = field(default_factory=dict)
    #: DPDK NICs that are not ours, each with the MTU that it has.
    nics: tuple[tuple[str, int], ...] = ()
    #: Whether it has ports that are neither ours nor its own internal one.
    has_strangers: bool = False
    #: The base flows it should have, by the ports that are there now.
    wanted_flows: frozenset[Flow] = frozenset()
    #: The base flows it has; None if they were not read.
    flows: frozenset[Flow] | None = None
    #: Cookies of ours on it that belong to no port that is there.
    stray_cookies: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SeenTunnels:
    """What the VXLAN networks of the host share."""

    #: Ports with our tunnel mark: the ends of the patch, and one for each UDP port.
    ports: Mapping[str, OvsPort] = field(default_factory=dict)
    #: Their flows by cookie, of the networks that were read; what was learned is not among them.
    flows: Mapping[int, frozenset[Flow]] = field(default_factory=dict)
    #: Networks that ports not in question are on, each with its UDP port.
    neighbours: Mapping[str, int] = field(default_factory=dict)
    #: Where the tunnels leave; None without ``[ovs] local_ip``, or if no port needs to know.
    underlay: Underlay | None = None


@dataclass(frozen=True)
class Seen(Observation):
    """What OVS has of the ports in question, of their bridges, flows and networks."""

    rows: Mapping[str, OvsPort] = field(default_factory=dict)
    #: Flows of the ports that have rows.
    flows: Mapping[str, frozenset[Flow]] = field(default_factory=dict)
    bridges: Mapping[str, SeenBridge] = field(default_factory=dict)
    tunnels: SeenTunnels = SeenTunnels()
    #: Rows of QoS with our mark, those of ports that are gone too.
    qos: tuple[OvsQos, ...] = ()
    #: Names of our ports that something else has taken.
    taken_names: frozenset[str] = frozenset()
    vhost_sockets: int = 0
    #: Whether VMs may send segments of 64 KiB (userspace-tso-enable).
    tso: bool = False
    #: Socket files that are there, by port id.
    socket_files: Mapping[str, str] = field(default_factory=dict)
    #: Read in a look at the whole host only.
    bonds: tuple[BondUse, ...] = ()
    pmd_threads: int = 0

    def is_used(self, bridge: str, planned: Collection[str]) -> bool:
        """Whether ports are on the bridge for which nothing is planned: neighbours, kept orphans."""
        found = self.bridges.get(bridge)
        return bool(found and found.neighbours) or bool(self._others(bridge, planned))

    def other_mtus(self, bridge: str, planned: Collection[str]) -> list[int]:
        """The MTUs that those ports ask for."""
        found = self.bridges.get(bridge)
        mtus = [found.neighbours_mtu] if found else []
        others = self._others(bridge, planned)
        return mtus + [(row.interface and row.interface.mtu_request) or 0 for row in others]

    def _others(self, bridge: str, planned: Collection[str]) -> list[OvsPort]:
        rows = self.rows.items()
        return [row for i, row in rows if row.bridge == bridge and i not in planned]

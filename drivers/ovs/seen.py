"""What backends see of OVS alike, as values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from drivers.ovs.sockets import NOTHING, SeenSockets
from netplugin.backend import Observation
from netplugin.host.openflow import Flow
from netplugin.host.ovs_rows import OvsPort, OvsQos


@dataclass(frozen=True)
class SeenBridge:
    """One bridge of ``bridge_mappings`` or of our own, as OVS has it."""

    name: str
    ours: bool
    datapath_type: str
    fail_mode: str | None
    #: What our mark says that it is there for: a physical network, or what is one backend's own.
    mark: str = ""
    #: How many VMs' ports are on it that are not in question (not in ``Seen.rows``).
    neighbours: int = 0
    #: Ports with our uplink mark.
    uplinks: Mapping[str, OvsPort] = field(default_factory=dict)
    #: DPDK NICs that are not ours, each with the MTU that it has.
    nics: tuple[tuple[str, int], ...] = ()
    #: Whether it has ports that are neither ours nor its own internal one.
    has_strangers: bool = False
    #: Ports without our mark on a bridge of ours: what it takes frames from as ``[ovs] service_ports``
    #: says, its internal port too, and what it takes none from.
    services: tuple[OvsPort, ...] = ()
    unmanaged: tuple[OvsPort, ...] = ()
    #: The base flows it should have, by the ports that are there now.
    wanted_flows: frozenset[Flow] = frozenset()
    #: The base flows it has; None if they were not read.
    flows: frozenset[Flow] | None = None
    #: Whether its flows see the ports of first fragments; None if that was not read.
    matches_fragments: bool | None = None
    #: Cookies of ours on it that belong to no port that is there.
    stray_cookies: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SeenOvs(Observation):
    """What OVS has of the ports in question, of their bridges and flows."""

    rows: Mapping[str, OvsPort] = field(default_factory=dict)
    #: The DPDK ports that stand beside ports in question and take their frames, by port id.
    beside: Mapping[str, OvsPort] = field(default_factory=dict)
    #: Flows of the ports that have rows.
    flows: Mapping[str, frozenset[Flow]] = field(default_factory=dict)
    bridges: Mapping[str, SeenBridge] = field(default_factory=dict)
    #: Rows of QoS with our mark, those of ports that are gone too.
    qos: tuple[OvsQos, ...] = ()
    #: Names of our ports that something else has taken.
    taken_names: frozenset[str] = frozenset()
    vhost_sockets: int = 0
    #: Whether VMs may send segments of 64 KiB (userspace-tso-enable).
    tso: bool = False
    #: The version of OVS, if it may leave datapath flows with old actions (``old_actions``).
    keeps_old_actions: str = ""
    #: Whether datapath flows were to be purged since, and could not be.
    purge_failed: bool = False
    sockets: SeenSockets = NOTHING

    def is_used(self, bridge: str, planned: Collection[str]) -> bool:
        """Whether ports are on the bridge for which nothing is planned: neighbours, kept orphans."""
        found = self.bridges.get(bridge)
        rows = self.rows.items()
        return bool(found and found.neighbours) or any(
            row.bridge == bridge and port_id not in planned for port_id, row in rows
        )

"""What backends on OVS observe of it, and the bridges and names that each of them uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from drivers.ovs import filters
from drivers.ovs.overlays import BRIDGE_MARKS, NO_TUNNELS, TUNNELS, ObservedTunnels
from drivers.ovs.sockets import NOTHING, ObservedSockets
from drivers.ovs.tunnels import BASE_FLOWS
from netplugin.backend import Observation
from netplugin.host.flow import Flow
from netplugin.host.names import VHOST
from netplugin.host.ovs_bonds import BondUse
from netplugin.host.ovs_rows import (
    BRIDGE_MARK,
    TUNNEL_MARK,
    UPLINK_MARK,
    VF_PORT_MARK,
    OvsBridge,
    OvsPort,
    OvsQos,
    OvsRoot,
)
from netplugin.host.ovs_view import OvsView

# -- The observed state of OVS, as values that all OVS backends share. ----------------------------


@dataclass(frozen=True)
class ObservedOvsBridge:
    """The observed state of one bridge of ``bridge_mappings`` or of ours."""

    name: str
    ours: bool
    datapath_type: str
    fail_mode: str | None
    #: The value of our bridge mark: a physical network, or a mark of one backend.
    mark: str = ""
    #: The number of VMs' ports on it that are not in scope (not in ``OvsObservation.rows``).
    neighbours: int = 0
    #: Ports with our uplink mark.
    uplinks: Mapping[str, OvsPort] = field(default_factory=dict)
    #: DPDK NICs that are not ours, each with its current MTU.
    nics: tuple[tuple[str, int], ...] = ()
    #: Whether others use it: by ports that are neither ours nor its internal port, or by an address
    #: on that one, as tunnels or the host itself do.
    used_by_others: bool = False
    #: Ports without our mark on a bridge of ours: ``services`` are in ``[ovs] service_ports``
    #: (possibly the internal port), so their frames are admitted; frames of ``unmanaged`` ports are
    #: dropped.
    services: tuple[OvsPort, ...] = ()
    unmanaged: tuple[OvsPort, ...] = ()
    #: The ports that exist now and whose frames it admits though they are those of no VM.
    doors: tuple[int, ...] = ()
    #: Whether it forwards to just those of its ports that it has to; None if that was not read, or it is not
    #: ours.
    forwards_right: bool | None = None
    #: On a bridge that is not ours: the ports with an address at which frames of VMs end in a tunnel.
    tunnel_ends: tuple[str, ...] = ()
    #: The desired base flows, for these.
    desired_flows: frozenset[Flow] = frozenset()
    #: The observed base flows; None if they were not read.
    flows: frozenset[Flow] | None = None
    #: The number of flows without our mark on a bridge of ours; 0 if they were not counted.
    flows_of_others: int = 0
    #: Whether it matches the L4 ports of first fragments; None if that was not read.
    matches_fragments: bool | None = None
    #: Our cookies on it that belong to no existing port.
    stray_cookies: frozenset[int] = frozenset()


@dataclass(frozen=True)
class OvsObservation(Observation):
    """The observed state of the ports in scope, their bridges and flows."""

    rows: Mapping[str, OvsPort] = field(default_factory=dict)
    #: The relay VF ports of the ports in scope, by port id.
    vf_ports: Mapping[str, OvsPort] = field(default_factory=dict)
    #: The flows of ports that have rows.
    flows: Mapping[str, frozenset[Flow]] = field(default_factory=dict)
    #: The ports to which their bridge is known to forward nothing; it is read if the scope is the whole
    #: host, or the flows of a port are closed.
    shut: frozenset[str] = frozenset()
    bridges: Mapping[str, ObservedOvsBridge] = field(default_factory=dict)
    tunnels: ObservedTunnels = NO_TUNNELS
    #: QoS rows with our mark, including those of deleted ports.
    qos: tuple[OvsQos, ...] = ()
    #: Names that ports, bridges and interfaces have: those that ports in scope and networks derive, and all
    #: that are not derived. Each with backend and id of the VM's port that it serves; None: it is that of
    #: others.
    names: Mapping[str, tuple[str, str] | None] = field(default_factory=dict)
    vhost_sockets: int = 0
    root: OvsRoot = field(default_factory=OvsRoot)
    #: Ports with a connected VM that no PMD thread polls.
    starved: frozenset[str] = frozenset()
    #: NICs without segmentation offload, where OVS would need it.
    cannot_segment: frozenset[str] = frozenset()
    #: Whether a purge of datapath flows has failed and is still due.
    purge_failed: bool = False
    sockets: ObservedSockets = NOTHING
    #: Read by one backend (``Layout.keeps``) and for the whole host only, as are PMD threads.
    bonds: tuple[BondUse, ...] = ()
    #: The number of PMD threads on each NUMA node that has some.
    pmd_threads: Mapping[int, int] = field(default_factory=dict)

    def is_used(self, bridge: str, planned: Collection[str]) -> bool:
        """Whether the bridge has ports without planned changes: ports out of scope, kept orphans."""
        found = self.bridges.get(bridge)
        rows = self.rows.items()
        return bool(found and found.neighbours) or any(
            row.bridge == bridge and port_id not in planned for port_id, row in rows
        )


# -- The bridges and name prefixes of an OVS backend, as a value. ---------------------------------


@dataclass(frozen=True)
class Layout:
    """Bridges of physical networks and VXLAN networks are shared by all backends: the last one with a port
    there removes them. A backend may have its own too.
    """

    backend: str
    #: Bridges of no physical network with their marks, which contain a colon, unlike physical networks.
    marks: Mapping[str, str] = field(default_factory=lambda: BRIDGE_MARKS)
    #: Those bridges that do not switch, each with its base flows.
    base: Mapping[str, frozenset[Flow]] = field(default_factory=lambda: {TUNNELS: BASE_FLOWS})
    #: The name prefixes of its ports.
    prefixes: tuple[str, ...] = (VHOST,)
    #: Whether it makes and repairs what ``OvsSettings.kept`` has, and reports on bonds and PMD threads. One
    #: backend does, so that no two add an uplink at once; all leave it there.
    keeps: bool = False

    def is_foreign(self, bridge: OvsBridge) -> bool:
        """Whether the bridge belongs to other backends alone."""
        mark = bridge.external_ids.get(BRIDGE_MARK, "")
        return ":" in mark and mark not in self.marks.values()

    def is_ours(self, bridge: OvsBridge) -> bool:
        """Whether netplugin created the bridge, for this backend among others or for all."""
        mark = bridge.external_ids.get(BRIDGE_MARK)
        if mark is None or self.is_foreign(bridge):
            return False
        return mark == self.marks.get(bridge.name, mark)


def forwards(port: OvsPort, services: Collection[str]) -> bool:
    """Whether a bridge of ours admits all frames from a port that does not belong to a VM.

    True for uplinks and tunnel ports (by our marks) and for ports in ``services``; false for all
    others, including the internal port unless it is in ``services``, and a VM's port that has lost
    its mark.
    """
    return port.name in services or not {UPLINK_MARK, TUNNEL_MARK}.isdisjoint(port.external_ids)


def base_flows(
    view: OvsView, bridge: OvsBridge, fixed: frozenset[Flow] | None, services: Collection[str]
) -> frozenset[Flow]:
    """The desired base flows of a bridge of ours, for the ports that exist now.

    ``fixed`` are the base flows of a bridge that does not switch. ``services`` are ``[ovs]
    service_ports``.
    """
    if fixed is not None:
        return fixed
    return filters.bridge_flows(doors(view, bridge, services), view.tunnels())


def doors(view: OvsView, bridge: OvsBridge, services: Collection[str]) -> tuple[int, ...]:
    """The ports of a bridge of ours that it admits all frames from (``forwards``), sorted."""
    return _numbers(port for port in view.unmanaged_on(bridge) if forwards(port, services))


def shut_ports(view: OvsView, bridge: OvsBridge, services: Collection[str]) -> tuple[int, ...]:
    """The ports of a bridge of ours to which it forwards nothing, sorted: the internal port and others that
    are neither ours nor in ``services``.

    OVS ends tunnels, and learns the neighbours of tunnels, at each port whose device has an address, now or
    later. Frames of VMs must not come there.
    """
    ports = view.unmanaged_on(bridge)
    return _numbers(p for p in ports if VF_PORT_MARK not in p.external_ids and not forwards(p, services))


def _numbers(ports: Iterable[OvsPort]) -> tuple[int, ...]:
    ofports = (interface.works_at for port in ports for interface in port.interfaces)
    return tuple(sorted(ofport for ofport in ofports if ofport))

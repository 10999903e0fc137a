"""The bridges and name prefixes of an OVS backend, as a value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from drivers.ovs import filters
from netplugin.host.names import VHOST
from netplugin.host.openflow import Flow
from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovs_rows import BRIDGE_MARK, TUNNEL_MARK, UPLINK_MARK, OvsBridge, OvsPort


@dataclass(frozen=True)
class Layout:
    """Bridges of physical networks are shared by all backends; a backend may also have its own."""

    backend: str
    #: The backend's own bridges with their marks, which contain a colon, unlike physical networks.
    marks: Mapping[str, str] = field(default_factory=dict)
    #: Auxiliary bridges without VMs' ports, each with the bridge that it serves.
    homes: Mapping[str, str] = field(default_factory=dict)
    #: The backend's own bridges that do not switch, each with its base flows.
    base: Mapping[str, frozenset[Flow]] = field(default_factory=dict)
    #: The name prefixes of its ports.
    prefixes: tuple[str, ...] = (VHOST,)

    def home(self, bridge: str) -> str:
        """The bridge whose ports keep this one in existence."""
        return self.homes.get(bridge, bridge)

    def is_foreign(self, bridge: OvsBridge) -> bool:
        """Whether the bridge belongs to another backend."""
        mark = bridge.external_ids.get(BRIDGE_MARK, "")
        return ":" in mark and mark not in self.marks.values()

    def is_ours(self, bridge: OvsBridge) -> bool:
        """Whether netplugin created the bridge, for this backend or for all."""
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
    mirror: Mirror, bridge: OvsBridge, fixed: frozenset[Flow] | None, services: Collection[str]
) -> frozenset[Flow]:
    """The desired base flows of a bridge of ours, for the ports that exist now.

    ``fixed`` are the base flows of a bridge that does not switch. ``services`` are ``[ovs]
    service_ports``.
    """
    if fixed is not None:
        return fixed
    ports = [port for port in mirror.strangers_on(bridge) if forwards(port, services)]
    ofports = (interface.works_at for port in ports for interface in port.interfaces)
    return filters.bridge_flows(ofport for ofport in ofports if ofport)

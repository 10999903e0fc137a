"""Which bridges and names a backend on OVS has to do with, as a value."""

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
    """The bridges of the operator's networks are everybody's; others are one backend's own."""

    backend: str
    #: The backend's own bridges with their marks: each has a colon, which no physical network has.
    marks: Mapping[str, str] = field(default_factory=dict)
    #: Of these, such as no VM's port is on, each with the bridge that it is there for.
    homes: Mapping[str, str] = field(default_factory=dict)
    #: Of its own, such as do not switch, each with the base flows that it has instead.
    base: Mapping[str, frozenset[Flow]] = field(default_factory=dict)
    #: What the names of its ports begin with.
    prefixes: tuple[str, ...] = (VHOST,)

    def home(self, bridge: str) -> str:
        """The bridge whose ports keep this one."""
        return self.homes.get(bridge, bridge)

    def is_foreign(self, bridge: OvsBridge) -> bool:
        """Whether a bridge is another backend's own."""
        mark = bridge.external_ids.get(BRIDGE_MARK, "")
        return ":" in mark and mark not in self.marks.values()

    def is_ours(self, bridge: OvsBridge) -> bool:
        """Whether netplugin made the bridge, for this backend or for all."""
        mark = bridge.external_ids.get(BRIDGE_MARK)
        if mark is None or self.is_foreign(bridge):
            return False
        return mark == self.marks.get(bridge.name, mark)


def forwards(port: OvsPort, services: Collection[str]) -> bool:
    """Whether a bridge of ours takes any frame from a port that is no VM's.

    From uplinks and what leads to tunnels, by our marks, and from what the operator names; not from
    others, and from the bridge's own internal port only if it is named. A VM's port that has lost its
    mark is one of the others.
    """
    return port.name in services or not {UPLINK_MARK, TUNNEL_MARK}.isdisjoint(port.external_ids)


def base_flows(
    mirror: Mirror, bridge: OvsBridge, fixed: frozenset[Flow] | None, services: Collection[str]
) -> frozenset[Flow]:
    """The base flows that a bridge of ours should have, by the ports that are on it now.

    ``fixed`` are those of a bridge that does not switch. ``services`` are ``[ovs] service_ports``.
    """
    if fixed is not None:
        return fixed
    ports = [port for port in mirror.strangers_on(bridge) if forwards(port, services)]
    ofports = (interface.works_at for port in ports for interface in port.interfaces)
    return filters.bridge_flows(ofport for ofport in ofports if ofport)

"""The changes of the flows of bridges: each looks at the ports that there are when it is applied.

Several backends may have ports on one bridge or VXLAN network, and each plans on what it observed before.
The flows of a bridge are edited by one thread at a time, and a port is in the database before its flows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, ClassVar

from drivers.ovs import filters, tunnels
from drivers.ovs.model import base_flows, doors, shut_ports
from drivers.ovs.overlays import OVERLAY, TO_OVERLAY, vxlan_name
from drivers.ovs.ports import VhostPort
from netplugin.backend import Change, Overlay
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.flow_actions import NORMAL
from netplugin.host.ovs import OvsHost


@dataclass(frozen=True)
class FlowEdit:
    """A flow update: delete the flows of ``cookies`` and the flows ``gone``, then add ``flows``.

    ``match_fragments``: first make the bridge match the L4 ports of first fragments. The bridge forwards
    to the ports ``opened``, and nothing to those of no VM ``sealed``, before that, and nothing to the ports
    ``shut`` after it: so a port that has its open flows is never shut.
    """

    cookies: tuple[int, ...] = ()
    flows: tuple[Flow, ...] = ()
    gone: tuple[Flow, ...] = ()
    match_fragments: bool = False
    shut: tuple[int, ...] = ()
    opened: tuple[int, ...] = ()
    sealed: tuple[int, ...] = ()

    @staticmethod
    def joined(edits: Collection[FlowEdit]) -> FlowEdit:
        """All of these updates as one."""
        of_all = {f.name: [getattr(edit, f.name) for edit in edits] for f in fields(FlowEdit)}
        match_fragments = any(of_all.pop("match_fragments"))
        joined: dict[str, Any] = {name: tuple(chain(*each)) for name, each in of_all.items()}
        return FlowEdit(**joined, match_fragments=match_fragments)


@dataclass(frozen=True)
class FlowChange(Change, ABC):
    """A change of the flows of one bridge."""

    is_light: ClassVar[bool] = True
    bridge: str

    @abstractmethod
    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        """The update for the ports that exist now. Raises: HostError, OperationTimeout."""


def ofport(ovs: OvsHost, name: str) -> int | None:
    """The OpenFlow port number; None if the port does not exist or vswitchd could not create it."""
    port = ovs.view.port(name)
    return port.works_at if port else None


@dataclass(frozen=True)
class SetBridgeFlows(FlowChange):
    """Replace the base flows of the bridge, for the ports that do not belong to a VM.

    ``fixed`` are the base flows of a bridge that does not switch. Also makes filters match the L4
    ports of first fragments, and the bridge forward nothing to ``shut_ports``.
    """

    described_as = "set the base flows of {self.bridge}"

    fixed: frozenset[Flow] | None = field(default=None, repr=False)

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        row = ovs.view.bridge(self.bridge)
        services = ovs.settings.service_ports
        if row is None:
            return FlowEdit((COOKIE_MARK,))
        return FlowEdit(
            (COOKIE_MARK,),
            tuple(base_flows(ovs.view, row, self.fixed, services)),
            match_fragments=True,
            opened=doors(ovs.view, row, services),
            sealed=shut_ports(ovs.view, row, services),
        )


@dataclass(frozen=True)
class DropFlows(FlowChange):
    """Remove our flows that belong to no existing port.

    ``strays``: they belonged to none when they were read, and another backend may have added it since.
    """

    cookies: tuple[int, ...]
    strays: bool = False

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        bridge = ovs.view.bridge(self.bridge) if self.strays else None
        owners = [port.owner for port in ovs.view.owned_on(bridge)] if bridge else []
        there = {filters.port_cookie(owner[1]) for owner in owners if owner}
        return FlowEdit(tuple(cookie for cookie in self.cookies if cookie not in there))

    def describe(self) -> str:
        return f"remove flows left on {self.bridge} ({', '.join(f'{c:#x}' for c in self.cookies)})"


@dataclass(frozen=True)
class SetFilter(FlowChange):
    """Replace the flows of one port. Its ofport is looked up when the change is applied.

    A relay VF port exchanges the port's frames; without one, the bridge switches them. ``foreign``:
    the bridge is not ours, so its own flows switch the frames of a port without a filter. ``reopens``:
    the bridge may be set to forward nothing to the port.
    """

    port: VhostPort
    foreign: bool = False
    reopens: bool = False

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        vf_port = self.port.vf_port
        own, other = ofport(ovs, self.port.name), ofport(ovs, vf_port.name) if vf_port else None
        bridge = None if self.foreign else ovs.view.bridge(self.bridge)
        open_to = doors(ovs.view, bridge, ovs.settings.service_ports) if bridge else ()
        ports = (own,) if own is not None and vf_port is None else ()
        return FlowEdit(
            (filters.port_cookie(self.port.port_id),),
            tuple(self.flows(own, other, open_to)),
            shut=ports if self.port.closed else (),
            opened=ports if self.reopens else (),
        )

    def flows(self, ofport: int | None, other: int | None, open_to: Iterable[int]) -> frozenset[Flow]:
        """The flows; empty if vswitchd could not create one of the ports. ``open_to``: ``doors``."""
        port_id, spec = self.port.port_id, self.port.spec
        if ofport is None or (self.port.vf_port and other is None):
            return frozenset()
        if self.port.closed:
            return filters.closed_flows(port_id, ofport, *(() if other is None else (other,)))
        if other is not None:  # no host asks it to announce its VM: it is closed until the guest runs
            relay = filters.relay_flows(port_id, ofport, other, spec)
            return relay | filters.miss_flows(port_id, ofport, spec).keys()
        if self.foreign and not spec.port_security.enabled:
            flows = filters.foreign_flows(port_id, ofport)
        else:
            # Only bridges of ours have the table that switches.
            flows = filters.port_flows(port_id, ofport, spec, NORMAL if self.foreign else filters.TO_SWITCH)
            flows |= filters.miss_flows(port_id, ofport, spec).keys()
        if self.port.follows and not self.foreign:
            flows |= filters.handover_flows(port_id, ofport, spec, self.port.tag, open_to)
        return flows

    def describe(self) -> str:
        security, vf_port = self.port.spec.port_security, self.port.vf_port
        what = f"{len(security.allowed_addresses)} addresses" if security.enabled else "no filter"
        what = "closed" if self.port.closed else what
        to = f", relayed to {vf_port.name}" if vf_port else ""
        return f"set flows of port {self.port.name} on {self.bridge} ({what}{to})"


@dataclass(frozen=True)
class SetNetwork(FlowChange):
    """Bring the flows of one VXLAN network to the desired set; correct flows are not touched."""

    overlay: Overlay
    local_ip: str

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        """Return the flows to delete and to add. Correct flows stay, because they carry traffic."""
        overlay, local_ip = self.overlay, self.local_ip
        tunnel = ofport(ovs, vxlan_name(overlay.spec.udp_port))
        patch = ofport(ovs, TO_OVERLAY)
        if not (tunnel and patch):
            return FlowEdit()
        cookie, of_learned = tunnels.with_learned(tunnels.network_cookie(overlay.network_id))
        found = ovs.flows.dump(self.bridge, (cookie, of_learned), deadline)
        own = [flow for flow in found if flow.cookie == cookie]
        learned = [flow for flow in found if flow.cookie == of_learned]
        desired = tunnels.network_flows(overlay, local_ip, tunnel, patch)
        stays = {flow.identity for flow in desired}
        gone = [flow for flow in own if flow.identity not in stays]
        gone += tunnels.stale(learned, overlay, local_ip, tunnel)
        return FlowEdit(flows=tuple(f for f in desired if f not in own), gone=tuple(gone))

    def describe(self) -> str:
        overlay, spec = self.overlay, self.overlay.spec
        what = f"VNI {spec.vni} is VLAN {overlay.local_vlan}, {len(spec.peers)} peers"
        return f"set flows of network {overlay.network_id}: {what}"


@dataclass(frozen=True)
class DropNetwork(FlowChange):
    """Remove the flows of a network without ports, with those that were learned."""

    described_as = "remove the flows of a network without ports from {self.bridge} ({self.cookie:#x})"

    cookie: int

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        overlay = ovs.view.bridge(OVERLAY)
        networks: Mapping[tuple[str, int], int] = ovs.view.networks_on(overlay) if overlay else {}
        if self.cookie in {tunnels.network_cookie(network_id) for network_id, _ in networks}:
            return FlowEdit()  # another backend has got a port on it meanwhile
        return FlowEdit(tunnels.with_learned(self.cookie))


@dataclass(frozen=True)
class PurgeDatapath(Change):
    """Repeat a purge of the datapath flows that failed (``old_actions``)."""

    described_as = "purge the datapath flows: some may go on by flows that were changed"

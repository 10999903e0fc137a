"""The changes of OVS, of rows and of flows: each describes itself, and has its commands or its flows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar
from uuid import UUID

from drivers.ovs import filters, remains, sockets
from drivers.ovs import row_writes as rows
from drivers.ovs.model import base_flows, doors, shut_ports
from drivers.ovs.ports import MERGED_OF_UPLINKS, OvsUplink, RelayVfPort, VhostPort
from drivers.ovs.service_ports import index_of
from drivers.ovs.sockets import Directory
from netplugin.backend import Change
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.flow_actions import NORMAL
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import UPLINK_MARK
from netplugin.host.ovsdb_commands import Api, Command


@dataclass(frozen=True)
class RowChange(Change, ABC):
    """A change of the database."""

    @abstractmethod
    def commands(self, api: Api) -> Iterable[Command]:
        """The commands of ovsdbapp that make the change, as part of a transaction."""

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        """The MTUs to wait for: port name, MTU, and whether it may stay unset until the VM connects."""
        return ()


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
    return port.interface.works_at if port and port.interface else None


# -- The changes that OVS backends can make, as values that build their own OVSDB or OpenFlow writes.


# -- bridges -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CreateBridge(RowChange):
    name: str
    mark: str

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.AddBridge(api, self.name, self.mark)]

    def describe(self) -> str:
        return f"create bridge {self.name} for {self.mark}"


@dataclass(frozen=True)
class SecureBridge(RowChange):
    """Restore ``fail_mode``: in standalone mode, filters would be open after a restart of vswitchd."""

    name: str

    def commands(self, api: Api) -> Iterable[Command]:
        return [api.set_fail_mode(self.name, "secure")]

    def describe(self) -> str:
        return f"set fail_mode of bridge {self.name} to secure"


@dataclass(frozen=True)
class RemoveBridge(RowChange):
    """Remove a bridge without ports of VMs, or (``home``) one that serves a bridge without."""

    name: str
    home: str = ""

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.DeleteBridge(api, self.name, self.home or self.name)]

    def describe(self) -> str:
        return f"remove bridge {self.name}, which nothing needs any more"


@dataclass(frozen=True)
class SetBridgeFlows(FlowChange):
    """Replace the base flows of the bridge, for the ports that do not belong to a VM.

    ``fixed`` are the base flows of a bridge that does not switch. Also makes filters match the L4
    ports of first fragments, and the bridge forward nothing to ``shut_ports``.
    """

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

    def describe(self) -> str:
        return f"set the base flows of {self.bridge}"


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


# -- uplinks and relay VF ports ----------------------------------------------------------------------


@dataclass(frozen=True)
class AddUplink(RowChange):
    uplink: OvsUplink

    def commands(self, api: Api) -> Iterable[Command]:
        """Another backend may have added it meanwhile."""
        new = self.uplink.new_interfaces()
        return [rows.AddOrSetPort(api, self.uplink, UPLINK_MARK, MERGED_OF_UPLINKS, new)]

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        return ((self.uplink.name, self.uplink.mtu, False),)

    def describe(self) -> str:
        devices, bond = ", ".join(self.uplink.devices), self.uplink.bond
        how = f"{devices}, {bond}" if bond else devices
        to = f"{self.uplink.bridge}, MTU {self.uplink.mtu}"
        return f"add uplink {self.uplink.name} ({how}) to {to}"


@dataclass(frozen=True)
class SetUplink(RowChange):
    uplink: OvsUplink

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.SetPort(api, self.uplink, MERGED_OF_UPLINKS, self.uplink.new_interfaces())]

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        return ((self.uplink.name, self.uplink.mtu, False),) if self.uplink.sets_mtu else ()

    def describe(self) -> str:
        uplink = self.uplink
        bond = f", {uplink.bond}" if uplink.bond else ""
        mtu = f", MTU {uplink.mtu}" if uplink.sets_mtu else ""
        return f"set uplink {uplink.name}: {', '.join(uplink.devices)}{bond}{mtu}"


@dataclass(frozen=True)
class RemoveUplink(RowChange):
    bridge: str
    name: str

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.DeletePort(api, self.bridge, self.name)]

    def describe(self) -> str:
        return f"remove uplink {self.name} from {self.bridge}"


@dataclass(frozen=True)
class AddBeside(RowChange):
    port: RelayVfPort

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.AddPort(api, self.port)]

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        return ((self.port.name, self.port.mtu, False),)

    def describe(self) -> str:
        return f"add {self.port.device} as port {self.port.name} to {self.port.bridge}"


@dataclass(frozen=True)
class SetBeside(RowChange):
    port: RelayVfPort

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.SetPort(api, self.port)]

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        return ((self.port.name, self.port.mtu, False),)

    def describe(self) -> str:
        return f"set port {self.port.name}: {self.port.device}, MTU {self.port.mtu}"


@dataclass(frozen=True)
class RemoveBeside(RowChange):
    bridge: str
    name: str
    device: str

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.DeletePort(api, self.bridge, self.name)]

    def describe(self) -> str:
        return f"remove port {self.name} ({self.device}) from {self.bridge}"


# -- ports of VMs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddPort(RowChange):
    port: VhostPort

    def commands(self, api: Api) -> Iterable[Command]:
        device = self.port.opened
        port = replace(self.port, ifindex=index_of(device)) if device else self.port
        return [rows.AddPort(api, port, port.qos_columns())]

    def describe(self) -> str:
        return f"add port {self.port.name} to {self.port.bridge}, tag {self.port.tag}, MTU {self.port.mtu}"


@dataclass(frozen=True)
class SetPort(RowChange):
    port: VhostPort

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.SetPort(api, self.port)]

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        return () if self.port.spec.device else ((self.port.name, self.port.mtu, True),)

    def describe(self) -> str:
        rate = f", sends {self.port.sends.kbps} kbit/s" if self.port.sends else ""
        return f"set port {self.port.name}: tag {self.port.tag}, MTU {self.port.mtu}, ids{rate}"


@dataclass(frozen=True)
class RemovePort(RowChange):
    bridge: str
    name: str
    backend: str

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.DeletePort(api, self.bridge, self.name, self.backend)]

    def describe(self) -> str:
        return f"remove port {self.name} from {self.bridge}"


@dataclass(frozen=True)
class SetQos(RowChange):
    """Set the rate limit on what the VM receives; the port's other columns do not change."""

    port: VhostPort

    def commands(self, api: Api) -> Iterable[Command]:
        return [rows.SetQos(api, self.port.name, self.port.backend, self.port.qos_columns())]

    def describe(self) -> str:
        rate = f"{self.port.receives.kbps} kbit/s" if self.port.receives else "any rate"
        return f"let port {self.port.name} receive {rate}"


@dataclass(frozen=True)
class DropQos(RowChange):
    """Remove one of our QoS rows that no port uses."""

    row: str

    def commands(self, api: Api) -> Iterable[Command]:
        there = UUID(self.row) in api.tables["QoS"].rows
        return [api.db_destroy("QoS", self.row)] if there else []

    def describe(self) -> str:
        return f"remove QoS {self.row}, which no port uses"


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
        beside = self.port.beside
        own, other = ofport(ovs, self.port.name), ofport(ovs, beside.name) if beside else None
        bridge = None if self.foreign else ovs.view.bridge(self.bridge)
        open_to = doors(ovs.view, bridge, ovs.settings.service_ports) if bridge else ()
        ports = (own,) if own is not None and beside is None else ()
        return FlowEdit(
            (filters.port_cookie(self.port.port_id),),
            tuple(self.flows(own, other, open_to)),
            shut=ports if self.port.closed else (),
            opened=ports if self.reopens else (),
        )

    def flows(self, ofport: int | None, other: int | None, open_to: Iterable[int]) -> frozenset[Flow]:
        """The flows; empty if vswitchd could not create one of the ports. ``open_to``: ``doors``."""
        port_id, spec = self.port.port_id, self.port.spec
        if ofport is None or (self.port.beside and other is None):
            return frozenset()
        if self.port.closed:
            return filters.closed_flows(port_id, ofport, *(() if other is None else (other,)))
        if other is not None:  # no host asks it to announce its VM: it is closed until the guest runs
            return filters.relay_flows(port_id, ofport, other, spec)
        if self.foreign and not spec.port_security.enabled:
            flows = filters.foreign_flows(port_id, ofport)
        else:
            # Only bridges of ours have the table that switches.
            flows = filters.port_flows(port_id, ofport, spec, NORMAL if self.foreign else filters.TO_SWITCH)
        if self.foreign and spec.port_security.enabled:
            flows |= {filters.refused_otherwise(port_id, ofport)}
        if self.port.follows and not self.foreign:
            flows |= filters.handover_flows(port_id, ofport, spec, self.port.tag, open_to)
        return flows

    def describe(self) -> str:
        security, beside = self.port.spec.port_security, self.port.beside
        what = f"{len(security.allowed_addresses)} addresses" if security.enabled else "no filter"
        what = "closed" if self.port.closed else what
        to = f", relayed to {beside.name}" if beside else ""
        return f"set flows of port {self.port.name} on {self.bridge} ({what}{to})"


@dataclass(frozen=True)
class PurgeDatapath(Change):
    """Repeat a purge of the datapath flows that failed (``old_actions``)."""

    def describe(self) -> str:
        return "purge the datapath flows: some may go on by flows that were changed"


class SocketChange(Change, ABC):
    """A change of the files of a port's socket."""

    #: Whether it is made before the rows are written, or after the flows.
    before_rows: ClassVar[bool] = False

    @abstractmethod
    def apply(self) -> None:
        """Make the change. Raises: HostError."""


@dataclass(frozen=True)
class MakeSocketDirectory(SocketChange):
    """Create the directory of a port's socket, or set its owner and mode."""

    before_rows: ClassVar[bool] = True
    directory: Directory

    def apply(self) -> None:
        sockets.make(self.directory)

    def describe(self) -> str:
        wish = self.directory
        return f"make directory {wish.path} (user {wish.uid}, group {wish.gid}, mode {wish.mode:o})"


@dataclass(frozen=True)
class RemoveSocketDirectory(SocketChange):
    """Remove the directory of a port, with the socket that QEMU left in it."""

    path: str

    def apply(self) -> None:
        remains.set_aside(self.path)

    def describe(self) -> str:
        return f"remove directory {self.path}"

"""The two kinds of OVS changes, rows and flows, and the writes that they consist of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from drivers.ovs import filters
from drivers.ovs.model import base_flows
from drivers.ovs.ports import MERGED_OF_UPLINKS, OvsUplink, RelayVfPort, Rows, VhostPort, is_marked
from drivers.ovs.sockets import Directory
from netplugin.api.models import PortSpec
from netplugin.backend import Change
from netplugin.host import ovs_commands as write
from netplugin.host.openflow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import BRIDGE_MARK
from netplugin.host.ovsdb import CommandFactory


@dataclass(frozen=True)
class RowChange(Change, ABC):
    """A change of the database."""

    @abstractmethod
    def command(self) -> CommandFactory:
        """The write, as part of a transaction."""

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        """The MTUs to wait for: port name, MTU, and whether it may stay unset until the VM connects."""
        return ()


@dataclass(frozen=True)
class FlowEdit:
    """A flow update: delete the flows of ``cookies`` and the flows ``gone``, then add ``flows``.

    ``match_fragments``: first make the bridge match the L4 ports of first fragments.
    """

    cookies: tuple[int, ...] = ()
    flows: tuple[Flow, ...] = ()
    gone: tuple[Flow, ...] = ()
    match_fragments: bool = False


@dataclass(frozen=True)
class FlowChange(Change, ABC):
    """A change of the flows of one bridge."""

    bridge: str

    @abstractmethod
    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        """The update for the ports that exist now. Raises: HostError, OperationTimeout."""


_Columns = Mapping[str, Mapping[str, Any]]


def add_rows(rows: Rows, qos: Mapping[str, Any] | None = None, new: _Columns | None = None) -> CommandFactory:
    """Create a port with its rows, ``new`` columns of its interfaces, and its QoS row ``qos``."""
    more = new or {}
    interfaces = {name: {**columns, **more.get(name, {})} for name, columns in rows.interfaces().items()}
    return partial(
        write.AddPortCommand,
        bridge=rows.bridge,
        name=rows.name,
        port=rows.port_columns(),
        interfaces=interfaces,
        qos=qos,
    )


def set_rows(
    rows: Rows, merged: tuple[str, ...] = ("external_ids",), new: _Columns | None = None
) -> CommandFactory:
    """Update an existing port to its rows. Interfaces that it does not have yet also get ``new``."""
    return partial(
        write.SetPortCommand,
        name=rows.name,
        port=rows.port_columns(),
        interfaces=rows.interfaces(),
        merged=merged,
        new=new or {},
    )


def ofport(ovs: OvsHost, name: str) -> int | None:
    """The OpenFlow port number; None if the port does not exist or vswitchd could not create it."""
    port = ovs.mirror.port(name)
    return port.interface.works_at if port and port.interface else None


# -- The changes that OVS backends can make, as values that build their own OVSDB or OpenFlow writes.


# -- bridges -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CreateBridge(RowChange):
    name: str
    mark: str

    def command(self) -> CommandFactory:
        return partial(
            write.AddBridge,
            name=self.name,
            datapath_type="netdev",
            fail_mode="secure",
            external_ids={BRIDGE_MARK: self.mark},
        )

    def describe(self) -> str:
        return f"create bridge {self.name} for {self.mark}"


@dataclass(frozen=True)
class SecureBridge(RowChange):
    """Restore ``fail_mode``: in standalone mode, filters would be open after a restart of vswitchd."""

    name: str

    def command(self) -> CommandFactory:
        return partial(write.SetBridge, name=self.name, fail_mode=["secure"])

    def describe(self) -> str:
        return f"set fail_mode of bridge {self.name} to secure"


@dataclass(frozen=True)
class RemoveBridge(RowChange):
    name: str

    def command(self) -> CommandFactory:
        return partial(write.DeleteBridge, name=self.name)

    def describe(self) -> str:
        return f"remove bridge {self.name}, which no port needs any more"


@dataclass(frozen=True)
class SetBridgeFlows(FlowChange):
    """Replace the base flows of the bridge, for the ports that do not belong to a VM.

    ``fixed`` are the base flows of a bridge that does not switch. Also makes filters match the L4
    ports of first fragments.
    """

    fixed: frozenset[Flow] | None = field(default=None, repr=False)

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        row = ovs.mirror.bridge(self.bridge)
        services = ovs.settings.service_ports
        flows = base_flows(ovs.mirror, row, self.fixed, services) if row else frozenset()
        return FlowEdit((COOKIE_MARK,), tuple(flows), match_fragments=True)

    def describe(self) -> str:
        return f"set the base flows of {self.bridge}"


@dataclass(frozen=True)
class DropFlows(FlowChange):
    """Remove our flows that belong to no existing port."""

    cookies: tuple[int, ...]

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        return FlowEdit(self.cookies)

    def describe(self) -> str:
        return f"remove flows left on {self.bridge} ({', '.join(f'{c:#x}' for c in self.cookies)})"


# -- uplinks and relay VF ports ----------------------------------------------------------------------


@dataclass(frozen=True)
class AddUplink(RowChange):
    uplink: OvsUplink

    def command(self) -> CommandFactory:
        return add_rows(self.uplink, new=self.uplink.new_interfaces())

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

    def command(self) -> CommandFactory:
        return set_rows(self.uplink, MERGED_OF_UPLINKS, self.uplink.new_interfaces())

    def describe(self) -> str:
        uplink = self.uplink
        return f"set uplink {uplink.name}: {', '.join(uplink.devices)}" + (
            f", {uplink.bond}" if uplink.bond else ""
        )


@dataclass(frozen=True)
class RemoveUplink(RowChange):
    bridge: str
    name: str

    def command(self) -> CommandFactory:
        return partial(write.DeletePort, bridge=self.bridge, name=self.name)

    def describe(self) -> str:
        return f"remove uplink {self.name} from {self.bridge}"


@dataclass(frozen=True)
class AddBeside(RowChange):
    port: RelayVfPort

    def command(self) -> CommandFactory:
        return add_rows(self.port)

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        return ((self.port.name, self.port.mtu, False),)

    def describe(self) -> str:
        return f"add {self.port.device} as port {self.port.name} to {self.port.bridge}"


@dataclass(frozen=True)
class SetBeside(RowChange):
    port: RelayVfPort

    def command(self) -> CommandFactory:
        return set_rows(self.port)

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        return ((self.port.name, self.port.mtu, False),)

    def describe(self) -> str:
        return f"set port {self.port.name}: {self.port.device}, MTU {self.port.mtu}"


@dataclass(frozen=True)
class RemoveBeside(RowChange):
    bridge: str
    name: str
    device: str

    def command(self) -> CommandFactory:
        return partial(write.DeletePort, bridge=self.bridge, name=self.name)

    def describe(self) -> str:
        return f"remove port {self.name} ({self.device}) from {self.bridge}"


# -- ports of VMs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddPort(RowChange):
    port: VhostPort

    def command(self) -> CommandFactory:
        return add_rows(self.port, self.port.qos_columns())

    def describe(self) -> str:
        return f"add port {self.port.name} to {self.port.bridge}, tag {self.port.tag}, MTU {self.port.mtu}"


@dataclass(frozen=True)
class SetPort(RowChange):
    port: VhostPort

    def command(self) -> CommandFactory:
        return set_rows(self.port)

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        return ((self.port.name, self.port.mtu, True),)

    def describe(self) -> str:
        rate = f", sends {self.port.sends.kbps} kbit/s" if self.port.sends else ""
        return f"set port {self.port.name}: tag {self.port.tag}, MTU {self.port.mtu}, ids{rate}"


@dataclass(frozen=True)
class RemovePort(RowChange):
    bridge: str
    name: str
    backend: str

    def command(self) -> CommandFactory:
        ours = partial(is_marked, backend=self.backend)
        return partial(write.DeletePort, bridge=self.bridge, name=self.name, ours=ours)

    def describe(self) -> str:
        return f"remove port {self.name} from {self.bridge}"


@dataclass(frozen=True)
class SetQos(RowChange):
    """Set the rate limit on what the VM receives; the port's other columns do not change."""

    port: VhostPort

    def command(self) -> CommandFactory:
        ours = partial(is_marked, backend=self.port.backend)
        return partial(write.SetQosCommand, name=self.port.name, qos=self.port.qos_columns(), ours=ours)

    def describe(self) -> str:
        rate = f"{self.port.receives.kbps} kbit/s" if self.port.receives else "any rate"
        return f"let port {self.port.name} receive {rate}"


@dataclass(frozen=True)
class DropQos(RowChange):
    """Remove one of our QoS rows that no port uses."""

    row: UUID

    def command(self) -> CommandFactory:
        return partial(write.DeleteQos, row=self.row)

    def describe(self) -> str:
        return f"remove QoS {self.row}, which no port uses"


@dataclass(frozen=True)
class SetFilter(FlowChange):
    """Replace the flows of one port. Its ofport is looked up when the change is applied.

    ``beside`` is the relay VF port that exchanges the port's frames; None: the bridge switches
    them. ``foreign``: the bridge is not ours, so its own flows switch the frames of a port without
    a filter.
    """

    name: str
    port_id: str
    spec: PortSpec
    beside: str | None = None
    foreign: bool = False

    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        own = ofport(ovs, self.name)
        other = ofport(ovs, self.beside) if self.beside else None
        return FlowEdit((filters.port_cookie(self.port_id),), tuple(self.flows(own, other)))

    def flows(self, ofport: int | None, other: int | None) -> frozenset[Flow]:
        """The flows; empty if vswitchd could not create one of the ports."""
        if ofport is None or (self.beside and other is None):
            return frozenset()
        if other is not None:
            return filters.relay_flows(self.port_id, ofport, other, self.spec)
        if self.foreign and not self.spec.port_security.enabled:
            return filters.foreign_flows(self.port_id, ofport)
        return filters.port_flows(self.port_id, ofport, self.spec)

    def describe(self) -> str:
        count = len(self.spec.port_security.allowed_addresses)
        what = f"{count} addresses" if self.spec.port_security.enabled else "no filter"
        to = f", relayed to {self.beside}" if self.beside else ""
        return f"set flows of port {self.name} on {self.bridge} ({what}{to})"


@dataclass(frozen=True)
class PurgeDatapath(Change):
    """Repeat a purge of the datapath flows that failed (``old_actions``)."""

    def describe(self) -> str:
        return "purge the datapath flows: some may go on by flows that were changed"


@dataclass(frozen=True)
class MakeSocketDirectory(Change):
    """Create the directory of a port's socket, or set its owner and mode."""

    directory: Directory

    def describe(self) -> str:
        wish = self.directory
        return f"make directory {wish.path} (user {wish.uid}, group {wish.gid}, mode {wish.mode:o})"


@dataclass(frozen=True)
class RemoveSocketDirectory(Change):
    """Remove the directory of a port, with the socket that QEMU left in it."""

    path: str

    def describe(self) -> str:
        return f"remove directory {self.path}"


@dataclass(frozen=True)
class RemoveSocket(Change):
    """Remove the socket file that QEMU left; never if the port is only recreated."""

    path: str

    def describe(self) -> str:
        return f"remove socket {self.path}"

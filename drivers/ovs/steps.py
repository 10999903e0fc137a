"""The two kinds of OVS changes, rows and flows, and the writes that they consist of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from drivers.ovs.ports import Rows
from netplugin.backend import Change
from netplugin.host import ovs_commands as write
from netplugin.host.openflow import Flow
from netplugin.host.ovs import OvsHost
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


def add_rows(
    rows: Rows, qos: Mapping[str, Any] | None = None, new: _Columns | None = None
) -> CommandFactory:
    """Create a port with its rows, ``new`` columns of its interfaces, and its QoS row ``qos``."""
    more = new or {}
    interfaces = {
        name: {**columns, **more.get(name, {})} for name, columns in rows.interfaces().items()
    }
    return partial(
        write.AddPort, bridge=rows.bridge, name=rows.name, port=rows.port_columns(),
        interfaces=interfaces, qos=qos,
    )  # fmt: skip


def set_rows(
    rows: Rows, merged: tuple[str, ...] = ("external_ids",), new: _Columns | None = None
) -> CommandFactory:
    """Update an existing port to its rows. Interfaces that it does not have yet also get ``new``."""
    return partial(
        write.SetPort, name=rows.name, port=rows.port_columns(), interfaces=rows.interfaces(),
        merged=merged, new=new or {},
    )  # fmt: skip


def ofport(ovs: OvsHost, name: str) -> int | None:
    """The OpenFlow port number; None if the port does not exist or vswitchd could not create it."""
    port = ovs.mirror.port(name)
    return port.interface.works_at if port and port.interface else None

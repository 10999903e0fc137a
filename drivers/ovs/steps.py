"""The two kinds of steps in OVS, rows and flows, and the writes that they are made of."""

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
    """A step in the database."""

    @abstractmethod
    def command(self) -> CommandFactory:
        """The write, as a part of a transaction."""

    def mtus(self) -> tuple[tuple[str, int, bool], ...]:
        """Ports whose MTU is to be waited for: name, MTU, and whether it may wait for the VM."""
        return ()


@dataclass(frozen=True)
class FlowEdit:
    """What becomes of flows: all of these cookies go and those ``gone``, then ``flows`` come.

    ``match_fragments``: and before, the bridge is set to match what is in first fragments.
    """

    cookies: tuple[int, ...] = ()
    flows: tuple[Flow, ...] = ()
    gone: tuple[Flow, ...] = ()
    match_fragments: bool = False


@dataclass(frozen=True)
class FlowChange(Change, ABC):
    """A step among the flows of one bridge."""

    bridge: str

    @abstractmethod
    def edit(self, ovs: OvsHost, deadline: float) -> FlowEdit:
        """By the ports that are there now. Raises: HostError, OperationTimeout."""


_Columns = Mapping[str, Mapping[str, Any]]


def add_rows(
    rows: Rows, qos: Mapping[str, Any] | None = None, new: _Columns | None = None
) -> CommandFactory:
    """A port with all that its rows say (and ``new`` of its interfaces), and a row of QoS with
    these columns."""
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
    """A port that is there, as its rows say; interfaces that it has not yet get ``new`` too."""
    return partial(
        write.SetPort, name=rows.name, port=rows.port_columns(), interfaces=rows.interfaces(),
        merged=merged, new=new or {},
    )  # fmt: skip


def ofport(ovs: OvsHost, name: str) -> int | None:
    """Where a port works; None if vswitchd could not make it, or there is none."""
    port = ovs.mirror.port(name)
    return port.interface.works_at if port and port.interface else None

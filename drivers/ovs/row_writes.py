"""How a port is written into a transaction: it comes, it changes, it goes, with the rows that it needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from drivers.ovs.ports import Rows, is_marked
from netplugin.api.errors import TryAgain
from netplugin.host.ovs_rows import BACKEND_MARK, PORT_MARK
from netplugin.host.ovsdb_writes import Row, Tables

_Columns = Mapping[str, Mapping[str, Any]]


def add_port(
    tables: Tables, rows: Rows, qos: Mapping[str, Any] | None = None, new: _Columns | None = None
) -> None:
    """Create a port with its interfaces (several for a bond), their ``new`` columns, and its QoS row.

    Raises: TryAgain if its bridge is gone: another backend has removed its own last port from it.
    """
    bridge = tables.find("Bridge", rows.bridge)
    if bridge is None:
        raise TryAgain(f"bridge {rows.bridge} is not there any more", step="plan")
    port = tables.insert("Port", name=rows.name, **rows.port_columns())
    for name, columns in rows.interfaces().items():
        port.add("interfaces", tables.insert("Interface", name=name, **columns, **(new or {}).get(name, {})))
    if qos is not None:
        port.set("qos", [tables.insert("QoS", **qos)])
    bridge.add("ports", port)


def add_or_set_port(
    tables: Tables,
    rows: Rows,
    mark: str,
    merged: Collection[str] = ("external_ids",),
    new: _Columns | None = None,
) -> None:
    """As ``add_port``, for a port that several backends share: another may have added it, with this mark."""
    found, bridge = tables.find("Port", rows.name), tables.find("Bridge", rows.bridge)
    is_ours = found is not None and mark in found.keys("external_ids")
    if is_ours and bridge is not None and found in bridge.rows("ports"):
        set_port(tables, rows, merged, new)
    else:
        add_port(tables, rows, new=new)


def set_port(
    tables: Tables,
    rows: Rows,
    merged: Collection[str] = ("external_ids",),
    new: _Columns | None = None,
) -> None:
    """Set a port and its interfaces to their rows; keep other keys of the maps in ``merged``.

    Other interfaces are removed from the port. One that it did not have also gets its columns of
    ``new``.
    """
    port = tables.get("Port", rows.name)
    there = {interface.name: interface for interface in port.rows("interfaces")}
    interfaces = rows.interfaces()
    set_row(port, rows.port_columns(), merged)
    for name, columns in interfaces.items():
        if name in there:
            set_row(there[name], columns, merged)
        else:
            made = tables.insert("Interface", name=name, **columns, **(new or {}).get(name, {}))
            port.add("interfaces", made)
    for name in there.keys() - interfaces.keys():
        port.remove("interfaces", there[name])
        there[name].delete()


def set_row(row: Row, columns: Mapping[str, Any], merged: Collection[str]) -> None:
    """Set columns of a row; of those that are ``merged`` the other keys stay."""
    for column, value in columns.items():
        if column in merged:
            for key, text in value.items():
                row.set_key(column, key, text)
        else:
            row.set(column, value)


def delete_port(tables: Tables, bridge_name: str, name: str, backend: str | None = None) -> None:
    """Remove a port with its rows from its bridge. No error if it does not exist.

    QoS is a root table in the schema, so the port's QoS row is deleted explicitly if it is marked as
    one of ``backend``.
    """
    port, bridge = tables.find("Port", name), tables.find("Bridge", bridge_name)
    if port is None or bridge is None:
        return
    bridge.remove("ports", port)
    for row in port.rows("qos"):
        if backend and is_marked(row.keys("external_ids"), backend):
            row.delete()
            # The server deletes the port only after it has checked references to the QoS row.
            port.set("qos", [])
    for interface in port.rows("interfaces"):
        interface.delete()
    port.delete()


def owned_ports(tables: Tables, bridge_name: str) -> list[Row]:
    """The ports of VMs that a bridge has, of all backends, without those that this transaction removes."""
    bridge = tables.find("Bridge", bridge_name)
    ports = [port for port in bridge.rows("ports") if not port.is_deleted] if bridge else []
    return [port for port in ports if {PORT_MARK, BACKEND_MARK} <= port.keys("external_ids").keys()]

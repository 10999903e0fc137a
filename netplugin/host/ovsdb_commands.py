"""What commands of ovsdbapp for Open vSwitch have in common, and those that several parts use.

A command writes through the rows of the Idl. It changes elements of sets and keys of maps one by one
(``addvalue``, ``setkey``), so that others' changes of the same column stay, and that the cost of a port does
not depend on the number of ports.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ovs.db import data, idl
from ovsdbapp.backend.ovs_idl.idlutils import RowNotFound, row_by_value

from netplugin.api.errors import HostError

#: A row of the Idl, ovsdbapp's API and one of its commands: their packages have no types.
Row = Any
Api = Any
Command = Any


class Change(Protocol):
    """A change of the database: commands of one transaction."""

    def commands(self, api: Api) -> Iterable[Command]: ...


class Transaction(idl.Transaction):  # type: ignore[misc]
    """A transaction that keeps why it was refused."""

    #: Whether a new bridge or port has the name of one that was there already.
    repeats = False
    #: The error of ovsdb-server, and its details.
    refusal: tuple[str, str] = ("", "")

    _status: str

    def _process_reply(self, msg: Any) -> None:
        super()._process_reply(msg)
        failed = [each for each in msg.result or () if isinstance(each, dict) and "error" in each]
        if failed:
            self.refusal = failed[0]["error"], failed[0].get("details", "")
            # The Idl takes an aborted transaction for a success: it aborts those of a dry run.
            if self._status == self.SUCCESS:
                self._status = self.ERROR


def root(api: Api) -> Row:
    """The row of Open_vSwitch. Raises: RowNotFound if the database is empty."""
    for row in api.idl.tables["Open_vSwitch"].rows.values():
        return row
    raise RowNotFound(table="Open_vSwitch", col="name", match=".")


def find(api: Api, table: str, name: str) -> Row | None:
    """The bridge, port or interface with this name; None if there is none, or the transaction deletes it."""
    return row_by_value(api.idl, table, "name", name, None)


def get(api: Api, table: str, name: str) -> Row:
    """As ``find``. Raises: RowNotFound."""
    return row_by_value(api.idl, table, "name", name)


def insert(api: Api, txn: Transaction, table: str, **columns: Any) -> Row:
    """Insert a row."""
    if table in ("Bridge", "Port"):
        txn.repeats |= find(api, table, columns["name"]) is not None
    row = txn.insert(api.idl.tables[table])
    for column, value in columns.items():
        set_column(row, column, value)
    return row


def set_column(row: Row, column: str, value: Any) -> None:
    """Set all of a column.

    Raises: HostError if the schema of this OVS does not have it, ovs.db.error.Error for a value that the
    schema does not allow. The Idl only logs such a value, and leaves the column as it is.
    """
    declared = row._table.columns.get(column)
    if declared is None:
        raise HostError(
            f"this Open vSwitch has no column {column} in table {row._table.name}",
            step="ovsdb-commit",
            fix="use a newer Open vSwitch",
        )
    before = row._changes.get(column)
    setattr(row, column, value)
    if row._changes.get(column) is before:  # it was not taken: this says why
        data.Datum.from_python(
            declared.type, value, lambda each: each.uuid if isinstance(each, idl.Row) else each
        )


def set_key(row: Row, column: str, key: str, value: str) -> None:
    """Set one key of a map."""
    if getattr(row, column).get(key) != value:
        row.setkey(column, key, value)


@dataclass(frozen=True)
class SetOtherConfig:
    """Set one key of ``other_config`` of Open_vSwitch or of an interface, or (None) remove it."""

    key: str
    value: str | None
    interface: str | None = None

    def commands(self, api: Api) -> Iterable[Command]:
        where = ("Interface", self.interface) if self.interface else ("Open_vSwitch", ".")
        if self.value is None:
            return [api.db_remove(*where, "other_config", self.key)]
        return [api.db_set(*where, ("other_config", {self.key: self.value}), if_exists=False)]


class Touch:
    """Change a key of ours, so that a transaction without other changes increments ``next_cfg``."""

    def commands(self, api: Api) -> Iterable[Command]:
        settled = {"netplugin-settled": str(uuid.uuid4())}
        return [api.db_set("Open_vSwitch", ".", ("external_ids", settled), if_exists=False)]

"""The operations of one OVSDB transaction (RFC 7047, section 5.2), composed from rows and their changes."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from netplugin.host.ovs_mirror import Mirror

Operation = dict[str, Any]
#: The tables that columns refer to.
_REFERENCES = {
    ("Open_vSwitch", "bridges"): "Bridge",
    ("Bridge", "ports"): "Port",
    ("Port", "interfaces"): "Interface",
    ("Port", "qos"): "QoS",
}


class RowNotFound(LookupError):
    """The database has no such row."""


@dataclass(eq=False)
class Row:
    """A row within a transaction: one of the database, or a new one.

    Values have the form of the database: an optional column is a list, a map a dictionary; a row
    stands for a reference to it. Elements of sets and keys of maps are changed one by one, so that
    the cost per port does not depend on the number of ports.
    """

    tables: Tables
    table: str
    reference: tuple[str, str]
    #: The values in the database; empty for a new row.
    found: Mapping[str, Any]
    is_new: bool = False
    is_deleted: bool = False
    _columns: dict[str, Any] = field(default_factory=dict)
    _mutations: list[list[Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.value("name"))

    def value(self, column: str) -> Any:
        """A value of the row, with what this transaction has set."""
        return self._columns.get(column, self.found.get(column))

    def keys(self, column: str) -> Mapping[str, str]:
        """A map of the row, as it is in the database or as this transaction has set all of it."""
        return self.value(column) or {}

    def rows(self, column: str) -> list[Row]:
        """The rows that a column refers to in the database."""
        value = self.found.get(column)
        ids = value if isinstance(value, set) else {value} - {None}
        return [self.tables.row(_REFERENCES[self.table, column], each) for each in sorted(ids)]

    def set(self, column: str, value: Any) -> None:
        """Set a column."""
        self._columns[column] = value

    def set_key(self, column: str, key: str, value: str) -> None:
        """Set one key of a map."""
        if self.is_new:
            self._columns[column] = {**self._columns.get(column, {}), key: value}
            return
        if self.found[column].get(key) != value:
            self._mutations.append([column, "delete", ["set", [key]]])
            self._mutations.append([column, "insert", ["map", [[key, value]]]])

    def remove_key(self, column: str, key: str) -> None:
        """Remove one key of a map, if it is there."""
        self._mutations.append([column, "delete", ["set", [key]]])

    def add(self, column: str, element: Row) -> None:
        """Add a reference to a set."""
        if self.is_new:
            self._columns[column] = [*self._columns.get(column, ()), element]
        else:
            self._mutations.append([column, "insert", ["set", [list(element.reference)]]])

    def remove(self, column: str, element: Row) -> None:
        """Remove a reference from a set. The server deletes a row to which nothing refers any more."""
        self._mutations.append([column, "delete", ["set", [list(element.reference)]]])

    def increment(self, column: str) -> None:
        self._mutations.append([column, "+=", 1])

    def delete(self) -> None:
        """Delete a row, or take note of it where the server does so when nothing refers to it."""
        self.is_deleted = True

    def operations(self) -> Iterator[Operation]:
        """The operations for what was changed."""
        columns = {column: _json(value) for column, value in self._columns.items()}
        where = {"table": self.table, "where": [["_uuid", "==", [*self.reference]]]}
        if self.is_new:
            # What is left out gets its default, which is what is empty here.
            set_ = {column: columns[column] for column, value in self._columns.items() if value}
            yield {"op": "insert", "table": self.table, "uuid-name": self.reference[1], "row": set_}
            return
        if columns:
            yield {"op": "update", **where, "row": columns}
        if self._mutations:
            yield {"op": "mutate", **where, "mutations": self._mutations}
        if self.is_deleted and self.table == "QoS":  # a root table: the server never deletes its rows
            yield {"op": "delete", **where}


def _json(value: Any) -> Any:
    """A value in the notation of RFC 7047, section 5.1."""
    if isinstance(value, Row):
        return [*value.reference]
    if isinstance(value, Mapping):
        return ["map", [[key, text] for key, text in value.items()]]
    if isinstance(value, list | tuple):
        return ["set", [_json(each) for each in value]]
    return value


class Tables:
    """The tables of the database within one transaction."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._rows: dict[tuple[str, str], Row] = {}
        self._new: list[Row] = []
        self._numbers = itertools.count()
        #: Whether a new bridge or port has the name of one that is there and stays.
        self.repeats = False

    @property
    def root(self) -> Row:
        """The row of Open_vSwitch. Raises: RowNotFound."""
        return self.get("Open_vSwitch", "")

    def row(self, table: str, uuid: str) -> Row:
        """The row with this id. Raises: RowNotFound."""
        row = self._rows.get((table, uuid))
        if row is None:
            found = self._mirror.row(table, uuid)
            if found is None:
                raise RowNotFound(f"{table} has no row {uuid}")
            row = self._rows[table, uuid] = Row(self, table, ("uuid", uuid), found)
        return row

    def find(self, table: str, key: str) -> Row | None:
        """The row with this name or id; None if there is none, or this transaction deletes it."""
        new = (row for row in self._new if row.table == table and row.value("name") == key)
        if (row := next(new, None)) is not None:
            return row
        uuid = self._mirror.id_of(table, key)
        row = None if uuid is None else self.row(table, uuid)
        return None if row is None or row.is_deleted else row

    def get(self, table: str, name: str) -> Row:
        """The row with this name. Raises: RowNotFound."""
        row = self.find(table, name)
        if row is None:
            raise RowNotFound(f"{table} has no row {name}")
        return row

    def insert(self, table: str, **columns: Any) -> Row:
        """A new row."""
        if table in ("Bridge", "Port"):
            self.repeats |= self.find(table, columns["name"]) is not None
        row = Row(self, table, ("named-uuid", f"row{next(self._numbers)}"), {}, is_new=True)
        for column, value in columns.items():
            row.set(column, value)
        self._new.append(row)
        return row

    def operations(self) -> list[Operation]:
        """The operations of all rows that were changed."""
        rows = (*self._new, *self._rows.values())
        return [operation for row in rows for operation in row.operations()]


class Write(Protocol):
    """What writes itself to the database, as part of a transaction."""

    def write(self, tables: Tables) -> None: ...


@dataclass(frozen=True)
class SetOtherConfig:
    """Set one key of ``other_config`` of Open_vSwitch or of an interface, or (None) remove it."""

    key: str
    value: str | None
    interface: str | None = None

    def write(self, tables: Tables) -> None:
        row = tables.get("Interface", self.interface) if self.interface else tables.root
        if self.value is None:
            row.remove_key("other_config", self.key)
        else:
            row.set_key("other_config", self.key, self.value)


class Touch:
    """Change a key of ours, so that a transaction without other changes increments ``next_cfg``."""

    def write(self, tables: Tables) -> None:
        tables.root.set_key("external_ids", "netplugin-settled", str(uuid.uuid4()))

"""Rows of an OVSDB database as Python values, kept current by the notices of ovsdb-server.

A notice (``update2``, ovsdb-server(7), section 4.1.14) has only what changed: of a bridge with a
thousand ports it names the one that came. Values: an optional column is None or its value; a reference
is the id of the row; a set is a ``set``, which is changed in place; a map is a ``dict``, which is
replaced when it changes, so that others may keep it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: The columns to read, by table.
Columns = Mapping[str, Collection[str]]
#: The keys to read of a map, by table and column; of other maps all.
Keys = Mapping[tuple[str, str], Collection[str]]
#: The parameter of a notice, and the answer to the request to monitor: by table and row.
Updates = Mapping[str, Mapping[str, Mapping[str, Any]]]
Row = dict[str, Any]

_DEFAULTS: Mapping[str, Any] = {"string": "", "integer": 0, "real": 0.0, "boolean": False}
_NO_KEYS: dict[str, Any] = {}
# Short values of maps are alike in all rows: "1", "disconnected".
_SHORT = 16


class MalformedUpdate(LookupError):
    """A notice that is not for these rows, or that is none: they have to be read again."""


class _Kind(Enum):
    ONE = 0
    OPTIONAL = 1
    SET = 2
    MAP = 3


class Was(Enum):
    """What happened to a row."""

    INSERTED = 0
    CHANGED = 1
    DELETED = 2


@dataclass(frozen=True, slots=True)
class RowChange:
    """A row that was inserted, changed or deleted.

    ``row`` has its values now, or the last ones of a deleted row. ``added`` and ``removed`` are the
    elements of its sets.
    """

    table: str
    uuid: str
    was: Was
    row: Row
    added: Mapping[str, Collection[Any]] = field(default_factory=dict)
    removed: Mapping[str, Collection[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Column:
    kind: _Kind
    default: Any

    @staticmethod
    def of(declared: Any) -> _Column:
        """The column of a type of the schema (RFC 7047, section 3.2)."""
        if isinstance(declared, str):
            return _Column(_Kind.ONE, _DEFAULTS.get(declared, ""))
        if "value" in declared:
            return _Column(_Kind.MAP, None)
        if declared.get("max", 1) != 1:
            return _Column(_Kind.SET, None)
        if declared.get("min", 1) == 0:
            return _Column(_Kind.OPTIONAL, None)
        key = declared["key"]
        return _Column(_Kind.ONE, _DEFAULTS.get(key if isinstance(key, str) else key["type"], ""))


class Rows:
    """The rows of some tables, by table and id. Not thread-safe."""

    def __init__(self, columns: Columns, schema: Mapping[str, Any], keys: Keys) -> None:
        """``schema`` is the answer to ``get_schema``; a column that it does not have is always None."""
        self._keys = keys
        self._absent: dict[str, list[str]] = {}
        self._columns: dict[str, dict[str, _Column]] = {}
        for table, names in columns.items():
            declared = schema["tables"][table]["columns"]
            self._columns[table] = {n: _Column.of(declared[n]["type"]) for n in names if n in declared}
            self._absent[table] = [n for n in names if n not in declared]
        self.tables: dict[str, dict[str, Row]] = {table: {} for table in columns}

    def requests(self) -> dict[str, list[dict[str, list[str]]]]:
        """The ``<monitor-cond-requests>`` for these columns."""
        return {table: [{"columns": [*columns]}] for table, columns in self._columns.items()}

    def apply(self, updates: Updates) -> list[RowChange]:
        """Apply a notice, or the first answer. Raises: MalformedUpdate; then discard the rows."""
        try:
            return [
                change
                for table, rows in updates.items()
                for uuid, update in rows.items()
                for change in self._apply(table, uuid, update)
            ]
        except (AttributeError, LookupError, TypeError, ValueError) as wrong:
            raise MalformedUpdate(f"a notice of ovsdb-server cannot be read: {wrong!r}") from wrong

    def _apply(self, table: str, uuid: str, update: Mapping[str, Any]) -> Iterator[RowChange]:
        rows = self.tables[table]
        if "delete" in update:
            row = rows.pop(uuid)
            yield RowChange(table, uuid, Was.DELETED, row, removed=self._sets(table, row))
        elif "modify" in update:
            row = rows[uuid]
            added: dict[str, set[Any]] = {}
            removed: dict[str, set[Any]] = {}
            changed = False
            for name, difference in update["modify"].items():
                changed |= self._modify(table, row, name, difference, added, removed)
            if changed:
                yield RowChange(table, uuid, Was.CHANGED, row, added, removed)
        else:
            row = self._inserted(table, update["initial"] if "initial" in update else update["insert"])
            rows[uuid] = row
            yield RowChange(table, uuid, Was.INSERTED, row, added=self._sets(table, row))

    def _sets(self, table: str, row: Row) -> dict[str, Collection[Any]]:
        return {name: row[name] for name, c in self._columns[table].items() if c.kind is _Kind.SET}

    def _inserted(self, table: str, columns: Mapping[str, Any]) -> Row:
        """A new row. The server leaves out the columns that have their default."""
        row: Row = dict.fromkeys(self._absent[table])
        for name, column in self._columns[table].items():
            if name in columns:
                row[name] = self._value(table, name, column, columns[name])
            elif column.kind is _Kind.SET:
                row[name] = set()
            else:
                row[name] = _NO_KEYS if column.kind is _Kind.MAP else column.default
        return row

    def _modify(
        self,
        table: str,
        row: Row,
        name: str,
        difference: Any,
        added: dict[str, set[Any]],
        removed: dict[str, set[Any]],
    ) -> bool:
        """Apply the difference of a column. Returns whether it is one of the keys that are read."""
        column = self._columns[table][name]
        value = self._value(table, name, column, difference)
        if column.kind is _Kind.SET:
            # The difference has the elements that only one of the two sets has.
            there: set[Any] = row[name]
            added[name], removed[name] = value - there, value & there
            there ^= value
        elif column.kind is _Kind.MAP:
            if not value:
                return False
            # A pair that is there is removed, any other one is set.
            new = {k: v for k, v in row[name].items() if value.get(k) != v}
            row[name] = new | {k: v for k, v in value.items() if row[name].get(k) != v}
        else:
            row[name] = value
        return True

    def _value(self, table: str, name: str, column: _Column, json: Any) -> Any:
        if column.kind is _Kind.MAP:
            keys = self._keys.get((table, name))
            pairs = ((k, v) for k, v in json[1] if keys is None or k in keys)
            return {sys.intern(k): _shared(v) for k, v in pairs} or _NO_KEYS
        if column.kind is _Kind.SET:
            return {_atom(each) for each in json[1]} if _is_set(json) else {_atom(json)}
        if _is_set(json):
            return _atom(json[1][0]) if json[1] else None
        return _atom(json)


def _is_set(json: Any) -> bool:
    return isinstance(json, list) and json[0] == "set"


def _atom(json: Any) -> Any:
    """A value; a reference is written as ``["uuid", id]``."""
    return json[1] if isinstance(json, list) else json


def _shared(value: Any) -> Any:
    return sys.intern(value) if isinstance(value, str) and len(value) <= _SHORT else _atom(value)

"""Unreadable rows of the store: moved to a separate table with the reason, so that other rows stay usable."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from agents.store.database import Database
from netplugin.api.errors import HostError
from netplugin.backend import Claim

LOG = logging.getLogger(__name__)
T = TypeVar("T")

#: The tables that are checked, with the column that identifies a row.
_KEYS: Mapping[str, str] = {
    "ports": "port_id",
    "networks": "network_id",
    "physical_networks": "name",
    "placements": "vm_id",
    "quarantine": "key",
    "fleet": "id",
    "tasks": "taskuuid",
}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Aside:
    """An unreadable row: its table, its columns, and the reason."""

    table: str
    key: str
    reason: str
    row: Row

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of a port's row. They stay reserved, because a VM may use the resources."""
        found = []
        for kind, key, memory in self.row.get("claims", ()):
            try:
                found.append(Claim(kind, key, json.loads(memory)))
            except (ValueError, TypeError):
                found.append(Claim(kind, key))
        return tuple(found)


class SetAside:
    """The rows set aside, each until a PUT replaces it. Any thread may read them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        rows = database.sql.execute("SELECT kind, key, content, reason FROM set_aside")
        self._found = {
            (table, key): Aside(table, key, reason, _content(content)) for table, key, content, reason in rows
        }

    def all(self) -> list[Aside]:
        return [aside for _, aside in sorted(self._found.items(), key=lambda item: item[0])]

    def get(self, table: str, key: str) -> Aside | None:
        return self._found.get((table, key))

    def sift(
        self, table: str, parse: Callable[[Row], T], more: Callable[[Row], Row] = lambda row: {}
    ) -> list[T]:
        """Parse all rows of a table; ``more`` adds columns to a row that is set aside."""
        cursor = self._database.sql.execute(f"SELECT rowid, * FROM {table}")
        names = [column[0] for column in cursor.description]
        parsed: list[T] = []
        for values in cursor.fetchall():
            row = dict(zip(names, values, strict=True))
            try:
                parsed.append(parse(row))
            except (ValueError, TypeError, KeyError) as wrong:
                self._set_aside(table, {**row, **more(row)}, wrong)
        return parsed

    def _set_aside(self, table: str, row: Row, wrong: Exception) -> None:
        """Move a row. If that fails (a full disk), it is still ignored by this process."""
        key = str(row[_KEYS[table]])
        reason = f"{type(wrong).__name__}: {wrong}"
        aside = Aside(table, key, reason, row)
        LOG.error("a row of %s cannot be read and is set aside: %s: %s", table, key, reason)
        self._found[table, key] = aside
        try:
            with self._database.transaction():
                self._database.sql.execute(
                    "INSERT OR REPLACE INTO set_aside VALUES (?, ?, ?, ?)",
                    (table, key, json.dumps(row, default=repr), reason),
                )
                self._database.sql.execute(
                    f"DELETE FROM {table} WHERE rowid = ?",
                    (row["rowid"],),
                )
        except (HostError, sqlite3.Error) as refused:
            LOG.error("it stays in its table: %s", refused)

    def forget(self, table: str, key: str) -> None:
        """Delete an entry that was replaced or is gone; within a transaction, followed by ``forgotten``."""
        if (table, key) in self._found:
            self._database.sql.execute("DELETE FROM set_aside WHERE kind = ? AND key = ?", (table, key))

    def forgotten(self, table: str, keys: Collection[str]) -> None:
        """Update the memory after the transaction of ``forget`` was committed."""
        gone = {(table, key) for key in keys}
        self._found = {key: aside for key, aside in self._found.items() if key not in gone}


def _content(text: str) -> Row:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

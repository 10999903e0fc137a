"""The replica of an Open vSwitch database that one connection has, and how changes are written to it.

A change writes through the rows of the Idl. It changes elements of sets and keys of maps one by one
(``addvalue``, ``setkey``), so that others' changes of the same column stay, and that the cost of a port does
not depend on the number of ports.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from ovs import jsonrpc
from ovs.db import data, idl
from ovsdbapp.backend.ovs_idl import connection, idlutils
from ovsdbapp.backend.ovs_idl.idlutils import RowNotFound, row_by_value
from ovsdbapp.schema.open_vswitch.impl_idl import OvsdbIdl

from netplugin.api.errors import HostError
from netplugin.host.ovs_rows import COLUMNS, MAY_LACK

#: A row of the Idl, and ovsdbapp's API: their packages have no types.
Row = Any
Api = Any


class ConnectionLost(Exception):
    """The connection has ended, or could not be made. The text is the reason."""


class ReplicaIdl(connection.OvsdbIdl):  # type: ignore[misc]
    """The replica of one connection: the columns that are read, of those that the schema has."""

    def __init__(self, remote: str, schema: Any) -> None:
        """Raises: ConnectionLost if it lacks others than ``MAY_LACK``."""
        helper = idlutils.create_schema_helper(schema)
        lacks: set[str] = set()
        for table, columns in COLUMNS.items():
            declared = schema["tables"].get(table, {}).get("columns", {})
            lacks |= {f"{table}.{name}" for name in columns if name not in declared}
            helper.register_columns(table, [name for name in columns if name in declared])
        if needed := lacks - MAY_LACK:
            raise ConnectionLost(f"its schema {schema.get('version')} has no {', '.join(sorted(needed))}")
        super().__init__(remote, helper)
        self.closed = False

    @property
    def lost(self) -> bool:
        """Whether its connection has ended. The session counts each one that it makes and each that ends."""
        return self.closed or self._session.get_seqno() > 1

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has not taken all that was sent."""
        return bool(self._session.get_backlog())

    @property
    def has_read(self) -> bool:
        return bool(self.state == self.IDL_S_MONITORING)

    @property
    def is_answered(self) -> bool:
        """Whether all rows are read, and known is who has the lock that was requested."""
        return self.has_read and (self.lock_name is None or self.has_lock or self.is_lock_contended)

    def send_echo(self) -> Echo:
        """Send a request that asks for nothing."""
        request = jsonrpc.Message.create_request("echo", [])
        echo = Echo(not self._session.send(request))
        self._outstanding_txns[request.id] = echo
        return echo

    def close(self) -> None:
        self.closed = True
        super().close()


@dataclass
class Echo:
    """A request that asks for nothing. To the Idl it is a transaction."""

    is_sent: bool
    is_answered: bool = False

    def _process_reply(self, msg: Any) -> None:
        self.is_answered = True


class _Api(OvsdbIdl):  # type: ignore[misc]
    """ovsdbapp's API on a connection of its own: in the library's class it is a property, one for all."""

    ovsdb_connection: Any = None


def replica(remote: str, schema: Any, lock: threading.Condition | None = None) -> Api:
    """ovsdbapp's API on an Idl that has not connected yet. ``lock`` is held by whom the Idl runs.

    Raises: ConnectionLost if the schema cannot be used.
    """
    carrier = connection.Connection(ReplicaIdl(remote, schema), 0)  # its own thread is not started
    carrier.lock = lock or carrier.lock
    api = _Api(carrier, start=False, auto_index=False)
    # Interfaces are found by their port: vswitchd writes to them often, and each write costs an index.
    for table in ("Bridge", "Port"):
        api.create_index(table, "name")
    return api


class Writable(Protocol):
    """A change of the database, as a part of a transaction."""

    def write(self, api: Api, txn: Transaction) -> None: ...


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
        found = f"this Open vSwitch has no column {column} in table {row._table.name}"
        raise HostError(found, step="ovsdb-commit", fix="use a newer Open vSwitch")
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

    def write(self, api: Api, txn: Transaction) -> None:
        where = ("Interface", self.interface) if self.interface else ("Open_vSwitch", ".")
        if self.value is None:
            api.db_remove(*where, "other_config", self.key).run_idl(txn)
        else:
            api.db_set(*where, ("other_config", {self.key: self.value}), if_exists=False).run_idl(txn)


class Touch:
    """Change a key of ours, so that a transaction without other changes increments ``next_cfg``."""

    def write(self, api: Api, txn: Transaction) -> None:
        set_key(root(api), "external_ids", "netplugin-settled", str(uuid.uuid4()))

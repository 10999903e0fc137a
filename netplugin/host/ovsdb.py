"""The connection to an Open vSwitch database: reads from a mirror, writes in verified transactions.

It works around two problems of ovsdbapp: a transaction reports success even if vswitchd does not
answer in time (the exception is logged and dropped), and the connection is a class attribute.
A process that manages ports holds a lock of the database (RFC 7047, section 4.1.8). The server
grants it to one client at a time, and to the next one that waits when the connection ends. Every
transaction of the holder asserts the lock (section 5.2.10), so none is carried out without it.
"""

from __future__ import annotations

import logging
import queue
import select
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ovs import json as ovs_json
from ovs import poller as ovs_poller
from ovs.db import idl as ovs_idl
from ovsdbapp import exceptions as ovsdb_errors
from ovsdbapp.backend.ovs_idl import command, connection, idlutils, transaction
from ovsdbapp.schema.open_vswitch import impl_idl

from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout
from netplugin.host.json_stream import StreamParser
from netplugin.host.names import CarriedMark, Mark, unmarked
from netplugin.host.ovs_mirror import COLUMNS, Connection, Mirror, MirrorDrift
from netplugin.host.ovs_rows import HOLDER_MARK, STORE_MARK
from netplugin.host.processes import remaining

LOG = logging.getLogger(__name__)
_RETRY_S = 0.5
#: The name of the lock. Locks of ovsdb-server are distinguished by name only.
LOCK = "netplugin"
_HOLDER_LENGTH = 200  # any client of the database can write this value, so bound what is shown


class _Poll:
    """A poll(2) poller for python-ovs, as documented in ``ovs/poller.py``.

    The default poller uses select(2), because of eventlet, which accepts no file descriptor above
    1,023. A descriptor may be registered for reading and again for writing.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._events: dict[int, int] = {}

    def register(self, fd: Any, events: int) -> None:
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        self._events[descriptor] = self._events.get(descriptor, 0) | events
        self._poll.register(descriptor, self._events[descriptor])

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        return self._poll.poll(timeout_ms)


ovs_poller.SelectPoll = _Poll


class _Idl(connection.OvsdbIdl):  # type: ignore[misc]
    """The IDL. It forwards rows to a mirror and reports changes of connection and lock.

    If ``holder`` (the identity of this process) is given, it requests the lock on every connection.
    """

    def __init__(
        self,
        remote: str,
        helper: Any,
        mirror: Mirror,
        tell: Callable[[bool, bool], None],
        holder: str | None,
    ):
        super().__init__(remote, helper)
        self._mirror = mirror
        #: Called with (online, locked) when either changes.
        self._tell = tell
        self._reported = (False, False)
        self._mirrored_seqno: int | None = None
        self._holder = holder
        if holder is not None:
            self.set_lock(LOCK)
        # The default back-off (1 s growing to 8 s) is longer than a VM should wait for its NIC.
        self._session.reconnect.set_backoff(100, 1000)

    def run(self) -> Any:
        # The session creates a parser before each message, unless one is set already.
        rpc = self._session.rpc
        if ovs_json.PARSER != ovs_json.PARSER_C and rpc is not None and rpc.parser is None:
            rpc.parser = StreamParser()
        try:
            changed = super().run()
        except Exception:
            # Updates from the server may be lost. Only reading all rows again recovers from that.
            self.force_reconnect()
            raise
        online = self.state == ovs_idl.Idl.IDL_S_MONITORING and self._session.is_connected()
        if online and self._mirrored_seqno != self._last_seqno:
            self._mirrored_seqno = self._last_seqno
            self._mirror.reset(self.tables)
        # The server answers in order and the lock is requested before the rows, so it is known
        # here.
        now = (online, online and self.has_lock)
        if now != self._reported:
            if now[1] and not self._reported[1]:
                self._write_holder()
            self._reported = now
            self._tell(*now)
        return changed

    def _write_holder(self) -> None:
        """Record the holder for the error message of a process that waits for the lock.

        vswitchd does not read this key. The commit is not waited for: ``run`` processes the reply.
        """
        txn = ovs_idl.Transaction(self)
        for row in self.tables["Open_vSwitch"].rows.values():
            if row.external_ids.get(HOLDER_MARK) != self._holder:
                row.setkey("external_ids", HOLDER_MARK, self._holder)
        txn.commit()

    def cooperative_yield(self) -> None:
        """Do nothing. ovsdbapp sleeps here for eventlet, which costs 70 us for each row."""

    def notify(self, event: str, row: Any, updates: Any = None) -> None:
        if self._mirrored_seqno == self._last_seqno:
            self._mirror.update(row, deleted=event == ovs_idl.ROW_DELETE)


class _NotLocked(Exception):
    """The transaction was not carried out because this process does not hold the lock."""


class _Transaction(transaction.Transaction):  # type: ignore[misc]
    """A transaction that increments ``next_cfg`` and records its value. It does not wait for vswitchd."""

    next_cfg = 0
    mark: Mark = staticmethod(unmarked)
    _attempt: Any = None

    def pre_commit(self, txn: Any) -> None:
        self._attempt = txn
        root = self.api._ovs
        root.increment("next_cfg")
        found = root.external_ids.get(STORE_MARK, "")
        if (mark := self.mark(found)) != found:
            root.setkey("external_ids", STORE_MARK, mark)

    def do_commit(self) -> Any:
        """Raises: the exceptions of the writes, RuntimeError, _NotLocked."""
        try:
            return super().do_commit()
        except RuntimeError as refused:
            attempt = self._attempt
            # For a transaction that has ended, commit() returns its status again.
            if attempt is not None and attempt.commit() == ovs_idl.Transaction.NOT_LOCKED:
                raise _NotLocked from refused
            raise

    def post_commit(self, txn: Any) -> None:
        super().post_commit(txn)
        self.next_cfg = txn.get_increment_new_value()


class _Api(impl_idl.OvsdbIdl):  # type: ignore[misc]
    """ovsdbapp's API with a connection per instance, not per class."""

    ovsdb_connection = None


def _late() -> OperationTimeout:
    return OperationTimeout(
        "ovsdb-server did not answer the transaction in time",
        step="ovsdb-commit",
        fix="look whether ovsdb-server hangs",
    )


class Tables:
    """The tables of the database within one transaction. Rows are those of ``ovs.db.idl``."""

    def __init__(self, api: Any, txn: Any) -> None:
        self._api, self._txn = api, txn

    @property
    def root(self) -> Any:
        """The row of Open_vSwitch."""
        return self._api._ovs

    def find(self, table: str, key: str) -> Any:
        """The row with this name or UUID; None if there is none."""
        return self._api.lookup(table, key, None)

    def get(self, table: str, name: str) -> Any:
        """The row with this name. Raises: RowNotFound."""
        return self._api.lookup(table, name)

    def insert(self, table: str, **columns: Any) -> Any:
        """A new row. Optional columns are lists."""
        row = self._txn.insert(self._api._tables[table])
        for column, value in columns.items():
            setattr(row, column, value)
        return row


class Write(Protocol):
    """What writes itself to the database, as part of a transaction.

    Unlike ovsdbapp's commands, ours set every attribute in the transaction that creates the row, and
    change sets by mutation, so the cost per port does not depend on the number of ports.
    """

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
            row.delkey("other_config", self.key)
        else:
            row.setkey("other_config", self.key, self.value)


class Touch:
    """Change a key of ours to increment ``next_cfg``, which vswitchd then confirms in ``cur_cfg``.

    The Python IDL drops a transaction that only increments ``next_cfg``.
    """

    def write(self, tables: Tables) -> None:
        tables.root.setkey("external_ids", "netplugin-settled", str(uuid.uuid4()))


class _Writes(command.BaseCommand):  # type: ignore[misc]
    """All writes of a transaction, as ovsdbapp's one command."""

    def __init__(self, api: Any, writes: Sequence[Write]) -> None:
        super().__init__(api)
        self._writes = writes

    def run_idl(self, txn: Any) -> None:
        tables = Tables(self.api, txn)
        for each in self._writes:
            each.write(tables)


class Ovsdb:
    """An Open vSwitch database. ``start`` connects in the background and reconnects after a loss."""

    def __init__(
        self,
        remote: str,
        drifted: Callable[[MirrorDrift], None] = lambda drift: None,
        changed: Callable[[], None] = lambda: None,
        holder: str | None = None,
        mark: Mark = unmarked,
        connection: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        """``remote`` is an OVSDB address, for example ``unix:/run/openvswitch/db.sock``.

        The callbacks run on the connection's thread; ``drifted`` and ``connection`` are those of
        ``Mirror``. ``changed`` is called when the connection or the lock is gained or lost.
        ``holder`` identifies this process for the lock; None: do not request the lock (the caller
        reads only, or changes rows that no agent manages). Every transaction writes the ``mark`` of
        the store into ``external_ids`` of Open_vSwitch.
        """
        self.remote = remote
        # Only the connection's thread uses both, and the rows are read before the first write.
        self._carried = CarriedMark(mark)
        self.mirror = Mirror(drifted, self._carried.found, connection)
        self._tell_changed = changed
        self._holder = holder
        self._connection: Any = None
        self._api: Any = None
        self._ready = threading.Event()
        self._locked = threading.Event()
        self._stop = threading.Event()
        self._unanswered: list[_Transaction] = []
        self._thread = threading.Thread(target=self._connect, name="ovsdb-connect", daemon=True)

    def start(self) -> Ovsdb:
        """Start to connect. No callback runs before this call, so the caller can finish its setup first."""
        self._thread.start()
        return self

    @property
    def online(self) -> bool:
        return self._ready.is_set()

    def require_online(self, wait_s: float = 0.0) -> None:
        """Wait up to ``wait_s`` seconds for the connection. Raises: BackendUnavailable."""
        if not self._ready.wait(wait_s):
            raise BackendUnavailable(
                f"no connection to the Open vSwitch database at {self.remote}",
                step="ovsdb-connect",
                fix="start ovsdb-server, or correct [ovs] connection",
            )

    @property
    def locked(self) -> bool:
        """Whether this process holds the lock, or needs none."""
        return self._holder is None or self._locked.is_set()

    def require_lock(self, wait_s: float = 0.0) -> None:
        """Wait up to ``wait_s`` seconds for the lock. Raises: BackendUnavailable."""
        self.require_online(wait_s)
        if self._holder is not None and not self._locked.wait(wait_s):
            raise self.other_holder()

    def other_holder(self) -> BackendUnavailable:
        """The error to raise if another client holds the lock."""
        last = self.mirror.root.holder or ""
        known = f" (it was last taken by: {last[:_HOLDER_LENGTH]!r})" if last else ""
        return BackendUnavailable(
            f"another agent has the lock {LOCK!r} of the Open vSwitch database at {self.remote}" + known,
            step="ovsdb-lock",
            fix="end the other agent, and this one goes on; or give this one an Open vSwitch of its "
            "own ([ovs] connection and rundir)",
        )

    def write(self, writes: Sequence[Write], deadline: float) -> None:
        """Commit the writes and wait until vswitchd has applied them.

        Raises: as ``commit`` and ``wait_configured``.
        """
        self.wait_configured(self.commit(writes, deadline), deadline)

    def commit(self, writes: Sequence[Write], deadline: float) -> int:
        """Commit all writes in one transaction and return the ``next_cfg`` to wait for.

        Raises: BackendUnavailable, HostError with the error text of ovsdb-server, OperationTimeout.
        """
        self.require_certain()
        txn = _Transaction(
            self._api,
            self._connection,
            max(0.1, remaining(deadline)),
            check_error=True,
            log_errors=False,
        )
        txn.mark = self._carried.after
        txn.add(_Writes(self._api, writes))
        try:
            self._connection.queue_txn(txn)
            result = txn.results.get(timeout=txn.timeout)
        except ovsdb_errors.TimeoutException as busy:
            raise _late() from busy
        except queue.Empty as late:
            self._unanswered.append(txn)
            self.require_online()
            raise _late() from late
        if isinstance(result, idlutils.ExceptionResult):
            self.require_online()
            if isinstance(result.ex, _NotLocked):
                raise self.other_holder() from result.ex
            raise HostError(str(result.ex), step="ovsdb-commit") from result.ex
        return txn.next_cfg

    def require_certain(self) -> None:
        """Require that the database is online and locked, without a pending transaction of ours.

        A transaction without an answer may still be carried out, so the rows read now may be about
        to change.

        Raises: BackendUnavailable, OperationTimeout.
        """
        self.require_lock()
        self._unanswered = [txn for txn in self._unanswered if txn.results.empty()]
        if self._unanswered:
            raise OperationTimeout(
                "an earlier transaction is still with ovsdb-server, its outcome unknown",
                step="ovsdb-commit",
                fix="look whether ovsdb-server hangs",
            )

    def wait_configured(self, next_cfg: int, deadline: float) -> None:
        """Wait until vswitchd has applied the configuration: ``cur_cfg`` reaches ``next_cfg``.

        Raises: OperationTimeout.
        """
        if not self.configured(next_cfg, deadline):
            self.require_online()
            raise OperationTimeout(
                "ovs-vswitchd did not carry out the configuration in time "
                f"(cur_cfg {self.mirror.root.cur_cfg}, requested {next_cfg})",
                step="vswitchd",
                fix="look whether ovs-vswitchd runs and what its log says",
            )

    def configured(self, next_cfg: int, deadline: float) -> bool:
        """Like ``wait_configured``, but return False at the deadline."""
        return self.mirror.wait_for(lambda: self.mirror.root.cur_cfg >= next_cfg, deadline)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        if self._connection is not None:
            self._connection.stop(timeout=5)

    def _connect(self) -> None:
        said = ""
        while not self._stop.is_set():
            idl: _Idl | None = None
            try:
                helper = idlutils.get_schema_helper(self.remote, "Open_vSwitch")
                for table, columns in COLUMNS.items():
                    known = helper.schema_json["tables"][table]["columns"]
                    helper.register_columns(table, [c for c in columns if c in known])
                idl = _Idl(self.remote, helper, self.mirror, self._changed, self._holder)
                self._connection = connection.Connection(idl, timeout=10)
                # This starts the thread, so the API must exist before a commit can see the
                # database online.
                self._api = _Api(self._connection, start=False, auto_index=False)
                for table in ("Bridge", "Port"):  # changes look rows up by name
                    self._api.create_index(table, "name")
                # This may return before the rows are read; ``_changed`` reports when they are.
                self._connection.start()
                return
            except Exception as failed:  # retry after any error
                if str(failed) != said:
                    said = str(failed)
                    LOG.warning("no OVS database at %s yet: %s", self.remote, said)
                if idl is not None:
                    idl.close()  # or the server could grant the lock to an unserved connection
                    self._changed(online=False, locked=False)
                self._stop.wait(_RETRY_S)

    def _changed(self, online: bool, locked: bool) -> None:
        for event, state, word in (
            (self._ready, online, "on line"),
            (self._locked, locked, "locked by this process"),
        ):
            if state != event.is_set():
                LOG.info("OVS database %s is %s%s", self.remote, "" if state else "not ", word)
            (event.set if state else event.clear)()
        self._tell_changed()

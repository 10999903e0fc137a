"""The connection to an Open vSwitch database: read from a mirror, written in checked transactions.

Two traps of ovsdbapp are closed here: its transactions report success when vswitchd did not answer
in time (the exception is logged and dropped), and its connection is an attribute of the class.

Who manages the database's ports holds its lock (RFC 7047, section 4.1.8): the server gives it to one
client at a time, takes it back when the connection ends, and gives it to the next that asked. Each
transaction of the holder asserts it (section 5.2.10), so that none is carried out without it.
"""

from __future__ import annotations

import logging
import queue
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ovs import json as ovs_json
from ovs import poller as ovs_poller
from ovs.db import idl as ovs_idl
from ovsdbapp import exceptions as ovsdb_errors
from ovsdbapp.backend.ovs_idl import command, connection, idlutils, transaction
from ovsdbapp.schema.open_vswitch import impl_idl

from netplugin.errors import BackendUnavailable, HostError, OperationTimeout
from netplugin.host.json_stream import StreamParser
from netplugin.host.ovs_mirror import COLUMNS, Drift, Mirror
from netplugin.host.ovs_rows import HOLDER_MARK, STORE_MARK
from netplugin.host.processes import remaining
from netplugin.host.store_mark import CarriedMark, Mark, unmarked

LOG = logging.getLogger(__name__)
_RETRY_S = 0.5
#: The name of the lock. The server keeps the locks of its databases apart by name alone.
LOCK = "netplugin"
_HOLDER_LENGTH = 200  # of what is read: anybody who writes to the database may have written it


class _Poll:
    """What python-ovs waits with, by poll(2). Its own waits by select(2), for eventlet's sake, and
    select takes no descriptor above 1,023; its source says to replace it so (``ovs/poller.py``).

    A descriptor may be registered for reading and again for writing.
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
    """The IDL, telling a mirror of every row, and of being on line again after a break.

    With a ``holder`` (who we are) it asks for the lock, again after each break.
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
        #: Called with whether the database is on line, and whether the lock is ours, when either changes.
        self._tell = tell
        self._told = (False, False)
        self._mirrored_seqno: int | None = None
        self._holder = holder
        if holder is not None:
            self.set_lock(LOCK)
        # The default, one second growing to eight, is longer than a VM should wait for its NIC.
        self._session.reconnect.set_backoff(100, 1000)

    def run(self) -> Any:
        # Before each message the session makes a parser, unless there is one already.
        rpc = self._session.rpc
        if ovs_json.PARSER != ovs_json.PARSER_C and rpc is not None and rpc.parser is None:
            rpc.parser = StreamParser()
        try:
            changed = super().run()
        except Exception:
            # Some of what the server told may be lost: only reading everything anew makes up for it.
            self.force_reconnect()
            raise
        online = self.state == ovs_idl.Idl.IDL_S_MONITORING and self._session.is_connected()
        if online and self._mirrored_seqno != self._last_seqno:
            self._mirrored_seqno = self._last_seqno
            self._mirror.reset(self.tables)
        # The server answers in order, and we requested the lock before the rows: it is known by now.
        now = (online, online and self.has_lock)
        if now != self._told:
            if now[1] and not self._told[1]:
                self._write_holder()
            self._told = now
            self._tell(*now)
        return changed

    def _write_holder(self) -> None:
        """For the sentence of who waits. vswitchd does not read this column, so it does nothing.

        Not waited for: the reply comes to ``run``.
        """
        txn = ovs_idl.Transaction(self)
        for row in self.tables["Open_vSwitch"].rows.values():
            if row.external_ids.get(HOLDER_MARK) != self._holder:
                row.setkey("external_ids", HOLDER_MARK, self._holder)
        txn.commit()

    def cooperative_yield(self) -> None:
        """Called for each row. ovsdbapp sleeps here for eventlet's sake: 70 us a row, in a thread
        that the interpreter switches away from anyway.
        """

    def notify(self, event: str, row: Any, updates: Any = None) -> None:
        if self._mirrored_seqno == self._last_seqno:
            self._mirror.update(row, deleted=event == ovs_idl.ROW_DELETE)


class _NotLocked(Exception):
    """The transaction was not carried out: the lock is not ours."""


class _Transaction(transaction.Transaction):  # type: ignore[misc]
    """A transaction that bumps ``next_cfg`` and remembers to what; it waits for nobody."""

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
        """Raises: what a command raises, RuntimeError, _NotLocked."""
        try:
            return super().do_commit()
        except RuntimeError as refused:
            attempt = self._attempt
            # Of a transaction that has ended, commit() gives the outcome again.
            if attempt is not None and attempt.commit() == ovs_idl.Transaction.NOT_LOCKED:
                raise _NotLocked from refused
            raise

    def post_commit(self, txn: Any) -> None:
        super().post_commit(txn)
        self.next_cfg = txn.get_increment_new_value()


class _Api(impl_idl.OvsdbIdl):  # type: ignore[misc]
    """ovsdbapp's API with a connection of its own instead of the class's."""

    ovsdb_connection = None


def _late() -> OperationTimeout:
    return OperationTimeout(
        "ovsdb-server did not answer the transaction in time", step="ovsdb-commit",
        fix="look whether ovsdb-server hangs",
    )  # fmt: skip


CommandFactory = Callable[[Any], command.BaseCommand]


class Ovsdb:
    """One Open vSwitch database. ``start`` before use: it then connects in the background, and again
    whenever the database was lost."""

    def __init__(
        self,
        remote: str,
        drifted: Callable[[Drift], None] = lambda drift: None,
        changed: Callable[[], None] = lambda: None,
        holder: str | None = None,
        mark: Mark = unmarked,
    ) -> None:
        """``remote`` is like ``unix:/run/openvswitch/db.sock``; the callbacks run on its thread.

        ``changed`` is called when the database comes or goes, and when the lock does. ``holder`` says
        who we are, for the lock; None: this one reads, or changes what is no agent's, and needs none.
        Every transaction writes the ``mark`` of the store into ``external_ids`` of Open_vSwitch.
        """
        self.remote = remote
        # Both are used on the connection's thread alone, and the rows are read before the first write.
        self._carried = CarriedMark(mark)
        self.mirror = Mirror(drifted, self._carried.found)
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
        """Begin to connect. The callbacks come from now on, not before: who gives them may not be
        whole yet when this object is made."""
        self._thread.start()
        return self

    @property
    def online(self) -> bool:
        return self._ready.is_set()

    def require_online(self, wait_s: float = 0.0) -> None:
        """Raises: BackendUnavailable unless the database is (or within ``wait_s`` comes) on line."""
        if not self._ready.wait(wait_s):
            raise BackendUnavailable(
                f"no connection to the Open vSwitch database at {self.remote}",
                step="ovsdb-connect",
                fix="start ovsdb-server, or correct [ovs] connection",
            )

    @property
    def locked(self) -> bool:
        """Whether the lock is ours, as far as one is needed."""
        return self._holder is None or self._locked.is_set()

    def require_lock(self, wait_s: float = 0.0) -> None:
        """Raises: BackendUnavailable unless the lock is (or within ``wait_s`` becomes) ours."""
        self.require_online(wait_s)
        if self._holder is not None and not self._locked.wait(wait_s):
            raise self.other_holder()

    def other_holder(self) -> BackendUnavailable:
        """The error for a database whose lock another client has."""
        last = self.mirror.root.holder or ""
        known = f" (it was last taken by: {last[:_HOLDER_LENGTH]!r})" if last else ""
        return BackendUnavailable(
            f"another agent has the lock {LOCK!r} of the Open vSwitch database at {self.remote}"
            + known, step="ovsdb-lock",
            fix="end the other agent, and this one goes on; or give this one an Open vSwitch of its "
            "own ([ovs] connection and rundir)",
        )  # fmt: skip

    def commit(self, commands: Sequence[CommandFactory], deadline: float) -> int:
        """Commit all commands in one transaction; the answer is the ``next_cfg`` to wait for.

        Raises: BackendUnavailable, HostError with the database's words, OperationTimeout.
        """
        self.require_certain()
        txn = _Transaction(
            self._api, self._connection, max(0.1, remaining(deadline)),
            check_error=True, log_errors=False,
        )  # fmt: skip
        txn.mark = self._carried.after
        for make in commands:
            txn.add(make(self._api))
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
        """That the database is on line and ours, and no transaction of ours is on its way to it.

        One that was not answered in time may yet be carried out: until that is known, what is read
        is not what will be.

        Raises: BackendUnavailable, OperationTimeout.
        """
        self.require_lock()
        self._unanswered = [txn for txn in self._unanswered if txn.results.empty()]
        if self._unanswered:
            raise OperationTimeout(
                "an earlier transaction is still with ovsdb-server, its outcome unknown",
                step="ovsdb-commit", fix="look whether ovsdb-server hangs",
            )  # fmt: skip

    def wait_configured(self, next_cfg: int, deadline: float) -> None:
        """Wait until vswitchd has carried out what was committed.

        Raises: OperationTimeout.
        """
        if not self.configured(next_cfg, deadline):
            self.require_online()
            raise OperationTimeout(
                "ovs-vswitchd did not carry out the configuration in time "
                f"(cur_cfg {self.mirror.root.cur_cfg}, wanted {next_cfg})",
                step="vswitchd",
                fix="look whether ovs-vswitchd runs and what its log says",
            )

    def configured(self, next_cfg: int, deadline: float) -> bool:
        """Wait as ``wait_configured``; False at the deadline."""
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
                # The thread starts here, so commits must find the API before they find us on line.
                self._api = _Api(self._connection, start=False, auto_index=False)
                for table in ("Bridge", "Port"):  # what our commands look up by name
                    self._api.create_index(table, "name")
                # This may come back before the rows are there: ``_changed`` tells when they are.
                self._connection.start()
                return
            except Exception as failed:  # whatever it is, it is tried again
                if str(failed) != said:
                    said = str(failed)
                    LOG.warning("no OVS database at %s yet: %s", self.remote, said)
                if idl is not None:
                    idl.close()  # else the server could give the lock to a connection nobody serves
                    self._changed(online=False, locked=False)
                self._stop.wait(_RETRY_S)

    def _changed(self, online: bool, locked: bool) -> None:
        for event, state, word in (
            (self._ready, online, "on line"), (self._locked, locked, "locked by this process")
        ):  # fmt: skip
            if state != event.is_set():
                LOG.info("OVS database %s is %s%s", self.remote, "" if state else "not ", word)
            (event.set if state else event.clear)()
        self._tell_changed()

"""The connection to an Open vSwitch database: reads from a mirror, writes in verified transactions.

A process that manages ports holds a lock of the database (RFC 7047, section 4.1.8). The server
grants it to one client at a time, and to the next one that waits when the connection ends. Every
transaction of the holder asserts the lock (section 5.2.10), so none is carried out without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any

from netplugin.api.errors import BackendUnavailable, HostError, NetpluginError, OperationTimeout, TryAgain
from netplugin.host.names import CarriedMark, Mark, unmarked
from netplugin.host.ovs_mirror import Connection, Mirror, MirrorDrift
from netplugin.host.ovs_rows import COLUMNS, HOLDER_MARK, KEYS, STORE_MARK
from netplugin.host.ovsdb_rows import Rows
from netplugin.host.ovsdb_session import ConnectionLost, OvsdbSession, Refused
from netplugin.host.ovsdb_writes import Operation, RowNotFound, Tables, Write
from netplugin.host.processes import remaining

LOG = logging.getLogger(__name__)
_DATABASE = "Open_vSwitch"
_LEAST_S = 0.1  # for the answer of a transaction
#: Seconds for an answer, after which the agent connects again: to read all of 5,000 ports takes a few.
_ANSWER_S = 30.0
#: The name of the lock. Locks of ovsdb-server are distinguished by name only.
LOCK = "netplugin"
_ASSERT: Operation = {"op": "assert", "lock": LOCK}
_NOT_LOCKED = "not owner"  # RFC 7047, section 5.2.10
_HOLDER_LENGTH = 200  # any client of the database can write this value, so bound what is shown

Answered = Future[Any]


def _late() -> OperationTimeout:
    return OperationTimeout(
        "ovsdb-server did not answer the transaction in time",
        step="ovsdb-commit",
        fix="look whether ovsdb-server hangs",
    )


def _refusal(error: str, details: str, repeats: bool) -> NetpluginError:
    """The error of a refused transaction. What others have made or removed meanwhile is planned again.

    ``repeats``: it has the name of a bridge or port that was there already when it was composed.
    """
    stale = error == "referential integrity violation" or ("identical values" in details and not repeats)
    return (TryAgain if stale else HostError)(f"{error}: {details}".rstrip(": "), step="ovsdb-commit")


class Ovsdb:
    """An Open vSwitch database. ``start`` connects in the background and reconnects after a loss."""

    def __init__(
        self,
        remote: str,
        drifted: Callable[[Collection[MirrorDrift]], None] = lambda drifts: None,
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
        # The connection's thread and that of one write at a time use it; each step is a whole one.
        self._carried = CarriedMark(mark)
        self.mirror = Mirror(drifted, self._carried.found, connection)
        self._tell_changed = changed
        self._holder = holder
        self._ready = threading.Event()
        self._locked = threading.Event()
        self._committing = threading.Lock()
        self._unanswered: Answered | None = None
        # Of the connection, in its thread: whether the rows are read, and whether the lock is held.
        self._read, self._has_lock = False, False
        self._failures = 0
        self._session = OvsdbSession(remote, self)

    def start(self) -> Ovsdb:
        """Start to connect. No callback runs before this call, so the caller can finish its setup first."""
        self._session.start()
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
        """Commit all writes in one transaction and return the ``next_cfg`` to wait for; 0: no change.

        If the connection is lost before the answer, they are composed again from the rows of the new
        one.

        Raises: BackendUnavailable, HostError with the error text of ovsdb-server, TryAgain if others have
        made or removed a row that the writes need, OperationTimeout, and what the writes raise.
        """
        deadline = max(deadline, time.monotonic() + _LEAST_S)
        while True:
            self.require_certain()
            if not self._committing.acquire(timeout=remaining(deadline)):
                raise _late()
            try:
                self.require_certain()
                return self._commit(writes, deadline)
            except ConnectionLost:
                self.require_lock(remaining(deadline))
                if not remaining(deadline):
                    raise _late() from None
            finally:
                self._committing.release()

    def _commit(self, writes: Sequence[Write], deadline: float) -> int:
        """As ``commit``, one transaction at a time: each is composed of the rows after the last one.

        Raises: ConnectionLost too.
        """
        tables, operations = self._composed(writes)
        if not operations:
            return 0
        answered: Answered = Future()
        self._transact(operations, answered)
        try:
            results = answered.result(remaining(deadline))
        except Late:
            # The only one: the next is not sent before this one is answered.
            self._unanswered = answered
            self.require_online()
            raise _late() from None
        except Refused as refused:
            raise HostError(str(refused), step="ovsdb-commit") from refused
        for result in results:
            if result and (error := result.get("error")):
                if error == _NOT_LOCKED:
                    raise self.other_holder()
                raise _refusal(error, result.get("details", ""), tables.repeats)
        return int(results[len(operations) - 1]["rows"][0]["next_cfg"])

    def _composed(self, writes: Sequence[Write]) -> tuple[Tables, list[Operation]]:
        """The tables as changed, and the operations; the result of the last one has ``next_cfg``.

        Raises: HostError, TryAgain if a row is gone, and the typed errors of the writes.
        """
        # The store is asked without the lock of the mirror.
        mark = self._carried.after(self.mirror.root.found_mark)
        with self.mirror.held():
            tables = Tables(self.mirror)
            try:
                for each in writes:
                    each.write(tables)
                root = tables.root
                if mark:
                    root.set_key("external_ids", STORE_MARK, mark)
            except NetpluginError:
                raise
            except RowNotFound as gone:  # since the plan was made
                raise TryAgain(f"{gone} any more", step="ovsdb-commit") from gone
            except Exception as failed:  # of a write, which may read the host too
                raise HostError(str(failed), step="ovsdb-commit") from failed
            if not tables.operations():
                return tables, []
            root.increment("next_cfg")
            where = [["_uuid", "==", [*root.reference]]]
            count = {"op": "select", "table": "Open_vSwitch", "where": where, "columns": ["next_cfg"]}
            operations = [*self._guard(), *tables.operations(), count]
        return tables, operations

    def _guard(self) -> list[Operation]:
        return [] if self._holder is None else [_ASSERT]

    def _transact(self, operations: Sequence[Operation], answered: Answered) -> None:
        def answer(results: Any, failed: Exception | None) -> None:
            if failed is None:
                answered.set_result(results)
            else:
                answered.set_exception(failed)

        # The server may still carry out what it did not answer, but not once this process has the lock by
        # another connection: until then ``require_lock`` refuses. Without the lock the outcome stays open.
        within_s = None if self._holder is None else _ANSWER_S
        self._session.request("transact", [_DATABASE, *operations], answer, within_s)

    def require_certain(self) -> None:
        """Require that the database is online and locked, without a pending transaction of ours.

        A transaction without an answer may still be carried out, so the rows read now may be about
        to change.

        Raises: BackendUnavailable, OperationTimeout.
        """
        self.require_lock()
        if self._unanswered is not None and not self._unanswered.done():
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
        self._session.close()

    # -- the connection, in its thread (``OvsdbSession``) ------------------------------------------

    def connected(self) -> None:
        # The server answers in order, so the lock is known before the rows are read.
        if self._holder is not None:
            self._session.request("lock", [LOCK], self._lock_answered, _ANSWER_S)
        self._session.request("get_schema", [_DATABASE], self._monitor, _ANSWER_S)

    def disconnected(self) -> None:
        self._read = self._has_lock = False
        self._failures += 1
        if self._failures == 2:
            LOG.warning("no OVS database at %s yet", self.remote)
        self._report()

    def notified(self, method: str, params: Any) -> None:
        if method == "update2" and self._read:
            self.mirror.update(params[1])
        elif method in ("locked", "stolen") and params[0] == LOCK:
            self._has_lock = method == "locked"
            self._report()

    def _lock_answered(self, result: Any, failed: Exception | None) -> None:
        if not self._refused(failed):
            self._has_lock = result["locked"]
            self._report()

    def _monitor(self, schema: Any, failed: Exception | None) -> None:
        if self._refused(failed):
            return
        rows = Rows(COLUMNS, schema, KEYS)

        def read(updates: Any, failed: Exception | None) -> None:
            if not self._refused(failed):
                self.mirror.reset(rows, updates)
                self._read, self._failures = True, 0
                self._report()

        self._session.request("monitor_cond", [_DATABASE, None, rows.requests()], read, _ANSWER_S)

    def _refused(self, failed: Exception | None) -> bool:
        """Whether a request failed. A server that refuses, for want of the database say, is asked again."""
        if isinstance(failed, Refused):
            LOG.warning("the OVS database at %s cannot be used: %s", self.remote, failed)
            self._session.reconnect()
        return failed is not None

    def _write_holder(self) -> None:
        """Record the holder for the error message of a process that waits for the lock.

        vswitchd does not read this key. The answer is not waited for.
        """
        assert self._holder is not None
        with self.mirror.held():
            tables = Tables(self.mirror)
            tables.root.set_key("external_ids", HOLDER_MARK, self._holder)
            operations = tables.operations()
        if operations:
            self._transact([_ASSERT, *operations], Future())

    def _report(self) -> None:
        """Tell what has changed of the connection and the lock."""
        online, locked = self._read, self._read and self._has_lock
        if (online, locked) == (self._ready.is_set(), self._locked.is_set()):
            return
        if locked and not self._locked.is_set():
            self._write_holder()
        for event, state, word in (
            (self._ready, online, "on line"),
            (self._locked, locked, "locked by this process"),
        ):
            if state != event.is_set():
                LOG.info("OVS database %s is %s%s", self.remote, "" if state else "not ", word)
            (event.set if state else event.clear)()
        self._tell_changed()

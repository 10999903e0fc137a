"""The connection to an Open vSwitch database: ovsdbapp on an Idl, with transactions that have a deadline.

A process that manages ports holds a lock of the database (RFC 7047, section 4.1.8). The server
grants it to one client at a time, and to the next one that waits when the connection ends. Every
transaction of the holder asserts the lock (section 5.2.10), so none is carried out without it.

One thread runs the Idl. Other threads compose and send their transaction themselves and wait for its answer.
The Idl can connect again, but with the schema of the first time and with no bound for the answers, so each
connection here has an Idl of its own. What was read last can be read until the next one has read all.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ovs import jsonrpc
from ovs import poller as ovs_poller
from ovsdbapp.backend.ovs_idl.idlutils import RowNotFound

from netplugin.api.errors import BackendUnavailable, HostError, NetpluginError, OperationTimeout, TryAgain
from netplugin.host.names import CarriedMark, Mark, unmarked
from netplugin.host.ovs_rows import HOLDER_MARK, STORE_MARK
from netplugin.host.ovs_rpc import TimedConnection, connect, milliseconds
from netplugin.host.ovs_view import Drift, OvsView, VmConnection
from netplugin.host.ovsdb_replica import (
    Api,
    ConnectionLost,
    ReplicaIdl,
    Transaction,
    Writable,
    replica,
    root,
    set_key,
)
from netplugin.host.processes import remaining

LOG = logging.getLogger(__name__)
_DATABASE = "Open_vSwitch"
_LEAST_S = 0.1  # for the answer of a transaction
#: Seconds for an answer, after which the agent connects again: to read all of 5,000 ports takes a few.
_ANSWER_S = 30.0
#: Seconds for the notices of what others have committed.
_CATCH_UP_S = 1.0
#: Between two connections, the least and the most, in seconds.
_PAUSE_S = (0.1, 1.0)
#: The name of the lock. Locks of ovsdb-server are distinguished by name only.
LOCK = "netplugin"
_HOLDER_LENGTH = 200  # any client of the database can write this value, so bound what is shown


def _late(what: str = "ovsdb-server did not answer the transaction in time") -> OperationTimeout:
    return OperationTimeout(what, step="ovsdb-commit", fix="look whether ovsdb-server hangs")


def _refusal(txn: Transaction, is_second: bool) -> NetpluginError:
    """The error of a refused transaction. What others have made or removed meanwhile is planned again, as is
    what the first attempt may have made."""
    error, details = txn.refusal
    is_made = "identical values" in details and (is_second or not txn.repeats)
    kind = TryAgain if is_made or error == "referential integrity violation" else HostError
    return kind(f"{error}: {details}".strip(": ") or txn.get_error(), step="ovsdb-commit")


class Ovsdb:
    """An Open vSwitch database. ``start`` connects in the background and reconnects after a loss."""

    def __init__(
        self,
        remote: str,
        drifted: Callable[[Collection[Drift]], None] = lambda drifts: None,
        changed: Callable[[], None] = lambda: None,
        holder: str | None = None,
        mark: Mark = unmarked,
        connection: Callable[[VmConnection], None] = lambda connection: None,
    ) -> None:
        """``remote`` is an OVSDB address, for example ``unix:/run/openvswitch/db.sock``, or several with
        commas between them.

        The callbacks run on the connection's thread. ``drifted`` is called when marked ports or bridges
        change after their creation, ``connection`` when a VM connects to a marked vhost-user port or
        disconnects, ``changed`` when the connection or the lock is gained or lost.
        ``holder`` identifies this process for the lock; None: do not request the lock (the caller
        reads only, or changes rows that no agent manages). Every transaction writes the ``mark`` of
        the store into ``external_ids`` of Open_vSwitch.
        """
        self.remote = remote
        self._carried = CarriedMark(mark)
        self._drifted, self._tell_changed, self._vm_connection = drifted, changed, connection
        self._holder = holder
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._committing = threading.Lock()
        #: The values of the rows that were read last.
        self.view = OvsView()
        self._api: Api = None
        #: A transaction without an answer in time, until another connection is made; and when that is due.
        self._unanswered: Transaction | None = None
        self._reconnect_at = 0.0
        self._reported = (False, False)
        self._reason = ""  # why there is no connection, if that is known
        self._stop = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="ovsdb", daemon=True)

    def start(self) -> Ovsdb:
        """Start to connect. No callback runs before this call, so the caller can finish its setup first."""
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    @property
    def online(self) -> bool:
        """Whether the rows are read and kept current. A fork of the process has no thread that does so."""
        api = self._api
        return api is not None and not api.idl.lost and self._process == os.getpid()

    def require_online(self, wait_s: float = 0.0) -> None:
        """Wait up to ``wait_s`` seconds for the connection. Raises: BackendUnavailable."""
        if not self._comes(lambda: self.online, wait_s):
            found = f"no connection to the Open vSwitch database at {self.remote}{self._reason}"
            fix = "start ovsdb-server, or correct [ovs] connection"
            raise BackendUnavailable(found, step="ovsdb-connect", fix=fix)

    @property
    def locked(self) -> bool:
        """Whether this process holds the lock, or needs none."""
        return self._holder is None or bool(self.online and self._api.idl.has_lock)

    def require_lock(self, wait_s: float = 0.0) -> None:
        """Wait up to ``wait_s`` seconds for the lock. Raises: BackendUnavailable."""
        deadline = time.monotonic() + wait_s
        self.require_online(wait_s)
        if not self._comes(lambda: self.locked, remaining(deadline)):
            raise self.other_holder()

    def other_holder(self) -> BackendUnavailable:
        """The error to raise if another client holds the lock."""
        last = self.view.root.holder or ""
        known = f" (it was last taken by: {last[:_HOLDER_LENGTH]!r})" if last else ""
        return BackendUnavailable(
            f"another agent has the lock {LOCK!r} of the Open vSwitch database at {self.remote}" + known,
            step="ovsdb-lock",
            fix="end the other agent, and this one goes on; or give this one an Open vSwitch of its "
            "own ([ovs] connection and rundir)",
        )

    def _comes(self, state: Callable[[], bool], wait_s: float) -> bool:
        """Whether a state holds within this time. A fork may have been made while the lock was held."""
        is_fork = self._process != os.getpid()
        return state() or (wait_s > 0 and not is_fork and self.wait_for(state, time.monotonic() + wait_s))

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition on the rows holds; False at the deadline (monotonic seconds).

        The condition is evaluated for each notice of ovsdb-server.
        """
        with self._changed:
            return self._changed.wait_for(condition, remaining(deadline))

    def catch_up(self, deadline: float = math.inf) -> None:
        """Wait until ``view`` has all that was committed before this call.

        The server sends a client all notices that it has for it before it takes the client's next request
        (``ovsdb_jsonrpc_session_run`` in ovsdb/jsonrpc-server.c), so they come before the answer to that.
        One that hangs is not waited for long: what is planned then is refused when it is committed.
        """
        if not self.online:
            return
        with self._changed:
            idl = self._api.idl
            echo = idl.send_echo()
            if idl.has_unsent or not echo.is_sent:
                self._wake()  # the thread sends the rest, or sees that the connection is lost
            until = min(deadline, time.monotonic() + _CATCH_UP_S)
            self.wait_for(lambda: echo.is_answered or idl.lost, until)

    def write(self, changes: Sequence[Writable], deadline: float) -> None:
        """Commit the changes and wait until vswitchd has applied them.

        Raises: as ``commit`` and ``wait_configured``.
        """
        self.wait_configured(self.commit(changes, deadline), deadline)

    def commit(self, changes: Sequence[Writable], deadline: float) -> int:
        """Commit all changes in one transaction and return the ``next_cfg`` to wait for; 0: no change.

        If the connection is lost before the answer, or others have changed what was read, they are composed
        again from the rows that there are then.

        Raises: BackendUnavailable, HostError with the error text of ovsdb-server, TryAgain if others have
        made or removed a row that the changes need, OperationTimeout, and what the changes raise.
        """
        deadline = max(deadline, time.monotonic() + _LEAST_S)
        is_second = False
        while True:
            self.require_certain()
            if not self._committing.acquire(timeout=remaining(deadline)):
                raise _late()
            try:
                return self._commit(changes, deadline, is_second)
            except ConnectionLost:
                is_second = True
            finally:
                self._committing.release()
            self.require_lock(remaining(deadline))
            if not remaining(deadline):
                raise _late()

    def _commit(self, changes: Sequence[Writable], deadline: float, is_second: bool) -> int:
        """As ``commit``, one transaction at a time: each is composed of the rows after the last one.

        ``is_second``: whether it is made again. Raises: ConnectionLost too.
        """
        # The store is asked without the lock.
        mark = self._carried.after(self.view.root.found_mark)
        with self._changed:
            self.require_certain()
            idl = self._api.idl
            read = idl.change_seqno
            txn = self._composed(changes, mark)
            status = txn.commit()
            if status != txn.INCOMPLETE or idl.has_unsent:
                self._wake()  # the thread sees that the connection is lost, or sends the rest
            if status == txn.INCOMPLETE:
                # The server may still carry out what it did not answer, but not once this process has the
                # lock by another connection. Without a lock there is no such moment to wait for.
                due = math.inf if self._holder is None else time.monotonic() + _ANSWER_S
                answer_by = min(deadline, due)
                if not self.wait_for(lambda: txn.commit() != txn.INCOMPLETE or idl.lost, answer_by):
                    self._unanswered, self._reconnect_at = txn, due
                    self._wake()
                    if not remaining(deadline):
                        raise _late()
                    self.wait_for(lambda: idl.lost, deadline)
            status = txn.commit()
            if status == txn.TRY_AGAIN and not idl.lost:
                # Others have changed what it had read: wait for the notice of that.
                self.wait_for(lambda: idl.change_seqno != read or idl.lost, deadline)
        if status == txn.SUCCESS:
            return int(txn.get_increment_new_value())
        if status == txn.UNCHANGED:
            return 0
        if status == txn.NOT_LOCKED:
            raise self.other_holder()
        if status == txn.ERROR:
            raise _refusal(txn, is_second)
        raise ConnectionLost(status)

    def _composed(self, changes: Sequence[Writable], mark: str) -> Transaction:
        """Raises: HostError, TryAgain if a row is gone, and the typed errors of the changes."""
        txn = Transaction(self._api.idl)
        try:
            for change in changes:
                change.write(self._api, txn)
            if mark:
                set_key(root(self._api), "external_ids", STORE_MARK, mark)
            root(self._api).increment("next_cfg")
        except NetpluginError:
            txn.abort()
            raise
        except RowNotFound as gone:  # since the plan was made
            txn.abort()
            raise TryAgain(f"{gone} any more", step="ovsdb-commit") from gone
        except Exception as failed:  # of a change, which may read the host too
            txn.abort()
            raise HostError(str(failed), step="ovsdb-commit") from failed
        return txn

    def require_certain(self) -> None:
        """Require that the database is online and locked, without a pending transaction of ours.

        A transaction without an answer may still be carried out, so the rows read now may be about to change.

        Raises: BackendUnavailable, OperationTimeout.
        """
        if self._is_pending:
            raise _late("an earlier transaction is still with ovsdb-server, its outcome unknown")
        self.require_lock()

    @property
    def _is_pending(self) -> bool:
        """Whether a transaction may still be answered, or carried out."""
        unanswered = self._unanswered
        return unanswered is not None and unanswered.commit() == unanswered.INCOMPLETE

    def wait_configured(self, next_cfg: int, deadline: float) -> None:
        """Wait until vswitchd has applied the configuration: ``cur_cfg`` reaches ``next_cfg``.

        Raises: OperationTimeout.
        """
        if not self.configured(next_cfg, deadline):
            self.require_online()
            raise OperationTimeout(
                "ovs-vswitchd did not carry out the configuration in time "
                f"(cur_cfg {self.view.root.cur_cfg}, requested {next_cfg})",
                step="vswitchd",
                fix="look whether ovs-vswitchd runs and what its log says",
            )

    def configured(self, next_cfg: int, deadline: float) -> bool:
        """Like ``wait_configured``, but return False at the deadline."""
        return self.wait_for(lambda: self.view.root.cur_cfg >= next_cfg, deadline)

    # -- the connection, in its thread -----------------------------------------------------------

    def _run(self) -> None:
        remotes = itertools.cycle(re.split(r",(?=\w+:)", self.remote))
        failures, pause_s = 0, _PAUSE_S[0]
        while not self._stop.is_set():
            failures, pause_s = failures + 1, min(2 * pause_s, _PAUSE_S[1])
            try:
                self._serve(next(remotes))
                failures, pause_s, self._reason = 0, _PAUSE_S[0], ""
            except ConnectionLost as lost:
                self._reason = f": {lost}"
                if failures == 2:
                    LOG.warning("the OVS database at %s cannot be used yet: %s", self.remote, lost)
            except Exception:
                # A notice may be lost. Only reading all rows again recovers from that.
                LOG.exception("the connection to the OVS database starts again")
            try:
                self._report()
            except Exception:
                LOG.exception("a loss of the OVS database was not reported to all")
            self._stop.wait(pause_s)
        self._wake_reader.close()
        self._wake_writer.close()

    def _serve(self, remote: str) -> None:
        """Connect, and keep the rows current until it is lost. Raises: ConnectionLost if none were read."""
        api = replica(remote, self._schema(remote), self._changed)
        idl = api.idl
        view = OvsView(idl, self._changed, self._carried.found, self.view.connections())
        if self._holder is not None:
            idl.set_lock(LOCK)
        answer_by = time.monotonic() + _ANSWER_S
        try:
            while not self._stop.is_set():
                self._turn(api, view)
                # Answers come in the order of the requests: that to the lock before the rows.
                due = self._answer_due(idl, answer_by)
                if not remaining(due) or (idl.has_read and not idl.is_answered):
                    LOG.warning("the server of the OVS database refuses a request, or does not answer it")
                    break
                poller = ovs_poller.Poller()
                with self._changed:
                    if idl.lost:
                        break
                    idl.wait(poller)
                poller.fd_wait(self._wake_reader, ovs_poller.POLLIN)
                if due != math.inf:
                    poller.timer_wait(milliseconds(due))
                poller.block()
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
        finally:
            with self._changed:
                idl.close()
                self._changed.notify_all()
        if view is not self.view:
            raise ConnectionLost("the connection ended before its rows were read")

    def _answer_due(self, idl: ReplicaIdl, connected_by: float) -> float:
        """When a connection that is not answered ends (``time.monotonic``)."""
        if not idl.is_answered:
            return connected_by
        return self._reconnect_at if self._is_pending else math.inf

    def _turn(self, api: Api, view: OvsView) -> None:
        """Read what there is to read, and tell of it."""
        idl, is_new = api.idl, api is not self._api
        if is_new:
            idl.run()  # this takes long, and nobody reads its rows yet
            if not idl.has_read:
                return
        with self._changed:
            idl.run()
            drifts, connections = view.settle()
            self._api, self.view = api, view
            if is_new and idl.is_answered:
                self._unanswered = None
            self._changed.notify_all()
        for each in connections:
            self._vm_connection(each)
        if drifts and not is_new:
            self._drifted(drifts)
        self._report()

    def _schema(self, remote: str) -> Any:
        """The schema of the server's database. Raises: ConnectionLost."""
        deadline = time.monotonic() + _ANSWER_S
        failed, stream = connect(remote, deadline)
        if failed:
            raise ConnectionLost(os.strerror(failed))
        rpc = TimedConnection(stream, deadline)
        try:
            failed, reply = rpc.transact_block(jsonrpc.Message.create_request("get_schema", [_DATABASE]))
        except TimeoutError:
            failed, reply = errno.ETIMEDOUT, None
        finally:
            rpc.close()
        if failed or reply.result is None:
            raise ConnectionLost(f"it does not tell the schema of {_DATABASE}")
        return reply.result

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake_writer.send(b"x")

    def _report(self) -> None:
        """Tell what has changed of the connection and the lock."""
        has_lock = self._holder is not None and self.locked
        before, self._reported = self._reported, (self.online, has_lock)
        if before == self._reported:
            return
        if self._holder is not None and has_lock and not before[1]:
            self._write_holder(self._holder)
        words = "on line", "locked by this process"
        for was, is_now, word in zip(before, self._reported, words, strict=True):
            if was != is_now:
                LOG.info("OVS database %s is %s%s", self.remote, "" if is_now else "not ", word)
        self._tell_changed()

    def _write_holder(self, holder: str) -> None:
        """Record the holder for the error message of a process that waits for the lock.

        vswitchd does not read this key. The answer is not waited for.
        """
        with self._changed, contextlib.suppress(RowNotFound):
            txn = Transaction(self._api.idl)
            try:
                set_key(root(self._api), "external_ids", HOLDER_MARK, holder)
            finally:
                txn.commit()

"""A connection to the management socket of one OVS bridge: requests go out together, answers come back."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from netplugin.api.errors import HostError, NetpluginError, OperationTimeout, TryAgain
from netplugin.host import openflow_messages as m
from netplugin.host.oxm import Malformed
from netplugin.host.processes import remaining

STEP = "openflow"
_CHUNK = 1 << 18  # bytes
#: Seconds without a byte from vswitchd, after which an exchange has failed whatever its deadline is. At a
#: start the deadline is minutes away, and a new connection may be answered.
_SILENT_S = 30.0


class Connection:
    """One OpenFlow 1.4 connection. Not thread-safe.

    After an error its state is unknown: close it. vswitchd sends nothing by itself on this socket
    but echo requests, if at all (``ofconn_receives_async_msg`` in ofproto/connmgr.c), and what ``changed``
    is called for.
    """

    def __init__(
        self, path: Path, deadline: float, changed: Callable[[m.Changed], None] | None = None
    ) -> None:
        """Connect; call ``changed`` when others change flows, if that is given.

        Raises: HostError, OperationTimeout, TryAgain if vswitchd has just ended or started.
        """
        self._path = path
        self._received = bytearray()
        self._changed = changed
        # Goes out with the first request.
        self._unsent = bytearray(m.hello(0) + (m.monitor_flows() if changed else b""))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(max(remaining(deadline), 0.001))  # until the queue has room
            self._socket.connect(str(path))
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            if isinstance(error, TimeoutError):
                raise self._late() from error
            why = error.strerror or str(error)
            # A socket that nobody listens at is of the last vswitchd: this one makes its own.
            refused = isinstance(error, ConnectionRefusedError)
            raise (self._closed(why) if refused else self._failed(why)) from error

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """The descriptor to wait at for what others change; -1 if it is closed."""
        return self._socket.fileno()

    def alive(self) -> bool:
        """Whether vswitchd has this connection open still. Takes what has come meanwhile."""
        try:
            while data := self._socket.recv(_CHUNK):
                self._received += data
                for message in m.split(self._received):
                    self._serve(message)
        except BlockingIOError:
            return True
        except (OSError, Malformed, NetpluginError):
            return False
        return False

    def exchange(self, requests: Sequence[bytes], deadline: float) -> list[m.OpenFlowMessage]:
        """Send the requests, whose transaction ids are 1, 2 and so on, and return all answers to them.

        A barrier follows them, so the end is known of answers of which there may be several, or none.
        Answers may be errors, also to what was sent before: a commit brings those of its bundle.

        Raises: TryAgain if vswitchd closes the connection, as it does when it ends, HostError if it does not
        speak OpenFlow 1.4, OperationTimeout.
        """
        last = len(requests) + 1
        self._unsent += b"".join(requests) + m.barrier(last)
        answers: list[m.OpenFlowMessage] = []
        answered = False
        poll = select.poll()
        while True:
            # Also the answer to an echo request, which comes while it waits.
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            if not poll.poll(math.ceil(min(remaining(deadline), _SILENT_S) * 1000)):
                raise self._late()
            self._send()
            for message in self._receive():
                if message.kind == m.BARRIER_REPLY and message.xid == last:
                    answered = True
                elif not self._serve(message) and message.xid:
                    answers.append(message)
            if answered:  # after what has come behind the last answer
                self._send()  # the answer to an echo request
                return answers

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            # What vswitchd sent before is read, and nothing is waited for: it may not have closed the
            # connection (ENOBUFS), and would close it after its inactivity probe.
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> list[m.OpenFlowMessage]:
        """The messages that have come whole. Raises: HostError, TryAgain."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._closed(os.strerror(error.errno or 0)) from error
        if not data:
            raise self._closed("vswitchd has closed the connection")
        self._received += data
        try:
            return m.split(self._received)
        except Malformed as error:
            raise self._failed(str(error)) from error

    def _serve(self, message: m.OpenFlowMessage) -> bool:
        """Do what a message asks for that is no answer; False if it may be one.

        Raises: HostError, Malformed.
        """
        if self._changed is not None and m.is_of_monitor(message):
            self._changed(m.read_changes(message))
        elif message.kind == m.ECHO_REQUEST:
            self._unsent += m.message(m.ECHO_REPLY, message.xid, message.body)
        elif message.kind == m.ERROR and m.refuses_version(message):
            bridge = self._path.stem
            fix = f"ovs-vsctl add bridge {bridge} protocols OpenFlow14"
            raise HostError(f"{bridge} does not speak OpenFlow 1.4", step=STEP, fix=fix)
        else:
            return message.kind == m.HELLO
        return True

    def _failed(self, why: str) -> HostError:
        return HostError(f"{self._path}: {why}", step=STEP, fix=self._fix)

    def _closed(self, why: str) -> TryAgain:
        return TryAgain(f"{self._path}: {why}", step=STEP, fix=self._fix)

    @property
    def _fix(self) -> str:
        bridge = self._path.stem
        return f"look whether ovs-vswitchd runs and has the bridge {bridge}: ovs-ofctl show {bridge}"

    def _late(self) -> OperationTimeout:
        return OperationTimeout(f"ovs-vswitchd did not answer at {self._path} in time", step=STEP)

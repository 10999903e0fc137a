"""The ovs-vswitchd process: watch for its start and end, and run commands as ovs-appctl does."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ovs import jsonrpc

from netplugin.api.errors import BackendUnavailable, HostError, NetpluginError, OperationTimeout
from netplugin.host.ovs_rpc import TimedConnection, connect
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.supervisor import Supervisor

LOG = logging.getLogger(__name__)
_RETRY_S = 0.05
#: The least and the most time that a command gets, in seconds. What another wait has used up must not make a
#: quick command fail, and at a start, whose deadline is minutes away, it is better made again.
_LEAST_S, _MOST_S = 0.05, 30.0
_STEP = "vswitchd"
_FIX = "start ovs-vswitchd, or correct [ovs] control_socket"


class VswitchdWatch:
    """Keeps a connection to vswitchd's control socket, which the kernel closes when vswitchd dies.

    The database does not show this: its rows stay the same while vswitchd is dead, and after a
    restart, when the flows are lost.
    """

    def __init__(self, sockets: OvsSockets, changed: Callable[[bool], None], supervisor: Supervisor) -> None:
        """Calls ``changed(True)`` when vswitchd accepts connections, ``changed(False)`` when it has died."""
        self._sockets = sockets
        self._changed = changed
        self._stop = threading.Event()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._alive = threading.Event()
        self._thread = supervisor.thread("vswitchd-watch", self._run, self._stop)

    def alive(self, wait_s: float = 0.0) -> bool:
        """Whether vswitchd runs; wait up to ``wait_s`` seconds for it."""
        return self._alive.wait(wait_s)

    def missing(self) -> BackendUnavailable:
        """Why vswitchd is not there, as its sockets are now."""
        try:
            return _not_running(self._sockets.control())
        except BackendUnavailable as missing:
            return missing

    def close(self) -> None:
        self._stop.set()
        self._stop_writer.send(b"x")
        self._thread.join(timeout=5)
        self._stop_reader.close()
        self._stop_writer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            held = self._hold()
            if held is None:
                # A socket that does not exist yet cannot be polled.
                self._stop.wait(_RETRY_S)
                continue
            with held:
                try:
                    self._alive.set()
                    self._tell(True)
                    self._wait_gone(held)
                finally:
                    # However the wait ended, this process is no longer watched.
                    self._alive.clear()
            if not self._stop.is_set():
                self._tell(False)
                # The kernel may close the connections of a process that ends before the socket it
                # listens at: connected to at once, it would seem to be there again.
                self._stop.wait(_RETRY_S)

    def _wait_gone(self, held: socket.socket) -> None:
        # Not select(): it accepts no descriptor above 1,023.
        poll = select.poll()
        poll.register(held, select.POLLIN)
        poll.register(self._stop_reader, select.POLLIN)
        poll.poll()

    def _hold(self) -> socket.socket | None:
        try:
            path = self._sockets.control()
        except BackendUnavailable:
            return None
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.connect(str(path))
        except OSError:
            held.close()
            return None
        return held

    def _tell(self, alive: bool) -> None:
        LOG.info("ovs-vswitchd has %s", "come" if alive else "gone")
        self._changed(alive)


def appctl(sockets: OvsSockets, *command: str, deadline: float) -> str:
    """Run a command in vswitchd, as ovs-appctl does, and return its output.

    Raises: BackendUnavailable if vswitchd does not run, HostError with its error text, OperationTimeout.
    """
    (answer,) = appctl_each(sockets, [command], deadline)
    if isinstance(answer, HostError):
        raise answer
    return answer


def appctl_each(
    sockets: OvsSockets, commands: Sequence[tuple[str, ...]], deadline: float
) -> list[str | HostError]:
    """The output of each command, or the error with which vswitchd refuses it, over one connection.

    They are sent together: vswitchd answers up to ten of a connection in one turn of its main loop
    (``run_connection`` in lib/unixctl.c).

    Raises: BackendUnavailable if vswitchd does not run, HostError, OperationTimeout.
    """
    now = time.monotonic()
    deadline = min(max(deadline, now + _LEAST_S), now + _MOST_S)
    path, first = sockets.control(), commands[0][0]
    failed, stream = connect(f"unix:{path}", deadline)
    if failed:
        raise _without_answer(path, first, failed)
    connection = TimedConnection(stream, deadline)
    answers: list[str | HostError] = []
    try:
        for name, *arguments in commands:
            # Without waiting for room in the socket: the rest goes with the wait for the answers.
            if failed := connection.send(jsonrpc.Message.create_request(name, arguments)):
                raise _without_answer(path, name, failed)
        for name, *_ in commands:  # their answers come in this order
            failed, message = connection.recv_block()
            if failed:
                raise _without_answer(path, name, failed)
            refused = message.type == jsonrpc.Message.T_ERROR
            words = str(message.error if refused else message.result)
            answers.append(HostError(f"{name}: {words.strip()}", step=_STEP) if refused else words)
    except TimeoutError:
        raise _without_answer(path, first, errno.ETIMEDOUT) from None
    finally:
        connection.close()
    return answers


def _without_answer(path: Path, command: str, failed: int) -> NetpluginError:
    """The error for a connection that failed with this errno."""
    if failed in (errno.ETIMEDOUT, errno.EAGAIN):
        return OperationTimeout(f"ovs-vswitchd did not answer {command} in time", step=_STEP)
    if failed in (errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, jsonrpc.EOF):
        return _not_running(path)
    return HostError(f"{path}: {os.strerror(failed)}", step=_STEP)


def _not_running(path: Path) -> BackendUnavailable:
    return BackendUnavailable(f"ovs-vswitchd does not run (looked at {path})", step=_STEP, fix=_FIX)

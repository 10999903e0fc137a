"""The ovs-vswitchd process: watch for its start and end, and run ovs-appctl commands."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from netplugin.api.errors import BackendUnavailable
from netplugin.host.processes import run
from netplugin.host.supervisor import Supervisor

LOG = logging.getLogger(__name__)
_RETRY_S = 0.05


def control_socket(rundir: Path) -> Path | None:
    """The path of vswitchd's control socket, from its pid file; None if there is no pid file."""
    try:
        pid = int((rundir / "ovs-vswitchd.pid").read_text())
    except (OSError, ValueError):
        return None
    return rundir / f"ovs-vswitchd.{pid}.ctl"


class VswitchdWatch:
    """Keeps a connection to vswitchd's control socket, which the kernel closes when vswitchd dies.

    The database does not show this: its rows stay the same while vswitchd is dead, and after a
    restart, when the flows are lost.
    """

    def __init__(self, rundir: Path, changed: Callable[[bool], None], supervisor: Supervisor) -> None:
        """Calls ``changed(True)`` when vswitchd accepts connections, ``changed(False)`` when it has died."""
        self._rundir = rundir
        self._changed = changed
        self._stop = threading.Event()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._alive = threading.Event()
        self._thread = supervisor.thread("vswitchd-watch", self._run, self._stop)

    def alive(self, wait_s: float = 0.0) -> bool:
        """Whether vswitchd runs; wait up to ``wait_s`` seconds for it."""
        return self._alive.wait(wait_s)

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

    def _wait_gone(self, held: socket.socket) -> None:
        # Not select(): it accepts no descriptor above 1,023.
        poll = select.poll()
        poll.register(held, select.POLLIN)
        poll.register(self._stop_reader, select.POLLIN)
        poll.poll()

    def _hold(self) -> socket.socket | None:
        path = control_socket(self._rundir)
        if path is None:
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


def appctl(rundir: Path, *command: str, deadline: float) -> str:
    """Run an ``ovs-appctl`` command and return its output.

    Raises: BackendUnavailable, HostError, OperationTimeout.
    """
    path = control_socket(rundir)
    if path is None:
        raise BackendUnavailable(
            f"no ovs-vswitchd.pid in {rundir}",
            step="vswitchd",
            fix="start ovs-vswitchd, or correct [ovs] rundir",
        )
    return run(["ovs-appctl", "-t", str(path), *command], step="vswitchd", deadline=deadline)

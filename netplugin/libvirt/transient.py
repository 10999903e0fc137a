"""Run a transient domain of libvirt, which is gone when it stops; its name finds what a killed run left."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from netplugin.api.errors import NetpluginError
from netplugin.host.processes import run
from netplugin.programs.polling import polled

_STEP = "vm"
#: Timeout of one virsh call, in seconds.
_CALL_S = 60.0
#: Interval of questions whether a domain still runs or answers, in seconds. Nothing reports that SSH answers,
#: and virsh reports the end of a domain only to who listened before, without saying that it listens.
_LOOK_S = 0.5


class TransientDomain:
    """``shutdown_s``: seconds that the VM has to shut down by itself; 0: it is destroyed at once."""

    def __init__(self, uri: str, name: str, shutdown_s: float = 0.0) -> None:
        self.name = name
        self._uri, self._shutdown_s = uri, shutdown_s

    @property
    def is_running(self) -> bool:
        """Raises: NetpluginError if libvirt does not answer."""
        return self.name in self._virsh("list", "--name").split()

    def start(self, xml: str) -> None:
        """Raises: NetpluginError with the error text of libvirt."""
        self._virsh("create", "/dev/stdin", stdin=xml)

    def stop(self) -> None:
        """Have the domain shut down, and destroy it if it has not by then. Raises: NetpluginError."""
        if not self.is_running:
            return
        if self._shutdown_s:
            with suppress(NetpluginError):  # it ends at this moment, or cannot
                self._virsh("shutdown", self.name, "--mode", "acpi")
                polled(lambda: self.is_running, lambda runs: not runs, self._shutdown_s, _LOOK_S)
            if not self.is_running:
                return
        try:
            self._virsh("destroy", self.name)
        except NetpluginError:
            if self.is_running:  # otherwise it has ended by itself
                raise

    def _virsh(self, *words: str, stdin: str | None = None) -> str:
        deadline = time.monotonic() + _CALL_S
        return run(["virsh", "-c", self._uri, *words], step=_STEP, deadline=deadline, stdin=stdin)


def answers_ssh(host: str, port: int, deadline: float, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Wait for the banner of an SSH server; return whether it came before the deadline.

    ``go_on`` ends the wait early if it returns false.
    """

    def answer() -> bool | None:
        """Whether it answers; None if it is waited for no more."""
        if not go_on():
            return None
        # A booting VM refuses, is unreachable, or accepts the connection before sshd is ready.
        with suppress(OSError), socket.create_connection((host, port), timeout=5.0) as there:
            return there.recv(4) == b"SSH-"
        return False

    seconds = deadline - time.monotonic()
    return bool(polled(answer, lambda found: found is not False, seconds, _LOOK_S))

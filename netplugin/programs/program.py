"""Run a program in the background with a log file, and query the telemetry of DPDK programs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from netplugin.programs import bounded

# -- Runs a program for the lifetime of its VNF, with a log file; it ends with this process. ------


T = TypeVar("T")
#: Polling interval for conditions without notification, in seconds.
_LOOK_S = 0.05
_END_S = 10.0
_LAST_LINES = 15


class ProgramError(Exception):
    """A program cannot be started, has ended, or does not do what it was started for."""


class Program:
    """A process and its children. It is killed if this process dies (setpriv of util-linux)."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start the program. Raises: ProgramError if it is not installed."""
        program = self._arguments[0]
        if shutil.which(program) is None:
            raise ProgramError(f"{program}: there is no such program; install it, or give its path")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self._arguments],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def check(self) -> None:
        """Check that the program runs. Raises: ProgramError."""
        if self._process is None:
            raise ProgramError(f"{self.name} has not been started")
        status = self._process.poll()
        if status is not None:
            raise ProgramError(f"{self.name} has ended with status {status}{self.log_tail()}")

    def wait_for(self, condition: Callable[[], T | None], deadline: float, what: str) -> T:
        """Poll until the condition is true and return its value. Raises: ProgramError on exit or deadline."""
        while True:
            self.check()
            if value := condition():
                return value
            if time.monotonic() > deadline:
                raise ProgramError(f"{self.name}: {what}: not in time{self.log_tail()}")
            assert self._process is not None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)

    def stop(self) -> None:
        """Send SIGTERM, then kill the process group. Idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def logged(self, text: str) -> bool:
        """Whether a line of the log has this text."""
        return text in self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        """Return the last lines of the log, to append to an error message."""
        with suppress(OSError), self.log.open(errors="replace") as log:
            lines = deque((line.rstrip() for line in log if line.strip()), maxlen=_LAST_LINES)
            return "".join(f"\n  {line}" for line in lines)
        return ""


def own_directory() -> Path:
    """Create a directory with a path short enough for sockets. The caller removes it."""
    base = "/run" if os.access("/run", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="netplugin-vnf-", dir=base))


# -- Client of the DPDK telemetry socket (DPDK's "Telemetry User Guide"). -------------------------


_LONGEST = 1 << 16


class Telemetry:
    """A lazy connection. ``answer_s``: timeout of each answer in seconds."""

    def __init__(self, path: Path, answer_s: float = 5.0) -> None:
        self._path = path
        self._answer_s = answer_s
        self._socket: socket.socket | None = None
        #: DPDK version such as ``DPDK 22.11.11``, sent on connect.
        self.version = "unknown"

    def ask(self, command: str, *arguments: object) -> Any:
        """Send a command and return its result. Raises: ProgramError."""
        question = ",".join([command, *map(str, arguments)])
        try:
            connection = self._connected()
            connection.send(question.encode())
            answer = bounded.parse(connection.recv(_LONGEST))
            return answer[command]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise ProgramError(f"{self._path}: no answer to {question}: {error!r}") from error

    def each(self, command: str, ports: Iterable[int]) -> list[Any]:
        """Send a command for each port and return the results. Raises: ProgramError."""
        return [self.ask(command, port) for port in ports]

    @property
    def there(self) -> bool:
        return self._path.is_socket()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            fresh = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                fresh.settimeout(self._answer_s)
                fresh.connect(str(self._path))
                self.version = str(bounded.parse(fresh.recv(_LONGEST))["version"])
            except BaseException:
                fresh.close()
                raise
            self._socket = fresh
        return self._socket

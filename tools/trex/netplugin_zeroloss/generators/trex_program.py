"""Starts ``t-rex-64`` as a server or for one batch, here or over SSH, and ends it with its children."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from netplugin_zeroloss.generators import guard
from netplugin_zeroloss.machines.contract import Connected, MachineError
from netplugin_zeroloss.machines.ssh import Local
from netplugin_zeroloss.values import GeneratorError, UnusableInput

PROGRAM: Final = "t-rex-64"
#: Seconds to set up hugepages, drivers and links.
_START_S: Final = 120.0
#: Seconds the program may take to clean up after SIGINT, and then its guard to kill it.
_STOP_S: Final = 20.0
_GUARD_S: Final = 5.0
_GUARD: Final = Path(guard.__file__).read_text()
_LOOK_S: Final = 0.2
#: Bytes that it may print; an hour has 10 MB.
_MOST_OUTPUT: Final = 1 << 28


def check_tree(machine: Connected, trex_dir: Path) -> None:
    """Check that TRex can be started on a machine. Raises: UnusableInput."""
    if not there(machine, trex_dir / PROGRAM):
        raise UnusableInput("--trex-dir", f"{trex_dir} is no tree of TRex: it has no {PROGRAM}")
    if not _is_root(machine):
        raise UnusableInput(PROGRAM, "TRex needs root: it takes ports from the kernel")
    try:
        machine.run([_python(machine), "-I", "-c", "from os import pidfd_open"])
    except MachineError as error:
        raise UnusableInput(PROGRAM, f"its machine needs python3 of version 3.9 or later: {error}") from error


def there(machine: Connected, path: Path) -> bool:
    """Whether a machine has this file."""
    try:
        machine.run(["test", "-f", str(path)])
    except MachineError:
        return False
    return True


def _is_root(machine: Connected) -> bool:
    return os.geteuid() == 0 if isinstance(machine, Local) else machine.run(["id", "-u"]).strip() == "0"


def _python(machine: Connected) -> str:
    return sys.executable if isinstance(machine, Local) else "python3"


class TrexProgram:
    """One run of ``t-rex-64``; it ends when this process is killed. The caller closes it."""

    def __init__(self, machine: Connected, trex_dir: Path, arguments: Sequence[str]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()
        # t-rex-64 finds its files relative to the working directory. Over SSH, the guard's input closes when
        # the connection does.
        how = ["0", str(int(signal.SIGINT)), str(_STOP_S)]
        guarded = [_python(machine), "-I", "-c", _GUARD, *how, f"./{PROGRAM}", *arguments]
        self._guard = subprocess.Popen(
            machine.command(["sh", "-c", 'cd "$0" && exec "$@"', str(trex_dir), *guarded]),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._ended = os.pidfd_open(self._guard.pid)

    @property
    def output(self) -> str:
        """The output so far. Raises: GeneratorError if it is too long."""
        self._output.seek(0)
        text = self._output.read(_MOST_OUTPUT)
        if len(text) == _MOST_OUTPUT:
            raise GeneratorError(f"{PROGRAM} prints more than {_MOST_OUTPUT} bytes")
        return text.decode(errors="replace")

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end. Returns whether it has ended."""
        select.select([self._ended], [], [], seconds)
        return self._guard.poll() is not None

    def stop(self) -> None:
        """Send SIGINT; kill it if it does not end in time."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        if not self.wait(_STOP_S + _GUARD_S):
            self._guard.kill()
        self._guard.wait()

    def close(self) -> None:
        """Stop the program and release its files. Idempotent."""
        if self._output.closed:
            return
        self.stop()
        os.close(self._ended)
        self._output.close()


class TrexServer:
    """A TRex server for stateless clients, started here. The caller closes it."""

    _program: TrexProgram | None = None

    def __init__(self, trex_dir: Path, configuration: Path, sync_port: int) -> None:
        """Start the server and wait until it listens. Raises: UnusableInput, GeneratorError."""
        if not configuration.is_file():
            raise UnusableInput("--trex-cfg", f"{configuration}: no such file")
        self._machine = Local()
        try:
            self._start(trex_dir, configuration, sync_port)
        except BaseException:
            self.close()
            raise

    def _start(self, trex_dir: Path, configuration: Path, sync_port: int) -> None:
        check_tree(self._machine, trex_dir)
        if _listens(sync_port):
            raise GeneratorError(
                f"port {sync_port} is taken: does another TRex run? Leave out --trex-cfg to use it, or"
                " give this one other ports (zmq_rpc_port, zmq_pub_port) and say them"
                " (--trex-sync-port, --trex-async-port)"
            )
        arguments = ["-i", "--no-scapy-server", "--cfg", str(configuration.resolve())]
        self._program = TrexProgram(self._machine, trex_dir, arguments)
        deadline = time.monotonic() + _START_S
        while not _listens(sync_port):
            if self._program.wait(_LOOK_S):
                raise GeneratorError(f"{PROGRAM} ended:\n{log_tail(self._program.output)}")
            if time.monotonic() > deadline:
                raise GeneratorError(
                    f"{PROGRAM} does not answer on port {sync_port} after {_START_S:g} s:\n"
                    + log_tail(self._program.output)
                )

    def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._program is not None:
            self._program.close()
        self._machine.close()


def log_tail(text: str) -> str:
    """Return the last lines of a program's output, for an error message."""
    return "\n".join(text.strip().splitlines()[-8:])


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False

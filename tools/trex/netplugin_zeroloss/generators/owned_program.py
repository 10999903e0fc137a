"""A program, here or over SSH, that is interrupted and then killed when it is closed or this process dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from netplugin_zeroloss.generators import ends_with_owner
from netplugin_zeroloss.machines import Machine
from netplugin_zeroloss.values import GeneratorError

_WRAPPER: Final = Path(ends_with_owner.__file__).read_text()
#: Seconds its wrapper may take to kill it.
_KILLED_S: Final = 5.0
#: Bytes that it may print; an hour of TRex has 10 MB.
_MOST_OUTPUT: Final = 1 << 28
_LAST_LINES: Final = 8


class OwnedProgram:
    """One run of a program and its children; its output is kept. The caller closes it."""

    def __init__(
        self, arguments: Sequence[str], stop_s: float, directory: str = ".", machine: Machine | None = None
    ) -> None:
        """Start it in ``directory`` of ``machine`` (None: this one). It gets ``stop_s`` after SIGINT."""
        self.name = Path(arguments[0]).name
        self._stop_s = stop_s
        self._output: IO[bytes] = tempfile.TemporaryFile()
        # Over SSH, the input of the wrapper closes when the connection does.
        how = ["-IS", "-c", _WRAPPER, "0", str(int(signal.SIGINT)), str(stop_s)]
        python = machine.python if machine else sys.executable
        command = ["sh", "-c", 'cd "$0" && exec "$@"', directory, python, *how, *arguments]
        self._wrapper = subprocess.Popen(
            command if machine is None else machine.command(command),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        #: A pidfd, readable when the program has ended.
        self.ended = os.pidfd_open(self._wrapper.pid)

    @property
    def output(self) -> str:
        """The output so far. Raises: GeneratorError if it is too long."""
        self._output.seek(0)
        text = self._output.read(_MOST_OUTPUT)
        if len(text) == _MOST_OUTPUT:
            raise GeneratorError(f"{self.name} prints more than {_MOST_OUTPUT} bytes")
        return text.decode(errors="replace")

    @property
    def status(self) -> int | None:
        """The exit status, as a shell reports it; None while the program runs."""
        return self._wrapper.poll()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end. Returns whether it has ended."""
        select.select([self.ended], [], [], seconds)
        return self.status is not None

    def interrupt(self) -> None:
        """Let the wrapper send SIGINT; it kills the program if that does not end in time."""
        assert self._wrapper.stdin is not None
        self._wrapper.stdin.close()

    def stop(self) -> None:
        """Interrupt it and wait for its end."""
        self.interrupt()
        if not self.wait(self._stop_s + _KILLED_S):
            self._wrapper.kill()
        self._wrapper.wait()

    def close(self) -> None:
        """Stop the program and release its files. Idempotent."""
        if self._output.closed:
            return
        self.stop()
        os.close(self.ended)
        self._output.close()


def log_tail(text: str) -> str:
    """Return the last lines of a program's output, for an error message."""
    return "\n".join(text.strip().splitlines()[-_LAST_LINES:])

"""Runs a program for as long as standard input is open: it ends with who started it, however that ends.

This file is run by its path, with the program and its arguments behind it, and imports nothing of ours.
When its input closes it interrupts the program, as Ctrl-C does, and after a while kills it with all that it
started. It exits as the program does.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

#: How long a program may take to give back what it has.
STOP_S: Final = 20.0


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status; negative for a signal, as in subprocess."""
    program = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)
    ended = os.pidfd_open(program.pid)
    readable, _, _ = select.select([sys.stdin.fileno(), ended], [], [])
    if ended not in readable:
        _signal_group(program.pid, signal.SIGINT)
        select.select([ended], [], [], STOP_S)
    # A script may be gone and its program not: the group is its own.
    _signal_group(program.pid, signal.SIGKILL)
    return program.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

"""Runs a program until standard input closes, so that it ends with its parent, even if the parent is killed.

This file is run by path, with the program and its arguments as arguments, and imports nothing from
netplugin. When its input closes, it sends SIGINT to the program, and SIGKILL to the process group after
``STOP_S``. Its exit status is that of the program.
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

#: Seconds the program may take to clean up after SIGINT.
STOP_S: Final = 20.0


def run(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit status, negative for a signal as in subprocess."""
    # nohup and shells ignore SIGINT for what they start in the background, which programs inherit; a
    # handler is not inherited. SIGINT of a terminal is for the parent, which then closes the input.
    signal.signal(signal.SIGINT, lambda *_: None)
    program = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)
    ended = os.pidfd_open(program.pid)
    readable, _, _ = select.select([sys.stdin.fileno(), ended], [], [])
    if ended not in readable:
        _signal_group(program.pid, signal.SIGINT)
        select.select([ended], [], [], STOP_S)
    # A wrapper script may have exited before its children: signal the whole group.
    _signal_group(program.pid, signal.SIGKILL)
    return program.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

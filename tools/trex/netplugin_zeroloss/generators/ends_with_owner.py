"""Runs a program until its owner closes a pipe or dies, and then ends it with all its children.

This file is run by path or from its text, and imports nothing from netplugin. Arguments: the descriptor of
the pipe's end, the signal for the process group when the other end is closed (0: none), seconds from then
until SIGKILL, the program and its arguments. Its exit status is that of the program, as a shell reports it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


def run(pipe: int, number: int, stop_s: float, arguments: Sequence[str]) -> int:
    """Run the program; returns its exit status, negative for a signal as in subprocess."""
    # nohup and shells ignore SIGINT for what they start in the background, which programs inherit; a
    # handler is not inherited. SIGINT of a terminal is for the parent, which then closes the pipe.
    signal.signal(signal.SIGINT, lambda *_: None)
    stdin = subprocess.DEVNULL if pipe == 0 else None
    try:
        program = subprocess.Popen(arguments, stdin=stdin, start_new_session=True)
    except OSError as error:
        sys.exit(f"{arguments[0]}: {error.strerror}")
    # The program alone holds its streams: they are closed when it closes them.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in {0, 1, 2} - {pipe}:
        os.dup2(null, stream)
    ended = os.pidfd_open(program.pid)
    readable, _, _ = select.select([pipe, ended], [], [])
    if ended not in readable:
        if number:
            _signal_group(program.pid, number)
        select.select([ended], [], [], stop_s)
    # A wrapper script may have exited before its children: signal the whole group.
    _signal_group(program.pid, signal.SIGKILL)
    return program.wait()


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    status = run(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    sys.exit(status if status >= 0 else 128 - status)

"""The heartbeat of a guest: it tells a guest whose clock or CPUs stand from a test that takes its time.

In the guest a process of its own writes the clock that it sees, once a second, to a serial port that
serves nothing else. Serial, because that needs no more of the guest than its CPUs and their timer.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import NoReturn

DEVICE = Path("/dev/ttyS1")
BEAT_S = 1.0
SILENCE_S = 30.0
"""A guest that is silent for so long while its watcher watches is taken to stand."""


def start_beating() -> None:
    """In the guest: start the process that beats for as long as the guest runs."""
    if os.fork() == 0:
        _beat()


def _beat() -> NoReturn:
    try:
        port = os.open(DEVICE, os.O_WRONLY | os.O_NOCTTY)
        while True:
            os.write(port, b"%.1f\n" % time.clock_gettime(time.CLOCK_BOOTTIME))
            time.sleep(BEAT_S)
    finally:
        os._exit(1)


class Pulse:
    """The outside's end of the heartbeat."""

    def __init__(self, channel: socket.socket, silence_s: float = SILENCE_S) -> None:
        self.channel = channel
        self.clock = ""
        """The last heartbeat: the guest's time since it booted, in seconds."""
        self._silence_s = silence_s
        self._silent_s: float | None = None
        self._received = b""

    @property
    def stands(self) -> bool:
        return self._silent_s is not None and self._silent_s >= self._silence_s

    def waited(self, asked_s: float, took_s: float) -> None:
        """A wait without output. As long as was asked counts: for what it took beyond
        that the watcher itself had no CPU, and the guest may not have had one either.
        """
        if self._silent_s is not None:
            self._silent_s += min(asked_s, took_s)

    def alive(self) -> None:
        """There was output, on whatever channel."""
        if self._silent_s is not None:
            self._silent_s = 0.0

    def receive(self) -> bool:
        """Read what has come; false if there is no more to come, as QEMU has ended."""
        try:
            more = self.channel.recv(1 << 16)
        except ConnectionResetError:
            more = b""
        *lines, self._received = (self._received + more).split(b"\n")
        if lines:
            self.clock = lines[-1].decode(errors="replace").strip()
            self._silent_s = 0.0  # from the first beat on: before it the guest boots
        return bool(more)

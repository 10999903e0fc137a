"""Locks on what one agent at a time may work at: names of UNIX sockets in a network namespace.

An abstract name (unix(7)) is of its network namespace, is one socket's at a time, and is free when
the process that bound it has ended, however it ended. Nobody speaks on these sockets: they listen
because the kernel tells who listens (``SO_PEERCRED``).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from netplugin.backend import Usability
from netplugin.errors import HostError

LOG = logging.getLogger(__name__)
_PREFIX = "\0netplugin/"
_CREDENTIALS = struct.Struct("iII")  # struct ucred in include/linux/socket.h: pid, uid, gid
# Who asks who we are waits in the queue until ``take`` is called again.
_QUEUE = 128


@dataclass(frozen=True)
class Holder:
    """The process that has a lock. ``pid`` is 0 if it is of another PID namespace; ``uid`` is None if
    the kernel does not tell who it is (it does not listen)."""

    pid: int = 0
    uid: int | None = None

    def __str__(self) -> str:
        if self.uid is None:
            return "a process that does not say who it is"
        if not self.pid:
            return f"a process of another PID namespace (user {self.uid})"
        return f"process {self.pid} ({_program(self.pid)}, user {self.uid})"

    @property
    def fix(self) -> str:
        """How to end it."""
        if self.uid is None:
            return "find it with: ss -xap | grep @netplugin/"
        if self.uid not in (0, os.geteuid()):
            return (
                f"it is no agent: end it (kill {self.pid})"
                if self.pid
                else "end it: it is no agent"
            )
        return "end that agent, and this one goes on"


class Locks:
    """Those of one process. What was taken stays taken until ``close``. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[str, socket.socket] = {}

    def hold(self, name: str, what: str, instead: str) -> Usability:
        """Take the lock of that name, of ``what``; the answer is whether it is ours.

        ``instead`` is what can be done where another agent is to keep it.
        """
        try:
            holder = self.take(name)
        except HostError as refused:
            return Usability.without(refused)
        if holder is None:
            return Usability(True)
        reason = f"{holder} has {what}, where one agent at a time may work"
        return Usability(False, reason, f"{holder.fix}; or {instead}", "lock")

    def take(self, name: str) -> Holder | None:
        """None: the lock is ours, from now on or since before. Otherwise who has it.

        Raises: HostError.
        """
        with self._lock:
            mine = self._taken.get(name)
            if mine is not None:
                _let_askers_go(mine)
                return None
            fresh: socket.socket | None = None
            try:
                fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                fresh.bind(_PREFIX + name)
                fresh.listen(_QUEUE)
            except OSError as refused:
                if fresh is not None:
                    fresh.close()
                if refused.errno != errno.EADDRINUSE:
                    raise HostError(
                        f"the lock {name}: {refused.strerror}", step="lock"
                    ) from refused
                return _holder(_PREFIX + name)
            LOG.info("the lock %s is ours", name)
            self._taken[name] = fresh
            return None

    def close(self) -> None:
        with self._lock:
            for mine in self._taken.values():
                mine.close()
            self._taken.clear()


class NoLocks(Locks):
    """For a model of a host, which has no other agents."""

    def take(self, name: str) -> Holder | None:
        return None


def _holder(name: str) -> Holder:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asker:
            asker.connect(name)
            told = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        # It does not listen, its queue is full, it has ended just now, or no descriptor is free here.
        return Holder()
    pid, uid, _ = _CREDENTIALS.unpack(told)
    return Holder(pid, uid)


def _let_askers_go(mine: socket.socket) -> None:
    """Whoever asked knows by now: the queue is for others."""
    while True:
        try:
            asker, _ = mine.accept()
        except OSError:
            return
        asker.close()


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "it has ended"

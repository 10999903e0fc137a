"""Locks that exclude other agents in the same network namespace, as abstract UNIX socket names.

An abstract name (unix(7)) belongs to its network namespace, can be bound by one socket at a time,
and is free as soon as the process that bound it has ended. No data is exchanged on these sockets.
They listen only so that the kernel reports the owner to others (``SO_PEERCRED``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from netplugin.api.errors import HostError
from netplugin.host.usability import Usability

LOG = logging.getLogger(__name__)
_PREFIX = "\0netplugin/"
_CREDENTIALS = struct.Struct("iII")  # struct ucred in include/linux/socket.h: pid, uid, gid
# Connections of processes that ask for the holder stay in this queue until the next ``take``.
_QUEUE = 128


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    ``pid`` is 0 for a process of another PID namespace. ``uid`` is None if the kernel does not
    report the owner, because the socket does not listen.
    """

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
        """How the operator can free the lock."""
        if self.uid is None:
            return "find it with: ss -xap | grep @netplugin/"
        if self.uid not in (0, os.geteuid()):
            return f"it is no agent: end it (kill {self.pid})" if self.pid else "end it: it is no agent"
        return "end that agent, and this one goes on"


class Locks:
    """The locks of one process, held until ``close``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[str, socket.socket] = {}

    def hold(self, name: str, what: str, instead: str) -> Usability:
        """Take the lock ``name``, which protects ``what``; return whether it is ours.

        ``instead`` is the alternative to offer the operator if another agent is to keep the lock.
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
        """Take the lock. Returns None if it is ours (now or already), otherwise its holder.

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
                    raise HostError(f"the lock {name}: {refused.strerror}", step="lock") from refused
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
    """For a simulated host, which has no other agents."""

    def take(self, name: str) -> Holder | None:
        return None


def _holder(name: str) -> Holder:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asker:
            asker.connect(name)
            credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        # It does not listen, its queue is full, it has just ended, or we are out of file descriptors.
        return Holder()
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return Holder(pid, uid)


def _let_askers_go(mine: socket.socket) -> None:
    """Empty the queue: whoever connected has the credentials by now."""
    with contextlib.suppress(OSError):
        while True:
            mine.accept()[0].close()


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "it has ended"

"""A listener for kernel events: a thread that reports changes by others and skips our own."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from pyroute2.netlink import NETLINK_ADD_MEMBERSHIP, SOL_NETLINK

from netplugin.host.cbpf import BpfProgram
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake


class KernelEventListener(ABC):
    """Reads event sockets of the kernel until ``close``.

    Our own changes cause events too, and the kernel queues them before the call returns. Make a change within
    ``suppress_own_events``: events queued at its end are our own, as far as ``decode`` attributes them to us.
    """

    def __init__(
        self,
        name: str,
        wake: Callable[[Wake], None],
        sources: Iterable[socket.socket],
        supervisor: Supervisor,
        period_s: float | None = None,
    ) -> None:
        """``period_s``: how long no event may come until ``decode`` is called all the same."""
        self._name = name
        self._timeout_ms = None if period_s is None else period_s * 1000
        self._wake = wake
        self._sources = tuple(sources)
        self._supervisor = supervisor
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = supervisor.thread(name, self._run, self._stopped)

    @abstractmethod
    def decode(self, own: frozenset[str] | None) -> Iterable[Wake]:
        """Decode the queued events. ``own``: names of what we have just changed (None: nothing)."""

    @contextlib.contextmanager
    def suppress_own_events(self, names: frozenset[str]) -> Iterator[None]:
        """Suppress the events of our changes to ``names``."""
        with self._lock:
            self._receive(None)
            try:
                yield
            finally:
                self._receive(names)

    def close(self) -> None:
        self._stopped.set()
        self._stop_writer.send(b"x")
        self._thread.join(timeout=5)
        for end in (*self._sources, self._stop_reader, self._stop_writer):
            end.close()

    def _run(self) -> None:
        # Not select(): it accepts no descriptor above 1,023.
        poll = select.poll()
        for end in (*self._sources, self._stop_reader):
            poll.register(end, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(self._timeout_ms)}
            if self._stop_reader.fileno() in ready:
                return
            with self._lock:
                try:
                    self._tell(self.decode(None))
                except Exception:
                    self._lost()
                    raise

    def _receive(self, own: frozenset[str] | None) -> None:
        """Read the queue before or after a change of ours; an error here must not fail the change."""
        try:
            self._tell(self.decode(own))
        except Exception as error:
            self._supervisor.failed(self._name, error)
            self._lost()

    def _lost(self) -> None:
        """Events were read but not reported, so request a full check."""
        self._wake(Wake(f"{self._name} could not read the kernel's events"))

    def _tell(self, news: Iterable[Wake]) -> None:
        for why in dict.fromkeys(news):
            self._wake(why)


def subscribed(protocol: int, *groups: int, only: BpfProgram | None = None) -> socket.socket:
    """Return a socket for the events of these multicast groups. ``only``: what the kernel lets through.

    Raises: OSError if the kernel refuses it.
    """
    events = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    if only is not None:
        only.attach(events)
    events.bind((0, 0))
    for group in groups:
        events.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
    return events


def queued(source: socket.socket) -> Iterator[bytes]:
    """Yield each queued datagram; an empty one if the kernel had to drop some."""
    while True:
        try:
            yield source.recv(1 << 17, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as lost:
            if lost.errno != errno.ENOBUFS:
                raise
            yield b""

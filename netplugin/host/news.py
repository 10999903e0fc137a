"""News of the kernel: a thread that hears of what others change, and passes over what we change."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from netplugin.backend import Wake
from netplugin.host.supervisor import Supervisor


class News(ABC):
    """Reads sockets that the kernel sends news to; ``close`` ends it.

    What we do ourselves makes news too, and the kernel queues it before the call returns. So a
    change is made within ``quiet``: what is queued at its end is our own, if ``of`` takes it so.
    """

    def __init__(
        self,
        name: str,
        wake: Callable[[Wake], None],
        sources: Iterable[socket.socket],
        supervisor: Supervisor,
    ) -> None:
        self._name = name
        self._wake = wake
        self._sources = tuple(sources)
        self._supervisor = supervisor
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = supervisor.thread(name, self._run, self._stopped)

    @abstractmethod
    def of(self, own: frozenset[str] | None) -> Iterable[Wake]:
        """What is queued. ``own``: we have just changed these, by name (None: nothing)."""

    @contextlib.contextmanager
    def quiet(self, names: frozenset[str]) -> Iterator[None]:
        """While we change these."""
        with self._lock:
            self._hear(None)
            try:
                yield
            finally:
                self._hear(names)

    def close(self) -> None:
        self._stopped.set()
        self._stop_writer.send(b"x")
        self._thread.join(timeout=5)
        for end in (*self._sources, self._stop_reader, self._stop_writer):
            end.close()

    def _run(self) -> None:
        # Not select(): it takes no descriptor above 1,023.
        poll = select.poll()
        for end in (*self._sources, self._stop_reader):
            poll.register(end, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._stop_reader.fileno() in ready:
                return
            with self._lock:
                try:
                    self._tell(self.of(None))
                except Exception:
                    self._lost()
                    raise

    def _hear(self, own: frozenset[str] | None) -> None:
        """What is queued, around a change of ours: it must not fail because news cannot be read."""
        try:
            self._tell(self.of(own))
        except Exception as error:
            self._supervisor.failed(self._name, error)
            self._lost()

    def _lost(self) -> None:
        """Some of what was queued is read and not told: only a look at everything finds it."""
        self._wake(Wake(f"{self._name} could not read what the kernel told"))

    def _tell(self, news: Iterable[Wake]) -> None:
        for why in dict.fromkeys(news):
            self._wake(why)


def queued(source: socket.socket) -> Iterator[bytes]:
    """Each datagram that waits; an empty one if the kernel had to drop some."""
    while True:
        try:
            yield source.recv(1 << 17, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as lost:
            if lost.errno != errno.ENOBUFS:
                raise
            yield b""

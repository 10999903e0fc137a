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


class News(ABC):
    """Reads sockets that the kernel sends news to; ``close`` ends it.

    What we do ourselves makes news too, and the kernel queues it before the call returns. So a
    change is made within ``quiet``: what is queued at its end is our own, if ``of`` takes it so.
    """

    def __init__(
        self, name: str, wake: Callable[[Wake], None], sources: Iterable[socket.socket]
    ) -> None:
        self._wake = wake
        self._sources = tuple(sources)
        self._lock = threading.Lock()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def of(self, own: frozenset[str] | None) -> Iterable[Wake]:
        """What is queued. ``own``: we have just changed these, by name (None: nothing)."""

    @contextlib.contextmanager
    def quiet(self, names: frozenset[str]) -> Iterator[None]:
        """While we change these."""
        with self._lock:
            self._tell(self.of(None))
            try:
                yield
            finally:
                self._tell(self.of(names))

    def close(self) -> None:
        self._stop_writer.send(b"x")
        self._thread.join(timeout=5)
        for end in (*self._sources, self._stop_reader, self._stop_writer):
            end.close()

    def _run(self) -> None:
        watched = [*self._sources, self._stop_reader]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._stop_reader in ready:
                return
            with self._lock:
                self._tell(self.of(None))

    def _tell(self, news: Iterable[Wake]) -> None:
        for why in dict.fromkeys(news):
            with contextlib.suppress(Exception):
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

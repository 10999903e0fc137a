"""Reads of the host that a scrape waits for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class SlowReading(Generic[T]):
    """Calls ``read`` in a thread of its own, one at a time: who asks meanwhile waits for the same result.

    A host that does not answer holds up that thread, and nobody for longer than they wait.
    """

    def __init__(self, name: str, read: Callable[[], T]) -> None:
        self._name = name
        self._read = read
        self._lock = threading.Lock()
        self._reading: Future[T] | None = None

    def begin(self) -> Future[T]:
        """The read in progress, or a new one. Raises: RuntimeError if no thread can be created."""
        with self._lock:
            if self._reading is None or self._reading.done():
                reading: Future[T] = Future()
                threading.Thread(target=self._fill, args=(reading,), name=self._name, daemon=True).start()
                self._reading = reading
            return self._reading

    def _fill(self, reading: Future[T]) -> None:
        try:
            reading.set_result(self._read())
        except Exception as wrong:
            reading.set_exception(wrong)

"""Supervision of threads and loops: an error is logged and counted, and the work is restarted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable

LOG = logging.getLogger(__name__)
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 0.1, 30.0


class Supervisor:
    """Runs the threads and loops of one process. Thread-safe.

    Work that raises is restarted with exponential back-off, from 0.1 s up to 30 s. Until then its
    name is in ``reasons``, because what it watches is not watched. A loop starts again at 0.1 s
    after a turn without an error, a thread if it ran for 30 s before the error.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._down: dict[str, str] = {}

    def thread(self, name: str, work: Callable[[], None], stopped: threading.Event) -> threading.Thread:
        """Start a thread that calls ``work`` until it returns, or fails while ``stopped`` is set.

        ``work`` is called again after an error, so it must keep its state outside itself.
        """
        thread = threading.Thread(target=self._keep_up, args=(name, work, stopped), name=name, daemon=True)
        thread.start()
        return thread

    async def every(self, name: str, seconds: float, turn: Callable[[], Awaitable[None]]) -> None:
        """Await ``turn`` at once, and again ``seconds`` after each end, until cancelled."""
        wait_s = _BACKOFF_FIRST_S
        while True:
            try:
                await turn()
            except Exception as error:
                self._fell(name, error)
                await asyncio.sleep(wait_s)
                wait_s = min(_BACKOFF_MOST_S, wait_s * 2)
            else:
                self._is_up(name)
                wait_s = _BACKOFF_FIRST_S
                await asyncio.sleep(seconds)

    def failed(self, name: str, error: BaseException) -> None:
        """Log and count an unexpected error of work that goes on by itself."""
        with self._lock:
            self._failures[name] += 1
        LOG.error("%s failed unexpectedly", name, exc_info=error)

    def failures(self) -> dict[str, int]:
        """The number of unexpected errors, by the name of the thread or loop."""
        with self._lock:
            return dict(self._failures)

    def reasons(self) -> list[str]:
        """The work that is down now, and why."""
        with self._lock:
            return [f"{name} does not go on: {why}" for name, why in sorted(self._down.items())]

    def _keep_up(self, name: str, work: Callable[[], None], stopped: threading.Event) -> None:
        wait_s = _BACKOFF_FIRST_S
        while True:
            started = self._clock()
            try:
                work()
                self._is_up(name)
                return
            except Exception as error:
                self._fell(name, error)
            except BaseException as error:  # SystemExit: the work ends on purpose
                self._fell(name, error)
                return
            if self._clock() - started >= _BACKOFF_MOST_S:
                wait_s = _BACKOFF_FIRST_S
            if stopped.wait(wait_s):
                return
            # Report it as up while it runs. If it cannot work it fails again soon, with a longer back-off.
            self._is_up(name)
            wait_s = min(_BACKOFF_MOST_S, wait_s * 2)

    def _fell(self, name: str, error: BaseException) -> None:
        self.failed(name, error)
        with self._lock:
            self._down[name] = repr(error)

    def _is_up(self, name: str) -> None:
        with self._lock:
            self._down.pop(name, None)

"""Threads for what would hold up the event loop: long computations, and looks at a host that may hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from netplugin.api.errors import OperationTimeout

P = ParamSpec("P")
T = TypeVar("T")


class OffLoop:
    """Threads apart from asyncio's own, which resolve the names of callbacks.

    What waits for a driver or a name server takes no thread from calls that need neither.
    """

    def __init__(self, look_s: float = 5.0, compute_s: float = 30.0) -> None:
        """Seconds for a look and for a computation, their wait for a thread included."""
        self.look_s, self.compute_s = look_s, compute_s
        # Computations hold the interpreter's lock, so more threads are no faster.
        self._compute = ThreadPoolExecutor(2, "compute")
        # A look that hangs keeps its thread. While all do, other looks end at their deadline.
        self._looks = ThreadPoolExecutor(8, "look")

    async def compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a computation, which waits for nothing, in a thread.

        Its input has limits, so that it ends: at the deadline only the caller waits no more.

        Raises: OperationTimeout; what it raises.
        """
        late = OperationTimeout(
            f"the agent has computed for {self.compute_s:g} s",
            step="compute",
            fix="send it again when the host is less busy, or send less at once",
        )
        return await _within(self.compute_s, self._compute, partial(work, *args, **kwargs), late)

    async def look(self, work: Callable[[], T], what: str) -> T:
        """Run what reads the host, such as /sys or netlink. Raises: OperationTimeout; what it raises."""
        late = OperationTimeout(
            f"{what} could not be read within {self.look_s:g} s",
            step="look",
            fix="see in the log of the kernel which device hangs",
        )
        return await _within(self.look_s, self._looks, work, late)

    def close(self) -> None:
        """End the threads without waiting for a look in progress."""
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._looks.shutdown(wait=False, cancel_futures=True)


async def _within(seconds: float, threads: ThreadPoolExecutor, work: Callable[[], T], late: Exception) -> T:
    begun = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        async with asyncio.timeout(seconds):
            return await begun
    except TimeoutError:
        raise late from None

"""Changes of networks: one at a time, on several backends in turn, each call within its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from agents.ports.reconciler import NetworkOutcome, Reconciler
from agents.worker import GRACE_S, BackendWorker, answer
from netplugin.api.errors import NetpluginError, OperationTimeout


class OneAtATime:
    """A failed change restores the state before it, so no other change may come in between."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: the seconds of one change; what fails is undone in ``GRACE_S`` after them."""
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[float]:
        """Wait for the turn of a call. Yields the deadline of its change (``time.monotonic``).

        Raises: OperationTimeout if the turn does not come in time.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise OperationTimeout(
                "other changes of networks took the whole time of the call",
                step="queue",
                fix="send it again",
            ) from None
        try:
            yield deadline
        finally:
            self._lock.release()


async def apply_on(
    workers: Sequence[BackendWorker],
    deadline: float,
    work: Callable[[Reconciler, float], NetworkOutcome],
    *,
    undo: bool = False,
    settle_first: bool = False,
) -> NetworkOutcome:
    """The outcome on all of them. ``work`` gets a reconciler and the time by which it has to end.

    ``deadline`` is that of the change. A backend that is late costs half of the time after it; what
    remains is for ``undo``. ``settle_first``: for what backends share on the host.
    """
    until, grace_s = (deadline + GRACE_S, 0.0) if undo else (deadline, GRACE_S / 2)
    if settle_first and len(workers) > 1:
        await _settle(workers, until)
    whole = NetworkOutcome()
    for worker in workers:
        try:
            part = await answer(
                worker.job(partial(work, worker.reconciler, until), until), until, grace_s=grace_s
            )
        except NetpluginError as error:
            part = NetworkOutcome(False, (error,))
        whole = whole.with_part(part)
    return whole


async def _settle(workers: Sequence[BackendWorker], until: float) -> None:
    """Wait until each worker has ended the work that it is at, which may be with what was stored before.

    Without this, one of them could write the state before a change after another has applied it. A worker
    that does not end in time is no error here.
    """
    for worker in workers:
        with suppress(NetpluginError):  # the change itself is refused too, or comes after the work
            await answer(worker.job(lambda: None, until), until, grace_s=0.0)

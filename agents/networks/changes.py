"""Changes of networks: one at a time, on several backends in turn, each call within its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from agents.ports.reconciler import NetworkOutcome, Reconciler
from agents.worker import GRACE_S, BackendWorker, answer
from netplugin.api.errors import NetpluginError, OperationTimeout


@dataclass(frozen=True)
class Until:
    """The deadline of some work, and when its answer is not awaited any more (``time.monotonic``)."""

    work: float
    answer: float


@dataclass(frozen=True)
class Limits:
    """The time of one call. If the change fails, it is undone in the rest."""

    change: Until
    undo: Until

    @classmethod
    def of(cls, timeout_s: float) -> Limits:
        """``timeout_s``: the seconds of the change. A backend that is late costs half of the rest."""
        change = time.monotonic() + timeout_s
        end = change + GRACE_S
        return cls(Until(change, change + GRACE_S / 2), Until(end, end))


class OneAtATime:
    """A failed change restores the state before it, so no other change may come in between."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Limits]:
        """Wait for the turn of a call. Raises: OperationTimeout if it does not come in time."""
        limits = Limits.of(self._timeout_s)
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
            yield limits
        finally:
            self._lock.release()


async def come_to_rest(workers: Iterable[BackendWorker], until: Until) -> None:
    """Wait until each worker has ended the work that it is at, which may be with what was stored before.

    Backends share what a network has on the host: without this, one of them could write the state before a
    change after another has applied it. A worker that does not end in time is no error here.
    """
    for worker in workers:
        with suppress(NetpluginError):  # the change itself is refused too, or comes after the work
            await answer(worker.job(lambda: None, until.work), until.work, grace_s=0.0)


async def apply_on(
    workers: Iterable[BackendWorker], until: Until, work: Callable[[Reconciler, float], NetworkOutcome]
) -> NetworkOutcome:
    """The outcome on all of them. ``work`` gets a reconciler and the deadline (monotonic, in seconds)."""
    whole = NetworkOutcome()
    for worker in workers:
        try:
            job = worker.job(partial(work, worker.reconciler, until.work), until.work)
            part = await answer(job, until.answer, grace_s=0.0)
        except NetpluginError as error:
            part = NetworkOutcome(False, (error,))
        whole = whole.with_part(part)
    return whole

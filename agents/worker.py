"""The worker thread of a backend: runs port operations in batches, background jobs, and reconciles.

Calls that arrive while a batch is being committed to ovs-vswitchd share the next transaction (group
commit).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from agents.batches import BatchSizes, next_batch
from agents.ports.call import NEXT_TRY_S, Call
from agents.ports.reconciler import Reconciler
from netplugin.api.errors import (
    BackendUnavailable,
    NetpluginError,
    OperationTimeout,
    Overloaded,
    as_host_error,
)
from netplugin.api.models import ReconcileReport
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake

LOG = logging.getLogger(__name__)

#: Retries that are due at once.
_RETRIES = 4
_RETRY_FIRST_S, _RETRY_MOST_S = 0.5, 30.0
_FIRST_LOOK_S = 2.0
GRACE_S = 10.0
# First delay in seconds of a retry that the host requested; it doubles with each retry.
_NEXT_TRY_FIRST_S = 0.05
# After a reconcile that a change of the host triggered, the next one waits for a multiple of its
# duration, up to a limit. Frequent changes, and changes caused by reading, then use a fifth of the
# thread.
_LOOK_GAP, _LOOK_GAP_MOST_S = 4.0, 5.0

Work = Callable[[], None]
T = TypeVar("T")


class Turn(Enum):
    """The kinds of work, which take turns when due."""

    CALLS = 0
    JOB = 1
    LOOK = 2


@dataclass(frozen=True)
class _Job:
    future: Future[Any]
    work: Callable[[], Any]
    deadline: float


@dataclass
class _Retry:
    """A call to be retried at ``due`` (``time.monotonic``); ``pause_s`` is the next delay."""

    call: Call
    due: float
    pause_s: float = _NEXT_TRY_FIRST_S


class BackendWorker:
    """Runs the operations of a backend in order, with reconciles in between. Call ``start`` before use."""

    def __init__(
        self,
        reconciler: Reconciler,
        supervisor: Supervisor,
        *,
        batch_size: int,
        interval_s: float,
        max_waiting: int,
        max_jobs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reconciler = reconciler
        self.ports = reconciler.ports
        reconciler.guests.later = self._do_later
        self._clock = clock
        self._sizes = BatchSizes.first(batch_size)
        self._interval_s = interval_s
        self._max_waiting = max_waiting
        self._max_jobs = max_jobs
        self._wake = threading.Condition()
        self._waiting: list[Call] = []
        self._open: dict[str, list[Call]] = {}  # by port: queued or in progress
        self._retries: dict[str, _Retry] = {}  # by port; what waits for such a port is behind its retry
        self._resumed = False  # whether the last batch consisted of retries
        self._jobs: deque[_Job] = deque()
        self._last_turn = Turn.LOOK
        self._look_at: set[str] = set()
        self._look_at_all = False
        self._no_look_before = 0.0
        self._next_look = self._clock() + interval_s
        self._retry_s = _RETRY_FIRST_S
        # The backend reports when the host can be observed; this is the fallback.
        self._retry_at: float | None = self._clock() + _FIRST_LOOK_S
        self._stopped = False
        #: When the current work of the thread started.
        self._begun: float | None = None
        self.looked_once = threading.Event()
        self._supervisor = supervisor
        self.name = self.ports.name
        self._name = f"worker-{self.name}"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.ports.backend.watch(self.wake)
        self._thread = self._supervisor.thread(self._name, self._run, self._ended)

    def refuse(self) -> None:
        """Accept no more work and refuse queued work; work in progress continues."""
        with self._wake:
            self._stopped = True
            waiting, jobs = self._waiting, list(self._jobs)
            self._waiting = []
            self._jobs.clear()
            self._wake.notify()
        self._ended.set()
        for call in waiting:
            _refuse(call.future, call.port_id)
        for job in jobs:
            _refuse(job.future)

    def stop(self, until: float) -> bool:
        """``refuse``, and wait for the batch in progress until the deadline (``time.monotonic``).

        Returns: whether the thread has ended. If not, it may still write to the host.
        """
        self.refuse()
        if self._thread is None:
            return True
        self._thread.join(timeout=max(0.0, until - self._clock()))
        if self._thread.is_alive():
            LOG.warning("%s is still at work; the next start goes on with it", self._name)
            return False
        return True

    def stuck_s(self) -> float:
        """Seconds since the current work started; infinite if the thread has died."""
        begun = self._begun
        if self._thread is None or not self._thread.is_alive():
            return 0.0 if self._stopped else float("inf")
        return 0.0 if begun is None else self._clock() - begun

    def submit(self, *calls: Call) -> None:
        """Queue calls. Raises: Overloaded, BackendUnavailable; then none of them is queued."""
        with self._wake:
            if self._stopped:
                raise BackendUnavailable("the agent stops", step="queue")
            if len(self._waiting) + len(calls) > self._max_waiting:
                raise Overloaded(
                    f"{len(self._waiting)} operations are waiting",
                    step="queue",
                    fix="try again later, or raise [api] max_waiting",
                )
            self._waiting += calls
            for call in calls:
                self._open.setdefault(call.port_id, []).append(call)
            self._wake.notify()

    def is_at(self, port_id: str) -> bool:
        """Whether a call for this port is queued or in progress.

        One that was answered is neither, though its batch may go on: its caller may ask for more at
        once. A caller who does not wait any more has cancelled no call in progress.
        """
        calls = tuple(self._open.get(port_id, ()))
        return any(not call.future.done() or call.future.cancelled() for call in calls)

    def reconcile(self, deadline: float, *, dry_run: bool, remove_orphans: bool) -> Future[ReconcileReport]:
        """Queue a reconcile of the whole host as a background job."""
        return self.job(
            lambda: self.reconciler.check(
                dry_run=dry_run, remove_orphans=remove_orphans, batch_size=self._sizes.plugs
            ),
            deadline,
        )

    def job(self, work: Callable[[], T], deadline: float) -> Future[T]:
        """Queue a background job.

        It is skipped if it cannot start before ``deadline`` (monotonic), or if its future was
        cancelled.

        Raises: Overloaded, BackendUnavailable. The future also raises OperationTimeout and what
        ``work`` raises.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._stopped:
                raise BackendUnavailable("the agent stops", step="queue")
            if len(self._jobs) >= self._max_jobs:
                raise Overloaded(
                    f"{len(self._jobs)} requests wait to read the host",
                    step="queue",
                    fix="try again later, or raise [api] max_waiting_reads",
                )
            self._jobs.append(_Job(future, work, deadline))
            self._wake.notify()
        return future

    def _do_later(self, work: Work, within_s: float) -> None:
        """Hand work back to the thread; if its turn does not come in time, it is left out."""
        with suppress(NetpluginError):  # the agent stops, or has too much to do for a repetition
            self.job(work, self._clock() + within_s)

    def wake(self, why: Wake) -> None:
        """Schedule a reconcile because the host has changed (callable from any thread)."""
        with self._wake:
            if why.ports is None:
                LOG.info("%s: %s", self.name, why.reason)
                self._look_at_all = True
                self._retry_s = _RETRY_FIRST_S
            else:
                self._look_at |= why.ports
            self._wake.notify()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            with self._wake:
                while not self._stopped and (idle_s := self.idle_s()):
                    self._wake.wait(idle_s)
            self.turn()
        self._resume(list(self._retries.values()), last=True)

    def turn(self) -> bool:
        """Do the work that is due next, as the thread does. Returns whether there was any."""
        with self._wake:
            now = self._clock()
            if self._stopped or not self._due(now):
                return False
            self._begun = now
            work = self._next(now)
        try:
            work()
        except NetpluginError as error:
            LOG.warning("%s: %s", self.name, error)
            self._retry_later()
        except Exception as error:
            self._supervisor.failed(self._name, error)
            self._retry_later()
        finally:
            self._begun = None
        return True

    def idle_s(self) -> float:
        """Seconds until work is due, if no other is queued before that."""
        now = self._clock()
        if self._due(now):
            return 0.0
        due = min((retry.due for retry in self._retries.values()), default=math.inf)
        return min(due, self._next_look_at()) - now

    def _due(self, now: float) -> bool:
        return any(self._is_due(turn, now) for turn in Turn)

    def _is_due(self, turn: Turn, now: float) -> bool:
        if turn is Turn.CALLS:
            return bool(self._ready() or self._due_again(now))
        if turn is Turn.JOB:
            return bool(self._jobs)
        return now >= self._next_look_at()

    def _ready(self) -> list[Call]:
        """What waits for no retry on the same port."""
        if not self._retries:
            return self._waiting
        return [call for call in self._waiting if call.port_id not in self._retries]

    def _due_again(self, now: float) -> list[_Retry]:
        """The retries that have been due for longest.

        Only a few at a time, because a driver may block before it fails (ice_wait_on_vf_reset: 0.8
        s per VF).
        """
        due = [retry for retry in self._retries.values() if retry.due <= now]
        return sorted(due, key=lambda retry: retry.due)[:_RETRIES]

    def _next_look_at(self) -> float:
        by_itself = self._look_at_all_at()
        reported = self._look_at or self._look_at_all
        return min(by_itself, self._no_look_before) if reported else by_itself

    def _look_at_all_at(self) -> float:
        return min(self._next_look, self._next_look if self._retry_at is None else self._retry_at)

    def _next(self, now: float) -> Work:
        """Select the next work; calls, jobs and reconciles rotate.

        None of them waits for more than one of each other kind.
        """
        turns = sorted(Turn, key=lambda turn: (turn.value - self._last_turn.value - 1) % len(Turn))
        turn = next(turn for turn in turns if self._is_due(turn, now))
        self._last_turn = turn
        if turn is Turn.CALLS:
            due = self._due_again(now)
            self._resumed = bool(due) and not (self._resumed and self._ready())
            if self._resumed:
                return lambda: self._resume(due)
            batch = self._take_batch()
            return lambda: self._serve(batch)
        if turn is Turn.JOB:
            job = self._jobs.popleft()
            return lambda: self._run_job(job)
        if self._look_at and not self._look_at_all and now < self._look_at_all_at():
            ports, self._look_at = frozenset(self._look_at), set()
            return lambda: self._look(ports)
        self._look_at_all = False
        self._look_at.clear()
        self._next_look = now + self._interval_s
        self._retry_at = None
        return lambda: self._look(None)

    def _run_job(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return  # the caller has disconnected
        if self._clock() >= job.deadline:
            job.future.set_exception(
                OperationTimeout("the request's turn did not come in time", step="queue")
            )
            return
        try:
            job.future.set_result(job.work())
        except Exception as error:
            if not isinstance(error, NetpluginError):
                self._supervisor.failed(self._name, error)
            job.future.set_exception(as_host_error(error, "agent"))

    def _take_batch(self) -> list[Call]:
        batch = next_batch(self._ready(), self._sizes, self._clock())
        taken = set(map(id, batch))
        self._waiting = [call for call in self._waiting if id(call) not in taken]
        return batch

    def _serve(self, batch: list[Call]) -> None:
        start = self._clock()
        self._carry_out(batch, lambda: self.reconciler.plug.serve(batch))
        self._sizes = self._sizes.after(batch, self._clock() - start)

    def _resume(self, due: list[_Retry], *, last: bool = False) -> None:
        """Retry calls separately from new ones, because their deadlines are nearer."""
        batch = [retry.call for retry in due]
        if batch:
            self._carry_out(batch, lambda: self.reconciler.plug.resume(batch, last=last))

    def _carry_out(self, batch: list[Call], work: Callable[[], list[Call]]) -> None:
        """Run a batch. The calls that ``work`` returns are retried, the others are answered."""
        again: list[Call] = []
        try:
            again = work()
        except Exception as failed:
            wrong = as_host_error(failed, "agent")
            for call in batch:
                if not call.future.done():
                    call.refuse(wrong)
            raise
        finally:
            with self._wake:
                for call in batch:
                    if any(call is each for each in again):
                        self._retry(call)
                    else:
                        self._close(call)
        if self.reconciler.unsettled():
            self._retry_later()

    def _retry(self, call: Call) -> None:
        now = self._clock()
        retry = self._retries.setdefault(call.port_id, _Retry(call, now))
        retry.due = now + retry.pause_s
        retry.pause_s = min(2 * retry.pause_s, NEXT_TRY_S)

    def _close(self, call: Call) -> None:
        self._retries.pop(call.port_id, None)
        self._open[call.port_id].remove(call)
        if not self._open[call.port_id]:
            del self._open[call.port_id]

    def _look(self, ports: frozenset[str] | None) -> None:
        begun = self._clock()
        try:
            self.reconciler.check(ports, batch_size=self._sizes.plugs)
        finally:
            now = self._clock()
            self._no_look_before = now + min(_LOOK_GAP_MOST_S, _LOOK_GAP * (now - begun))
        if ports is None:
            self.looked_once.set()
        if self.reconciler.unsettled():
            self._retry_later()
        elif ports is None:
            self._retry_s = _RETRY_FIRST_S

    def _retry_later(self) -> None:
        with self._wake:
            if self._retry_at is not None:
                return  # failing calls must not postpone the retry
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(_RETRY_MOST_S, self._retry_s * 2)


async def answer(
    future: Future[T], deadline: float, port_id: str | None = None, grace_s: float = GRACE_S
) -> T:
    """Await the result of a worker in the event loop; cancelling the caller cancels queued work.

    Raises: OperationTimeout ``grace_s`` after the deadline, to leave time for cleaning up.
    """
    left = deadline + grace_s - time.monotonic()
    try:
        # Not wait_for: its own future takes the event loop another turn.
        async with asyncio.timeout(max(0.0, left)):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise OperationTimeout(
            "the host did not answer in time; the agent goes on to put it right",
            step="wait",
            port_id=port_id,
        ) from None


async def ask(worker: BackendWorker, timeout_s: float, work: Callable[[], T]) -> T:
    """Run a background job in the worker and await its result. Raises: as ``job`` and its future."""
    deadline = time.monotonic() + timeout_s
    return await answer(worker.job(work, deadline), deadline)


def _refuse(future: Future[Any], port_id: str | None = None) -> None:
    """Fail a future that will not be served, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_exception(BackendUnavailable("the agent stops", step="queue", port_id=port_id))

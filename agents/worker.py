"""The worker thread of a backend: runs port operations in batches, background jobs, and reconciles.

Calls that arrive while a batch is being committed to ovs-vswitchd share the next transaction (group
commit).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from agents.ports.call import Call
from agents.ports.reconciler import Reconciler
from agents.schedule import CallBatch, Job, Look, Schedule
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
GRACE_S = 10.0

T = TypeVar("T")


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
        self._max_waiting = max_waiting
        self._max_jobs = max_jobs
        self._wake = threading.Condition()
        self._schedule = Schedule(batch_size, interval_s, clock())
        self._open: dict[str, list[Call]] = {}  # by port: queued or in progress
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
            waiting, jobs = self._schedule.waiting, list(self._schedule.jobs)
            self._schedule.waiting = []
            self._schedule.jobs.clear()
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
            waiting = len(self._schedule.waiting)
            if waiting + len(calls) > self._max_waiting:
                raise Overloaded(
                    f"{waiting} operations are waiting",
                    step="queue",
                    fix="try again later, or raise [api] max_waiting",
                )
            self._schedule.waiting += calls
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
                dry_run=dry_run, remove_orphans=remove_orphans, batch_size=self._schedule.sizes.plugs
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
            if len(self._schedule.jobs) >= self._max_jobs:
                raise Overloaded(
                    f"{len(self._schedule.jobs)} requests wait to read the host",
                    step="queue",
                    fix="try again later, or raise [api] max_waiting_reads",
                )
            self._schedule.jobs.append(Job(future, work, deadline))
            self._wake.notify()
        return future

    def _do_later(self, work: Callable[[], None], within_s: float) -> None:
        """Hand work back to the thread; if its turn does not come in time, it is left out."""
        with suppress(NetpluginError):  # the agent stops, or has too much to do for a repetition
            self.job(work, self._clock() + within_s)

    def wake(self, why: Wake) -> None:
        """Schedule a reconcile because the host has changed (callable from any thread)."""
        with self._wake:
            if why.ports is None:
                LOG.info("%s: %s", self.name, why.reason)
            self._schedule.looks.wake(why.ports)
            self._wake.notify()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            with self._wake:
                while not self._stopped and (idle_s := self.idle_s()):
                    self._wake.wait(idle_s)
            self.turn()
        if last := self._schedule.retried():
            self._run_calls(last, partial(self.reconciler.plug.resume, last, last=True))

    def idle_s(self) -> float:
        """Seconds until work is due, if no other is queued before that."""
        return self._schedule.idle_s(self._clock())

    def turn(self) -> bool:
        """Do the work that is due next, as the thread does. Returns whether there was any."""
        with self._wake:
            now = self._clock()
            work = None if self._stopped else self._schedule.next(now)
            if work is None:
                return False
            self._begun = now
        try:
            if isinstance(work, Job):
                self._run_job(work)
            elif isinstance(work, Look):
                self._look(work.ports)
            else:
                self._serve(work)
        except NetpluginError as error:
            LOG.warning("%s: %s", self.name, error)
            self._look_again()
        except Exception as error:
            self._supervisor.failed(self._name, error)
            self._look_again()
        finally:
            self._begun = None
        return True

    def _run_job(self, job: Job) -> None:
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

    def _serve(self, batch: CallBatch) -> None:
        start, plug = self._clock(), self.reconciler.plug
        self._run_calls(batch.calls, partial(plug.resume if batch.is_retry else plug.serve, batch.calls))
        if not batch.is_retry:
            self._schedule.sizes = self._schedule.sizes.after(batch.calls, self._clock() - start)

    def _run_calls(self, batch: list[Call], work: Callable[[], list[Call]]) -> None:
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
                        self._schedule.retry(call, self._clock())
                    else:
                        self._close(call)
        if self.reconciler.unsettled():
            self._look_again()

    def _close(self, call: Call) -> None:
        self._schedule.end_retry(call)
        self._open[call.port_id].remove(call)
        if not self._open[call.port_id]:
            del self._open[call.port_id]

    def _look(self, ports: frozenset[str] | None) -> None:
        begun = self._clock()
        try:
            self.reconciler.check(ports, batch_size=self._schedule.sizes.plugs)
        finally:
            with self._wake:
                self._schedule.looks.ended(begun, self._clock())
        if ports is None:
            self.looked_once.set()
        if self.reconciler.unsettled():
            self._look_again()
        elif ports is None:
            with self._wake:
                self._schedule.looks.reset_delay()

    def _look_again(self) -> None:
        with self._wake:
            self._schedule.looks.look_again(self._clock())


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

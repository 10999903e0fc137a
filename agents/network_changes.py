"""Apply a change of a network on several backends, one after the other, within one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from agents.ports.drift import NetworkOutcome
from agents.ports.reconciler import Reconciler
from agents.worker import BackendWorker, answer
from netplugin.api.errors import NetpluginError


async def apply_on(
    workers: Iterable[BackendWorker],
    timeout_s: float,
    work: Callable[[Reconciler, float], NetworkOutcome],
) -> NetworkOutcome:
    """The outcome on all of them. ``work`` gets a reconciler and the deadline (monotonic, in seconds)."""
    deadline = time.monotonic() + timeout_s
    whole = NetworkOutcome()
    for worker in workers:
        try:
            job = worker.job(partial(work, worker.reconciler, deadline), deadline)
            part = await answer(job, deadline)
        except NetpluginError as error:
            part = NetworkOutcome(False, (error,))
        whole = whole.with_part(part)
    return whole

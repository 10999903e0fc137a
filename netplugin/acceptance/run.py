"""Runs a search: passes its trial requests to a generator and returns the measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from netplugin.acceptance.generators.contract import Generator
from netplugin.acceptance.search import Found, search
from netplugin.acceptance.trials import Asking, SearchPlan, T
from netplugin.acceptance.values import Measurement, TrialRequest

#: Called after every trial.
Watcher = Callable[[TrialRequest, Measurement], None]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished search and its real time in seconds."""

    found: Found
    wall_s: float


def carry_out(asking: Asking[T], generator: Generator, watch: Watcher | None = None) -> T:
    """Run trials until the search returns; returns its result. Raises: GeneratorError."""
    try:
        request = next(asking)
        while True:
            measured = generator.run(request)
            if watch is not None:
                watch(request, measured)
            request = asking.send(measured)
    except StopIteration as end:
        result: T = end.value
        return result


def run_search(plan: SearchPlan, generator: Generator, watch: Watcher | None = None) -> Run:
    """Search for all goals of a plan. Raises: GeneratorError."""
    begun = time.monotonic()
    found = carry_out(search(plan), generator, watch)
    return Run(found, time.monotonic() - begun)

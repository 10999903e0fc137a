"""Trials and searches in a line: what the tests of the acceptance library are written with."""

from __future__ import annotations

import random
from typing import Any

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.generators.devices import DeviceSpec
from netplugin_zeroloss.generators.sim import SimFamily, SimGenerator, sim_generator
from netplugin_zeroloss.search.search import SearchResult, carry_out, search
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import Measurement, TrialRequest, headline

LINE_PPS = 14.88e6


def plan(precision: float = 0.005, line: float = LINE_PPS, **options: Any) -> SearchPlan:
    return SearchPlan((headline(precision=precision),), line, **options)


def run_search(plan: SearchPlan, generator: Generator) -> SearchResult:
    return carry_out(search(plan), generator)


def search_family(name: str, seed: object, **options: Any) -> SearchResult:
    return run_search(plan(**options), sim_generator(name, str(seed)))


def hard_cap(capacity: float, ring: float = 1024, can_abort: bool = True) -> SimGenerator:
    """A device with a sharp limit, and nothing random about it."""
    spec = DeviceSpec(capacity_pps=capacity, ring_packets=ring)
    return SimGenerator(SimFamily("cap", (spec,)), random.Random(0), can_abort)


def traffic(found: SearchResult) -> float:
    return sum(trial.traffic_s for trial in found.trials)


def asked(rate: float = 1e6, duration: float = 60.0, **options: Any) -> TrialRequest:
    return TrialRequest(rate, duration, **options)


def measured(tx: int = 60_000_000, lost: int = 0, elapsed: float = 60.0, **rest: Any) -> Measurement:
    return Measurement(tx, tx - lost, elapsed, **rest)

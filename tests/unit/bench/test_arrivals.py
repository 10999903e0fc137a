"""Calls of an open loop: when they are made, and what is counted as their latency."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from tests.bench.arrivals import Call, outcome, poisson


def test_so_many_calls_in_the_time_at_irregular_gaps() -> None:
    times = poisson(50, 20, seed=1)
    assert len(times) == 1000 and times == sorted(times)
    assert 0 < times[0] and times[-1] < 20
    gaps = [b - a for a, b in pairwise(times)]
    # Exponential gaps: their deviation is their mean.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.15)
    assert poisson(50, 20, seed=1) == times != poisson(50, 20, seed=2)


def test_a_call_that_waited_for_a_connection_has_waited() -> None:
    """An agent that stops for a second delays all calls of that second, not only the one it has."""
    stalled = [Call(n / 10, 1.0, 1.0 + n / 1000, "ok") for n in range(10)]
    found = outcome(stalled)
    assert found.latencies_ms[0] == pytest.approx(1000)
    assert sum(ms >= 499 for ms in found.latencies_ms) == 6
    assert found.latest_ms == pytest.approx(1000)


def test_a_refusal_is_counted_and_has_no_latency() -> None:
    calls = [
        Call(0.0, 0.0, 0.5, "ok", removed_ms=20.0),
        Call(0.1, 0.1, 0.101, "overloaded"),
        Call(0.2, 0.2, 0.201, "overloaded"),
        Call(0.3, None, None, "no answer"),
    ]
    found = outcome(calls)
    assert found.removals_ms == (20.0,)
    assert found.latencies_ms == (500.0,)
    assert found.refused == {"overloaded": 2, "no answer": 1}

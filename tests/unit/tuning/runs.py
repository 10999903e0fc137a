"""Runs of ``host verify`` as they might have been measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from netplugin.tuning.verifying.result import (
    Histogram,
    Latency,
    LatencyRound,
    LatencySettings,
    MeasuredRun,
    Throughput,
    ThroughputSettings,
)

#: Frames a second, as in the guides before and after tuning.
SLOW = (4.68e6, 4.70e6, 4.61e6, 4.66e6, 4.75e6, 4.69e6)
FAST = (5.21e6, 5.19e6, 5.25e6, 5.20e6, 5.17e6, 5.22e6)


def throughput(samples: Sequence[float], **settings: Any) -> Throughput:
    reported = {"host_cpu": 1, "guest_cpu": 2, "hugepage_node": 0, "window_s": 2, "frame_size": 64}
    return Throughput(
        program="DPDK 22.11",
        settings=ThroughputSettings.model_validate({**reported, **settings}),
        samples=tuple(samples),
    )


def latency(highest: Sequence[int], **settings: Any) -> Latency:
    """A round for each; 1,000 samples of 5 to 14 us, and the highest."""
    reported = {"cpus": "2", "round_s": 10, "interval_us": 200, "priority": 95, "width_us": 2000}
    rounds = []
    for top in highest:
        counts = dict.fromkeys(range(5, 15), 100) | ({top: 1} if top < 2000 else {})
        each = Histogram(
            counts=counts,
            overflows=int(top >= 2000),
            min_us=5,
            average_us=(9500 + top) / 1001,
            max_us=top,
        )
        rounds.append(LatencyRound(cpus={2: each}))
    return Latency(
        program="2.40",
        settings=LatencySettings.model_validate({**reported, **settings}),
        rounds=tuple(rounds),
    )


def run(label: str = "run", **fields: Any) -> MeasuredRun:
    begin = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return MeasuredRun(**({"label": label, "started": begin, "conditions": {}} | fields))

"""Runs of ``host verify`` as they might have been measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from netplugin.tuning.verifying.result import (
    GuestMeasurement,
    GuestVm,
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
#: Maxima in a VM, as in the guide of real-time KVM before and after tuning.
HIGH, LOW = (1475, 900, 1100, 1300, 800, 1000), (12, 11, 14, 13, 15, 12)


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


def in_a_vm(label: str, highest: Sequence[int], **vm: Any) -> MeasuredRun:
    fields: dict[str, Any] = {
        "image": "0123456789abcdef0123",
        "origin": "Debian bookworm",
        "kernel": "6.1.0",
        "arguments": "isolcpus=1",
        "vcpus": 2,
        "memory_mb": 1024,
        "emulated": False,
        "pins": {},
        "realtime": False,
    }
    made = GuestVm.model_validate({**fields, **vm})
    return run(label, guest=GuestMeasurement(vm=made, latency=latency(highest)))

"""All ports of a full host from nothing: a new OVS, a new agent, and batches."""

from __future__ import annotations

import time

from tests.bench.lab import OvsLab
from tests.bench.names import FROM_NOTHING
from tests.bench.recorder import Recorder
from tests.bench.stalls import Stalls
from tests.bench.workloads import resources


def measure(lab: OvsLab, record: Recorder, ports: int) -> None:
    """``lab`` is new; it has the ports afterwards."""
    with Stalls(lab.ovs) as stalls:
        start = time.perf_counter()
        lab.fill(ports)
        seconds = time.perf_counter() - start
    record.add(FROM_NOTHING, "plug of all", seconds, ports=ports, addresses=1, unit="s")
    record.add(FROM_NOTHING, "longest stall", stalls.longest_ms, way="ovs-vswitchd", ports=ports)
    resources.note(lab, record)

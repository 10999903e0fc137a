"""CPU cost of forwarding on the host at the NDR. A PMD thread occupies its core, busy or not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netplugin.acceptance.matrix.records import Cell


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU use: 1 is one CPU all the time. None: not measured."""

    #: Cores of PMD threads, which poll at any load.
    pmd: float | None = None
    #: Share of busy PMD cycles, 0 to 1.
    pmd_busy: float | None = None
    #: PMD cycles per frame that crosses OVS; in and out of the VNF count separately.
    cycles_per_packet: float | None = None
    softirq: float | None = None
    #: Share of softirq on the busiest CPU, 0 to 1; at 1 it is the bottleneck.
    softirq_busiest: float | None = None
    #: Kernel time outside softirq.
    system: float | None = None

    @property
    def host(self) -> float | None:
        """Total CPUs of the host used for forwarding."""
        known = [part for part in (self.pmd, self.softirq, self.system) if part is not None]
        return sum(known) if known else None


#: Reading of a trial by field.
READINGS: Mapping[str, str] = {
    "pmd_busy": "ovs.pmd_busy_share",
    "cycles_per_packet": "ovs.pmd_cycles_per_packet",
    "softirq": "host.softirq_cpus",
    "softirq_busiest": "host.softirq_busiest_share",
    "system": "host.system_cpus",
}


def cpu_use(cell: Cell, trials: Sequence[Mapping[str, Any]]) -> CpuUse | None:
    """Return the mean CPU use over these trial log entries (those at the NDR); None if unknown."""
    found: dict[str, float] = {}
    for field, reading in READINGS.items():
        values = [
            float(trial["measured"]["readings"][reading])
            for trial in trials
            if trial["measured"].get("readings", {}).get(reading) is not None
        ]
        if values:
            found[field] = statistics.fmean(values)
    # OVS may also have PMD threads that a backend without PMD threads does not use.
    if cell.pmd_cores is not None:
        found["pmd"] = float(cell.pmd_cores)
    return CpuUse(**found) if found else None

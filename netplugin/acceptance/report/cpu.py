"""What forwarding cost the host in CPUs, at the zero-loss rate: a PMD thread holds its core, busy or not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netplugin.acceptance.matrix.records import Cell


@dataclass(frozen=True, slots=True)
class CpuUse:
    """In CPUs: 1 is one of them all the time. None: not read."""

    #: Cores that PMD threads hold; they poll, so they are taken at any load.
    pmd: float | None = None
    #: How much of the PMD time went to packets, 0 to 1.
    pmd_busy: float | None = None
    #: For each frame that passed OVS, in PMD threads: once on its way in and once on its way out.
    cycles_per_packet: float | None = None
    softirq: float | None = None
    #: How busy with softirq the CPU was that had most of it, 0 to 1: at 1 it is what limits.
    softirq_busiest: float | None = None
    #: The kernel apart from softirq.
    system: float | None = None

    @property
    def host(self) -> float | None:
        """All that the host gives for forwarding."""
        known = [part for part in (self.pmd, self.softirq, self.system) if part is not None]
        return sum(known) if known else None


#: Readings of a trial that say it, by field.
READINGS: Mapping[str, str] = {
    "pmd_busy": "ovs.pmd_busy_share",
    "cycles_per_packet": "ovs.pmd_cycles_per_packet",
    "softirq": "host.softirq_cpus",
    "softirq_busiest": "host.softirq_busiest_share",
    "system": "host.system_cpus",
}


def cpu_use(cell: Cell, trials: Sequence[Mapping[str, Any]]) -> CpuUse | None:
    """Over these entries of a trial log (those at the zero-loss rate); None if nothing is known."""
    found: dict[str, float] = {}
    for field, reading in READINGS.items():
        values = [
            float(trial["measured"]["readings"][reading])
            for trial in trials
            if trial["measured"].get("readings", {}).get(reading) is not None
        ]
        if values:
            found[field] = statistics.fmean(values)
    # OVS may have more of them on this host: what a backend without PMD threads does not use.
    if cell.pmd_cores is not None:
        found["pmd"] = float(cell.pmd_cores)
    return CpuUse(**found) if found else None

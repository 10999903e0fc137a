"""Stored form of a run: results, settings and conditions of the host."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from netplugin.tuning.verifying.histogram import Histogram, merged

#: Part of a file name.
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LatencySettings(Kept):
    """``cpus`` is a list like ``2-5``; ``width_us`` is the histogram's width."""

    cpus: str
    round_s: int
    interval_us: int
    priority: int
    width_us: int


class LatencyRound(Kept):
    """One run of cyclictest: the histogram of each CPU."""

    cpus: Mapping[int, Histogram]

    @property
    def overall(self) -> Histogram:
        return merged(self.cpus.values())


class Latency(Kept):
    """``program`` is cyclictest's version."""

    program: str
    settings: LatencySettings
    rounds: Annotated[tuple[LatencyRound, ...], Field(min_length=1)]

    @property
    def overall(self) -> Histogram:
        return merged(each.overall for each in self.rounds)

    def by_cpu(self) -> Mapping[int, Histogram]:
        cpus = sorted({cpu for each in self.rounds for cpu in each.cpus})
        return {cpu: merged(r.cpus[cpu] for r in self.rounds if cpu in r.cpus) for cpu in cpus}


class ThroughputSettings(Kept):
    """CPUs of both sides; ``hugepage_node`` is the node of the hugepages, None for ordinary pages."""

    host_cpu: int
    guest_cpu: int
    hugepage_node: int | None
    window_s: int
    frame_size: int


class Throughput(Kept):
    """``samples`` are frames per second each way, one per run of the two testpmd."""

    program: str
    settings: ThroughputSettings
    samples: Annotated[tuple[float, ...], Field(min_length=1)]


class Run(Kept):
    """One measurement. ``conditions`` are host settings by name, as text."""

    format: Literal[1] = 1
    label: Label
    started: datetime
    conditions: Mapping[str, str]
    latency: Latency | None = None
    throughput: Throughput | None = None

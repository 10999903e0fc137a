"""Options of a run, and the settings that follow from them on this host (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from netplugin.tuning.facts import Facts
from netplugin.tuning.live import Live
from netplugin.tuning.planning.plan import Plan
from netplugin.tuning.root import known
from netplugin.tuning.verifying.cpus import latency_cpus, loop_cpus, measured_cpus
from netplugin.tuning.verifying.loop import hugepage_node
from netplugin.tuning.verifying.result import Label, LatencySettings, ThroughputSettings

_Seconds = Annotated[int, Field(ge=1, le=86400)]


class Options(BaseModel):
    """Options of a run; each field is a command line option."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: Label = Field("run", description="name of the run, like before or after")
    only: Literal["latency", "throughput"] | None = Field(
        None, description="measure only this: latency or throughput"
    )
    cpus: str | None = Field(
        None, description="CPUs to measure with cyclictest, like 2-5,8; not given: the isolated "
        "CPUs, or else the plan's CPUs for VMs, without those of PMD threads and pinned vCPUs"
    )  # fmt: skip
    loop_cpus: str | None = Field(
        None, description="the two CPUs of the testpmd loop; not given: on two cores of one "
        "node, measured CPUs if possible"
    )  # fmt: skip
    rounds: Annotated[int, Field(ge=1, le=1000)] = Field(
        6, description="runs of each program; they are the samples of a comparison"
    )
    duration: _Seconds = Field(
        60, description="total time of cyclictest over all rounds, seconds; guides use 600"
    )
    interval_us: Annotated[int, Field(ge=20, le=1_000_000)] = Field(
        200, description="interval of cyclictest's timers, microseconds"
    )
    priority: Annotated[int, Field(ge=1, le=99)] = Field(
        95, description="SCHED_FIFO priority of cyclictest"
    )
    width_us: Annotated[int, Field(ge=100, le=100_000)] = Field(
        2000, description="width of the latency histogram, microseconds"
    )
    window: _Seconds = Field(
        2, description="time in which the frames of a round are counted, seconds"
    )
    frame_size: Annotated[int, Field(ge=64, le=1518)] = Field(
        64, description="frame size without FCS, bytes"
    )


@dataclass(frozen=True)
class Asked:
    """What to measure; a measurement that is None is skipped. ``rounds`` are runs of each program."""

    label: str
    rounds: int
    latency: LatencySettings | None
    throughput: ThroughputSettings | None


def asked_of(options: Options, facts: Facts, live: Live, plan: Plan | None) -> Asked:
    """Derive the settings. Raises: InvalidRequest naming the option, HostError for a missing fact."""
    measured = measured_cpus(options.cpus, facts, live, plan)
    latency = throughput = None
    if options.only != "throughput":
        latency = LatencySettings(
            cpus=latency_cpus(measured), round_s=-(-options.duration // options.rounds),
            interval_us=options.interval_us, priority=options.priority, width_us=options.width_us,
        )  # fmt: skip
    if options.only != "latency":
        host, guest = loop_cpus(options.loop_cpus, facts, live, measured)
        nodes = sorted({c.node for c in known(facts.cpus.cores, ()) if c.cpus & {host, guest}})
        throughput = ThroughputSettings(
            host_cpu=host, guest_cpu=guest, hugepage_node=hugepage_node(facts, nodes),
            window_s=options.window, frame_size=options.frame_size,
        )  # fmt: skip
    return Asked(options.label, options.rounds, latency, throughput)

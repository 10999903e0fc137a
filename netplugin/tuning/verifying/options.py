"""Options of a measurement, and the CPUs that it uses on this host (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from netplugin.api.errors import FieldError, InvalidRequest
from netplugin.host.cpus import format_list, parse_list
from netplugin.libvirt.vm_image import Image, read
from netplugin.tuning.facts import Core, Cpus, Facts, Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import needed
from netplugin.tuning.verifying.guest.machine import measured_vcpus
from netplugin.tuning.verifying.loop import hugepage_node
from netplugin.tuning.verifying.result import Label, LatencySettings, TcpSettings, ThroughputSettings

_Seconds = Annotated[int, Field(ge=1, le=86400)]


class Options(BaseModel):
    """Options of a run; each field is a command line option."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: Label = Field("run", description="name of the run, like before or after")
    only: Literal["latency", "throughput"] | None = Field(
        None, description="measure only this: latency or throughput"
    )
    cpus: str | None = Field(
        None,
        description="CPUs to measure with cyclictest, like 2-5,8; not given: the isolated "
        "CPUs, or else the plan's CPUs for VMs, without those of PMD threads and pinned vCPUs",
    )
    loop_cpus: str | None = Field(
        None,
        description="the two CPUs of the testpmd loop; not given: on two cores of one "
        "node, measured CPUs if possible",
    )
    rounds: Annotated[int, Field(ge=1, le=1000)] = Field(
        6, description="runs of each program; they are the samples of a comparison"
    )
    duration: _Seconds = Field(
        60, description="total time of cyclictest over all rounds, seconds; guides use 600"
    )
    interval_us: Annotated[int, Field(ge=20, le=1_000_000)] = Field(
        200, description="interval of cyclictest's timers, microseconds"
    )
    priority: Annotated[int, Field(ge=1, le=99)] = Field(95, description="SCHED_FIFO priority of cyclictest")
    width_us: Annotated[int, Field(ge=100, le=100_000)] = Field(
        2000, description="width of the latency histogram, microseconds"
    )
    window: _Seconds = Field(
        2, description="time in which the frames, or the bytes of TCP, of a round are counted, seconds"
    )
    frame_size: Annotated[int, Field(ge=64, le=1518)] = Field(64, description="frame size without FCS, bytes")
    guest: Path | None = Field(
        None,
        description="folder of an image of a VM (netplugin-zeroloss vm build), or its link latest: measure "
        "in this VM; a plan places it, and --cpus are vCPUs",
    )
    tcp: bool = Field(False, description="with guest: measure TCP too, from this VM to a second one")
    testpmd: bool = Field(
        False, description="with guest: measure frames too, in a loop of testpmd here and in the VM"
    )
    streams: Annotated[int, Field(ge=1, le=64)] = Field(4, description="streams of TCP")
    unplaced: bool = Field(False, description="do not place the VM, as on a host without a plan")
    emulate: bool = Field(
        False, description="run the VM without KVM: very slow, and its figures are no measure of the host"
    )
    boot: _Seconds = Field(300, description="time that the VM has to boot, seconds")

    @field_validator("guest")
    @classmethod
    def _absolute(cls, folder: Path | None) -> Path | None:
        """``host verify effect`` may go on in another directory."""
        return folder and folder.absolute()

    @model_validator(mode="after")
    def _of_one_place(self) -> Self:
        if self.guest is not None and (self.only == "throughput" or self.loop_cpus is not None):
            raise ValueError("guest: the testpmd loop is measured on the host; leave guest away")
        if (self.tcp or self.testpmd) and self.guest is None:
            raise ValueError("tcp and testpmd are measured in VMs; name their image, --guest")
        return self


@dataclass(frozen=True)
class MeasurementOptions:
    """What to measure on this host; a measurement that is None is skipped."""

    options: Options
    latency: LatencySettings | None
    throughput: ThroughputSettings | None


@dataclass(frozen=True)
class VerifyOptions:
    """What to measure in a VM on ``image``. The CPUs of ``latency`` are vCPUs."""

    options: Options
    image: Image
    latency: LatencySettings
    tcp: TcpSettings | None


def guest_asked_of(options: Options) -> VerifyOptions:
    """Derive the settings of a measurement in a VM; ``options.guest`` is set.

    Raises: InvalidRequest if there is no such image, or naming the option.
    """
    assert options.guest is not None
    image = read(options.guest)
    latency = _latency_settings(options, measured_vcpus(image, options.cpus))
    tcp = TcpSettings(streams=options.streams, window_s=options.window) if options.tcp else None
    return VerifyOptions(options, image, latency, tcp)


def _latency_settings(options: Options, cpus: str) -> LatencySettings:
    return LatencySettings(
        cpus=cpus,
        round_s=-(-options.duration // options.rounds),
        interval_us=options.interval_us,
        priority=options.priority,
        width_us=options.width_us,
    )


def asked_of(options: Options, facts: Facts, live: Live, plan: TuningPlan | None) -> MeasurementOptions:
    """Derive the settings. Raises: InvalidRequest naming the option, HostError for a missing fact."""
    measured = measured_cpus(options.cpus, facts, live, plan)
    latency = throughput = None
    if options.only != "throughput":
        latency = _latency_settings(options, latency_cpus(measured))
    if options.only != "latency":
        host, guest = loop_cpus(options.loop_cpus, facts, live, measured)
        throughput = ThroughputSettings(
            host_cpu=host,
            guest_cpu=guest,
            hugepage_node=hugepage_node(facts, frozenset({host, guest})),
            window_s=options.window,
            frame_size=options.frame_size,
        )
    return MeasurementOptions(options, latency, throughput)


def measured_cpus(asked: str | None, facts: Facts, live: Live, plan: TuningPlan | None) -> Cpus:
    """CPUs to measure: those in ``asked``, else the isolated ones, else the plan's CPUs for vCPUs, else none.

    CPUs of OVS's PMD threads and of pinned vCPUs are used only if they are named, because the measurement
    starves what runs there. Raises: InvalidRequest naming ``cpus``.
    """
    online = needed(facts.cpus.online)
    if asked is not None:
        return _named("cpus", asked, online)
    isolated = known(facts.cpus.isolated, None) or frozenset()
    for found in (isolated, plan.partition.vcpus if plan else frozenset()):
        if free := (found & online) - busy_cpus(live):
            return free
    return frozenset()


def latency_cpus(measured: Cpus) -> str:
    """Format the CPUs as a list. Raises: InvalidRequest naming ``cpus`` if there are none."""
    if not measured:
        raise _refused(
            "cpus",
            "none is isolated and free of PMD threads and vCPUs, and no plan has some for VMs",
            "name them, --cpus LIST, or say what the host is for, --pmd-cores N",
        )
    return format_list(measured)


def loop_cpus(asked: str | None, facts: Facts, live: Live, measured: Cpus) -> tuple[int, int]:
    """Choose a CPU for each side, if possible on two cores of one node; measured CPUs are preferred.

    Raises: InvalidRequest naming ``loop_cpus``.
    """
    online = needed(facts.cpus.online)
    if asked is not None:
        named = sorted(_named("loop_cpus", asked, online))
        if len(named) != 2:
            raise _refused("loop_cpus", f"{len(named)} CPUs, and not 2", "name two: --loop-cpus A,B")
        return named[0], named[1]
    cores = needed(facts.cpus.cores)
    free = online - busy_cpus(live) | measured
    found = _pair(cores, measured, measured) or _pair(cores, free, measured)
    if found is None:
        raise _refused(
            "loop_cpus",
            f"the two sides need two CPUs, and {format_list(free)} are free",
            "leave the loop out: --only latency",
        )
    return found


def busy_cpus(live: Live) -> Cpus:
    """CPUs of PMD threads and pinned vCPUs, as far as OVS and libvirt report them."""
    pmds = frozenset() if isinstance(live.ovs, Unknown) else frozenset(p.cpu for p in live.ovs.pmds)
    return pmds.union(*(domain.pinned for domain in known(live.domains, ())))


def _pair(cores: Sequence[Core], cpus: Cpus, measured: Cpus) -> tuple[int, int] | None:
    """Two CPUs of two cores, as siblings slow each other down; siblings only if one core is usable."""
    firsts = {node: min(c.first for c in cores if c.node == node) for node in {c.node for c in cores}}
    usable = {min(c.cpus & cpus & measured or c.cpus & cpus): c for c in cores if c.cpus & cpus}

    def rank(pair: tuple[int, int]) -> tuple[int, ...]:
        """One node, measured CPUs, not the first core of a node, which does the housekeeping, low numbers."""
        of = [usable[cpu] for cpu in pair]
        here = sum(core.first == firsts[core.node] for core in of)
        return of[0].node != of[1].node, len({*pair} - measured), here, sum(pair)

    if len(usable) > 1:
        return min(combinations(sorted(usable), 2), key=rank)
    siblings = sorted(cpu for core in usable.values() for cpu in core.cpus & cpus)
    return (siblings[0], siblings[1]) if len(siblings) > 1 else None


def _named(field: str, text: str, online: Cpus) -> Cpus:
    try:
        named = frozenset(parse_list(text))
    except ValueError:
        raise _refused(field, f"{text} is no list of CPUs", "write it like 2-5,8") from None
    if not named:
        raise _refused(field, "the list is empty", "write it like 2-5,8")
    if missing := named - online:
        raise _refused(
            field, f"CPU {format_list(missing)} is not on line", f"choose among {format_list(online)}"
        )
    return named


def _refused(field: str, message: str, fix: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {message}", step="verify", fix=fix, errors=[FieldError(field=field, message=message)]
    )

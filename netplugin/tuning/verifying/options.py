"""Options of a measurement, and the CPUs that it uses on this host (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from netplugin.api.errors import CapacityExhausted, InvalidRequest
from netplugin.api.fields import Value
from netplugin.host.cpus import format_list, parse_list
from netplugin.libvirt.vm_image import Manifest
from netplugin.tuning.command_line import Machine, parse_command_line
from netplugin.tuning.facts import Core, Cpus, Facts, Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import needed
from netplugin.tuning.verifying.result import Label, LatencySettings, ThroughputSettings

_DAY_S = 86_400
#: Memory of each testpmd, MB.
MEMORY_MB = 64
_refused = partial(InvalidRequest.of_field, step="verify")


class Options(Value):
    """Options of a run; each field is a command line option."""

    label: Label = Field("run", description="name of the run, like before or after")
    only: Literal["latency", "throughput"] | None = Field(
        None, description="latency or throughput: only this"
    )
    cpus: str | None = Field(
        None, description="CPUs of cyclictest, like 2-5,8; not given: the isolated ones, or a plan's for VMs"
    )
    loop_cpus: str | None = Field(None, description="CPUs of the two testpmd; not given: two cores of a node")
    rounds: int = Field(6, ge=1, le=1000, description="runs of each program: the samples of a comparison")
    duration: int = Field(60, ge=1, le=_DAY_S, description="seconds of cyclictest, all rounds together")
    interval_us: int = Field(200, ge=20, le=1_000_000, description="interval of cyclictest's timers, us")
    priority: int = Field(95, ge=1, le=99, description="SCHED_FIFO priority of cyclictest")
    width_us: int = Field(2000, ge=100, le=100_000, description="width of the histogram, microseconds")
    window: int = Field(2, ge=1, le=_DAY_S, description="seconds in which a round counts frames, or bytes")
    frame_size: int = Field(64, ge=64, le=1518, description="frame size without FCS, bytes")
    #: Absolute: ``host verify effect`` may go on in another directory.
    guest: Annotated[Path, AfterValidator(Path.absolute)] | None = Field(
        None,
        description="folder of an image (netplugin-zeroloss vm build): measure in a VM; --cpus: vCPUs",
    )
    tcp: bool = Field(False, description="with guest: measure TCP too, from this VM to a second one")
    testpmd: bool = Field(False, description="with guest: measure frames too, in a loop with the VM")
    streams: int = Field(4, ge=1, le=64, description="streams of TCP")
    unplaced: bool = Field(False, description="do not place the VM, as on a host without a plan")
    emulate: bool = Field(False, description="run the VM without KVM: its figures are no measure of the host")
    boot: int = Field(300, ge=1, le=_DAY_S, description="seconds that the VM has to boot")

    @model_validator(mode="after")
    def _of_one_place(self) -> Self:
        if self.guest is not None and (self.only == "throughput" or self.loop_cpus is not None):
            raise ValueError("guest: the testpmd loop is measured on the host; leave guest away")
        if (self.tcp or self.testpmd) and self.guest is None:
            raise ValueError("tcp and testpmd are measured in VMs; name their image, --guest")
        return self

    def latency_on(self, cpus: str) -> LatencySettings:
        same = self.model_dump(include={"interval_us", "priority", "width_us"})
        return LatencySettings(cpus=cpus, round_s=-(-self.duration // self.rounds), **same)

    def throughput_on(self, host: int, guest: int, node: int | None) -> ThroughputSettings:
        same = {"window_s": self.window, "frame_size": self.frame_size}
        return ThroughputSettings(host_cpu=host, guest_cpu=guest, hugepage_node=node, **same)


_HostSettings = tuple[LatencySettings | None, ThroughputSettings | None]


def settings_of(options: Options, facts: Facts, live: Live, plan: TuningPlan | None) -> _HostSettings:
    """Derive the settings on this host; a measurement that is None is skipped.

    Raises: InvalidRequest naming the option, HostError for a missing fact.
    """
    measured = measured_cpus(options.cpus, facts, live, plan)
    latency = throughput = None
    if options.only != "throughput":
        if not measured:
            what = "none is isolated and free of PMD threads and vCPUs, and no plan has some for VMs"
            fix = "name them, --cpus LIST, or say what the host is for, --pmd-cores N"
            raise _refused("cpus", what, fix=fix)
        latency = options.latency_on(format_list(measured))
    if options.only != "latency":
        pair = loop_cpus(options.loop_cpus, facts, live, measured)
        throughput = options.throughput_on(*pair, hugepage_node(facts, frozenset(pair)))
    return latency, throughput


def measured_cpus(asked: str | None, facts: Facts, live: Live, plan: TuningPlan | None) -> Cpus:
    """CPUs to measure: those in ``asked``, else the isolated ones, else the plan's CPUs for vCPUs, else none.

    CPUs of OVS's PMD threads and of pinned vCPUs are used only if they are named, because the measurement
    starves what runs there. Raises: InvalidRequest naming ``cpus``.
    """
    online = needed(facts.cpus.online)
    if asked is not None:
        return _named("cpus", asked, online, "the CPUs on line")
    isolated, free = known(facts.cpus.isolated, None) or frozenset(), online - busy_cpus(live)
    return isolated & free or (plan.partition.vcpus & free if plan else frozenset())


def measured_vcpus(asked: str | None, image: Manifest) -> Cpus:
    """The same in a VM: those in ``asked``, else those that its kernel isolates, else all."""
    every = frozenset(range(image.vcpus))
    if asked is not None:
        return _named("cpus", asked, every, "the VM's vCPUs")
    isolation = parse_command_line(image.arguments).isolation(Machine(image.vcpus, every, (), ()))
    return isolation.get("domain") or every


def loop_cpus(asked: str | None, facts: Facts, live: Live, measured: Cpus) -> tuple[int, int]:
    """Choose a CPU for each side, if possible on two cores of one node; measured CPUs are preferred.

    Raises: InvalidRequest naming ``loop_cpus``.
    """
    online = needed(facts.cpus.online)
    if asked is not None:
        named = sorted(_named("loop_cpus", asked, online, "the CPUs on line"))
        if len(named) != 2:
            raise _refused("loop_cpus", f"{len(named)} CPUs, and not 2", fix="name two: --loop-cpus A,B")
        return named[0], named[1]
    cores, free = needed(facts.cpus.cores), online - busy_cpus(live) | measured
    if found := _pair(cores, measured, measured) or _pair(cores, free, measured):
        return found
    what = f"the two sides need two CPUs, and {format_list(free)} are free"
    raise _refused("loop_cpus", what, fix="leave the loop out: --only latency")


def hugepage_node(facts: Facts, cpus: Cpus) -> int | None:
    """The first node of these CPUs with enough free hugepages of one size for both sides of a loop."""
    for node in sorted({core.node for core in known(facts.cpus.cores, ()) if core.cpus & cpus}):
        for pool in known(facts.memory.pools, ()):
            each = -(-MEMORY_MB * 1024 // pool.size_kb)
            if pool.node == node and known(pool.free, 0) >= 2 * each:
                return node
    return None


def free_cpu(pins: Cpus, plan: TuningPlan | None, facts: Facts, live: Live) -> int:
    """A CPU for testpmd, next to a VM on ``pins``: one of OVS, if it is free. Raises: CapacityExhausted."""
    free = needed(facts.cpus.online) - pins - busy_cpus(live)
    if plan:
        free = free & plan.partition.pmd or free - plan.partition.housekeeping or free
    if not free:
        fix = "stop a VM or OVS, or leave --testpmd away"
        raise CapacityExhausted("no CPU is left for testpmd on this host", step="verify", fix=fix)
    return max(free)


def busy_cpus(live: Live) -> Cpus:
    """CPUs of PMD threads and pinned vCPUs, as far as OVS and libvirt report them."""
    pmds = frozenset() if isinstance(live.ovs, Unknown) else frozenset(p.cpu for p in live.ovs.pmds)
    return pmds.union(*(domain.pinned for domain in known(live.domains, ())))


def _pair(cores: Sequence[Core], cpus: Cpus, measured: Cpus) -> tuple[int, int] | None:
    """Two CPUs of two cores, as siblings slow each other down; siblings only if one core is usable."""
    firsts = {node: min(c.first for c in cores if c.node == node) for node in {c.node for c in cores}}
    core_of = {cpu: core for core in cores for cpu in core.cpus & cpus}

    def rank(pair: tuple[int, int]) -> tuple[int, ...]:
        """One node, measured CPUs, not the first core of a node, which does the housekeeping, low numbers."""
        one, other = (core_of[cpu] for cpu in pair)
        here = sum(core.first == firsts[core.node] for core in (one, other))
        return one is other, one.node != other.node, len({*pair} - measured), here, sum(pair)

    return min(combinations(sorted(core_of), 2), key=rank, default=None)


def _named(field: str, text: str, among: Cpus, what: str) -> Cpus:
    with suppress(ValueError):
        named = frozenset(parse_list(text))
        if named and named <= among:
            return named
    message = f"{text} is no list of {what}, which are {format_list(among)}"
    raise _refused(field, message, fix="write it like 2-5,8")

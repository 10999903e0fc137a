"""Measure a run: record the host's settings, then take both measurements round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

from netplugin.api.errors import HostError
from netplugin.host.cpus import format_list, parse_list
from netplugin.host.processes import printable
from netplugin.tuning.facts import Cpus, Facts, Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.verifying import cyclictest, loop
from netplugin.tuning.verifying.guest import frames, link, vm
from netplugin.tuning.verifying.guest import latency as guest_latency
from netplugin.tuning.verifying.guest import tcp as guest_tcp
from netplugin.tuning.verifying.guest.machine import Machine, machines_on
from netplugin.tuning.verifying.options import MeasurementOptions, VerifyOptions
from netplugin.tuning.verifying.result import (
    GuestMeasurement,
    GuestVm,
    Latency,
    LatencyRound,
    LatencySettings,
    MeasuredRun,
    Throughput,
    ThroughputSettings,
)

Say = Callable[[str], None]

#: Characters of a kernel's release, of which Linux has at most 64.
_RELEASE = 64


def require(asked: MeasurementOptions) -> None:
    """Check the tools before measuring. Raises: BackendUnavailable, HostError."""
    if asked.latency:
        cyclictest.require()
    if asked.throughput:
        loop.require()


def require_guest(asked: VerifyOptions) -> None:
    """Check this host and the image before a VM is started. Raises: BackendUnavailable."""
    vm.require(asked.emulate)
    guest_latency.require(asked.image)
    if asked.tcp:
        guest_tcp.require(asked.image)
    if asked.testpmd:
        frames.require(asked.image)


def measure(asked: MeasurementOptions, facts: Facts, live: Live, say: Say) -> MeasuredRun:
    """Measure; ``say`` is called with progress messages. Raises: HostError, OperationTimeout."""
    started = datetime.now(UTC).replace(microsecond=0)
    cpus = set(parse_list(asked.latency.cpus)) if asked.latency else set()
    if asked.throughput:
        cpus |= {asked.throughput.host_cpu, asked.throughput.guest_cpu}
    # The short measurement comes first: if it fails, hours of cyclictest are not lost.
    throughput = _throughput(asked.throughput, asked.rounds, say) if asked.throughput else None
    latency = (
        _latency(asked.latency, asked.rounds, say, cyclictest.measure, "cyclictest on CPU")
        if asked.latency
        else None
    )
    return MeasuredRun(
        label=asked.label,
        started=started,
        conditions=conditions(facts, live, frozenset(cpus)),
        latency=latency,
        throughput=throughput,
    )


def measure_guest(
    asked: VerifyOptions, plan: TuningPlan | None, facts: Facts, live: Live, uri: str, say: Say
) -> MeasuredRun:
    """Start the VM, measure in it and end it; then with a second one, TCP. ``uri`` is libvirt's.

    Without a plan the VMs are not placed. Raises: NetpluginError.
    """
    started = datetime.now(UTC).replace(microsecond=0)
    ports = [vm.free_port() for _ in range(2 if asked.tcp else 1)]
    machines = machines_on(asked.image, ports, asked.emulate, plan, facts, live)
    machine, made = machines[0], asked.image.manifest
    say(f"starting a VM on {asked.image.folder}: {made.vcpus} vCPUs, {made.memory_mb} MB")
    with vm.alone(asked.image, uri), ExitStack() as stack:
        throughput = _guest_frames(asked, machine, plan, facts, live, uri, say) if asked.testpmd else None
        if asked.tcp:
            stack.enter_context(link.switch())
        shell = stack.enter_context(vm.booted(machine, uri, asked.boot_s, say))
        guest_latency.require_in(shell)
        if asked.tcp:
            guest_tcp.require_in(shell)
        described = machine.described(printable(shell.run(["uname", "-r"]).strip())[:_RELEASE])

        def once(settings: LatencySettings) -> tuple[str, LatencyRound]:
            return guest_latency.measure(shell, made.vcpus, settings)

        found = _latency(asked.latency, asked.rounds, say, once, "in the VM, cyclictest on vCPU")
        tcp = None
        if asked.tcp:
            say("starting the second VM")
            second = stack.enter_context(vm.booted(machines[1], uri, asked.boot_s, say))
            tcp = guest_tcp.measure((shell, second), asked.tcp, asked.rounds, vm.free_port(), say)
    cpus = frozenset(cpu for each in machines for cpu in each.pins.values())
    return MeasuredRun(
        label=asked.label,
        started=started,
        conditions={**conditions(facts, live, cpus), **dict(guest_conditions(described))},
        guest=GuestMeasurement(vm=described, latency=found, tcp=tcp, throughput=throughput),
    )


def _guest_frames(
    asked: VerifyOptions,
    machine: Machine,
    plan: TuningPlan | None,
    facts: Facts,
    live: Live,
    uri: str,
    say: Say,
) -> Throughput:
    """Measure frames in a VM of its own boot: testpmd polls, which would disturb what else is measured."""
    cpu = frames.free_cpu(machine, plan, facts, live)
    nodes = sorted({c.node for c in known(facts.cpus.cores, ()) if cpu in c.cpus})
    settings = ThroughputSettings(
        host_cpu=cpu,
        guest_cpu=max(parse_list(asked.latency.cpus)),
        hugepage_node=loop.hugepage_node(facts, nodes),
        window_s=asked.window_s,
        frame_size=asked.frame_size,
    )
    found = []
    with frames.host_side(settings) as side:
        port = [machine.ssh.port]
        [connected] = machines_on(asked.image, port, asked.emulate, plan, facts, live, side.socket)
        with vm.booted(connected, uri, asked.boot_s, say) as shell:
            for number in range(1, asked.rounds + 1):
                say(f"testpmd on CPU {cpu} and in the VM, {number} of {asked.rounds}, {settings.window_s} s")
                version, each = frames.measure(shell, side, settings)
                found.append(each)
    return Throughput(program=version, settings=settings, samples=tuple(found))


def _latency(
    settings: LatencySettings,
    rounds: int,
    say: Say,
    once: Callable[[LatencySettings], tuple[str, LatencyRound]],
    what: str,
) -> Latency:
    versions, found = set(), []
    for number in range(1, rounds + 1):
        end = datetime.now().astimezone() + timedelta(seconds=settings.round_s)
        say(f"{what} {settings.cpus}, {number} of {rounds}, until {end:%H:%M:%S}")
        version, each = once(settings)
        if set(each.cpus) != set(parse_list(settings.cpus)):
            raise HostError(
                f"cyclictest measured CPUs {sorted(each.cpus)}, not {settings.cpus}",
                step=cyclictest.STEP,
                fix="take a CPU that the control group gives",
            )
        versions.add(version)
        found.append(each)
    return Latency(program=" ".join(versions), settings=settings, rounds=tuple(found))


def _throughput(settings: ThroughputSettings, rounds: int, say: Say) -> Throughput:
    versions, found = set(), []
    for number in range(1, rounds + 1):
        sides = f"{settings.host_cpu} and {settings.guest_cpu}"
        say(f"testpmd on CPU {sides}, {number} of {rounds}, {settings.window_s} s")
        version, each = loop.measure(settings)
        versions.add(version)
        found.append(each)
    return Throughput(program=" ".join(versions), settings=settings, samples=tuple(found))


def conditions(facts: Facts, live: Live, measured: Cpus) -> Mapping[str, str]:
    """Collect the settings. ``measured`` are the CPUs of the run. Unknown facts give their reason."""
    return {name: _text(value) for name, value in _all(facts, live, measured)}


def guest_conditions(vm: GuestVm) -> Iterator[tuple[str, str]]:
    """Yield the settings of a VM that affect its figures, by name (pure)."""
    yield "guest image", f"{vm.origin}, {vm.image[:16]}"
    yield "guest kernel", vm.kernel
    yield "guest kernel arguments", vm.arguments
    pins = ", ".join(f"{vcpu} on CPU {cpu}" for vcpu, cpu in sorted(vm.pins.items()))
    yield "guest vCPUs", pins or "not placed"
    yield "guest in real time", _text(vm.realtime)


def _all(facts: Facts, live: Live, measured: Cpus) -> Iterator[tuple[str, object]]:
    yield "CPU model", facts.cpus.model
    yield "CPUs on line", facts.cpus.online
    yield "SMT", facts.cpus.smt
    yield "isolated CPUs", facts.cpus.isolated
    yield "nohz_full CPUs", facts.cpus.nohz_full
    yield "kernel", facts.kernel.release
    yield "kernel in real time", facts.kernel.realtime
    yield from _arguments(facts)
    for name, value in facts.kernel.sysctls.items():
        yield f"sysctl {name}", value
    tuned = facts.kernel.tuned
    yield "tuned profile", tuned if tuned is None or isinstance(tuned, Unknown) else tuned.profile
    yield from _power(facts)
    yield from _memory(facts)
    yield from _interrupts(facts, measured)
    yield from _ovs(live)


def _arguments(facts: Facts) -> Iterator[tuple[str, object]]:
    line = facts.kernel.arguments
    if isinstance(line, Unknown):
        yield "kernel arguments", line
        return
    for name in dict.fromkeys(name for name, _ in line.arguments):
        values = [value for each, value in line.arguments if each == name]
        yield (
            f"kernel argument {name}",
            " ".join("set" if value is None else value for value in values),
        )


def _power(facts: Facts) -> Iterator[tuple[str, object]]:
    policies = facts.power.policies
    if isinstance(policies, Unknown):
        yield "frequency governors", policies
    else:
        governors = sorted({_text(policy.governor) for policy in policies})
        yield "frequency governors", ", ".join(governors) or None
    yield "turbo", facts.power.turbo
    yield "idle driver", facts.power.idle_driver


def _memory(facts: Facts) -> Iterator[tuple[str, object]]:
    pools = facts.memory.pools
    if isinstance(pools, Unknown):
        yield "hugepages", pools
    else:
        for pool in pools:
            yield f"hugepages of {pool.size_kb} KB on node {pool.node}", pool.total
    yield "KSM", facts.memory.ksm
    yield "transparent hugepages", facts.memory.transparent
    swaps = facts.memory.swaps
    yield "swap", swaps if isinstance(swaps, Unknown) else ", ".join(swaps) or None


def _interrupts(facts: Facts, measured: Cpus) -> Iterator[tuple[str, object]]:
    yield "default affinity of interrupts", facts.interrupts.default_affinity
    irqs = facts.interrupts.irqs
    if isinstance(irqs, Unknown):
        yield "interrupts", irqs
    else:
        here = [i for i in irqs if not isinstance(i.affinity, Unknown) and i.affinity & measured]
        yield "interrupts that may come to the measured CPUs", len(here)
    yield "workqueues", facts.interrupts.workqueues
    yield "writeback", facts.interrupts.writeback


def _ovs(live: Live) -> Iterator[tuple[str, object]]:
    if isinstance(live.ovs, Unknown):
        yield "OVS", None if live.ovs.missing else live.ovs
        return
    yield "OVS", live.ovs.version
    yield "DPDK of OVS", live.ovs.dpdk_version
    for key, value in sorted(live.ovs.other_config.items()):
        yield f"OVS other_config:{key}", value


def _text(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case frozenset():
            return format_list(value) or "none"
        case _:
            return str(value)

"""Measure a run: record the host's settings, then take both measurements round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from netplugin.host.cpus import format_list, parse_list
from netplugin.host.processes import printable
from netplugin.libvirt.vm_image import read
from netplugin.tuning.facts import Cpus, Facts, Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.verifying import cyclictest, iperf, loop, result, vm
from netplugin.tuning.verifying.options import Options, free_cpu, hugepage_node, measured_vcpus, settings_of
from netplugin.tuning.verifying.result import GuestVm, Latency, MeasuredRun, Throughput
from netplugin.tuning.verifying.shell import require
from netplugin.tuning.verifying.vm import Say, machines_on


def measure(
    options: Options, plan: TuningPlan | None, facts: Facts, live: Live, folder: Path, say: Say
) -> MeasuredRun:
    """Measure this host; ``say`` is called with progress messages. Results are to be kept in ``folder``.

    Raises: InvalidRequest, BackendUnavailable, HostError, OperationTimeout.
    """
    name, started, cpus = options.label, datetime.now(UTC).replace(microsecond=0), set[int]()
    latency = throughput = None
    timers, loops = settings_of(options, facts, live, plan)
    require([*(["dpdk-testpmd"] if loops else []), *(["cyclictest"] if timers else [])])
    result.prepare(folder)
    rounds = partial(_rounds, options.rounds, say)
    # The short measurement comes first: if it fails, hours of cyclictest are not lost.
    if loops:
        cpus |= {loops.host_cpu, loops.guest_cpu}
        what = f"testpmd on CPU {loops.host_cpu} and {loops.guest_cpu}, {loops.window_s} s"
        program, samples = rounds(what, partial(loop.measure, loops))
        throughput = Throughput(program=program, settings=loops, samples=samples)
    if timers:
        cpus |= set(parse_list(timers.cpus))
        what = f"cyclictest on CPU {timers.cpus}, {timers.round_s} s"
        program, histograms = rounds(what, partial(cyclictest.measure, timers))
        latency = Latency(program=program, settings=timers, rounds=histograms)
    kept = conditions(facts, live, frozenset(cpus))
    return MeasuredRun(label=name, started=started, conditions=kept, latency=latency, throughput=throughput)


def measure_guest(
    options: Options, plan: TuningPlan | None, facts: Facts, live: Live, uri: str, folder: Path, say: Say
) -> MeasuredRun:
    """Start the VM of ``options.guest``, measure in it and end it; then with a second one, TCP.

    ``uri`` is libvirt's. Without a plan the VMs are not placed. Raises: NetpluginError.
    """
    assert options.guest is not None
    image, plan = read(options.guest), None if options.unplaced else plan
    made = image.manifest
    vcpus = measured_vcpus(options.cpus, made)
    timers, programs = options.latency_on(format_list(vcpus)), vm.require(options, image)
    result.prepare(folder)
    started, throughput, tcp = datetime.now(UTC).replace(microsecond=0), None, None
    made_on = partial(machines_on, image, emulate=options.emulate, plan=plan, facts=facts, live=live)
    machines = made_on([vm.free_port() for _ in range(2 if options.tcp else 1)])
    booted = partial(vm.booted, uri=uri, boot_s=options.boot, say=say)
    rounds = partial(_rounds, options.rounds, say)
    say(f"starting a VM on {image.folder}: {made.vcpus} vCPUs, {made.memory_mb} MB")
    with vm.alone(image, uri), ExitStack() as stack:
        if options.testpmd:
            cpu = free_cpu(frozenset(machines[0].vm.pins.values()), plan, facts, live)
            loops = options.throughput_on(cpu, max(vcpus), hugepage_node(facts, frozenset({cpu})))
            what = f"testpmd on CPU {cpu} and in the VM, {options.window} s"
            # In a boot of its own: testpmd polls, which would disturb what else is measured.
            with loop.host_side(loops, of_vm=True) as side:
                [connected] = made_on([machines[0].ssh.port], vhost=side.folder / loop.SOCKET)
                with booted(connected) as shell:
                    program, samples = rounds(what, partial(loop.measure_in, shell, side, loops))
            throughput = Throughput(program=program, settings=loops, samples=samples)
        if options.tcp:
            stack.enter_context(vm.bridge())
        shell = stack.enter_context(booted(machines[0]))
        for program in programs:
            shell.require(program)
        kernel = printable(shell.run(["uname", "-r"]).strip())[:64]  # Linux has none that is longer
        what = f"in the VM, cyclictest on vCPU {timers.cpus}, {timers.round_s} s"
        every = frozenset(range(made.vcpus))
        program, histograms = rounds(what, partial(cyclictest.measure_by, shell, every, timers))
        latency = Latency(program=program, settings=timers, rounds=histograms)
        if options.tcp:
            say("starting the second VM")
            second = stack.enter_context(booted(machines[1]))
            settings = result.TcpSettings(streams=options.streams, window_s=options.window)
            tcp = iperf.measure((shell, second), settings, options.rounds, vm.free_port(), say)
    there = machines[0].vm.model_copy(update={"kernel": kernel})
    guest = result.GuestMeasurement(vm=there, latency=latency, tcp=tcp, throughput=throughput)
    cpus = frozenset(cpu for each in machines for cpu in each.vm.pins.values())
    kept = {**conditions(facts, live, cpus), **guest_conditions(there)}
    return MeasuredRun(label=options.label, started=started, conditions=kept, guest=guest)


_T = TypeVar("_T")


def _rounds(many: int, say: Say, what: str, once: Callable[[], tuple[str, _T]]) -> tuple[str, tuple[_T, ...]]:
    """Measure so often; return the versions of the program, and the samples."""
    found = []
    for number in range(1, many + 1):
        say(f"{what}, {number} of {many}")
        found.append(once())
    return " ".join(dict.fromkeys(version for version, _ in found)), tuple(each for _, each in found)


def conditions(facts: Facts, live: Live, measured: Cpus) -> Mapping[str, str]:
    """Collect the settings. ``measured`` are the CPUs of the run. Unknown facts give their reason."""
    return {name: _text(value) for name, value in _all(facts, live, measured)}


def guest_conditions(vm: GuestVm) -> Mapping[str, str]:
    """Collect the settings of a VM that affect its figures (pure)."""
    return {
        "guest image": f"{vm.origin}, {vm.image[:16]}",
        "guest kernel": vm.kernel,
        "guest kernel arguments": vm.arguments,
        "guest vCPUs": vm.placed,
        "guest in real time": _text(vm.realtime),
    }


def _all(facts: Facts, live: Live, measured: Cpus) -> Iterator[tuple[str, object]]:
    cpus, kernel, power, memory, irqs = facts.cpus, facts.kernel, facts.power, facts.memory, facts.interrupts
    yield from {"CPU model": cpus.model, "CPUs on line": cpus.online, "SMT": cpus.smt}.items()
    yield from {"isolated CPUs": cpus.isolated, "nohz_full CPUs": cpus.nohz_full}.items()
    yield from {"kernel": kernel.release, "kernel in real time": kernel.realtime}.items()
    if isinstance(line := kernel.arguments, Unknown):
        yield "kernel arguments", line
    else:
        for name in dict.fromkeys(name for name, _ in line.arguments):
            values = ("set" if value is None else value for each, value in line.arguments if each == name)
            yield f"kernel argument {name}", " ".join(values)
    yield from ((f"sysctl {name}", value) for name, value in kernel.sysctls.items())
    yield "tuned profile", _of(kernel.tuned, lambda tuned: tuned and tuned.profile)
    governors = _of(power.policies, lambda all_: _list(_text(each.governor) for each in all_))
    yield from {"frequency governors": governors, "turbo": power.turbo}.items()
    yield "idle driver", power.idle_driver
    if isinstance(memory.pools, Unknown):
        yield "hugepages", memory.pools
    for each in known(memory.pools, ()):
        yield f"hugepages of {each.size_kb} KB on node {each.node}", each.total
    yield from {"KSM": memory.ksm, "transparent hugepages": memory.transparent}.items()
    yield "swap", _of(memory.swaps, _list)
    yield "default affinity of interrupts", irqs.default_affinity
    here = [irq for irq in known(irqs.irqs, ()) if known(irq.affinity, frozenset()) & measured]
    yield "interrupts that may come to the measured CPUs", _of(irqs.irqs, lambda _: len(here))
    yield from {"workqueues": irqs.workqueues, "writeback": irqs.writeback}.items()
    if isinstance(live.ovs, Unknown):
        yield "OVS", None if live.ovs.missing else live.ovs
        return
    yield from {"OVS": live.ovs.version, "DPDK of OVS": live.ovs.dpdk_version}.items()
    yield from ((f"OVS other_config:{name}", value) for name, value in sorted(live.ovs.other_config.items()))


def _of(fact: _T | Unknown, value: Callable[[_T], object]) -> object:
    """Return the value of a fact, or the fact itself if it is not known."""
    return fact if isinstance(fact, Unknown) else value(fact)


def _list(words: Iterable[str]) -> str | None:
    return ", ".join(sorted(set(words))) or None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, frozenset):
        return format_list(value) or "none"
    return "none" if value is None else str(value)

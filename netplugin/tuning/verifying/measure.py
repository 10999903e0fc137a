"""Measure a run: record the host's settings, then take both measurements round by round."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from netplugin.api.errors import HostError
from netplugin.host.cpus import parse_list
from netplugin.tuning.facts import Facts
from netplugin.tuning.live import Live
from netplugin.tuning.verifying import cyclictest, loop
from netplugin.tuning.verifying.conditions import conditions
from netplugin.tuning.verifying.options import MeasurementOptions
from netplugin.tuning.verifying.result import (
    Latency,
    LatencySettings,
    MeasuredRun,
    Throughput,
    ThroughputSettings,
)

Say = Callable[[str], None]


def require(asked: MeasurementOptions) -> None:
    """Check the tools before measuring. Raises: BackendUnavailable, HostError."""
    if asked.latency:
        cyclictest.require()
    if asked.throughput:
        loop.require()


def measure(asked: MeasurementOptions, facts: Facts, live: Live, say: Say) -> MeasuredRun:
    """Measure; ``say`` is called with progress messages. Raises: HostError, OperationTimeout."""
    started = datetime.now(UTC).replace(microsecond=0)
    cpus = set(parse_list(asked.latency.cpus)) if asked.latency else set()
    if asked.throughput:
        cpus |= {asked.throughput.host_cpu, asked.throughput.guest_cpu}
    # The short measurement comes first: if it fails, hours of cyclictest are not lost.
    throughput = _throughput(asked.throughput, asked.rounds, say) if asked.throughput else None
    latency = _latency(asked.latency, asked.rounds, say) if asked.latency else None
    return MeasuredRun(
        label=asked.label,
        started=started,
        conditions=conditions(facts, live, frozenset(cpus)),
        latency=latency,
        throughput=throughput,
    )


def _latency(settings: LatencySettings, rounds: int, say: Say) -> Latency:
    versions, found = set(), []
    for number in range(1, rounds + 1):
        end = datetime.now().astimezone() + timedelta(seconds=settings.round_s)
        say(f"cyclictest on CPU {settings.cpus}, {number} of {rounds}, until {end:%H:%M:%S}")
        version, each = cyclictest.measure(settings)
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

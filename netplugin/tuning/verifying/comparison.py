"""Compare two runs figure by figure with a statistical test (pure).

The rounds of each run are the samples. A two-sided exact rank test compares them. Holm's adjustment keeps
the probability of any false claim among the figures at or below ``LEVEL``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter
from statistics import median

from netplugin.host.cpus import parse_list
from netplugin.statistics import RelativeChange, adjusted, change, p_lower
from netplugin.tuning.verifying.result import (
    PERCENTILES,
    TCP_VARIANTS,
    Histogram,
    Latency,
    MeasuredRun,
    TcpSample,
    Throughput,
    tcp_words,
)

LEVEL = 0.05
_Settings = Mapping[str, int | str]


class FigureVerdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference found"
    UNDECIDED = "cannot be decided"


@dataclass(frozen=True)
class MeasuredFigure:
    """A figure of a run: ``whole`` is None if it was not measured, and ``samples`` are those of the rounds.

    ``settings`` are those that must be equal for two runs to be comparable.
    """

    name: str
    unit: str
    more_is_better: bool
    settings: _Settings
    samples: Sequence[float]
    whole: float | None


@dataclass(frozen=True)
class FigureRow:
    """``before`` and ``after`` are values of the whole runs; ``p`` is adjusted, None if not tested."""

    figure: MeasuredFigure
    before: float | None
    after: float | None
    samples: tuple[Sequence[float], Sequence[float]]
    finding: FigureVerdict
    why: str = ""
    change: RelativeChange | None = None
    p: float | None = None


@dataclass(frozen=True)
class Difference:
    """A condition of the host that differs; None if a run does not have it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class MeasurementComparison:
    before: MeasuredRun
    after: MeasuredRun
    rows: tuple[FigureRow, ...]
    differences: tuple[Difference, ...]

    def of(self, finding: FigureVerdict) -> tuple[FigureRow, ...]:
        return tuple(row for row in self.rows if row.finding is finding)


def compare(before: MeasuredRun, after: MeasuredRun) -> MeasurementComparison:
    both = zip(figures(before), figures(after), strict=True)
    pairs = [(old, new) for old, new in both if (old.whole, new.whole) != (None, None)]
    reasons = [_apart(old, new) for old, new in pairs]
    tested = adjusted(
        [None if why else (old.samples, new.samples) for (old, new), why in zip(pairs, reasons, strict=True)],
        LEVEL,
        sides=2,
    )
    rows = tuple(_row(*pair, why, p) for pair, why, p in zip(pairs, reasons, tested, strict=True))
    return MeasurementComparison(
        before, after, rows, tuple(_differences(before.conditions, after.conditions))
    )


def _apart(old: MeasuredFigure, new: MeasuredFigure) -> str:
    """Why the two cannot be compared; empty if they can."""
    if None in (old.whole, new.whole):
        return "not measured in both"
    for name in old.settings.keys() & new.settings.keys():
        if old.settings[name] != new.settings[name]:
            return f"{name} is {old.settings[name]} in one and {new.settings[name]} in the other"
    return "" if old.samples and new.samples else "too few samples in a round"


def _row(old: MeasuredFigure, new: MeasuredFigure, why: str, p: float | None) -> FigureRow:
    both = (old, old.whole, new.whole, (old.samples, new.samples))
    if p is None:
        return FigureRow(*both, FigureVerdict.UNDECIDED, why or "too few rounds")
    found, finding = change(old.samples, new.samples), FigureVerdict.SAME
    if p <= LEVEL:
        more = p_lower(new.samples, old.samples) < p_lower(old.samples, new.samples)
        better = more is old.more_is_better
        finding = FigureVerdict.BETTER if better else FigureVerdict.WORSE
    return FigureRow(*both, finding, change=found, p=p)


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Difference]:
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield Difference(name, before.get(name), after.get(name))


#: What is compared of a histogram, by name.
_OF_LATENCY: Mapping[str, Callable[[Histogram], float | None]] = {
    "average": attrgetter("average_us"),
    **{name: partial(Histogram.percentile, share=share) for name, share in PERCENTILES.items()},
    "maximum": attrgetter("max_us"),
}


def figures(run: MeasuredRun) -> Iterator[MeasuredFigure]:
    """Yield all figures, also those that were not measured: the same ones for each run."""
    vm: _Settings = {}
    if run.guest is not None:
        vm = {
            "the VM's processor": "emulated" if run.guest.vm.emulated else "KVM's",
            "number of vCPUs": run.guest.vm.vcpus,
            "memory of the VM (MB)": run.guest.vm.memory_mb,
        }
    yield from _latency("latency", run.latency, {})
    yield from _latency("guest latency", run.guest_latency, vm)
    yield _throughput("throughput", run.throughput, {})
    yield _throughput("guest throughput", run.guest_throughput, vm)
    tcp = run.tcp
    streams = {"number of streams": tcp.settings.streams, **vm} if tcp else {}
    for mtu, lso in TCP_VARIANTS:
        samples = tcp.variant(mtu, lso) if tcp else ()
        yield from _tcp(f"TCP between VMs, {tcp_words(mtu, lso)}", samples, streams)
    yield from _tcp("TCP on the host", tcp.host if tcp else (), streams)


def _latency(what: str, latency: Latency | None, vm: _Settings) -> Iterator[MeasuredFigure]:
    settings: _Settings = {}
    if latency is not None:
        s = latency.settings
        settings = {
            "number of CPUs": len(parse_list(s.cpus)),
            "length of a round (s)": s.round_s,
            "interval (us)": s.interval_us,
            "priority": s.priority,
            "width (us)": s.width_us,
            **vm,
        }
    for name, of in _OF_LATENCY.items():
        found = [of(each.overall) for each in latency.rounds] if latency else []
        values = [value for value in found if value is not None]
        # If one round lacks the value, drop all: that round may be the worst.
        samples = values if len(values) == len(found) else []
        whole = of(latency.overall) if latency else None
        yield MeasuredFigure(f"{what} {name}", "us", False, settings, samples, whole)


def _throughput(what: str, found: Throughput | None, vm: _Settings) -> MeasuredFigure:
    settings = {"frame size": found.settings.frame_size, **vm} if found else {}
    return _of_samples(what, "pps", True, settings, found.samples if found else ())


def _tcp(what: str, samples: Sequence[TcpSample], settings: _Settings) -> Iterator[MeasuredFigure]:
    """Yield the rate and its CPU cost."""
    yield _of_samples(what, "bps", True, settings, [each.bits_per_s for each in samples])
    cost = [each.cpus_per_gbps for each in samples]
    yield _of_samples(f"{what}, CPU", "CPUs per Gbit/s", False, settings, cost)


def _of_samples(
    name: str, unit: str, more: bool, settings: _Settings, samples: Sequence[float]
) -> MeasuredFigure:
    return MeasuredFigure(name, unit, more, settings, samples, median(samples) if samples else None)

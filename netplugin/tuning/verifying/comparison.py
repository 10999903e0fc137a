"""Compare two runs figure by figure with a statistical test (pure).

The rounds of each run are the samples. A two-sided exact rank test compares them. Holm's adjustment keeps
the probability of any false claim among the figures at or below ``LEVEL``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from netplugin.host.cpus import parse_list
from netplugin.statistics import RelativeChange, can_reach, change, holm, p_lower
from netplugin.tuning.verifying.result import (
    PERCENTILES,
    TCP_VARIANTS,
    Histogram,
    Latency,
    MeasuredRun,
    Tcp,
    TcpSample,
    Throughput,
    tcp_words,
)

LEVEL = 0.05


class FigureVerdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference found"
    UNDECIDED = "cannot be decided"


@dataclass(frozen=True)
class MeasuredFigure:
    """A measured figure. ``samples`` returns one value per round, or none if it was not measured.

    ``settings`` are those that must be equal for two runs to be comparable.
    """

    name: str
    unit: str
    more_is_better: bool
    settings: Callable[[MeasuredRun], Mapping[str, int | str]]
    samples: Callable[[MeasuredRun], Sequence[float]]
    whole: Callable[[MeasuredRun], float | None]


@dataclass(frozen=True)
class FigureRow:
    """``before`` and ``after`` are values of the whole runs; ``p`` is adjusted, None if not tested."""

    figure: MeasuredFigure
    before: float | None
    after: float | None
    samples: tuple[Sequence[float], Sequence[float]]
    finding: FigureVerdict = FigureVerdict.SAME
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
    rows = [row for figure in FIGURES if (row := _row(figure, before, after))]
    testable = [row for row in rows if not row.why]
    sizes = [(len(old), len(new)) for old, new in (row.samples for row in testable)]
    able = dict(zip((r.figure.name for r in testable), can_reach(sizes, LEVEL / 2), strict=True))
    tested = [row for row in testable if able[row.figure.name]]
    adjusted = holm([min(1.0, 2 * min(_tails(row))) for row in tested])
    judged = {row.figure.name: _judged(row, p) for row, p in zip(tested, adjusted, strict=True)}
    return MeasurementComparison(
        before,
        after,
        tuple(judged.get(r.figure.name) or _undecided(r, r.why or "too few rounds") for r in rows),
        tuple(_differences(before.conditions, after.conditions)),
    )


def _row(figure: MeasuredFigure, before: MeasuredRun, after: MeasuredRun) -> FigureRow | None:
    """Make a row; None if neither run has the figure. ``why`` is set if it cannot be tested."""
    values = figure.whole(before), figure.whole(after)
    row = FigureRow(figure, *values, (figure.samples(before), figure.samples(after)))
    if values == (None, None):
        return None
    if None in values:
        return _undecided(row, "not measured in both")
    if apart := _apart(figure, before, after):
        return _undecided(row, apart)
    return row if all(row.samples) else _undecided(row, "too few samples in a round")


def _undecided(row: FigureRow, why: str) -> FigureRow:
    return replace(row, finding=FigureVerdict.UNDECIDED, why=why)


def _apart(figure: MeasuredFigure, before: MeasuredRun, after: MeasuredRun) -> str:
    """The setting that makes the runs incomparable, as text; empty if there is none."""
    one, other = (figure.settings(run) for run in (before, after))
    for name in one:
        if name in other and one[name] != other[name]:
            return f"{name} is {one[name]} in one and {other[name]} in the other"
    return ""


def _tails(row: FigureRow) -> tuple[float, float]:
    """One-sided p-values for ``after`` being as low, and as high, by chance."""
    old, new = row.samples
    return p_lower(old, new), p_lower(new, old)


def _judged(row: FigureRow, p: float) -> FigureRow:
    finding = FigureVerdict.SAME
    if p <= LEVEL:
        low, high = _tails(row)
        better = (high < low) is row.figure.more_is_better
        finding = FigureVerdict.BETTER if better else FigureVerdict.WORSE
    return replace(row, finding=finding, change=change(*row.samples), p=p)


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[Difference]:
    return [
        Difference(name, before.get(name), after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


_Of = Callable[[Histogram], float | None]


_Latency = Callable[[MeasuredRun], Latency | None]


def _of_host(run: MeasuredRun) -> Latency | None:
    return run.latency


def _of_guest(run: MeasuredRun) -> Latency | None:
    return run.guest_latency


def _of_latency(latency: Latency | None) -> Mapping[str, int | str]:
    if latency is None:
        return {}
    s = latency.settings
    return {
        "number of CPUs": len(parse_list(s.cpus)),
        "length of a round (s)": s.round_s,
        "interval (us)": s.interval_us,
        "priority": s.priority,
        "width (us)": s.width_us,
    }


def _of_vm(run: MeasuredRun) -> Mapping[str, int | str]:
    """The settings of a VM without which two are not alike."""
    if run.guest is None:
        return {}
    vm = run.guest.vm
    return {
        "the VM's processor": "emulated" if vm.emulated else "KVM's",
        "number of vCPUs": vm.vcpus,
        "memory of the VM (MB)": vm.memory_mb,
    }


def _throughput(what: str, find: Callable[[MeasuredRun], Throughput | None]) -> MeasuredFigure:
    def settings(run: MeasuredRun) -> Mapping[str, int | str]:
        found = find(run)
        if found is None:
            return {}
        return {
            "frame size": found.settings.frame_size,
            **(_of_vm(run) if found is not run.throughput else {}),
        }

    def samples(run: MeasuredRun) -> Sequence[float]:
        found = find(run)
        return found.samples if found else ()

    def whole(run: MeasuredRun) -> float | None:
        found = find(run)
        return median(found.samples) if found else None

    return MeasuredFigure(what, "pps", True, settings, samples, whole)


def _latency(what: str, find: _Latency, name: str, of: _Of) -> MeasuredFigure:
    def settings(run: MeasuredRun) -> Mapping[str, int | str]:
        latency = find(run)
        return {**_of_latency(latency), **(_of_vm(run) if find is _of_guest else {})}

    def samples(run: MeasuredRun) -> Sequence[float]:
        latency = find(run)
        found = [of(each.overall) for each in latency.rounds] if latency else []
        values = [value for value in found if value is not None]
        # If one round lacks the value, drop all: that round may be the worst.
        return values if len(values) == len(found) else []

    def whole(run: MeasuredRun) -> float | None:
        latency = find(run)
        return of(latency.overall) if latency else None

    return MeasuredFigure(f"{what} {name}", "us", False, settings, samples, whole)


def _latencies(what: str, find: _Latency) -> Iterator[MeasuredFigure]:
    yield _latency(what, find, "average", lambda histogram: histogram.average_us)
    for name, share in PERCENTILES.items():
        yield _latency(what, find, name, _percentile(share))
    yield _latency(what, find, "maximum", lambda histogram: histogram.max_us)


def _percentile(share: float) -> _Of:
    return lambda histogram: histogram.percentile(share)


_Samples = Callable[[Tcp], Sequence[TcpSample]]


def _tcp(what: str, find: _Samples) -> Iterator[MeasuredFigure]:
    """The rate and its CPU cost; ``find`` returns the samples of a variant."""

    def settings(run: MeasuredRun) -> Mapping[str, int | str]:
        if run.tcp is None:
            return {}
        return {"number of streams": run.tcp.settings.streams, **_of_vm(run)}

    def figure(unit: str, more: bool, value: Callable[[TcpSample], float]) -> MeasuredFigure:
        def samples(run: MeasuredRun) -> Sequence[float]:
            return [value(sample) for sample in find(run.tcp)] if run.tcp else ()

        def whole(run: MeasuredRun) -> float | None:
            found = samples(run)
            return median(found) if found else None

        name = f"{what}, CPU" if unit == "CPUs per Gbit/s" else what
        return MeasuredFigure(name, unit, more, settings, samples, whole)

    yield figure("bps", True, lambda sample: sample.bits_per_s)
    yield figure("CPUs per Gbit/s", False, lambda sample: sample.cpus_per_gbps)


def _between(mtu: int, lso: bool) -> Iterator[MeasuredFigure]:
    yield from _tcp(f"TCP between VMs, {tcp_words(mtu, lso)}", lambda tcp: tcp.variant(mtu, lso))


FIGURES: tuple[MeasuredFigure, ...] = (
    *_latencies("latency", _of_host),
    *_latencies("guest latency", _of_guest),
    _throughput("throughput", lambda run: run.throughput),
    _throughput("guest throughput", lambda run: run.guest_throughput),
    *(figure for variant in TCP_VARIANTS for figure in _between(*variant)),
    *_tcp("TCP on the host", lambda tcp: tcp.host),
)

"""The figures of a run: one description of each for tables, JSON, comparisons and plots (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import median
from typing import Any, Final

from netplugin.host.cpus import parse_list
from netplugin.tuning.verifying import result
from netplugin.tuning.verifying.result import GuestMeasurement, Histogram, MeasuredRun, tcp_words

_Settings = dict[str, int | str]


@dataclass(frozen=True)
class Unit:
    """``name`` is in JSON, ``shown`` in tables and plots, where values are divided by ``scale``."""

    name: str
    shown: str
    more_is_better: bool = False
    scale: float = 1
    form: Callable[[float], str] = "{:.3g}".format

    def text(self, value: float | None) -> str:
        return "-" if value is None else self.form(value / self.scale)


US: Final = Unit("us", "us", form=lambda us: f"{round(us, 1):.12g}")
PPS: Final = Unit("pps", "Mpps", more_is_better=True, scale=1e6, form="{:.3f}".format)
BPS: Final = Unit("bps", "Gbit/s", more_is_better=True, scale=1e9)
_COUNT: Final = Unit("", "", form="{:.0f}".format)
_BUSY: Final = Unit("CPUs", "busy CPUs of the host", form="{:.2f}".format)
_COST: Final = Unit("CPUs per Gbit/s", "CPUs per Gbit/s")


@dataclass(frozen=True)
class Column:
    """A figure of one measurement: its head in a table, which is the key in JSON, and its value there.

    ``compared`` comes after the name of the measurement in a comparison; None: it is not compared. A value is
    None if it takes more samples.
    """

    head: str
    unit: Unit
    of: Callable[[Any], float | None]
    compared: str | None = None

    def values(self, rounds: Sequence[Any]) -> list[float]:
        return [value for each in rounds if (value := self.of(each)) is not None]


#: Of a histogram.
LATENCY: Final = (
    Column("min", US, attrgetter("min_us")),
    Column("average", US, attrgetter("average_us"), " average"),
    *(Column(n, US, partial(Histogram.percentile, share=p), f" {n}") for n, p in result.PERCENTILES.items()),
    Column("max", US, attrgetter("max_us"), " maximum"),
    Column("samples", _COUNT, attrgetter("samples")),
    Column("overflows", _COUNT, attrgetter("overflows")),
)
#: Of a sample of the testpmd loop.
THROUGHPUT: Final = (Column("median", PPS, float, ""),)
#: Of a sample of TCP.
TCP: Final = (
    Column(BPS.shown, BPS, attrgetter("bits_per_s"), ""),
    Column(_BUSY.shown, _BUSY, attrgetter("busy_cpus")),
    Column(_COST.shown, _COST, lambda sample: sample.busy_cpus / (sample.bits_per_s / 1e9), ", CPU"),
)


@dataclass(frozen=True)
class Figure:
    """A figure of a run: ``samples`` are those of the rounds, and ``whole`` is None if it was not measured.

    Two runs are comparable if their ``settings`` are equal.
    """

    name: str
    unit: Unit
    settings: _Settings
    samples: Sequence[float]
    whole: float | None


def figures(run: MeasuredRun) -> Iterator[Figure]:
    """Yield all figures, also those that were not measured: the same ones for each run."""
    guest, vm = run.guest, _Settings()
    if guest:
        vm["the VM's processor"] = "emulated" if guest.vm.emulated else "KVM's"
        vm |= {"number of vCPUs": guest.vm.vcpus, "memory of the VM (MB)": guest.vm.memory_mb}
    yield from _on_cpus("", run, {})
    yield from _on_cpus("guest ", guest, vm)
    tcp = guest and guest.tcp
    settings = {"number of streams": tcp.settings.streams, **vm} if tcp else {}
    samples = {(each.mtu, each.lso): each.samples for each in tcp.between} if tcp else {}
    for mtu, lso in result.TCP_VARIANTS:
        name = f"TCP between VMs, {tcp_words(mtu, lso)}"
        yield from _figures(name, TCP, settings, samples.get((mtu, lso), ()))
    yield from _figures("TCP on the host", TCP, settings, tcp.host if tcp else ())


def _on_cpus(place: str, of: MeasuredRun | GuestMeasurement | None, more: _Settings) -> Iterator[Figure]:
    """Yield what is measured on CPUs or on vCPUs."""
    settings, rounds, overall = _Settings(), [], None
    if latency := of and of.latency:
        s, rounds, overall = latency.settings, [each.overall for each in latency.rounds], latency.overall
        settings = {"number of CPUs": len(parse_list(s.cpus)), "length of a round (s)": s.round_s, **more}
        settings |= {"interval (us)": s.interval_us, "priority": s.priority, "width (us)": s.width_us}
    yield from _figures(f"{place}latency", LATENCY, settings, rounds, overall)
    throughput = of and of.throughput
    settings = {"frame size": throughput.settings.frame_size, **more} if throughput else {}
    yield from _figures(f"{place}throughput", THROUGHPUT, settings, throughput.samples if throughput else ())


def _figures(
    name: str, columns: Sequence[Column], settings: _Settings, rounds: Sequence[Any], overall: Any = None
) -> Iterator[Figure]:
    """``overall``: all rounds together; without it the figure of a run is the median of the rounds."""
    for column in columns:
        if column.compared is not None:
            samples = column.values(rounds)
            whole = column.of(overall) if overall else median(samples) if samples else None
            # If one round lacks the value, drop all: that round may be the worst.
            samples = samples if len(samples) == len(rounds) else []
            yield Figure(name + column.compared, column.unit, settings, samples, whole)

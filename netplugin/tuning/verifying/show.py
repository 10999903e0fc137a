"""Render a run and a comparison as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from netplugin.tuning.verifying import result
from netplugin.tuning.verifying.comparison import LEVEL, FigureRow, FigureVerdict, MeasurementComparison
from netplugin.tuning.verifying.figures import LATENCY, PPS, TCP
from netplugin.tuning.verifying.result import GuestMeasurement, Histogram, MeasuredRun, tcp_words

#: What must stand next to figures of a VM without KVM.
EMULATED: Final = "Emulated, without KVM: this shows that it works, and is no measure of this host."
_Block = list[str]


def run_text(run: MeasuredRun) -> str:
    blocks = [[_when(run)], *_parts(run, "CPU")]
    if guest := run.guest:
        blocks += [[vm_text(guest.vm)], *_parts(guest, "vCPU"), *([_tcp(guest.tcp)] if guest.tcp else [])]
    return _text(blocks)


def _text(blocks: Iterable[Iterable[str]]) -> str:
    return "\n\n".join(map("\n".join, blocks)) + "\n"


def _when(run: MeasuredRun) -> str:
    return f"{run.label}, {run.started:%Y-%m-%d %H:%M:%S} UTC"


def _parts(of: MeasuredRun | GuestMeasurement, cpu: str) -> Iterator[_Block]:
    """Format what is measured on CPUs or on vCPUs."""
    if of.latency:
        yield _latency(of.latency, cpu)
    if of.throughput:
        yield _throughput(of.throughput, "" if cpu == "CPU" else f"{cpu} ")


def _latency(latency: result.Latency, cpu: str) -> _Block:
    s = latency.settings
    histograms = {str(cpu): each for cpu, each in latency.by_cpu().items()}
    if len(histograms) > 1:
        histograms["all"] = latency.overall
    rows = [[name, *(c.unit.text(c.of(each)) for c in LATENCY)] for name, each in histograms.items()]
    head = [cpu, *(each.head for each in LATENCY[:-1]), f"over {s.width_us}"]
    title = f"Latency (cyclictest {latency.program}, priority {s.priority}, every {s.interval_us} us, "
    return [f"{title}{_times(len(latency.rounds), s.round_s)}), microseconds", *table([head, *rows])]


def _throughput(throughput: result.Throughput, guest: str) -> _Block:
    s, samples = throughput.settings, throughput.samples
    huge, ordinary = f"hugepages of node {s.hugepage_node}", "ordinary pages, as too few hugepages are free"
    middle, low, high = map(PPS.text, (median(samples), min(samples), max(samples)))
    return [
        f"Throughput ({throughput.program}, testpmd on CPU {s.host_cpu} and {guest}{s.guest_cpu}, "
        f"{s.frame_size} bytes, {ordinary if s.hugepage_node is None else huge}), {PPS.shown} each way",
        f"  median {middle}, from {low} to {high} ({_times(len(samples), s.window_s)})",
    ]


def _tcp(tcp: result.Tcp) -> _Block:
    s = tcp.settings
    measured = [(tcp_words(each.mtu, each.lso), each.samples) for each in tcp.between]
    measured.append(("this host, loopback device", tcp.host))
    rows = [[name, *(c.unit.text(median(c.values(samples))) for c in TCP)] for name, samples in measured]
    title = f"TCP ({tcp.program}, {s.streams} streams, {_times(len(tcp.host), s.window_s)}), medians"
    return [title, *table([["VM to VM", *(each.head for each in TCP)], *rows])]


def vm_text(vm: result.GuestVm) -> str:
    """One line about the VM, which reports it if its figures are no measure."""
    where = f"{'vCPU ' if vm.pins else ''}{vm.placed}" + (", real time" if vm.realtime else "")
    text = f"In a VM ({vm.origin}, Linux {vm.kernel}, {vm.vcpus} vCPUs, {vm.memory_mb} MB; {where})"
    return f"{text}\n{EMULATED}" if vm.emulated else text


def comparison_text(comparison: MeasurementComparison) -> str:
    runs = {"before": comparison.before, "after": comparison.after}
    head = ["", *runs, "rounds", "change of rounds", "p", ""]
    tested = sum(row.p is not None for row in comparison.rows)
    level = (
        f"{tested} figures tested (exact rank test of the rounds, p adjusted by Holm): at most "
        f"{LEVEL:.0%} for any false claim among them, if runs vary as the rounds of one do."
    )
    emulated = any(run.is_emulated for run in runs.values())
    begin = [*(f"{name}: {_when(run)}" for name, run in runs.items()), *([EMULATED] if emulated else [])]
    rows, end = (
        table([head, *map(_row, comparison.rows)]),
        [verdict(comparison), *([level] if tested else [])],
    )
    return _text([begin, rows, _differences(comparison), end])


def verdict(comparison: MeasurementComparison) -> str:
    """One sentence per kind of finding: ``Better: latency P99, throughput.``"""
    names = {each: ", ".join(row.before.name for row in comparison.of(each)) for each in FigureVerdict}
    parts = (f"{each[0].upper()}{each[1:]}: {names[each]}." for each in FigureVerdict if names[each])
    return " ".join(parts) or "Nothing was measured in either run."


def _row(row: FigureRow) -> list[str]:
    unit, sides = row.before.unit, (row.before, row.after)
    ratios = [f"{r:.3g}" if math.isfinite(r) else "too large for a number" for r in row.ratios]
    return [
        f"{row.before.name} ({unit.shown})",
        *(unit.text(side.whole) for side in sides),
        "" if row.p is None else "/".join(str(len(side.samples)) for side in sides),
        "x{} ({} to {})".format(*ratios) if ratios else "",
        "" if row.p is None else f"{row.p:.2g}",
        f"{row.finding}: {row.why}" if row.why else row.finding.value,
    ]


def _differences(comparison: MeasurementComparison) -> Iterator[str]:
    if not comparison.differences:
        yield "The machine was set alike in both runs, as far as is known."
        return
    yield "What differs between the runs:"
    for each in comparison.differences:
        yield f"  {each.name}: {each.before or 'not set'} -> {each.after or 'not set'}"


def _times(count: int, seconds: int) -> str:
    return f"{f'{count} times' if count > 1 else 'once'} {seconds} s"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows in columns; the first and the last column are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        middle = map(str.rjust, row[1:-1], widths[1:-1])
        last = row[-1].rjust(widths[-1]) if row[-1].isdigit() else row[-1]
        yield "  ".join(["", row[0].ljust(widths[0]), *middle, last]).rstrip()


def run_json(run: MeasuredRun, path: Path) -> str:
    """Render the figures of a run; ``file`` names the file with all samples."""
    shown = {**_named(run), "file": str(path), **_parts_json(run)}
    if run.guest:
        tcp = {"tcp": run.guest.tcp.model_dump()} if run.guest.tcp else {}
        shown["guest"] = {"vm": run.guest.vm.model_dump(), **_parts_json(run.guest), **tcp}
    return json.dumps({**shown, "conditions": dict(run.conditions)}, indent=2) + "\n"


def _named(run: MeasuredRun) -> dict[str, Any]:
    return {"label": run.label, "started": run.started.isoformat()}


def _parts_json(of: MeasuredRun | GuestMeasurement) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if of.latency:
        shown["latency_us"] = {
            "settings": of.latency.settings.model_dump(),
            "overall": _values(of.latency.overall),
            "cpus": {str(cpu): _values(each) for cpu, each in of.latency.by_cpu().items()},
        }
    if of.throughput:
        samples = list(of.throughput.samples)
        shown["throughput_pps"] = {
            "settings": of.throughput.settings.model_dump(),
            **{"median": median(samples), "min": min(samples), "max": max(samples), "samples": samples},
        }
    return shown


def _values(histogram: Histogram) -> dict[str, float | None]:
    values = {each.head: each.of(histogram) for each in LATENCY}
    return {name: value and round(value, 2) for name, value in values.items()}


def comparison_json(comparison: MeasurementComparison) -> str:
    """Render a comparison; a missing number is null, ``ratio`` is after divided by before."""
    shown = {
        "before": _named(comparison.before),
        "after": _named(comparison.after),
        "verdict": verdict(comparison),
        "level": LEVEL,
        "figures": [_row_json(row) for row in comparison.rows],
        "differences": [vars(each) for each in comparison.differences],
    }
    return json.dumps(shown, indent=2, allow_nan=False) + "\n"


def _row_json(row: FigureRow) -> dict[str, Any]:
    sides = {"before": row.before, "after": row.after}
    ratios = zip(("ratio", "ratio_low", "ratio_high"), row.ratios or (math.nan,) * 3, strict=True)
    return {
        "name": row.before.name,
        "unit": row.before.unit.name,
        **{when: side.whole for when, side in sides.items()},
        **{f"samples_{when}": list(side.samples) for when, side in sides.items()},
        **{name: r if math.isfinite(r) else None for name, r in ratios},
        "p_adjusted": row.p,
        "finding": row.finding.value,
        "why": row.why or None,
    }

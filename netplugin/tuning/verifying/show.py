"""Render a run and a comparison as text, as JSON and as a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

from netplugin.api.errors import BackendUnavailable, HostError, InvalidRequest
from netplugin.statistics import RelativeChange
from netplugin.tuning.verifying.comparison import LEVEL, FigureRow, FigureVerdict, MeasurementComparison
from netplugin.tuning.verifying.result import (
    PERCENTILES,
    GuestMeasurement,
    GuestVm,
    Histogram,
    Latency,
    MeasuredRun,
    Tcp,
    TcpSample,
    Throughput,
    tcp_words,
)

#: What must stand next to figures of a VM without KVM.
EMULATED: Final = "Emulated, without KVM: this shows that it works, and is no measure of this host."


def run_text(run: MeasuredRun) -> str:
    return "\n".join(_run(run)) + "\n"


def _run(run: MeasuredRun) -> Iterator[str]:
    yield f"{run.label}, {run.started:%Y-%m-%d %H:%M:%S} UTC"
    yield from _parts(run, "CPU")
    if run.guest:
        yield ""
        yield vm_text(run.guest.vm)
        yield from _parts(run.guest, "vCPU")
        if run.guest.tcp:
            yield ""
            yield from _tcp(run.guest.tcp)


def _parts(of: MeasuredRun | GuestMeasurement, cpu: str) -> Iterator[str]:
    """Format what is measured on CPUs or on vCPUs."""
    if of.latency:
        yield ""
        yield from _latency(of.latency, cpu)
    if of.throughput:
        yield ""
        yield from _throughput(of.throughput, "" if cpu == "CPU" else f"{cpu} ")


def _tcp(tcp: Tcp) -> Iterator[str]:
    s, rounds = tcp.settings, len(tcp.host)
    yield f"TCP ({tcp.program}, {s.streams} streams, {_times(rounds)} {s.window_s} s), medians"
    rows = [(tcp_words(v.mtu, v.lso), v.samples) for v in tcp.between]
    rows.append(("this host, loopback device", tcp.host))
    head = ("VM to VM", "Gbit/s", "busy CPUs of the host", "CPUs per Gbit/s")
    yield from table([head, *(_tcp_row(name, samples) for name, samples in rows)])


def _tcp_row(name: str, samples: Sequence[TcpSample]) -> tuple[str, ...]:
    return (
        name,
        _gbps(median(each.bits_per_s for each in samples)),
        f"{median(each.busy_cpus for each in samples):.2f}",
        f"{median(each.cpus_per_gbps for each in samples):.3g}",
    )


def vm_text(vm: GuestVm) -> str:
    """One line about the VM, which reports it if its figures are no measure."""
    pins = ", ".join(f"vCPU {vcpu} on CPU {cpu}" for vcpu, cpu in sorted(vm.pins.items()))
    where = (pins or "not placed") + (", real time" if vm.realtime else "")
    text = f"In a VM ({vm.origin}, Linux {vm.kernel}, {vm.vcpus} vCPUs, {vm.memory_mb} MB; {where})"
    return f"{text}\n{EMULATED}" if vm.emulated else text


def _latency(latency: Latency, cpus: str) -> Iterator[str]:
    s, rounds = latency.settings, len(latency.rounds)
    yield (
        f"Latency (cyclictest {latency.program}, priority {s.priority}, every {s.interval_us} us, "
        f"{_times(rounds)} {s.round_s} s), microseconds"
    )
    rows = {str(cpu): _figures(each, 1) for cpu, each in latency.by_cpu().items()}
    if len(rows) > 1:
        rows["all"] = _figures(latency.overall, 1)
    head = (cpus, "min", "average", *PERCENTILES, "max", "samples", f"over {s.width_us}")
    yield from table([head, *((name, *map(_shown, each.values())) for name, each in rows.items())])


def _figures(histogram: Histogram, digits: int) -> Mapping[str, float | None]:
    return {
        "min": histogram.min_us,
        "average": round(histogram.average_us, digits),
        **{name: histogram.percentile(share) for name, share in PERCENTILES.items()},
        "max": histogram.max_us,
        "samples": histogram.samples,
        "overflows": histogram.overflows,
    }


def _shown(value: float | None) -> str:
    return "-" if value is None else str(value)


def _throughput(throughput: Throughput, guest: str) -> Iterator[str]:
    s, samples = throughput.settings, throughput.samples
    memory = f"hugepages of node {s.hugepage_node}"
    if s.hugepage_node is None:
        memory = "ordinary pages, as too few hugepages are free"
    yield (
        f"Throughput ({throughput.program}, testpmd on CPU {s.host_cpu} and {guest}{s.guest_cpu}, "
        f"{s.frame_size} bytes, {memory}), Mpps each way"
    )
    yield (
        f"  median {_mpps(median(samples))}, from {_mpps(min(samples))} to {_mpps(max(samples))} "
        f"({_times(len(samples))} {s.window_s} s)"
    )


def comparison_text(comparison: MeasurementComparison) -> str:
    return "\n".join(_comparison(comparison)) + "\n"


def _comparison(comparison: MeasurementComparison) -> Iterator[str]:
    for name, run in (("before", comparison.before), ("after", comparison.after)):
        yield f"{name}: {run.label}, {run.started:%Y-%m-%d %H:%M:%S} UTC"
    if any(run.guest and run.guest.vm.emulated for run in (comparison.before, comparison.after)):
        yield EMULATED
    yield ""
    head = ("", "before", "after", "rounds", "change of rounds", "p", "")
    yield from table([head, *(_row(row) for row in comparison.rows)])
    yield ""
    yield from _differences(comparison)
    yield ""
    yield verdict(comparison)
    tested = sum(row.p is not None for row in comparison.rows)
    if tested:
        yield (
            f"{tested} figures tested (exact rank test of the rounds, p adjusted by Holm): at most "
            f"{LEVEL:.0%} for any false claim among them, if runs vary as the rounds of one do."
        )


def verdict(comparison: MeasurementComparison) -> str:
    """One sentence per kind of finding: ``Better: latency P99, throughput.``"""
    parts = []
    for finding in FigureVerdict:
        names = [row.figure.name for row in comparison.of(finding)]
        if names:
            parts.append(f"{finding[0].upper()}{finding[1:]}: {', '.join(names)}.")
    return " ".join(parts) or "Nothing was measured in either run."


def _row(row: FigureRow) -> tuple[str, ...]:
    unit, shown = _UNITS.get(row.figure.unit, (row.figure.unit, _three))
    return (
        f"{row.figure.name} ({unit})",
        *("-" if value is None else shown(value) for value in (row.before, row.after)),
        "/".join(str(len(samples)) for samples in row.samples) if row.p is not None else "",
        change_text(row.change),
        "" if row.p is None else f"{row.p:.2g}",
        f"{row.finding}: {row.why}" if row.why else row.finding.value,
    )


def _differences(comparison: MeasurementComparison) -> Iterator[str]:
    if not comparison.differences:
        yield "The machine was set alike in both runs, as far as is known."
        return
    yield "What differs between the runs:"
    for each in comparison.differences:
        before, after = ("not set" if value is None else value for value in (each.before, each.after))
        yield f"  {each.name}: {before} -> {after}"


def change_text(change: RelativeChange | None) -> str:
    """Format a change as ``x1.12 (1.08 to 1.15)``: the ratio and the confidence interval of the test."""
    if change is None:
        return ""
    middle, low, high = (
        _three(value + 1) if math.isfinite(value) else "too large for a number"
        for value in (change.ratio, change.low, change.high)
    )
    return f"x{middle} ({low} to {high})"


def _three(value: float) -> str:
    return f"{value:.3g}"


def _gbps(bps: float) -> str:
    return _three(bps / 1e9)


def _mpps(pps: float) -> str:
    return f"{pps / 1e6:.3f}"


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


#: Units, as they are shown, and their values.
_UNITS: Final = {"pps": ("Mpps", _mpps), "bps": ("Gbit/s", _gbps), "us": ("us", _us)}


def _times(count: int) -> str:
    return f"{count} times" if count > 1 else "once"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows in columns; the first and the last column are left-aligned."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        cells[-1] = row[-1].ljust(widths[-1]) if not row[-1].isdigit() else cells[-1]
        yield ("  " + "  ".join(cells)).rstrip()


def run_json(run: MeasuredRun, path: Path) -> str:
    """Render the figures of a run; ``file`` names the file with all samples."""
    shown = {"label": run.label, "started": run.started.isoformat(), "file": str(path), **_parts_json(run)}
    if run.guest:
        tcp = {"tcp": run.guest.tcp.model_dump()} if run.guest.tcp else {}
        shown["guest"] = {"vm": run.guest.vm.model_dump(), **_parts_json(run.guest), **tcp}
    return json.dumps({**shown, "conditions": dict(run.conditions)}, indent=2) + "\n"


def _parts_json(of: MeasuredRun | GuestMeasurement) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if of.latency:
        shown["latency_us"] = {
            "settings": of.latency.settings.model_dump(),
            "overall": _figures(of.latency.overall, 2),
            "cpus": {str(cpu): _figures(each, 2) for cpu, each in of.latency.by_cpu().items()},
        }
    if of.throughput:
        samples = of.throughput.samples
        shown["throughput_pps"] = {
            "settings": of.throughput.settings.model_dump(),
            "median": median(samples),
            "min": min(samples),
            "max": max(samples),
            "samples": list(samples),
        }
    return shown


def comparison_json(comparison: MeasurementComparison) -> str:
    """Render a comparison; a missing number is null, ``ratio`` is after divided by before."""
    runs = {"before": comparison.before, "after": comparison.after}
    figures = [
        {
            "name": row.figure.name,
            "unit": row.figure.unit,
            "before": row.before,
            "after": row.after,
            "samples_before": list(row.samples[0]),
            "samples_after": list(row.samples[1]),
            "ratio": _one_and(row.change.ratio if row.change else None),
            "ratio_low": _one_and(row.change.low if row.change else None),
            "ratio_high": _one_and(row.change.high if row.change else None),
            "p_adjusted": row.p,
            "finding": row.finding.value,
            "why": row.why or None,
        }
        for row in comparison.rows
    ]
    shown = {
        **{n: {"label": r.label, "started": r.started.isoformat()} for n, r in runs.items()},
        "verdict": verdict(comparison),
        "level": LEVEL,
        "figures": figures,
        "differences": [
            {"name": d.name, "before": d.before, "after": d.after} for d in comparison.differences
        ],
    }
    return json.dumps(shown, indent=2, allow_nan=False) + "\n"


def _one_and(less_one: float | None) -> float | None:
    return None if less_one is None or not math.isfinite(less_one) else less_one + 1


# -- Plot a comparison: the share of samples above each latency, and the throughput of the rounds.
# It uses matplotlib's object interface, not pyplot, which keeps global state.


STEP = "plot"
_INK: Final = "#1f2328"
_STYLE: Final = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **{"axes.grid": True, "grid.alpha": 0.35, "grid.linewidth": 0.5},
    **{"axes.spines.top": False, "axes.spines.right": False},
}
_COLOURS: Final = ("#0072b2", "#d55e00")  # distinguishable with red-green colour blindness
#: Label, colour, and what was measured.
_Drawn: TypeAlias = tuple[str, str, Any]
_KINDS: Final = (".png", ".svg")


def require_plot(path: Path) -> None:
    """Raises: BackendUnavailable naming the missing extra, InvalidRequest for another file type."""
    if path.suffix not in _KINDS:
        raise InvalidRequest(
            f"--plot: {path.name} is neither PNG nor SVG", step=STEP, fix="name it .png or .svg"
        )
    if find_spec("matplotlib") is None:
        raise BackendUnavailable(
            "a picture needs matplotlib, which is not installed",
            step=STEP,
            fix="pip install 'netplugin[plot]'",
        )


def draw_plot(comparison: MeasurementComparison, path: Path) -> None:
    """Draw the plot to a PNG or SVG file. Raises: HostError if it cannot be written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = (comparison.before, comparison.after)
    emulated = any(run.guest and run.guest.vm.emulated for run in runs)
    in_vm = "Latency of a timer in the VM (cyclictest" + (", emulated: no measure)" if emulated else ")")
    panels: list[tuple[str, Callable[[Any, list[_Drawn]], None], list[Any]]] = [
        ("Latency of a timer (cyclictest)", _draw_latency, [run.latency for run in runs]),
        (in_vm, _draw_latency, [run.guest_latency for run in runs]),
        ("Throughput (two testpmd)", _draw_throughput, [run.throughput for run in runs]),
    ]
    panels = [panel for panel in panels if any(panel[2])]
    labels = [run.label for run in runs]
    if labels[0] == labels[1]:
        labels = [f"{run.label} ({run.started:%Y-%m-%d %H:%M:%S})" for run in runs]
    with matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False, **_STYLE}):
        picture = Figure(figsize=(8.0, 3.6 * max(1, len(panels))), layout="constrained")
        FigureCanvasAgg(picture)
        for number, (title, draw, measured) in enumerate(panels, 1):
            axes = picture.add_subplot(len(panels), 1, number)
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            draw(axes, [each for each in zip(labels, _COLOURS, measured, strict=True) if each[2]])
        try:
            picture.savefig(path, dpi=150, facecolor="white")
        except OSError as wrong:
            raise HostError(f"{path} cannot be written: {wrong.strerror}", step=STEP) from wrong


def _draw_latency(axes: Any, measured: Sequence[_Drawn]) -> None:
    """Draw the share of samples above each latency, to show the tail."""
    for label, colour, latency in measured:
        later, shares = _tail(latency.overall)
        name = f"{label} (at most {latency.overall.max_us} us)"
        axes.step(later, shares, where="post", color=colour, linewidth=1.8, label=name)
        axes.plot(later[-1:], shares[-1:], marker="o", markersize=4, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="microseconds", ylabel="share of samples later than this")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: "all" if value >= 1 else f"1 in {round(1 / value):,}")
    axes.legend(frameon=False, fontsize=9)


def _tail(histogram: Histogram) -> tuple[list[int], list[float]]:
    """Latencies, up to the maximum, and the share of samples above each."""
    left, later, shares = histogram.samples, [], []
    for value in sorted(histogram.counts):
        left -= histogram.counts[value]
        if left:
            later.append(max(1, value))
            shares.append(left / histogram.samples)
    return [*later, max(1, histogram.max_us)], [*shares, shares[-1] if shares else 1.0]


def _draw_throughput(axes: Any, measured: Sequence[_Drawn]) -> None:
    """Draw a point for each round, side by side so that equal ones stay visible."""
    for place, (_, colour, throughput) in enumerate(measured):
        mpps = [sample / 1e6 for sample in throughput.samples]
        across = [place + 0.3 * ((n + 0.5) / len(mpps) - 0.5) for n in range(len(mpps))]
        axes.plot(across, mpps, linestyle="none", marker="o", markersize=6, alpha=0.8, color=colour)
        axes.hlines(median(mpps), place - 0.22, place + 0.22, color=colour, linewidth=2)
    axes.set_xticks(range(len(measured)), [label for label, _, _ in measured])
    highest = max(max(each.samples) for _, _, each in measured) / 1e6
    axes.set(xlim=(-0.6, len(measured) - 0.4), ylim=(0, highest * 1.15), ylabel="Mpps each way")
    axes.set_xlabel("a point for each round, a line at their median")

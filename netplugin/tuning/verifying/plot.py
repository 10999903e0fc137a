"""Plot a comparison: the share of samples above each latency, and the throughput of the rounds.

It uses matplotlib's object interface, not pyplot, which keeps global state.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from netplugin.api.errors import BackendUnavailable, HostError, InvalidRequest
from netplugin.tuning.verifying.comparison import MeasurementComparison
from netplugin.tuning.verifying.result import Latency, MeasuredRun, Throughput

STEP = "plot"
_INK: Final = "#1f2328"
_COLOURS: Final = ("#0072b2", "#d55e00")  # distinguishable with red-green colour blindness
_INCHES: Final = (8.0, 3.6)
_KINDS: Final = (".png", ".svg")


def require(path: Path) -> None:
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


def draw(comparison: MeasurementComparison, path: Path) -> None:
    """Draw the plot to a PNG or SVG file. Raises: HostError if it cannot be written."""
    import matplotlib

    style = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with matplotlib.rc_context(style):
        picture = _picture(comparison)
        try:
            picture.savefig(path, dpi=150, facecolor="white")
        except OSError as wrong:
            raise HostError(f"{path} cannot be written: {wrong.strerror}", step=STEP) from wrong


def _picture(comparison: MeasurementComparison) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = (comparison.before, comparison.after)
    panels = []
    if any(run.latency for run in runs):
        panels.append(_draw_latency)
    if any(run.throughput for run in runs):
        panels.append(_draw_throughput)
    height = _INCHES[1] * max(1, len(panels))
    picture = Figure(figsize=(_INCHES[0], height), layout="constrained")
    FigureCanvasAgg(picture)
    for number, panel in enumerate(panels, 1):
        axes = picture.add_subplot(len(panels), 1, number)
        panel(axes, _named(runs))
        axes.grid(linewidth=0.5, alpha=0.35)
        axes.spines[["top", "right"]].set_visible(False)
    return picture


def _named(runs: tuple[MeasuredRun, MeasuredRun]) -> list[tuple[str, str, MeasuredRun]]:
    """Label, colour and run; equal labels get the start time appended."""
    labels = [run.label for run in runs]
    if labels[0] == labels[1]:
        labels = [f"{run.label} ({run.started:%Y-%m-%d %H:%M:%S})" for run in runs]
    return list(zip(labels, _COLOURS, runs, strict=True))


def _draw_latency(axes: Any, runs: list[tuple[str, str, MeasuredRun]]) -> None:
    """Draw the share of samples above each latency, to show the tail."""
    for label, colour, run in runs:
        if run.latency:
            later, shares = _tail(run.latency)
            highest = run.latency.overall.max_us
            axes.step(
                later,
                shares,
                where="post",
                color=colour,
                linewidth=1.8,
                label=f"{label} (at most {highest} us)",
            )
            axes.plot([later[-1]], [shares[-1]], marker="o", markersize=4, color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("Latency of a timer (cyclictest)", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("microseconds")
    axes.set_ylabel("share of samples later than this")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: _one_in(value))
    axes.legend(frameon=False, fontsize=9)


def _tail(latency: Latency) -> tuple[list[int], list[float]]:
    """Latencies, up to the maximum, and the share of samples above each."""
    histogram = latency.overall
    left, later, shares = histogram.samples, [], []
    for value in sorted(histogram.counts):
        left -= histogram.counts[value]
        if left:
            later.append(max(1, value))
            shares.append(left / histogram.samples)
    return [*later, max(1, histogram.max_us)], [*shares, shares[-1] if shares else 1.0]


def _one_in(share: float) -> str:
    return "all" if share >= 1 else f"1 in {round(1 / share):,}"


def _draw_throughput(axes: Any, runs: list[tuple[str, str, MeasuredRun]]) -> None:
    measured: list[tuple[str, str, Throughput]] = [
        (label, colour, run.throughput) for label, colour, run in runs if run.throughput
    ]
    for place, (_, colour, throughput) in enumerate(measured):
        mpps = [sample / 1e6 for sample in throughput.samples]
        # Side by side, so that equal samples stay visible.
        across = [place + 0.3 * ((n + 0.5) / len(mpps) - 0.5) for n in range(len(mpps))]
        axes.plot(across, mpps, linestyle="none", marker="o", markersize=6, alpha=0.8, color=colour)
        axes.hlines(median(mpps), place - 0.22, place + 0.22, color=colour, linewidth=2)
    axes.set_xticks(range(len(measured)), [label for label, _, _ in measured])
    axes.set_xlim(-0.6, len(measured) - 0.4)
    axes.set_ylim(0, max(max(t.samples) for _, _, t in measured) / 1e6 * 1.15)
    axes.set_title("Throughput (two testpmd)", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("a point for each round, a line at their median")
    axes.set_ylabel("Mpps each way")

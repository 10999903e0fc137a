"""Plot a comparison: the share of samples above each latency, and the throughput of the rounds.

It uses matplotlib's object interface, not pyplot, which keeps global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from netplugin.api.errors import BackendUnavailable, HostError, InvalidRequest
from netplugin.tuning.verifying.comparison import MeasurementComparison
from netplugin.tuning.verifying.figures import PPS, US
from netplugin.tuning.verifying.result import Histogram

STEP = "plot"
_INK: Final = "#1f2328"
_STYLE: Final = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **{"axes.grid": True, "grid.alpha": 0.35, "grid.linewidth": 0.5, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"},
    **{"axes.titleweight": "bold", "axes.titlesize": 11, "legend.frameon": False, "legend.fontsize": 9},
    **{"svg.fonttype": "none", "text.parse_math": False},
}
_COLOURS: Final = ("#0072b2", "#d55e00")  # distinguishable with red-green colour blindness
#: Label, colour, and what was measured.
_Drawn = tuple[str, str, Any]


def require_plot(path: Path) -> None:
    """Raises: BackendUnavailable naming the missing extra, InvalidRequest for another file type."""
    if path.suffix not in (".png", ".svg"):
        detail = f"--plot: {path.name} is neither PNG nor SVG"
        raise InvalidRequest(detail, step=STEP, fix="name it .png or .svg")
    if find_spec("matplotlib") is None:
        fix = "pip install 'netplugin[plot]'"
        raise BackendUnavailable("a picture needs matplotlib, which is not installed", step=STEP, fix=fix)


def draw_plot(comparison: MeasurementComparison, path: Path) -> None:
    """Draw the plot to a PNG or SVG file. Raises: HostError if it cannot be written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    runs = (comparison.before, comparison.after)
    labels = [run.label for run in runs]
    if labels[0] == labels[1]:
        labels = [f"{run.label} ({run.started:%Y-%m-%d %H:%M:%S})" for run in runs]
    in_vm, panels = ", emulated: no measure" if any(run.is_emulated for run in runs) else "", []
    for place, more, of in (("", "", runs), (" in the VM", in_vm, [run.guest for run in runs])):
        for title, kind, draw in _PANELS:
            measured = (getattr(each, kind, None) for each in of)
            drawn = [each for each in zip(labels, _COLOURS, measured, strict=True) if each[2]]
            panels += [(title.format(place, more), draw, drawn)] if drawn else []
    with matplotlib.rc_context(_STYLE):
        picture = Picture(figsize=(8.0, 3.6 * max(1, len(panels))), layout="constrained")
        FigureCanvasAgg(picture)
        for number, (title, draw, drawn) in enumerate(panels, 1):
            draw(picture.add_subplot(len(panels), 1, number, title=title), drawn)
        try:
            picture.savefig(path, dpi=150, facecolor="white")
        except OSError as wrong:
            raise HostError(f"{path} cannot be written: {wrong.strerror}", step=STEP) from wrong


def _draw_latency(axes: Any, measured: Sequence[_Drawn]) -> None:
    """Draw the share of samples above each latency, to show the tail."""
    for label, colour, latency in measured:
        later, shares = _tail(latency.overall)
        name = f"{label} (at most {latency.overall.max_us} {US.shown})"
        axes.step(later, shares, where="post", color=colour, linewidth=1.8, label=name)
        axes.plot(later[-1:], shares[-1:], marker="o", markersize=4, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="microseconds", ylabel="share of samples later than this")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: "all" if value >= 1 else f"1 in {round(1 / value):,}")
    axes.legend()


def _tail(histogram: Histogram) -> tuple[list[int], list[float]]:
    """Latencies, up to the maximum, and the share of samples above each."""
    left, later, shares = histogram.samples, [], []
    for value, count in sorted(histogram.counts.items()):
        left -= count
        if left:
            later.append(max(1, value))
            shares.append(left / histogram.samples)
    return [*later, max(1, histogram.max_us)], [*shares, shares[-1] if shares else 1.0]


def _draw_throughput(axes: Any, measured: Sequence[_Drawn]) -> None:
    """Draw a point for each round, side by side so that equal ones stay visible."""
    for place, (_, colour, throughput) in enumerate(measured):
        rates = [sample / PPS.scale for sample in throughput.samples]
        across = [place + 0.3 * ((n + 0.5) / len(rates) - 0.5) for n in range(len(rates))]
        axes.plot(across, rates, linestyle="none", marker="o", markersize=6, alpha=0.8, color=colour)
        axes.hlines(median(rates), place - 0.22, place + 0.22, color=colour, linewidth=2)
    axes.set_xticks(range(len(measured)), [label for label, _, _ in measured])
    axes.set(xlim=(-0.6, len(measured) - 0.4), ylim=(0, None), ylabel=f"{PPS.shown} each way")
    axes.set_xlabel("a point for each round, a line at their median")


#: Title, field of what was measured, and how it is drawn.
_PANELS: Final = (
    ("Latency of a timer{} (cyclictest{})", "latency", _draw_latency),
    ("Throughput{} (two testpmd{})", "throughput", _draw_throughput),
)

"""A run as a picture: latency over the ports of the host, and over the rate of an open loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.bench import names
from tests.bench.quantiles import quantile
from tests.bench.values import Run, Series

_INK = "#1f2328"
#: Okabe and Ito: distinguishable with red-green colour blindness.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7")
_MARKERS = ("o", "s", "D", "^", "v", "P")
_INCHES = (7.4, 3.8)


def draw(run: Run, path: Path) -> None:
    """Draw to a PNG or SVG file."""
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "bench",
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    panels = [panel for panel in (_over_ports(run), _over_rates(run)) if panel.lines]
    with matplotlib.rc_context(style):
        picture = Figure(figsize=(_INCHES[0], _INCHES[1] * max(1, len(panels))), layout="constrained")
        FigureCanvasAgg(picture)
        for number, panel in enumerate(panels, 1):
            _draw(picture.add_subplot(len(panels), 1, number), panel)
        picture.savefig(
            path, dpi=150, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None
        )


#: By name, points: where, value, and what its interval has below and above it.
_Lines = dict[str, list[tuple[float, float, float, float]]]


@dataclass(frozen=True)
class _Panel:
    title: str
    across: str
    lines: _Lines
    scale: str


def _over_ports(run: Run) -> _Panel:
    lines: _Lines = {}
    for series in run.of(names.ONE_PORT, "plug"):
        name = series.way if series.addresses is None else f"{series.way}, {series.addresses} in the filter"
        _add(lines, name, series.ports or 0, series, 0.5)
    return _Panel("One port on OVS-DPDK, p50", "ports that are there already", lines, "linear")


def _over_rates(run: Run) -> _Panel:
    lines: _Lines = {}
    for series in run.of(names.OPEN_LOOP, f"plug, {names.PLUGS}"):
        for share in (0.5, 0.99, 0.999):
            _add(lines, f"p{share * 100:g}", series.rate or 0, series, share)
    ports = next((series.ports for series in run.of(names.OPEN_LOOP, f"plug, {names.PLUGS}")), 0)
    # An agent that cannot keep up answers a hundred times later than one that can.
    return _Panel(f"Open loop with {ports} ports", "plugs a second", lines, "log")


def _add(lines: _Lines, name: str, at: float, series: Series, share: float) -> None:
    found = quantile(series.samples, share)
    if found is not None:
        high = found.value if found.high is None else found.high
        lines.setdefault(name, []).append((at, found.value, found.value - found.low, high - found.value))


def _draw(axes: Any, panel: _Panel) -> None:
    for number, (name, points) in enumerate(panel.lines.items()):
        at, values, low, high = zip(*sorted(points), strict=True)
        axes.errorbar(
            at,
            values,
            yerr=(low, high),
            label=name,
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            linewidth=1.5,
            capsize=3,
        )
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(panel.across)
    axes.set_ylabel("ms")
    axes.set_yscale(panel.scale)
    axes.set_xscale(panel.scale)
    if panel.scale == "linear":
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.5, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))

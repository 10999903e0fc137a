"""A soak as a picture: each figure over time, with its trend after the warm-up."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.long.soak_record import Soak
from tests.long.trend import Trend, after_warm_up

_INK = "#1f2328"
_LINE, _TREND = "#0072b2", "#d55e00"


def draw(soak: Soak, path: Path) -> None:
    """Draw to a PNG or SVG file."""
    style = {"svg.fonttype": "none", "font.size": 9, "text.color": _INK, "axes.edgecolor": _INK}
    trends = soak.trends()
    with matplotlib.rc_context(style):
        picture = Figure(figsize=(7.4, 1.7 * len(trends)), layout="constrained")
        FigureCanvasAgg(picture)
        for number, (name, found) in enumerate(trends.items(), 1):
            _panel(picture.add_subplot(len(trends), 1, number), soak, name, found)
        picture.savefig(path, dpi=150, facecolor="white")


def _panel(axes: Any, soak: Soak, name: str, found: Trend) -> None:
    minutes = [at / 60 for at in soak.times_s]
    axes.plot(minutes, soak.samples[name], color=_LINE, linewidth=1)
    judged = after_warm_up(soak.times_s, soak.samples[name])
    level = statistics.fmean(value for _, value in judged)
    axes.plot(
        [judged[0][0] / 60, judged[-1][0] / 60],
        [level - found.growth / 2, level + found.growth / 2],
        color=_TREND,
        linewidth=1.5,
        linestyle="--",
    )
    axes.set_title(f"{name}: {found}{'' if found.steady else ', GROWS'}", loc="left", fontsize=9)
    axes.set_ylim(bottom=0, top=max(soak.samples[name]) * 1.15 or 1)
    axes.set_xlabel("minutes")
    axes.spines[["top", "right"]].set_visible(False)

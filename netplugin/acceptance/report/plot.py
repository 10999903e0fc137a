"""The plot of a run: NDR against PMD cores, one line per backend, with ideal scaling.

Uses the object API of Matplotlib, not pyplot, so there is no global state between plots.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any, Final

from netplugin.acceptance.report.figures import Report
from netplugin.acceptance.report.lines import (
    Line,
    error_mpps,
    has_rate,
    highest_mpps,
    label,
    lines_of,
    plain,
)
from netplugin.acceptance.report.published import Beside
from netplugin.acceptance.report.table import Grid, grids

#: Colour of text and axes; the page replaces it with its own.
_INK: Final = "#1f2328"
#: Marker: an upward arrow for "at least".
_ARROW: Final = [(0, 0), (0, 1), (-0.3, 0.65), (0, 1), (0.3, 0.65), (0, 1)]
_INCHES: Final = (7.4, 4.3)
_DPI: Final = 150
#: Maximum number of panels; the tables have the rest.
_PANELS: Final = 6


def png(report: Report) -> bytes:
    return _saved(report, "png", {"Software": None}, "white")


def svg(report: Report) -> str:
    """Return a standalone SVG file."""
    return _saved(report, "svg", {"Date": None, "Creator": None}, "white").decode()


def inline_svg(report: Report, title: str) -> str:
    """Return an SVG element for the page: transparent, in the page's text colour, with an ARIA label."""
    text = _saved(report, "svg", {"Date": None, "Creator": None}, "none").decode()
    element = text[text.index("<svg") :].replace(_INK, "currentColor")
    head, _, body = element.partition(">")
    return f'{head} role="img" aria-label="{title}">{body}'


def _saved(report: Report, kind: str, metadata: dict[str, None], background: str) -> bytes:
    import matplotlib

    style = {
        # A fixed salt makes SVG ids reproducible; text stays text.
        "svg.hashsalt": "zeroloss", "svg.fonttype": "none", "text.parse_math": False,
        "font.family": "sans-serif", "font.size": 10, "text.color": _INK, "axes.edgecolor": _INK,
        "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(style):
        # Missing glyphs are drawn as boxes; the tables have the name.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = _draw(report)
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata, facecolor=background)
    return buffer.getvalue()


def _draw(report: Report) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    backends = list(dict.fromkeys(figure.cell.backend for figure in report.figures))
    panels = [(grid, lines_of(grid, backends)) for grid in grids(report)]
    shown = [panel for panel in panels if has_rate(panel[1])][:_PANELS]
    picture = Picture(figsize=(_INCHES[0], _INCHES[1] * max(1, len(shown))), layout="constrained")
    FigureCanvasAgg(picture)
    for number, (grid, lines) in enumerate(shown, 1):
        title = f"Zero-loss rate: {grid.title}{' (simulated)' if report.simulated else ''}"
        _panel(
            picture.add_subplot(len(shown), 1, number),
            title,
            grid,
            lines,
            report.beside,
        )
    if not shown:
        picture.text(0.5, 0.5, "No cell has a zero-loss rate.", ha="center", fontsize=12)
    return picture


def _panel(axes: Any, title: str, grid: Grid, lines: Sequence[Line], beside: Beside) -> None:
    cores = [column for column in grid.columns if column is not None]
    left, right = 0, max(cores, default=1) * 1.06
    for line in lines:
        if line.flat:
            _draw_flat(axes, line, left, right)
        else:
            _draw_scaling(axes, line, max(cores))
    if beside is not Beside.NOT_SHOWN:
        _draw_published(axes, lines, right)
    axes.set_facecolor("none")
    axes.set_title(plain(title), loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("PMD cores" if cores else "no backend with PMD cores")
    axes.set_ylabel("Mpps, both directions together")
    axes.set_xticks(sorted({0, *cores}) if cores else [])
    axes.set_xlim(left, right)
    axes.set_ylim(0, highest_mpps(lines, beside) * 1.08)
    axes.grid(axis="y", linewidth=0.5, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, lines, beside)


def _draw_flat(axes: Any, line: Line, left: float, right: float) -> None:
    for figure in line.rated:
        rate = (figure.rate_pps or 0) / 1e6
        axes.plot([left, right], [rate, rate], color=line.colour, linewidth=2)
        low, high = error_mpps(figure)
        axes.fill_between(
            [left, right],
            rate - low,
            rate + high,
            color=line.colour,
            alpha=0.15,
            linewidth=0,
        )


def _draw_scaling(axes: Any, line: Line, most: int) -> None:
    points = [(f.cell.pmd_cores or 0, (f.rate_pps or 0) / 1e6, *error_mpps(f)) for f in line.rated]
    points.sort()
    if points:
        cores, rates, low, high = map(list, zip(*points, strict=True))
        per_core = rates[0] / cores[0]
        if len(points) > 1:
            axes.plot(
                [0, most], [0, per_core * most], color=line.colour, linewidth=1, linestyle=(0, (4, 4)),
                alpha=0.6,
            )  # fmt: skip
        axes.errorbar(
            cores, rates, yerr=[low, high], color=line.colour, marker=line.marker, markersize=7,
            linewidth=2, capsize=4, elinewidth=1.2, clip_on=False, zorder=3,
        )  # fmt: skip
    for figure in line.figures:
        if figure.at_least_pps is not None:
            axes.plot(
                [figure.cell.pmd_cores], [figure.at_least_pps / 1e6], color=line.colour,
                marker=_ARROW, markersize=15, fillstyle="none", linestyle="none", zorder=3,
            )  # fmt: skip


def _draw_published(axes: Any, lines: Sequence[Line], right: float) -> None:
    """Draw published figures with hollow markers."""
    for line in lines:
        for figure in line.figures:
            if figure.published_pps is not None:
                at = figure.cell.pmd_cores
                axes.plot(
                    [right if at is None else at], [figure.published_pps / 1e6], color=line.colour,
                    marker=line.marker, markersize=8, markerfacecolor="none", linestyle="none",
                    clip_on=False, zorder=4,
                )  # fmt: skip


def _legend(axes: Any, lines: Sequence[Line], beside: Beside) -> None:
    from matplotlib.lines import Line2D

    entries = []
    for line in lines:
        marker = "none" if line.flat else line.marker
        width = 2 if line.rated else 0
        entries.append(
            Line2D(
                [],
                [],
                color=line.colour,
                marker=marker,
                linewidth=width,
                label=plain(label(line)),
            )
        )
    if any(len(line.rated) > 1 for line in lines):
        entries.append(
            Line2D(
                [],
                [],
                color=_INK,
                linewidth=1,
                linestyle=(0, (4, 4)),
                label="ideal scaling",
            )
        )
    if any(f.at_least_pps is not None for line in lines for f in line.figures):
        entries.append(
            Line2D(
                [], [], color=_INK, marker=_ARROW, markersize=12, fillstyle="none", linestyle="none",
                label="at least (generator limit)",
            )
        )  # fmt: skip
    if any(f.published_pps is not None for line in lines for f in line.figures):
        entries.append(
            Line2D(
                [], [], color=_INK, marker="o", markerfacecolor="none", linestyle="none", label=beside.value
            )
        )  # fmt: skip
    axes.legend(
        handles=entries, loc="upper left", bbox_to_anchor=(1.03, 1.0), frameon=False, fontsize=9,
        borderaxespad=0,
    )  # fmt: skip

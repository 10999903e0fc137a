"""The plot of a run: NDR against PMD cores, one line per backend, with ideal scaling.

Uses the object API of Matplotlib, not pyplot, so there is no global state between plots. It is as wide as a
phone, with the legend below, so that its text can be read there.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from netplugin_zeroloss.report.figures import Report, ReportFigure
from netplugin_zeroloss.report.table import Grid, caveats, grids, mark_text, short_text

#: Colour-blind-safe palette of Okabe and Ito, and a marker each.
_STYLES: Final = (
    ("#0072b2", "o"),
    ("#d55e00", "s"),
    ("#009e73", "D"),
    ("#cc79a7", "^"),
    ("#e69f00", "v"),
    ("#56b4e9", "P"),
)
#: Colour of text and axes; the page replaces it with its own.
_INK: Final = "#1f2328"
#: Marker: an upward arrow for "at least".
_ARROW: Final = [(0, 0), (0, 1), (-0.3, 0.65), (0, 1), (0.3, 0.65), (0, 1)]
_IDEAL: Final = {"linewidth": 1, "linestyle": (0, (4, 4)), "alpha": 0.7}
_AT_LEAST: Final = {"marker": _ARROW, "markersize": 15, "fillstyle": "none", "linestyle": "none"}
_PUBLISHED: Final = {"markersize": 8, "markerfacecolor": "none", "linestyle": "none"}
#: Inches: width, height of the axes, height of a line of text; characters of a line.
_WIDTH, _HEIGHT, _LINE, _CHARACTERS = 4.6, 3.2, 0.2, 44
_DPI: Final = 240
#: Maximum number of panels; the tables have the rest.
_PANELS: Final = 6


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One backend in one panel."""

    backend: str
    colour: str
    marker: str
    figures: tuple[ReportFigure, ...]

    @property
    def rated(self) -> list[ReportFigure]:
        return [f for f in self.figures if f.rate_pps is not None]

    @property
    def flat(self) -> bool:
        """Whether the backend has no PMD threads, so the rate does not depend on PMD cores."""
        return all(f.cell.pmd_cores is None for f in self.figures)


def lines_of(grid: Grid, backends: Sequence[str]) -> list[PlotLine]:
    """Return the lines of a panel; colour and marker of a backend are the same in every panel."""
    return [
        PlotLine(backend, *_STYLES[backends.index(backend) % len(_STYLES)], tuple(filter(None, figures)))
        for backend, figures in grid.rows
    ]


def error_mpps(figure: ReportFigure) -> tuple[float, float]:
    """Return the error bars: the interval over repeats, or else the bounds."""
    rate, (low, high) = figure.rate_pps or 0.0, figure.range_pps
    return max(0.0, rate - low) / 1e6, max(0.0, high - rate) / 1e6


def label(line: PlotLine) -> str:
    """Return the legend text: the backend, what has no rate, and VNF limits."""
    cores: dict[str, list[int]] = {}
    for figure in line.figures:
        if figure.known_pps is None or figure.verdict == "vnf_limited":
            what = short_text(figure) if figure.known_pps is None else mark_text(figure)
            cores.setdefault(what, []).extend(filter(None, [figure.cell.pmd_cores]))
    remarks = (
        f"{what} with {', '.join(map(str, at))} core{'s' * (at != [1])}" if at else what
        for what, at in cores.items()
    )
    return _plain("; ".join([line.backend, *remarks]))


def _plain(text: str) -> str:
    """Replace characters that fonts or XML cannot represent; limits the length."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    # A legend leaves out what is empty or begins with "_".
    return "\n".join(textwrap.wrap(shown[:120], _CHARACTERS)).replace("_", " _", shown.startswith("_")) or " "


def png(report: Report) -> bytes:
    return _saved(report, "png", "white")


def svg(report: Report, background: str = "white") -> str:
    """Return a standalone SVG file."""
    return _saved(report, "svg", background).decode()


def inline_svg(report: Report, title: str) -> str:
    """Return an SVG element for the page: transparent, in the page's text colour, with an ARIA label."""
    text = svg(report, "none")
    head, _, body = text[text.index("<svg") :].replace(_INK, "currentColor").partition(">")
    return f'{head} role="img" aria-label="{title}">{body}'


def _saved(report: Report, kind: str, background: str) -> bytes:
    import matplotlib

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    # A fixed salt makes SVG ids reproducible; text stays text.
    svg_style = {"svg.hashsalt": "zeroloss", "svg.fonttype": "none"}
    style = {"text.parse_math": False, "font.family": "sans-serif", "font.size": 10, **svg_style}
    # Nothing that differs from run to run.
    metadata = dict.fromkeys(("Software",) if kind == "png" else ("Date", "Creator"))
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(style | dict.fromkeys(ink, _INK)):
        # Missing glyphs are drawn as boxes; the tables have the name.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        picture = _draw(report)
        picture.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata, facecolor=background)
    return buffer.getvalue()


def _draw(report: Report) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    backends = list(dict.fromkeys(figure.cell.backend for figure in report.figures))
    shown = [grid for grid in grids(report) if any(f.known_pps for f in grid.figures)][:_PANELS]
    panels = [(grid, lines_of(grid, backends)) for grid in shown]
    text = sum(3 + sum(label(line).count("\n") + 1 for line in lines) for _, lines in panels)
    height = _HEIGHT * len(panels) + _LINE * text if panels else 1
    picture = Picture(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(picture)
    for number, (grid, lines) in enumerate(panels, 1):
        _panel(picture.add_subplot(len(panels), 1, number), report, grid, lines)
    if not panels:
        picture.text(0.5, 0.5, "No cell has an NDR.", ha="center", va="center", fontsize=12)
    return picture


def _panel(axes: Any, report: Report, grid: Grid, lines: Sequence[PlotLine]) -> None:
    cores = [column for column in grid.columns if column is not None]
    right = max(cores, default=1) * 1.06
    for line in lines:
        known = any(f.known_pps for f in line.figures)
        width, marker = (2 if known else 0), (line.marker if known and not line.flat else "none")
        axes.plot([], [], color=line.colour, marker=marker, linewidth=width, label=label(line))
    for line in lines:
        (_draw_flat if line.flat else _draw_scaling)(axes, line, right)
        for figure in line.figures:
            at = right if figure.cell.pmd_cores is None else figure.cell.pmd_cores
            for rate, style in ((figure.at_least_pps, _AT_LEAST), (figure.published_pps, _PUBLISHED)):
                if rate is not None:
                    marked = {"marker": line.marker, "color": line.colour, "zorder": 4, **style}
                    axes.plot([at], [rate / 1e6], clip_on=False, **marked)
    if any(len(line.rated) > 1 and not line.flat for line in lines):
        axes.plot([], [], color=_INK, label="ideal scaling", **_IDEAL)
    if any(f.at_least_pps is not None for f in grid.figures):
        axes.plot([], [], color=_INK, label="at least (generator limit)", **{**_AT_LEAST, "markersize": 11})
    if report.published and any(f.published_pps is not None for f in grid.figures):
        axes.plot([], [], color=_INK, marker="o", label=report.published.label, **_PUBLISHED)
    axes.set_facecolor("none")
    kind = "".join(f", {text.partition(':')[0].lower()}" for text in caveats(report)[:1])
    axes.set_title(_plain(f"NDR{kind}: {grid.title}"), loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("PMD cores" if cores else "no backend with PMD cores")
    axes.set_ylabel("Mpps, all directions together")
    axes.set_xticks(sorted({0, *cores}) if cores else [])
    axes.set_xlim(0, right)
    axes.set_ylim(0, max(_highest(grid)) / 1e6 * 1.08)
    axes.grid(axis="y", linewidth=0.5, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.2), frameon=False, borderaxespad=0)


def _highest(grid: Grid) -> Iterator[float]:
    """Yield all that is to be within the axes; ideal scaling may exceed them."""
    for figure in grid.figures:
        yield from (figure.known_pps or 0.0, figure.published_pps or 0.0)
        if figure.spread:
            yield figure.spread["interval_pps"][1]


def _draw_flat(axes: Any, line: PlotLine, right: float) -> None:
    for figure in line.figures:
        rate = (figure.known_pps or 0.0) / 1e6
        if rate:
            axes.plot([0, right], [rate, rate], color=line.colour, linewidth=2)
        if figure.rate_pps:
            low, high = error_mpps(figure)
            axes.axhspan(rate - low, rate + high, color=line.colour, alpha=0.15, linewidth=0)


def _draw_scaling(axes: Any, line: PlotLine, right: float) -> None:
    points = [(f.cell.pmd_cores or 0, (f.rate_pps or 0) / 1e6, *error_mpps(f)) for f in line.rated]
    if not points:
        return
    cores, rates, low, high = map(list, zip(*sorted(points), strict=True))
    if len(points) > 1:
        most = right / 1.06
        axes.plot([0, most], [0, rates[0] / cores[0] * most], color=line.colour, **_IDEAL)
    axes.errorbar(
        cores,
        rates,
        yerr=[low, high],
        color=line.colour,
        marker=line.marker,
        markersize=7,
        linewidth=2,
        capsize=4,
        elinewidth=1.2,
        clip_on=False,
        zorder=3,
    )

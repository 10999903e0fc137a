"""Plots of a report: NDR against PMD cores for each backend, and the trials of a search."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.figures import Report, ReportFigure
from netplugin_zeroloss.report.published import PublishedRelation
from netplugin_zeroloss.report.table import Grid, grids, short_text
from netplugin_zeroloss.search.recorded import TrialEntry
from netplugin_zeroloss.search.trials import SearchVerdict

# -- Lines of the plot: colour, marker, figures and legend text of each backend. ------------------
# Colours are the colour-blind-safe palette of Okabe and Ito; markers differ as well.


_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS: Final = ("o", "s", "D", "^", "v", "P")


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
        PlotLine(
            backend,
            _COLOURS[backends.index(backend) % len(_COLOURS)],
            _MARKERS[backends.index(backend) % len(_MARKERS)],
            tuple(figure for figure in figures if figure is not None),
        )
        for backend, figures in grid.rows
    ]


def has_rate(lines: Sequence[PlotLine]) -> bool:
    figures = [figure for line in lines for figure in line.figures]
    return any(f.rate_pps is not None or f.at_least_pps is not None for f in figures)


def highest_mpps(lines: Sequence[PlotLine], relation: PublishedRelation) -> float:
    """Return the highest measured rate (ideal scaling may exceed the plot)."""
    values = [
        value / 1e6
        for line in lines
        for f in line.figures
        for value in (
            f.rate_pps,
            f.at_least_pps,
            f.interval.high_pps if f.interval else None,
            f.published_pps if relation is not PublishedRelation.NOT_SHOWN else None,
        )
        if value
    ]
    return max(values, default=1.0)


def error_mpps(figure: ReportFigure) -> tuple[float, float]:
    """Return the error bars: the interval over repeats, or else the bounds."""
    rate = figure.rate_pps or 0.0
    low, high = figure.bounds_pps or (rate, rate)
    if figure.interval is not None:
        low, high = figure.interval.low_pps, figure.interval.high_pps
    return max(0.0, rate - low) / 1e6, max(0.0, high - rate) / 1e6


def label(line: PlotLine) -> str:
    """Return the legend text: the backend, its missing points and its VNF limits."""
    return "\n".join([line.backend, *_remarks(line)])


def _remarks(line: PlotLine) -> Iterator[str]:
    for figure in line.figures:
        vnf = figure.verdict == SearchVerdict.VNF_LIMITED
        if vnf or (figure.rate_pps is None and figure.at_least_pps is None):
            what = "VNF limit" if vnf else short_text(figure)
            cores = figure.cell.pmd_cores
            where = "" if cores is None else f" with {words.count(cores, 'core')}"
            yield f"  {what}{where}"


def plain(text: str) -> str:
    """Replace characters that fonts or XML cannot represent; limits the length."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)[:120]


# -- The plot of a run: NDR against PMD cores, one line per backend, with ideal scaling. ----------
# Uses the object API of Matplotlib, not pyplot, so there is no global state between plots.


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
        "svg.hashsalt": "zeroloss",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
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
        title = f"NDR: {grid.title}{' (simulated)' if report.simulated else ''}"
        _panel(
            picture.add_subplot(len(shown), 1, number),
            title,
            grid,
            lines,
            report.relation,
        )
    if not shown:
        picture.text(0.5, 0.5, "No cell has an NDR.", ha="center", fontsize=12)
    return picture


def _panel(axes: Any, title: str, grid: Grid, lines: Sequence[PlotLine], relation: PublishedRelation) -> None:
    cores = [column for column in grid.columns if column is not None]
    left, right = 0, max(cores, default=1) * 1.06
    for line in lines:
        if line.flat:
            _draw_flat(axes, line, left, right)
        else:
            _draw_scaling(axes, line, max(cores))
    if relation is not PublishedRelation.NOT_SHOWN:
        _draw_published(axes, lines, right)
    axes.set_facecolor("none")
    axes.set_title(plain(title), loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("PMD cores" if cores else "no backend with PMD cores")
    axes.set_ylabel("Mpps, all directions together")
    axes.set_xticks(sorted({0, *cores}) if cores else [])
    axes.set_xlim(left, right)
    axes.set_ylim(0, highest_mpps(lines, relation) * 1.08)
    axes.grid(axis="y", linewidth=0.5, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, lines, relation)


def _draw_flat(axes: Any, line: PlotLine, left: float, right: float) -> None:
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


def _draw_scaling(axes: Any, line: PlotLine, most: int) -> None:
    points = [(f.cell.pmd_cores or 0, (f.rate_pps or 0) / 1e6, *error_mpps(f)) for f in line.rated]
    points.sort()
    if points:
        cores, rates, low, high = map(list, zip(*points, strict=True))
        per_core = rates[0] / cores[0]
        if len(points) > 1:
            axes.plot(
                [0, most],
                [0, per_core * most],
                color=line.colour,
                linewidth=1,
                linestyle=(0, (4, 4)),
                alpha=0.6,
            )
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
    for figure in line.figures:
        if figure.at_least_pps is not None:
            axes.plot(
                [figure.cell.pmd_cores],
                [figure.at_least_pps / 1e6],
                color=line.colour,
                marker=_ARROW,
                markersize=15,
                fillstyle="none",
                linestyle="none",
                zorder=3,
            )


def _draw_published(axes: Any, lines: Sequence[PlotLine], right: float) -> None:
    """Draw published figures with hollow markers."""
    for line in lines:
        for figure in line.figures:
            if figure.published_pps is not None:
                at = figure.cell.pmd_cores
                axes.plot(
                    [right if at is None else at],
                    [figure.published_pps / 1e6],
                    color=line.colour,
                    marker=line.marker,
                    markersize=8,
                    markerfacecolor="none",
                    linestyle="none",
                    clip_on=False,
                    zorder=4,
                )


def _legend(axes: Any, lines: Sequence[PlotLine], relation: PublishedRelation) -> None:
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
                [],
                [],
                color=_INK,
                marker=_ARROW,
                markersize=12,
                fillstyle="none",
                linestyle="none",
                label="at least (generator limit)",
            )
        )
    if any(f.published_pps is not None for line in lines for f in line.figures):
        entries.append(
            Line2D(
                [], [], color=_INK, marker="o", markerfacecolor="none", linestyle="none", label=relation.value
            )
        )
    axes.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=(1.03, 1.0),
        frameon=False,
        fontsize=9,
        borderaxespad=0,
    )


# -- Layout of the trial plot of a search: load by trial number, marked by verdict. ---------------


#: Size of the drawing in SVG units.
WIDTH: Final = 640
HEIGHT: Final = 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 34
_TICKS: Final = 4
#: Range around the answer as a fraction; trials outside are drawn at the edge.
_AROUND: Final = 0.15


@dataclass(frozen=True, slots=True)
class Dot:
    """Position and tooltip of one trial."""

    x: float
    y: float
    verdict: str
    title: str


@dataclass(frozen=True, slots=True)
class Tick:
    """An axis tick and its label."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class TrialPlot:
    """Layout in SVG units; y grows downwards."""

    dots: tuple[Dot, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    #: Line of the answer, if there is one.
    answer: Tick | None
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM
    top: int = _TOP


def trial_plot(trials: Sequence[TrialEntry], answer_pps: float | None) -> TrialPlot | None:
    """Return the layout for the trial log of one repeat; None if it is empty."""
    if not trials:
        return None
    low, high = _range([float(t["rate_pps"]) for t in trials], answer_pps)

    def y(rate: float) -> float:
        part = min(1.0, max(0.0, (rate - low) / (high - low)))
        return round(HEIGHT - _BOTTOM - part * (HEIGHT - _BOTTOM - _TOP), 1)

    def x(position: int) -> float:
        part = (position + 0.5) / len(trials)
        return round(_LEFT + part * (WIDTH - _LEFT - _RIGHT), 1)

    dots = tuple(Dot(x(n), y(t["rate_pps"]), t["verdict"], _title(t)) for n, t in enumerate(trials))
    every = max(1, -(-len(trials) // 15))
    x_ticks = tuple(Tick(x(n), str(t["number"])) for n, t in enumerate(trials) if n % every == 0)
    levels = [low + (high - low) * n / _TICKS for n in range(_TICKS + 1)]
    y_ticks = tuple(Tick(y(level), words.mpps(level, 4)) for level in levels)
    answer = Tick(y(answer_pps), words.mpps(answer_pps, 4)) if answer_pps is not None else None
    return TrialPlot(dots, x_ticks, y_ticks, answer)


def _range(rates: Sequence[float], answer_pps: float | None) -> tuple[float, float]:
    """Return the displayed range around the answer; early trials far from it are drawn at the edge."""
    low, high = min(rates), max(rates)
    if answer_pps:
        low = max(low, answer_pps * (1 - _AROUND))
        high = min(high, answer_pps * (1 + _AROUND))
    margin = 0.06 * (high - low) or 0.1 * high
    return max(0.0, low - margin), high + margin


def _title(trial: TrialEntry) -> str:
    return (
        f"trial {trial['number']}: {trial['rate_pps'] / 1e6:.5g} Mpps for"
        f" {trial['duration_s']:g} s, {trial['verdict']}"
    )

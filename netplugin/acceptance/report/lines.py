"""Lines of the plot: colour, marker, figures and legend text of each backend.

Colours are the colour-blind-safe palette of Okabe and Ito; markers differ as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from netplugin.acceptance.outcome import SearchVerdict
from netplugin.acceptance.report import words
from netplugin.acceptance.report.figures import Figure
from netplugin.acceptance.report.published import Beside
from netplugin.acceptance.report.table import Grid, short_text

_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS: Final = ("o", "s", "D", "^", "v", "P")


@dataclass(frozen=True, slots=True)
class Line:
    """One backend in one panel."""

    backend: str
    colour: str
    marker: str
    figures: tuple[Figure, ...]

    @property
    def rated(self) -> list[Figure]:
        return [f for f in self.figures if f.rate_pps is not None]

    @property
    def flat(self) -> bool:
        """Whether the backend has no PMD threads, so the rate does not depend on PMD cores."""
        return all(f.cell.pmd_cores is None for f in self.figures)


def lines_of(grid: Grid, backends: Sequence[str]) -> list[Line]:
    """Return the lines of a panel; colour and marker of a backend are the same in every panel."""
    return [
        Line(
            backend,
            _COLOURS[backends.index(backend) % len(_COLOURS)],
            _MARKERS[backends.index(backend) % len(_MARKERS)],
            tuple(figure for figure in figures if figure is not None),
        )
        for backend, figures in grid.rows
    ]


def has_rate(lines: Sequence[Line]) -> bool:
    figures = [figure for line in lines for figure in line.figures]
    return any(f.rate_pps is not None or f.at_least_pps is not None for f in figures)


def highest_mpps(lines: Sequence[Line], beside: Beside) -> float:
    """Return the highest measured rate (ideal scaling may exceed the plot)."""
    values = [
        value / 1e6
        for line in lines
        for f in line.figures
        for value in (
            f.rate_pps,
            f.at_least_pps,
            f.interval.high_pps if f.interval else None,
            f.published_pps if beside is not Beside.NOT_SHOWN else None,
        )
        if value
    ]
    return max(values, default=1.0)


def error_mpps(figure: Figure) -> tuple[float, float]:
    """Return the error bars: the interval over repeats, or else the bounds."""
    rate = figure.rate_pps or 0.0
    low, high = figure.bounds_pps or (rate, rate)
    if figure.interval is not None:
        low, high = figure.interval.low_pps, figure.interval.high_pps
    return max(0.0, rate - low) / 1e6, max(0.0, high - rate) / 1e6


def label(line: Line) -> str:
    """Return the legend text: the backend, its missing points and its VNF limits."""
    return "\n".join([line.backend, *_remarks(line)])


def _remarks(line: Line) -> Iterator[str]:
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

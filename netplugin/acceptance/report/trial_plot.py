"""Layout of the trial plot of a search: load by trial number, marked by verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from netplugin.acceptance.report import words

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


def trial_plot(trials: Sequence[Mapping[str, Any]], answer_pps: float | None) -> TrialPlot | None:
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


def _title(trial: Mapping[str, Any]) -> str:
    return (
        f"trial {trial['number']}: {trial['rate_pps'] / 1e6:.5g} Mpps for"
        f" {trial['duration_s']:g} s, {trial['verdict']}"
    )

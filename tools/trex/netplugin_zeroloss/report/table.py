"""The results of a run as a table (backends by PMD cores, each figure with its limits), CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.figures import MISSING, Report, ReportFigure
from netplugin_zeroloss.search.follow_up import LATENCY_LOADS
from netplugin_zeroloss.search.trials import SearchVerdict

#: Markdown special characters: markup, and the start of a tag or an entity.
_SPECIAL = re.compile(r"[\\`*\[\]|]|(?<!\w)_|_(?!\w)|<(?=[A-Za-z/!?])|&(?=#?\w+;)")


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells that differ only by backend and PMD cores."""

    #: One of them.
    like: Cell
    #: PMD cores; None (backends without PMD threads) first.
    columns: tuple[int | None, ...]
    #: Backend and its figure per column; None if the run has no such cell.
    rows: tuple[tuple[str, tuple[ReportFigure | None, ...]], ...]

    @property
    def title(self) -> str:
        cell = self.like
        queues = words.count(cell.queues, "queue")
        return f"{frame(cell.frame)}, {words.count(cell.flows, 'flow')}, {queues}{variant(cell)}"


def grids(report: Report) -> list[Grid]:
    """Return one grid for each combination of the other axes, in the order of the run."""
    found: dict[Cell, list[ReportFigure]] = {}
    for figure in report.figures:
        alike = dataclasses.replace(figure.cell, backend="", pmd_cores=None)
        found.setdefault(alike, []).append(figure)
    return [_grid(figures) for figures in found.values()]


def _grid(mine: list[ReportFigure]) -> Grid:
    columns = sorted({f.cell.pmd_cores for f in mine}, key=lambda cores: cores or 0)
    by_cell = {(f.cell.backend, f.cell.pmd_cores): f for f in mine}
    backends = dict.fromkeys(f.cell.backend for f in mine)
    return Grid(
        mine[0].cell,
        tuple(columns),
        tuple((b, tuple(by_cell.get((b, cores)) for cores in columns)) for b in backends),
    )


# -- words of a cell -----------------------------------------------------------------------------


def frame(name: str) -> str:
    """Format a frame size: ``64-byte frames``, ``imix``."""
    return f"{name}-byte frames" if name.isdecimal() else name


def variant(cell: Cell) -> str:
    """Format what a cell has besides the usual: ``, VNF in mode io, bursts of 32 frames``; may be empty."""
    mode = f", VNF in mode {cell.vnf_mode}" if cell.vnf_mode else ""
    burst = f", bursts of {cell.burst} frames" if cell.burst > 1 else ""
    return mode + burst + (f", VNF {cell.numa} to the NICs" if cell.numa else "")


def column(cores: int | None) -> str:
    if cores is None:
        return "no PMD"
    return words.count(cores, "PMD core")


def figure_text(figure: ReportFigure | None) -> str:
    """Format a figure with its mark."""
    if figure is None:
        return words.NONE
    text, mark = short_text(figure), mark_text(figure)
    return f"{text} ({mark})" if mark and _has_number(figure) else mark or text


def short_text(figure: ReportFigure | None) -> str:
    """Format the number of a figure, or the verdict if there is none."""
    if figure is None:
        return words.NONE
    digits = words.digits_of(figure.goal.relative_width) if figure.goal else 3
    if figure.rate_pps is not None:
        return words.mpps(figure.rate_pps, digits)
    if figure.at_least_pps is not None:
        return f">= {words.mpps(figure.at_least_pps, digits)}"
    if figure.verdict == MISSING:
        return "not measured"
    return figure.verdict.replace("_", " ")


def mark_text(figure: ReportFigure) -> str:
    """Return the limit of a figure and how many queues it has if not those of its cell, or why it has no
    number; may be empty."""
    fewer = figure.port_queues is not None and figure.port_queues < figure.cell.queues
    if fewer and _has_number(figure):
        only = words.count(figure.port_queues or 0, "queue")
        return ", ".join(filter(None, (_limit_text(figure), only)))
    return _limit_text(figure)


def _limit_text(figure: ReportFigure) -> str:
    if figure.verdict == SearchVerdict.VNF_LIMITED:
        return "VNF limit"
    if figure.verdict == SearchVerdict.GENERATOR_LIMITED:
        return "generator limit"
    if figure.verdict == SearchVerdict.FLOOR and figure.floor_ratio is not None:
        where = f", at {figure.floor_place}" if figure.floor_place else ""
        return f"floor: {words.ratio(figure.floor_ratio)} lost at any load{where}"
    if figure.verdict == SearchVerdict.FAILED:
        return f"failed: {figure.reason}"
    return ""


def _has_number(figure: ReportFigure) -> bool:
    return figure.rate_pps is not None or figure.at_least_pps is not None


def interval_text(figure: ReportFigure) -> str:
    """Format the interval over repeats: ``4.02 to 4.31 (98 %, 7 results)``."""
    if figure.interval is None or figure.goal is None:
        return "one result" if figure.repeats == 1 and figure.rate_pps else words.NONE
    digits = words.digits_of(figure.goal.relative_width)
    found = figure.interval
    return (
        f"{words.mpps(found.low_pps, digits)} to {words.mpps(found.high_pps, digits)}"
        f" ({words.percent(found.confidence)}, {found.answers} results)"
    )


def cpu_text(figure: ReportFigure) -> str:
    """Format CPU use: ``2.36 (2 PMD, 71 % busy; 0.31 softirq; 0.05 system)``, in CPUs of the host."""
    cpu = figure.cpu
    if cpu is None or cpu.host is None:
        return words.NONE
    parts = []
    if cpu.pmd is not None:
        busy = "" if cpu.pmd_busy is None else f", {words.percent(cpu.pmd_busy)} busy"
        parts.append(f"{cpu.pmd:g} PMD{busy}")
    for name, value in (("softirq", cpu.softirq), ("system", cpu.system)):
        if value is not None:
            parts.append(f"{value:.2f} {name}")
    return f"{cpu.host:.2f} ({'; '.join(parts)})"


def efficiency_text(figure: ReportFigure) -> str:
    return words.NONE if figure.efficiency is None else words.percent(figure.efficiency)


def published_text(figure: ReportFigure) -> str:
    return words.NONE if figure.published_pps is None else words.mpps(figure.published_pps)


def status_text(report: Report) -> str:
    """Return whether the run is complete, as a sentence."""
    missing = len(report.missing)
    if not missing:
        return f"Complete: {words.count(len(report.figures), 'cell')}."
    return (
        f"Incomplete: {missing} of {words.count(len(report.figures), 'cell')}"
        f" {'was' if missing == 1 else 'were'} not measured."
    )


#: Columns of the detail table: name, and text of a cell.
DETAILS: tuple[tuple[str, Callable[[ReportFigure], str]], ...] = (
    ("zero-loss Mpps", figure_text),
    ("goal", lambda f: f.goal.words if f.goal else words.NONE),
    ("interval over repeats", interval_text),
    ("CPUs of the host", cpu_text),
    ("scaling", efficiency_text),
)


# -- Markdown ------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """Return the Markdown report: the grids, each followed by its details."""
    return "\n".join(_markdown(report))


def _markdown(report: Report) -> Iterator[str]:
    yield f"# {escape(report.run)}\n"
    simulated = " Simulated: no frame was sent." if report.simulated else ""
    yield f"{status_text(report)}{simulated} Rates are Mpps of all directions together.\n"
    for grid in grids(report):
        yield from _markdown_grid(report, grid)
    if report.missing:
        yield "## Not measured\n"
        yield from (f"- `{escape(figure.cell.key)}`" for figure in report.missing)
        yield ""
    if report.published is not None:
        yield f"## {report.relation.value.capitalize()}\n"
        yield f"Source: {report.published.source}.\n"
        yield from (f"- {what}: {value}" for what, value in report.published.conditions)
        yield ""


def _markdown_grid(report: Report, grid: Grid) -> Iterator[str]:
    yield f"## {escape(grid.title)}\n"
    yield _row(["backend", *map(column, grid.columns)])
    yield _row(["---"] * (1 + len(grid.columns)))
    for backend, figures in grid.rows:
        yield _row([backend, *map(_grid_text, figures)])
    yield ""
    last = [(report.relation.value, published_text)] if report.published else []
    details = [*DETAILS, *last]
    yield _row(["backend", "PMD cores", *(name for name, _ in details)])
    yield _row(["---"] * (2 + len(details)))
    for _, figures in grid.rows:
        for f in figures:
            if f is not None:
                cores = words.NONE if f.cell.pmd_cores is None else str(f.cell.pmd_cores)
                yield _row([f.cell.backend, cores, *(text(f) for _, text in details)])
    yield ""
    yield from _markdown_others(grid)
    yield from _markdown_followed(grid)
    yield from _markdown_paths(grid)


def _grid_text(figure: ReportFigure | None) -> str:
    """Format a grid cell; reasons for a missing number are in the detail table."""
    number = figure is not None and _has_number(figure)
    return figure_text(figure) if number else short_text(figure)


def _markdown_others(grid: Grid) -> Iterator[str]:
    """Yield the results of the additional goals."""
    lines = [
        f"- `{escape(f.cell.key)}`, {escape(goal.name)} ({escape(goal.words)}): "
        + (escape(goal_text(goal.rate_pps, goal.relative_width, goal.verdict)))
        for _, figures in grid.rows
        for f in figures
        if f is not None
        for goal in f.others
    ]
    if lines:
        yield "Other goals, from the same searches:\n"
        yield from lines
        yield ""


def _markdown_followed(grid: Grid) -> Iterator[str]:
    """Yield latency and soak at the found rates."""
    lines = [
        f"- `{escape(f.cell.key)}`, {name}: {escape(text)}"
        for _, figures in grid.rows
        for f in figures
        if f is not None
        for name, text in followed(f)
    ]
    if lines:
        yield "At the found rates, after the searches:\n"
        yield from lines
        yield ""


def _markdown_paths(grid: Grid) -> Iterator[str]:
    """Yield the loss of each path of cells with several pairs of ends."""
    lines = [
        f"- `{escape(f.cell.key)}`: {escape(text)}"
        for _, figures in grid.rows
        for f in figures
        if f is not None and (text := by_path(f))
    ]
    if lines:
        yield "Lost by path, just above the found rates:\n"
        yield from lines
        yield ""


def followed(figure: ReportFigure) -> Iterator[tuple[str, str]]:
    """Yield what was measured at the found rate: name, and result in words."""
    for load in figure.latencies:
        yield f"latency at {words.percent(load.part)}", words.latency(dataclasses.asdict(load))
    if figure.no_latency:
        yield "latency", f"not measured: {figure.no_latency}"
    if figure.soak is not None:
        yield "soak", figure.soak.text


def by_path(figure: ReportFigure) -> str:
    """Format the loss of each path just above the rate; empty with one pair of ends."""
    if figure.worst_path is None:
        return ""
    return "; ".join(f"{name}: {words.count(lost, 'frame')}" for name, lost in figure.paths)


def goal_text(rate_pps: float | None, relative_width: float, verdict: str) -> str:
    """Format a rate with its unit, or the verdict if there is none."""
    if rate_pps is None:
        return f"no rate: {verdict}"
    return f"{words.mpps(rate_pps, words.digits_of(relative_width))} Mpps"


def _row(texts: list[str]) -> str:
    return f"| {' | '.join(map(escape, texts))} |"


def escape(text: str) -> str:
    """Escape text for Markdown, including tables and HTML."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(text.split()))


# -- Figures of a run for programs: CSV with one row per cell, and JSON.
# New columns and fields are appended; none is renamed. Rates are pps of all directions together. A
# missing value is empty (CSV) or null (JSON).


FORMAT: Final = 1

_Value = str | float | int | None


def _latency(figure: ReportFigure, part: float, name: str) -> _Value:
    return figure.latency(part, name)


#: Column name and value.
COLUMNS: Final[tuple[tuple[str, Callable[[ReportFigure], _Value]], ...]] = (
    ("backend", lambda f: f.cell.backend),
    ("pmd_cores", lambda f: f.cell.pmd_cores),
    ("frame", lambda f: f.cell.frame),
    ("flows", lambda f: f.cell.flows),
    ("queues", lambda f: f.cell.queues),
    ("verdict", lambda f: f.verdict),
    ("zero_loss_pps", lambda f: f.rate_pps),
    ("at_least_pps", lambda f: f.at_least_pps),
    ("lower_pps", lambda f: f.bounds_pps[0] if f.bounds_pps else None),
    ("upper_pps", lambda f: f.bounds_pps[1] if f.bounds_pps else None),
    ("goal", lambda f: f.goal.words if f.goal else None),
    ("repeats", lambda f: f.repeats),
    ("median_pps", lambda f: f.interval.median_pps if f.interval else None),
    ("interval_low_pps", lambda f: f.interval.low_pps if f.interval else None),
    ("interval_high_pps", lambda f: f.interval.high_pps if f.interval else None),
    ("interval_confidence", lambda f: f.interval.confidence if f.interval else None),
    ("pps_per_pmd_core", lambda f: f.rate_per_core_pps),
    ("scaling_efficiency", lambda f: f.efficiency),
    ("cpu_pmd", lambda f: f.cpu.pmd if f.cpu else None),
    ("cpu_pmd_busy_share", lambda f: f.cpu.pmd_busy if f.cpu else None),
    ("cycles_per_packet", lambda f: f.cpu.cycles_per_packet if f.cpu else None),
    ("cpu_softirq", lambda f: f.cpu.softirq if f.cpu else None),
    ("cpu_softirq_busiest_share", lambda f: f.cpu.softirq_busiest if f.cpu else None),
    ("cpu_system", lambda f: f.cpu.system if f.cpu else None),
    ("floor_loss_ratio", lambda f: f.floor_ratio),
    ("floor_place", lambda f: f.floor_place),
    ("loopback_pps", lambda f: f.loopback.rate_pps if f.loopback else None),
    ("vnf_alone_pps", lambda f: f.vnf.rate_pps if f.vnf else None),
    ("published_pps", lambda f: f.published_pps),
    ("trials", lambda f: f.trials),
    ("invalid_trials", lambda f: f.invalid_trials),
    ("traffic_s", lambda f: f.traffic_s),
    ("started", lambda f: f.started),
    ("reason", lambda f: f.reason),
    ("port_queues", lambda f: f.port_queues),
    *(
        (f"latency_{round(100 * part)}_{name}", partial(_latency, part=part, name=name))
        for part in LATENCY_LOADS
        for name in ("p50_us", "p90_us", "p99_us", "samples")
    ),
    ("soak_s", lambda f: f.soak.elapsed_s if f.soak and f.soak.verdict else None),
    ("soak_verdict", lambda f: f.soak.verdict if f.soak else None),
    ("soak_lost_packets", lambda f: f.soak.lost_packets if f.soak and f.soak.verdict else None),
    ("soak_loss_ratio", lambda f: f.soak.loss_ratio if f.soak and f.soak.verdict else None),
    ("vnf_mode", lambda f: f.cell.vnf_mode or None),
    ("burst", lambda f: f.cell.burst),
    ("numa", lambda f: f.cell.numa or None),
    ("paths", lambda f: len(f.paths) or None),
    ("worst_path", lambda f: f.worst_path[0] if f.worst_path else None),
    ("worst_path_lost_packets", lambda f: f.worst_path[1] if f.worst_path else None),
)


def csv_text(report: Report) -> str:
    """Return CSV with a header. Text that a spreadsheet would evaluate is prefixed with ``'``."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([name for name, _ in COLUMNS])
    writer.writerows([_safe(value(figure)) for _, value in COLUMNS] for figure in report.figures)
    return buffer.getvalue()


def _safe(value: _Value) -> _Value:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def json_text(report: Report) -> str:
    """Return JSON: ``cells`` has the CSV columns, ``others`` the additional goals."""
    cells: list[dict[str, Any]] = [
        {
            "key": figure.cell.key,
            **{name: value(figure) for name, value in COLUMNS},
            "verdicts": dict(figure.verdicts),
            "others": [dataclasses.asdict(goal) for goal in figure.others],
        }
        for figure in report.figures
    ]
    whole = {
        "format": FORMAT,
        "run": report.run,
        "complete": not report.missing,
        "goals": list(report.goals),
        "published": (
            {
                "name": report.published.name,
                "source": report.published.source,
                "beside": report.relation.value,
                "conditions": dict(report.published.conditions),
            }
            if report.published
            else None
        ),
        "cells": cells,
    }
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"

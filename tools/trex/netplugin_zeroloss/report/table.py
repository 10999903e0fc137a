"""The results of a run: the answer in words, the table (backends by PMD cores), Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.figures import MISSING, Report, ReportFigure
from netplugin_zeroloss.search.recorded import GoalResult
from netplugin_zeroloss.search.result import dumps
from netplugin_zeroloss.search.trials import FAILURES, SearchVerdict

#: Markdown special characters: markup, and the start of a tag or an entity.
_SPECIAL = re.compile(r"[\\`*\[\]|]|(?<!\w)_|_(?!\w)|<(?=[A-Za-z/!?])|&(?=#?\w+;)")
#: The domain of a VM without KVM.
_EMULATED: Final = re.compile(r"<domain[^>]*\stype=[\"']qemu[\"']")
#: Verdicts whose limit is not that of the backend, which may do more.
_LIMITS: Final = {SearchVerdict.VNF_LIMITED: "VNF limit", SearchVerdict.GENERATOR_LIMITED: "generator limit"}


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells that differ only by backend and PMD cores."""

    #: What they have in common.
    title: str
    #: PMD cores; None (backends without PMD threads) first.
    columns: tuple[int | None, ...]
    #: Backend and its figure per column; None if the run has no such cell.
    rows: tuple[tuple[str, tuple[ReportFigure | None, ...]], ...]

    @property
    def figures(self) -> Sequence[ReportFigure]:
        return [figure for _, row in self.rows for figure in row if figure is not None]


def grids(report: Report) -> list[Grid]:
    """Return one grid for each combination of the other axes, in the order of the run."""
    found: dict[Cell, list[ReportFigure]] = {}
    for figure in report.figures:
        found.setdefault(replace(figure.cell, backend="", pmd_cores=None), []).append(figure)
    made = []
    for alike, mine in found.items():
        columns = sorted({f.cell.pmd_cores for f in mine}, key=lambda cores: cores or 0)
        by_cell = {(f.cell.backend, f.cell.pmd_cores): f for f in mine}
        backends = dict.fromkeys(f.cell.backend for f in mine)
        rows = ((b, tuple(by_cell.get((b, cores)) for cores in columns)) for b in backends)
        made.append(Grid(words.axes(alike), tuple(columns), tuple(rows)))
    return made


# -- Words of a cell. ----------------------------------------------------------------------------


def column(cores: int | None) -> str:
    return "no PMD" if cores is None else words.count(cores, "PMD core")


def short_text(figure: ReportFigure) -> str:
    """Format the number of a figure, or the verdict if there is none."""
    if figure.number is not None:
        return figure.number if figure.rate_pps is not None else f">= {figure.number}"
    return "not measured" if figure.verdict == MISSING else figure.verdict.replace("_", " ")


def mark_text(figure: ReportFigure) -> str:
    """Return the limit of a figure and how many queues it has if not those of its cell, or why it has no
    number; may be empty."""
    if figure.known_pps is None:
        if figure.floor and figure.verdict == SearchVerdict.FLOOR:
            where = f", at {figure.floor['place']}" if figure.floor["place"] else ""
            return f"{words.ratio(figure.floor['loss_ratio'])} lost at any load{where}"
        return "" if figure.verdict == MISSING else figure.reason
    marks = [text for verdict, text in _LIMITS.items() if figure.verdict == verdict]
    if figure.port_queues is not None and figure.port_queues < figure.cell.queues:
        marks.append(words.count(figure.port_queues, "queue"))
    return ", ".join(marks)


def figure_text(figure: ReportFigure) -> str:
    """Format a figure with its mark: ``3.99 (VNF limit)``, ``failed: no free VF``."""
    text, mark = short_text(figure), mark_text(figure)
    if not mark:
        return text
    return f"{text}: {mark}" if figure.known_pps is None else f"{text} ({mark})"


def interval_text(figure: ReportFigure) -> str:
    """Format the interval over repeats: ``4.02 to 4.31 (98 %, 7 results)``."""
    found = figure.spread
    if found is None or figure.goal is None:
        single = figure.result is not None and figure.result["repeats"]["count"] == 1
        return "one result" if single and figure.rate_pps else words.NONE
    low, high = (words.found(rate, figure.goal["relative_width"]) for rate in found["interval_pps"])
    return f"{low} to {high} ({words.percent(found['confidence'])}, {found['answers']} results)"


def cpu_text(figure: ReportFigure) -> str:
    """Format CPU use: ``2.36 (2 PMD, 71 % busy; 0.31 softirq; 0.05 system)``, in CPUs of the host."""
    cpu = figure.cpu
    if cpu.host is None:
        return words.NONE
    busy = "" if cpu.pmd_busy is None else f", {words.percent(cpu.pmd_busy)} busy"
    parts = [f"{cpu.pmd:g} PMD{busy}"] if cpu.pmd is not None else []
    for name, value in (("softirq", cpu.softirq), ("system", cpu.system)):
        if value is not None:
            parts.append(f"{value:.2f} {name}")
    return f"{cpu.host:.2f} ({'; '.join(parts)})"


def price_text(figure: ReportFigure) -> str:
    """Format the CPUs for each Mpps: ``0.51``; ``>= 0.50`` if not all CPU use was measured."""
    price = figure.cpus_per_mpps
    if price is None:
        return words.NONE
    return f"{'' if figure.cpu.whole else '>= '}{price:.2{'f' if price >= 0.1 else 'g'}}"


def details(report: Report) -> Sequence[tuple[str, Callable[[ReportFigure], str]]]:
    """Return name and text of what is printed of each figure, everywhere."""
    found: list[tuple[str, Callable[[ReportFigure], str]]] = [
        ("zero-loss Mpps", figure_text),
        ("goal", lambda f: f.goal["in_words"] if f.goal else words.NONE),
        ("interval over repeats", interval_text),
        ("CPUs of the host", cpu_text),
        ("CPUs for each Mpps", price_text),
        ("scaling", lambda f: words.NONE if f.efficiency is None else words.percent(f.efficiency)),
    ]
    if (table := report.published) is not None:
        found.append((table.label, lambda f: words.mpps(f.published_pps) if f.published_pps else words.NONE))
    return found


def also(figure: ReportFigure) -> Iterator[tuple[str, str]]:
    """Yield what else was found for a cell: other goals, latency and soak at its rate, loss by path."""
    for goal in figure.others:
        width, pps = goal["goal"]["relative_width"], goal["rate_pps"]
        rate = f"no rate: {goal['verdict']}" if pps is None else words.rate(pps, width)
        yield f"{goal['goal']['name']} ({goal['goal']['in_words']})", rate
    for part, load in figure.latencies.items():
        yield f"latency at {part} %", words.latency(load)
    latency = figure.result.get("latency") if figure.result else None
    if latency and latency["reason"]:
        yield "latency", f"not measured: {latency['reason']}"
    if figure.soak and figure.goal:
        yield "soak", words.soak(figure.soak, figure.goal["relative_width"])
    if figure.worst_path:
        by_path = (f"{name}: {words.count(lost, 'frame')}" for name, lost in figure.paths)
        yield "lost by path, just above the rate", "; ".join(by_path)


# -- The answer: which backend to choose, and the conditions under which it holds. ----------------


def status_text(report: Report) -> str:
    """Return whether the run is complete, as a sentence."""
    cells, missing = words.count(len(report.figures), "cell"), len(report.missing)
    failed = sum(f.verdict in FAILURES for f in report.figures)
    ended = f", {failed} failed" if failed else ""
    if not missing:
        return f"Complete: {cells}{ended}."
    return f"Incomplete: {missing} of {cells} {'was' if missing == 1 else 'were'} not measured{ended}."


def caveats(report: Report) -> list[str]:
    """Return what makes the rates other than those of hardware."""
    simulated = any(name.startswith("sim:") for name in report.generators)
    emulated = any(_EMULATED.search(str(f.record.setup.get("vm", ""))) for f in report.figures if f.record)
    texts = {
        "Simulated: no frame was sent, and no hardware is spoken of.": simulated,
        "Emulated: the VM ran without KVM, so these are no rates of hardware.": emulated,
        # Earlier versions did not record it.
        "Virtual: the host is a virtual machine, so its hypervisor was measured too.": (
            report.run.environment.get("virtual") is True
        ),
    }
    return [text for text, holds in texts.items() if holds]


def choice(report: Report, grid: Grid) -> str:
    """Return which backend to choose: one paragraph, with the price in CPUs and where it holds."""
    return " ".join(_choice(report, grid))


def _choice(report: Report, grid: Grid) -> Iterator[str]:
    rows: dict[str, list[ReportFigure]] = {}
    for figure in grid.figures:
        rows.setdefault(figure.cell.backend, []).append(figure)
    best = sorted(filter(_known, map(_best, rows.values())), key=_known, reverse=True)
    known = list(filter(_known, grid.figures))
    if not best:
        yield "No backend can be chosen: none has a rate."
    elif len(rows) == 1:
        yield f"There is nothing to choose: one backend was measured. {_offer(best[0])}."
    else:
        first, *others = best
        yield f"Choose {_offer(first)}: {'the highest rate' if others else 'no other backend has a rate'}."
        priced = [f for f in known if f.cpu.whole and f.cpus_per_mpps is not None]
        cheapest = min(priced, key=lambda f: f.cpus_per_mpps or 0.0, default=first)
        if cheapest is not first:
            yield f"For the fewest CPUs for each Mpps, choose {_offer(cheapest)}."
        elif len(priced) > 1:
            yield "No other cell takes fewer CPUs for each Mpps."
        if rest := [_offer(f) for f in others if f is not cheapest]:
            yield f"The others at their best: {'; '.join(rest)}."
        near = [f for f in others if f.verdict in _LIMITS or f.range_pps[1] >= first.range_pps[0]]
        if near:
            yield f"The run does not decide whether {' or '.join(map(_named, near))} is as fast."
    if without := [figures[0] for figures in rows.values() if not any(map(_known, figures))]:
        texts = (f"{_named(f)} ({_shortened(figure_text(f))})" for f in without)
        yield f"Not in the choice: {'; '.join(texts)}."
    yield f"This holds for {grid.title} on {' and '.join(report.hosts)}, under the conditions below."
    if fewer := len(grid.figures) - len(known):
        yield f"Cells without a rate: {fewer} of {len(grid.figures)}."
    yield from (f"{text.partition(':')[0]}: not valid for hardware." for text in caveats(report)[:1])


def _known(figure: ReportFigure) -> float:
    return figure.known_pps or 0.0


def _best(figures: Sequence[ReportFigure]) -> ReportFigure:
    """Return the highest rate; of several that cannot be distinguished, that with the fewest PMD cores."""
    highest = max(figures, key=_known)
    alike = [f for f in figures if f.rate_pps and f.range_pps[1] >= highest.range_pps[0]]
    return min(alike, key=lambda f: f.cell.pmd_cores or 0, default=highest)


def _named(figure: ReportFigure) -> str:
    cores = figure.cell.pmd_cores
    return figure.cell.backend + ("" if cores is None else f" with {column(cores)}")


def _offer(figure: ReportFigure) -> str:
    mark = mark_text(figure)
    text = f"{_named(figure)}, {short_text(figure)} Mpps{f' ({mark})' if mark else ''}"
    if figure.cpu.host is None:
        return f"{text}, CPUs not measured"
    return f"{text} for {figure.cpu.host:.2f} CPUs of the host ({price_text(figure)} CPUs for each Mpps)"


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def conditions(report: Report) -> Iterator[str]:
    """Yield under which conditions the answer holds, and what was not shown."""
    measured, environment = report.measured, report.run.environment
    if not measured:
        yield "Nothing was measured."
        return
    different = "Cells have different goals. " if len(report.goals) > 1 else ""
    yield f"{different}Zero loss here means: {'; '.join(report.goals)}."
    yield (
        "Rates are millions of frames a second (Mpps), all directions together. CPUs of the host are whole"
        " PMD cores, and softirq and system time of the whole machine at this rate; those of the VM come on"
        " top."
    )
    kernel, cpus = (environment.get(name, "unknown") for name in ("kernel", "cpus"))
    machines = "One machine" if len(report.hosts) == 1 else "Several machines, so cells may not be comparable"
    yield (
        f"{machines}: {', '.join(report.hosts)}, Linux {kernel}, {cpus} CPUs, generator"
        f" {', '.join(report.generators)}. Other NICs, frames, flows and VNFs have other rates. Features are"
        " not weighed."
    )
    without = Counter(f.verdict.replace("_", " ") for f in report.figures if f.known_pps is None)
    if without:
        counts = ", ".join(f"{number} {verdict}" for verdict, number in without.items())
        yield f"{words.count(without.total(), 'cell')} of {len(report.figures)} without a rate: {counts}."
    if any(f.rate_pps is not None and f.spread is None for f in measured):
        yield (
            "Cells with one result: how far another search would be from it. Where loss is a"
            " matter of chance that can be 10 % and more; repeats tell."
        )
    few = [f for f in measured if f.spread and f.spread["confidence"] < 0.95]
    if few:
        yield f"{_cells(few)}: too few repeats for an interval with 95 % confidence."
    for place, name in (("generator by itself", "loopback"), ("VNF without backend", "vnf")):
        if bare := [f for f in measured if getattr(f, name) is None]:
            yield f"{_cells(bare)}: what the {place} can do, for there was no such control."
    if some := [f for f in measured if not f.cpu.whole]:
        yield f"{_cells(some)}: what it cost the host in CPUs, of which not all was measured."
    left, extra = ([f for f in measured if f.unexplained[which]] for which in (0, 1))
    if left:
        frames = words.count(sum(f.unexplained[0] for f in left), "frame")
        yield f"{_cells(left)}: where {frames} of the trials were lost. No place counted them."
    if extra:
        frames = words.count(sum(f.unexplained[1] for f in extra), "frame")
        yield (
            f"{_cells(extra)}: where frames were lost. Places counted {frames} more than were missing:"
            " frames of other traffic, or the same frame twice."
        )


def _cells(figures: Sequence[ReportFigure]) -> str:
    return figures[0].cell.key if len(figures) == 1 else words.count(len(figures), "cell")


def markdown(report: Report) -> str:
    """Return the Markdown report: the answer, then the grids, each followed by its details."""
    return "\n".join(_markdown(report))


def _markdown(report: Report) -> Iterator[str]:
    yield f"# {escape(report.run.name)}\n"
    yield f"{' '.join([status_text(report), *caveats(report)])}\n"
    every = grids(report)
    for grid in every:
        yield f"{escape(choice(report, grid))}\n"
    yield "Conditions, and what this does not tell:\n"
    yield from (f"- {escape(text)}" for text in conditions(report))
    for grid in every:
        yield f"\n## {escape(grid.title)}\n"
        yield row(["backend", *map(column, grid.columns)])
        yield row(["---"] * (1 + len(grid.columns)))
        for backend, figures in grid.rows:
            yield row([backend, *map(_grid_text, figures)])
        yield ""
        named = details(report)
        yield row(["backend", "PMD cores", *(name for name, _ in named)])
        yield row(["---"] * (2 + len(named)))
        for f in grid.figures:
            cores = words.NONE if f.cell.pmd_cores is None else str(f.cell.pmd_cores)
            yield row([f.cell.backend, cores, *(text(f) for _, text in named)])
        more = [(f.cell.key, *each) for f in grid.figures for each in also(f)]
        if more:
            yield "\nAlso found:\n"
        yield from (f"- `{escape(key)}`, {escape(name)}: {escape(text)}" for key, name, text in more)
    if report.published is not None:
        yield f"\n## {report.published.label.capitalize()}\n"
        yield f"Source: {report.published.source}.\n"
        yield from (f"- {what}: {value}" for what, value in report.published.conditions)
    yield ""


def _grid_text(figure: ReportFigure | None) -> str:
    """Format a grid cell; reasons for a missing number are in the detail table."""
    if figure is None:
        return words.NONE
    return short_text(figure) if figure.known_pps is None else figure_text(figure)


def row(texts: list[str]) -> str:
    return f"| {' | '.join(map(escape, texts))} |"


def escape(text: str) -> str:
    """Escape text for Markdown, including tables and HTML."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(text.split()))


# -- For programs: CSV with one row per cell, and JSON.
# New columns and fields are appended; none is renamed. Rates are pps of all directions together; those in
# Mpps are the text of the table. A missing value is empty (CSV) or null (JSON).


FORMAT: Final = 1

_Value = str | float | int | None

#: Columns: the name, and where a figure has the value if that is not its name.
_COLUMNS: Final = """
    backend=cell.backend pmd_cores=cell.pmd_cores frame=cell.frame flows=cell.flows queues=cell.queues
    verdict zero_loss_pps=rate_pps at_least_pps lower_pps=bounds_pps.0 upper_pps=bounds_pps.1
    goal=goal.in_words repeats=result.repeats.count
    median_pps=spread.median_pps interval_low_pps=spread.interval_pps.0
    interval_high_pps=spread.interval_pps.1 interval_confidence=spread.confidence
    pps_per_pmd_core=rate_per_core_pps scaling_efficiency=efficiency
    cpu_pmd=cpu.pmd cpu_pmd_busy_share=cpu.pmd_busy cycles_per_packet=cpu.cycles_per_packet
    cpu_softirq=cpu.softirq cpu_softirq_busiest_share=cpu.softirq_busiest cpu_system=cpu.system
    floor_loss_ratio=floor.loss_ratio floor_place=floor.place
    loopback_pps=loopback.known_pps vnf_alone_pps=vnf.known_pps published_pps
    trials=result.trials invalid_trials=result.invalid_trials traffic_s=result.traffic_s
    started=record.started reason port_queues
    latency_10_p50_us=latencies.10.p50_us latency_10_p90_us=latencies.10.p90_us
    latency_10_p99_us=latencies.10.p99_us latency_10_samples=latencies.10.samples
    latency_50_p50_us=latencies.50.p50_us latency_50_p90_us=latencies.50.p90_us
    latency_50_p99_us=latencies.50.p99_us latency_50_samples=latencies.50.samples
    latency_90_p50_us=latencies.90.p50_us latency_90_p90_us=latencies.90.p90_us
    latency_90_p99_us=latencies.90.p99_us latency_90_samples=latencies.90.samples
    soak_s=soak.elapsed_s soak_verdict=soak.verdict
    soak_lost_packets=soak.lost_packets soak_loss_ratio=soak.loss_ratio
    vnf_mode=cell.vnf_mode burst=cell.burst numa=cell.numa
    paths=ends worst_path=worst_path.0 worst_path_lost_packets=worst_path.1
    zero_loss_mpps=number cpus_per_mpps
"""
COLUMNS: Final[Mapping[str, Sequence[str]]] = {
    name: (path or name).split(".") for name, _, path in (each.partition("=") for each in _COLUMNS.split())
}
#: Values of a cell that was not measured.
_UNMEASURED: Final[Mapping[str, _Value]] = {
    "repeats": 0,
    "trials": 0,
    "invalid_trials": 0,
    "traffic_s": 0.0,
    "started": "",
}


def values(figure: ReportFigure) -> dict[str, _Value]:
    """Return the value of each column; None if there is none."""
    return {name: _at(figure, path, _UNMEASURED.get(name)) for name, path in COLUMNS.items()}


def _at(figure: ReportFigure, path: Sequence[str], default: _Value) -> _Value:
    found: Any = figure
    for name in path:
        if isinstance(found, Mapping):
            found = found.get(name)
        elif found is not None:
            found = found[int(name)] if name.isdecimal() else getattr(found, name)
    return default if found is None or found == "" else found


def csv_text(report: Report) -> str:
    """Return CSV with a header. Text that a spreadsheet would evaluate is prefixed with ``'``."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(map(_safe, values(figure).values()) for figure in report.figures)
    return buffer.getvalue()


def _safe(value: _Value) -> _Value:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def json_text(report: Report) -> str:
    """Return JSON: ``cells`` has the CSV columns, ``others`` the additional goals."""
    table = report.published
    whole = {
        "format": FORMAT,
        "run": report.run.name,
        "complete": not report.missing,
        "goals": list(report.goals),
        "published": table
        and {
            "name": table.name,
            "source": table.source,
            "beside": table.label,
            "conditions": dict(table.conditions),
        },
        "cells": [_cell(figure) for figure in report.figures],
        "caveats": caveats(report),
    }
    return dumps(whole)


def _cell(figure: ReportFigure) -> dict[str, Any]:
    verdicts = figure.result["repeats"]["verdicts"] if figure.result else {}
    others = [_other(goal) for goal in figure.others]
    return {"key": figure.cell.key, **values(figure), "verdicts": verdicts, "others": others}


def _other(found: GoalResult) -> dict[str, Any]:
    goal = found["goal"]
    described = {"name": goal["name"], "words": goal["in_words"], "relative_width": goal["relative_width"]}
    return {**described, **{name: found.get(name) for name in ("verdict", "rate_pps", "reason")}}

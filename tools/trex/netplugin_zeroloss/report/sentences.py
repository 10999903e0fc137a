"""Summary of a run in sentences: the results, and what they do not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from netplugin_zeroloss.journal import RunRecord
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.figures import MISSING, Report, ReportFigure, unexplained
from netplugin_zeroloss.report.table import Grid, short_text
from netplugin_zeroloss.search.outcome import SearchVerdict

#: Scaling efficiency below which the summary mentions it.
_POOR_SCALING = 0.8


def answer(grid: Grid) -> list[str]:
    """Return the results of a grid: one or two sentences per backend, the fastest first."""
    return list(_of_grid(grid))


def _of_grid(grid: Grid) -> Iterator[str]:
    backends = [(name, [f for f in figures if f is not None]) for name, figures in grid.rows]
    rated = [(name, figures) for name, figures in backends if _best(figures) is not None]
    rated.sort(key=lambda row: -_rate(row[1]))
    for name, figures in rated:
        yield _of_backend(name, figures)
    for name, figures in backends:
        for figure in figures:
            if figure.rate_pps is None:
                yield f"{name}{_with(figure)} {_without_rate(figure)}."


def _best(figures: Sequence[ReportFigure]) -> ReportFigure | None:
    rated = [f for f in figures if f.rate_pps is not None]
    return max(rated, key=lambda f: f.rate_pps or 0.0, default=None)


def _rate(figures: Sequence[ReportFigure]) -> float:
    best = _best(figures)
    return best.rate_pps or 0.0 if best else 0.0


def _of_backend(name: str, figures: Sequence[ReportFigure]) -> str:
    best = _best(figures)
    assert best is not None
    text = f"{name}{_with(best)} forwards {short_text(best)} Mpps without loss"
    if best.verdict == SearchVerdict.VNF_LIMITED:
        text += ", which is what the VNF does by itself: the backend may do more"
    if best.efficiency is not None:
        text += f"; each core does {words.percent(best.efficiency)} of what the first did"
        if best.efficiency < _POOR_SCALING:
            text += ", so further cores bring less"
    if best.cpu is not None and best.cpu.host is not None:
        text += f". It takes {best.cpu.host:.2g} CPUs of the host"
    return text + "."


def _with(figure: ReportFigure) -> str:
    cores = figure.cell.pmd_cores
    return "" if cores is None else f" with {words.count(cores, 'PMD core')}"


def _without_rate(figure: ReportFigure) -> str:
    if figure.verdict == MISSING:
        return "was not measured"
    if figure.verdict == SearchVerdict.GENERATOR_LIMITED:
        if figure.at_least_pps is None:
            return "cannot be decided: the generator ended before the device"
        least = short_text(figure).removeprefix(">= ")
        return f"forwards at least {least} Mpps: the generator ended before the device"
    if figure.verdict == SearchVerdict.FLOOR:
        part = words.ratio(figure.floor_ratio) if figure.floor_ratio is not None else "some"
        where = f", at {figure.floor_place}" if figure.floor_place else ""
        return f"has no NDR: it loses {part} at any load{where}"
    return f"has no verdict: {figure.reason.rstrip('.')}"


def meaning(report: Report) -> str:
    """Return the meaning of "zero loss": the goal."""
    if not report.goals:
        return "Nothing was measured."
    if len(report.goals) == 1:
        return f"Zero loss here means: {report.goals[0]}."
    return f"Cells were measured with different goals: {'; '.join(report.goals)}."


def not_known(run: RunRecord, report: Report) -> list[str]:
    """Return the limits of the results."""
    return list(_not_known(run, report))


def _not_known(run: RunRecord, report: Report) -> Iterator[str]:
    measured = [f for f in report.figures if f.goal is not None]
    if report.simulated:
        yield "The devices were simulated. No frame was sent, and no hardware is spoken of."
    if report.missing:
        yield f"{words.count(len(report.missing), 'cell')} not measured: the run is incomplete."
    if any(f.repeats == 1 and f.rate_pps is not None for f in measured):
        yield (
            "Cells with one result: how far another search would be from it. Where loss is a"
            " matter of chance that can be 10 % and more; repeats tell."
        )
    few = [f for f in measured if f.interval is not None and f.interval.confidence < 0.95]
    if few:
        yield f"{_cells(few)}: too few repeats for an interval with 95 % confidence."
    for place, control in (
        ("generator by itself", "loopback"),
        ("VNF without backend", "vnf"),
    ):
        bare = [f for f in measured if getattr(f, control) is None]
        if bare:
            yield f"{_cells(bare)}: what the {place} can do, for there was no such control."
    if any(f.cpu is None or f.cpu.host is None for f in measured):
        yield "What it cost the host in CPUs, where no such figure stands."
    for figure in measured:
        left, extra = unexplained(run, figure.cell)
        if left:
            yield (
                f"{figure.cell.key}: where {words.count(left, 'frame')} of its trials were lost."
                " No place counted them."
            )
        if extra:
            yield (
                f"{figure.cell.key}: where frames were lost. Places counted"
                f" {words.count(extra, 'frame')} more than were missing: those of somebody else, or"
                " the same ones twice."
            )


def _cells(figures: Sequence[ReportFigure]) -> str:
    return figures[0].cell.key if len(figures) == 1 else words.count(len(figures), "cell")

"""The files of a report, and its self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Final

from netplugin.host.safe_files import replacing
from netplugin_zeroloss.journal import RunRecord
from netplugin_zeroloss.report import plot, table, words
from netplugin_zeroloss.report.figures import MISSING, Report, ReportFigure, located, not_located, unexplained
from netplugin_zeroloss.report.plot import HEIGHT, WIDTH, TrialPlot, inline_svg, trial_plot
from netplugin_zeroloss.report.table import Grid, short_text
from netplugin_zeroloss.search.recorded import ResultEntry, SetupEntry, TrialEntry
from netplugin_zeroloss.search.trials import SearchVerdict
from netplugin_zeroloss.values import UnusableInput

# -- The self-contained HTML page of a report: summary first, then the details of each cell. ------
# All text of a run is escaped, and the page's CSP forbids loading resources and any script but its own.
# The same run always gives the same page.


@dataclass(frozen=True, slots=True)
class Repeat:
    """One search of a cell: its trial log entries."""

    number: int
    answer_pps: float | None
    trials: Sequence[TrialEntry]
    plot: TrialPlot | None
    shown: bool


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell with the data behind its figure. ``anchor`` is its id on the page."""

    anchor: str
    figure: ReportFigure
    result: ResultEntry | None = None
    setup: SetupEntry = field(default_factory=SetupEntry)
    started: str = ""
    ended: str = ""
    repeats: tuple[Repeat, ...] = ()


def page(run: RunRecord, report: Report) -> str:
    """Return the HTML document."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for module, names in (
        (words, ("mpps", "pps", "percent", "ratio", "count", "seconds")),
        (
            table,
            (
                "figure_text",
                "short_text",
                "mark_text",
                "interval_text",
                "cpu_text",
                "efficiency_text",
                "published_text",
                "goal_text",
                "followed",
                "column",
                "frame",
                "variant",
                "by_path",
            ),
        ),
    ):
        environment.filters |= {name: getattr(module, name) for name in names}
    environment.globals |= {"located": located, "not_located": not_located}
    environment.tests["mapping_of_values"] = lambda value: isinstance(value, Mapping)
    script = _template("page.js")
    cells = [_cell(run, figure, n) for n, figure in enumerate(report.figures, 1)]
    text: str = environment.from_string(_template("page.html.j2")).render(
        run=run,
        report=report,
        cells=cells,
        anchors={view.figure.cell: view.anchor for view in cells},
        grids=table.grids(report),
        status=table.status_text(report),
        answers=[(grid.title, answer(grid)) for grid in table.grids(report)],
        meaning=meaning(report),
        unknown=not_known(run, report),
        picture=Markup(inline_svg(report, html.escape(_described(report)))),
        style=Markup(_template("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        plot_size=(WIDTH, HEIGHT),
    )
    return text


def _template(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _described(report: Report) -> str:
    """Return the text alternative of the plot; its numbers are in the table."""
    found = [f"{g.title}: {' '.join(answer(g))}" for g in table.grids(report)]
    return f"NDR against PMD cores. {' '.join(found)}"


def _cell(run: RunRecord, figure: ReportFigure, number: int) -> CellView:
    anchor = f"cell-{number}"
    record = run.record(figure.cell)
    if record is None:
        return CellView(anchor, figure)
    if record.result is None:
        return CellView(anchor, figure, None, record.setup, record.started, record.ended)
    return CellView(
        anchor,
        figure,
        record.result,
        record.setup,
        record.started,
        record.ended,
        tuple(_repeats(record.result)),
    )


def _repeats(result: ResultEntry) -> list[Repeat]:
    """Return the repeats, the reported one first."""
    shown = result["repeats"]["shown"]
    found = []
    for number, answer_pps in enumerate(result["repeats"]["answers_pps"]):
        trials = [t for t in result["trial_log"] if t["repeat"] == number]
        plot = trial_plot(trials, answer_pps)
        found.append(Repeat(number + 1, answer_pps, trials, plot, number == shown))
    return sorted(found, key=lambda repeat: not repeat.shown)


# -- The files of a report and their writer. ------------------------------------------------------


#: Name, description, and function that creates the content.
FILES: Final[tuple[tuple[str, str, Callable[[RunRecord, Report], str | bytes]], ...]] = (
    ("report.html", "one page with everything, to be opened in a browser", page),
    ("table.md", "the table in Markdown", lambda _, report: table.markdown(report)),
    ("table.csv", "one row a cell", lambda _, report: table.csv_text(report)),
    (
        "table.json",
        "the same, with goals and verdicts of repeats",
        lambda _, r: table.json_text(r),
    ),
    ("scaling.png", "the picture", lambda _, report: plot.png(report)),
    ("scaling.svg", "the picture, to be scaled", lambda _, report: plot.svg(report)),
)


def write(run: RunRecord, report: Report, folder: Path) -> list[Path]:
    """Create all files in the folder, which is created if needed. Raises: UnusableInput."""
    made = [(folder / name, make(run, report)) for name, _, make in FILES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in made:
            # Text may contain lone surrogates, which UTF-8 cannot encode.
            data = content if isinstance(content, bytes) else content.encode(errors="replace")
            with replacing(path, 0o644) as file:
                file.write(data)
    except OSError as error:
        raise UnusableInput("--output", f"{error.filename}: {error.strerror}") from error
    return [path for path, _ in made]


# -- Summary of a run in sentences: the results, and what they do not show. ------------------------


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
        yield "The devices were simulated. No frame was sent: the figures say nothing of hardware."
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

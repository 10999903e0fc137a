"""The files of a report, and its self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from netplugin_zeroloss.journal import RunRecord
from netplugin_zeroloss.report import machine, plot, sentences, table, words
from netplugin_zeroloss.report.figures import Report, ReportFigure, located, not_located
from netplugin_zeroloss.report.plot import HEIGHT, WIDTH, TrialPlot, inline_svg, trial_plot
from netplugin_zeroloss.values import UnusableInput

# -- The self-contained HTML page of a report: summary first, then the details of each cell. ------
# All text of a run is escaped, and the page's CSP forbids loading resources and any script but its own.
# The same run always gives the same page.


@dataclass(frozen=True, slots=True)
class Repeat:
    """One search of a cell: its trial log entries."""

    number: int
    answer_pps: float | None
    trials: Sequence[Mapping[str, Any]]
    plot: TrialPlot | None
    shown: bool


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell with the data behind its figure. ``anchor`` is its id on the page."""

    anchor: str
    figure: ReportFigure
    result: Mapping[str, Any] | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)
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
                "column",
                "frame",
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
        answers=[(grid.title, sentences.answer(grid)) for grid in table.grids(report)],
        meaning=sentences.meaning(report),
        unknown=sentences.not_known(run, report),
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
    found = [f"{g.title}: {' '.join(sentences.answer(g))}" for g in table.grids(report)]
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


def _repeats(result: Mapping[str, Any]) -> list[Repeat]:
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
    ("table.csv", "one row a cell", lambda _, report: machine.csv_text(report)),
    (
        "table.json",
        "the same, with goals and verdicts of repeats",
        lambda _, r: machine.json_text(r),
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
            path.write_bytes(data)
    except OSError as error:
        raise UnusableInput("--output", f"{error.filename}: {error.strerror}") from error
    return [path for path, _ in made]

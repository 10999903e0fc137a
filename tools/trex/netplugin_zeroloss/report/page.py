"""The files of a report, and its self-contained HTML page: the answer first, then the details of each cell.

All text of a run is escaped, and the page's CSP forbids scripts and to load anything. The same run always
gives the same page.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from netplugin.host.safe_files import replacing
from netplugin_zeroloss.report import figures, plot, table, words
from netplugin_zeroloss.report.figures import Report, ReportFigure
from netplugin_zeroloss.search.recorded import TrialEntry
from netplugin_zeroloss.values import UnusableInput

#: Functions that the template calls as filters, by module.
_FILTERS: Final = (
    (words, ("rate", "requested", "percent", "count", "seconds", "axes")),
    (table, ("figure_text", "short_text", "mark_text", "column", "also", "choice")),
    (figures, ("located", "not_located")),
)


def page(report: Report) -> str:
    """Return the HTML document."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for module, names in _FILTERS:
        environment.filters |= {name: getattr(module, name) for name in names}
    environment.filters |= {"command": shlex.join, "facts": _facts, "searches": _searches}
    environment.tests["mapping_of_values"] = lambda value: isinstance(value, Mapping)
    grids = table.grids(report)
    # The text alternative of the plot; its numbers are in the table.
    described = " ".join(f"{grid.title}: {table.choice(report, grid)}" for grid in grids)
    text: str = environment.from_string(_template("page.html.j2")).render(
        report=report,
        run=report.run,
        grids=grids,
        anchors={f.cell: f"cell-{number}" for number, f in enumerate(report.figures, 1)},
        details=table.details(report),
        status=table.status_text(report),
        caveats=table.caveats(report),
        conditions=table.conditions(report),
        picture=Markup(plot.inline_svg(report, html.escape(f"NDR against PMD cores. {described}"))),
        style=Markup(_template("page.css")),
    )
    return text


def _template(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _searches(figure: ReportFigure) -> Sequence[tuple[int, bool, float | None, Sequence[TrialEntry]]]:
    """Return number, whether it is the reported one, answer and trials of each search, that one first."""
    if figure.result is None:
        return ()
    repeats, log = figure.result["repeats"], figure.result["trial_log"]
    found = [
        (number + 1, number == repeats["shown"], answer, [t for t in log if t["repeat"] == number])
        for number, answer in enumerate(repeats["answers_pps"])
    ]
    return sorted(found, key=lambda search: not search[1])


def _facts(figure: ReportFigure) -> Iterator[tuple[str, str]]:
    """Yield what the table does not have of a cell with a result: name and text."""
    result, goal = figure.result, figure.goal
    if result is None or goal is None or figure.record is None:
        return
    evidence, width = result["evidence"], goal["relative_width"]

    def bound(rate: float, trials: Sequence[int]) -> str:
        named = "trial" if len(trials) == 1 else "trials" if trials else "no trial"
        return f"{words.rate(rate, width)} ({' '.join([named, ', '.join(map(str, trials))]).strip()})"

    lower, upper = result["bounds_pps"]
    yield (
        "bounds",
        f"{bound(lower, evidence['lower_trials'])} to {bound(upper, evidence['upper_trials'])}",
    )
    if figure.spread:
        yield "median over repeats", words.rate(figure.spread["median_pps"], width)
    verdicts = (f"{many} {name.replace('_', ' ')}" for name, many in result["repeats"]["verdicts"].items())
    yield "searches", f"{result['repeats']['count']}: {', '.join(verdicts)}"
    places = (f", {lost:,.0f} at {place}" for place, lost in evidence["places_at_upper"].items())
    yield "lost at the upper bound", words.count(evidence["lost_at_upper"], "frame") + "".join(places)
    if figure.cpu.cycles_per_packet is not None:
        yield "PMD cycles for each frame", f"{figure.cpu.cycles_per_packet:.0f}"
    if figure.cpu.softirq_busiest is not None:
        yield "softirq on the busiest CPU", words.percent(figure.cpu.softirq_busiest)
    if figure.rate_per_core_pps is not None:
        yield "per PMD core", words.rate(figure.rate_per_core_pps, width)
    for name, control in (("generator by itself", figure.loopback), ("VNF without backend", figure.vnf)):
        yield name, "no such control" if control is None else table.figure_text(control)
    causes = "".join(f"; {cause} {number}" for cause, number in evidence["invalid_causes"].items())
    spent = f"{words.seconds(result['traffic_s'])} of traffic"
    yield (
        "cost",
        f"{words.count(result['trials'], 'trial')} ({result['invalid_trials']} invalid{causes}), {spent}",
    )
    yield "time", f"{figure.record.started} to {figure.record.ended}"


#: Name, description, and function that creates the content.
FILES: Final[tuple[tuple[str, str, Callable[[Report], str | bytes]], ...]] = (
    ("report.html", "one page with everything, to be opened in a browser", page),
    ("table.md", "the table in Markdown", table.markdown),
    ("table.csv", "one row a cell", table.csv_text),
    ("table.json", "the same, with goals and verdicts of repeats", table.json_text),
    ("scaling.png", "the picture", plot.png),
    ("scaling.svg", "the picture, to be scaled", plot.svg),
)


def write(report: Report, folder: Path) -> list[Path]:
    """Create all files in the folder, which is created if needed. Raises: UnusableInput."""
    made = [(folder / name, make(report)) for name, _, make in FILES]
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

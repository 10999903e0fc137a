"""The files of a report and their writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.matrix.records import RunRecord
from netplugin.acceptance.report import machine, page, plot, table
from netplugin.acceptance.report.figures import Report

#: Name, description, and function that creates the content.
FILES: Final[tuple[tuple[str, str, Callable[[RunRecord, Report], str | bytes]], ...]] = (
    ("report.html", "one page with everything, to be opened in a browser", page.page),
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

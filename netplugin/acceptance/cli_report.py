"""The sub-commands ``report`` (table, plot and page of a run) and ``compare`` (regression check)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from netplugin.acceptance.cli_options import number
from netplugin.acceptance.errors import UnusableInput

_EXTRA = "pip install 'netplugin[acceptance]'"


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write the table, the plot and the page of a run",
        description="Write the results of a run: one HTML page, the table in Markdown, CSV and JSON,"
        " and the plot as PNG and SVG. An incomplete run is marked as incomplete.",
    )
    parser.set_defaults(command=_report)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument(
        "--output", metavar="DIR", type=Path,
        help="output directory (default: RUN/report)",
    )  # fmt: skip
    parser.add_argument(
        "--published", action="store_true",
        help="add published figures, labelled as measured on other hardware; a description"
        " with `comparable_to: [zstack-4.4]` always adds them",
    )  # fmt: skip


def _report(options: argparse.Namespace) -> int:
    from netplugin.acceptance.matrix.journal import read_run
    from netplugin.acceptance.report.figures import report_of
    from netplugin.acceptance.report.published import Beside, beside, zstack
    from netplugin.acceptance.report.table import status_text

    run = read_run(options.run)
    published = zstack()
    _needs("jinja2", "matplotlib", "yaml")
    shown = beside(run, published, options.published)
    report = report_of(run, None if shown is Beside.NOT_SHOWN else published, shown)
    from netplugin.acceptance.report.files import FILES, write

    paths = write(run, report, options.output or options.run / "report")
    for path, (_, what, _) in zip(paths, FILES, strict=True):
        print(f"{path}: {what}")
    print(status_text(report))
    return 0


def _needs(*modules: str) -> None:
    """Check that these modules are installed. Raises: UnusableInput."""
    from importlib.util import find_spec

    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise UnusableInput(", ".join(missing), f"not installed; {_EXTRA} brings what this needs")


def add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="check a run for regressions against an older run",
        description="Compare two runs cell by cell. Exit status: 0 if no cell is worse, 1 if a cell is,"
        " 2 if the runs do not allow a decision.",
    )
    parser.set_defaults(command=_compare)
    parser.add_argument("old", metavar="OLD", type=Path, help="folder of the older run")
    parser.add_argument("new", metavar="NEW", type=Path, help="folder of the run to check")
    parser.add_argument(
        "--tolerance", type=number(0, 0.5, inclusive=True), default=0.01, metavar="RATIO",
        help="smallest decrease that is a regression (default: %(default)s; at least the"
        " precision of the goal)",
    )  # fmt: skip
    parser.add_argument(
        "--noisy-tolerance", type=number(0, 0.9, inclusive=True), default=0.5, metavar="RATIO",
        help="the same for cells with random loss and too few repeats for a test;"
        " a decrease from half of it on is undecided (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--level", type=number(0, 0.5), default=0.05, metavar="P",
        help="probability of at least one false alarm among all tested cells"
        " (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="FILE", help="write the comparison as JSON (- : standard output)"
    )


def _compare(options: argparse.Namespace) -> int:
    from netplugin.acceptance.matrix.journal import read_run
    from netplugin.acceptance.report.compare import Limits, compare
    from netplugin.acceptance.report.comparison_text import json_text, text

    limits = Limits(options.tolerance, options.noisy_tolerance, options.level)
    found = compare(read_run(options.old), read_run(options.new), limits)
    if options.json == "-":
        sys.stdout.write(json_text(found))
        return found.status
    sys.stdout.write(text(found))
    if options.json is not None:
        try:
            Path(options.json).write_text(json_text(found), encoding="utf-8")
        except OSError as error:
            raise UnusableInput("--json", f"{options.json}: {error.strerror}") from error
    return found.status

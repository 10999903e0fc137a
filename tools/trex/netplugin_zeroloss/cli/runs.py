"""The sub-commands for whole runs: ``matrix``, ``guard``, ``doctor``, ``report``, ``compare``; ``evaluate``.

What only one of them needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from netplugin_zeroloss.asked import add_fields
from netplugin_zeroloss.cli.frame import (
    Commands,
    add_folder,
    add_json,
    add_quiet,
    ends_cleanly,
    progress,
    write_out,
)
from netplugin_zeroloss.cli.options import number, whole
from netplugin_zeroloss.evaluation import algorithms as searches
from netplugin_zeroloss.evaluation.evaluate import Progress, as_json, as_table, evaluate
from netplugin_zeroloss.evaluation.population import CLASSES
from netplugin_zeroloss.generators.sim import FAMILIES
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import UnusableInput, headline, line_rate_pps

_DEVICES = "named devices, and classes of which each run takes another device (default: all)"
_FORMATS = {"table": as_table, "json": as_json}


def add_commands(commands: Commands) -> None:
    _add_matrix(commands)
    _add_doctor(commands)
    _add_prove(commands)
    _add_report(commands)
    _add_compare(commands)
    _add_guard(commands)
    _add_evaluate(commands)


def _add_matrix(commands: Commands) -> None:
    parser = commands.add_parser(
        "matrix",
        help="run a search for every cell of a run description",
        description="Measure every cell of a run description (YAML). Every trial is written to the"
        " folder's journal when it ends; the table goes to standard output, progress to standard"
        " error. Exit status: 0 if every cell has a verdict, 1 if a cell failed.",
    )
    parser.set_defaults(command=_matrix)
    parser.add_argument("description", metavar="FILE", type=Path, help="the run description")
    add_folder(parser, "folder of the run, new or empty (default: the name of the run)")
    dry = "check everything, print the cells and the estimated duration, and exit"
    parser.add_argument("--dry-run", action="store_true", help=dry)


def _matrix(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.matrix import session

    command = tuple(sys.argv)
    asked = session.RunOptions(options.description, options.folder, options.resume, options.quiet, command)
    if options.dry_run:
        sys.stdout.write(session.dry_run(asked))
        return 0
    folder = str(session.folder_of(asked))
    with ends_cleanly("matrix", str(options.description), "--folder", folder, "--resume"):
        return session.carry_out(asked, sys.stdout)


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="list what is missing on this host for a run, and how to fix it",
        description="Check this host for the run description, or without one for any run: one line for each"
        " check, and below what is missing the command or change that mends it. Nothing is changed. Exit"
        " status: 0 if nothing is missing, 1 if something is.",
    )
    parser.set_defaults(command=_doctor)
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="the run description")


def _doctor(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.cli.doctor import doctor

    return doctor(options)


def _add_prove(commands: Commands) -> None:
    parser = commands.add_parser(
        "prove",
        help="show what works on the NICs of this host, and write a report for an issue",
        description="Plug ports on the NICs of a run description, read from kernel and OVS what they"
        " have, and measure one cell of each backend shortly. All is undone; after a kill, by the same"
        " command. The report is proof.md. Exit status: 0 if no step failed, 1 if one did.",
    )
    parser.set_defaults(command=_prove)
    parser.add_argument("description", metavar="FILE", type=Path, help="the run description")
    where = "folder of the report (default: NAME-proof)"
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help=where)
    add_quiet(parser)


def _prove(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.matrix.proof import REPORT, prove, write
    from netplugin_zeroloss.report.proof import Outcome, markdown

    where = ["--folder", str(options.folder)] if options.folder else []
    with ends_cleanly("prove", str(options.description), *where):
        found, folder = prove(options.description, options.folder, progress(options.quiet), options.quiet)
    print(markdown(found))
    write(folder / "proof.json", json.dumps(asdict(found), indent=1) + "\n")
    write(folder / REPORT, markdown(found))
    return int(any(step.outcome is Outcome.FAILED for step in found.steps))


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="write the table, the plot and the page of a run",
        description="Write the results of a run: one HTML page, the table in Markdown, CSV and JSON,"
        " and the plot as PNG and SVG. An incomplete run is marked as incomplete.",
    )
    parser.set_defaults(command=_report)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    output = "output directory (default: RUN/report)"
    parser.add_argument("--output", metavar="DIR", type=Path, help=output)
    published = (
        "add published figures, labelled as measured on other hardware; a description"
        " with `comparable_to: [zstack-4.4]` always adds them"
    )
    parser.add_argument("--published", action="store_true", help=published)


def _report(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.journal import read_run
    from netplugin_zeroloss.report.figures import report_of
    from netplugin_zeroloss.report.page import FILES, write
    from netplugin_zeroloss.report.published import published_for
    from netplugin_zeroloss.report.table import status_text

    run = read_run(options.run)
    report = report_of(run, published_for(run, options.published))
    paths = write(report, options.output or options.run / "report")
    for path, (_, what, _) in zip(paths, FILES, strict=True):
        print(f"{path}: {what}")
    print(status_text(report))
    return 0


def _add_compare(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="check a run for regressions against an older run",
        description="Compare two runs cell by cell. Exit status: 0 if no cell is worse, 1 if a cell is,"
        " 2 if the runs do not allow a decision.",
    )
    parser.set_defaults(command=_compare)
    parser.add_argument("old", metavar="OLD", type=Path, help="folder of the older run")
    parser.add_argument("new", metavar="NEW", type=Path, help="folder of the run to check")

    def share(flag: str, default: float, parse: Callable[[str], float], metavar: str, what: str) -> None:
        what += " (default: %(default)s)"
        parser.add_argument(flag, type=parse, default=default, metavar=metavar, help=what)

    tolerance = "smallest decrease that is a regression, at least the precision of the goal"
    share("--tolerance", 0.01, number(0, 0.5, inclusive=True), "RATIO", tolerance)
    noisy = (
        "the same for cells with random loss and too few repeats for a test; a decrease from half of it"
        " on is undecided"
    )
    share("--noisy-tolerance", 0.5, number(0, 0.9, inclusive=True), "RATIO", noisy)
    level = "probability of at least one false alarm among all tested cells"
    share("--level", 0.05, number(0, 0.5), "P", level)
    add_json(parser, "the comparison")


def _compare(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.journal import read_run
    from netplugin_zeroloss.report.compare import ComparisonLimits, compare
    from netplugin_zeroloss.report.comparison_text import json_text, text

    limits = ComparisonLimits(options.tolerance, options.noisy_tolerance, options.level)
    found = compare(read_run(options.old), read_run(options.new), limits)
    write_out(options.json, text(found), json_text(found))
    return found.status


def _add_guard(commands: Commands) -> None:
    parser = commands.add_parser(
        "guard",
        help="measure two run descriptions in turn, and tell whether the second is worse",
        description="Search the rate of each cell of A once; then set up A and B in turn, in random order,"
        " until it is decided whether B is worse. Exit status: 0 if no cell is worse, 1 if one is, 2 if one"
        " cannot be measured, 3 if it is undecided.",
    )
    parser.set_defaults(command=_guard)
    parser.add_argument("a", metavar="A", type=Path, help="the run description to compare with")
    parser.add_argument("b", metavar="B", type=Path, help="the run description that may be worse")
    add_folder(parser, "folder of both runs, new or empty (default: %(default)s)", Path("guard"))
    most = "traffic of a cell, with its search, after which it is undecided (default: %(default)s)"
    parser.add_argument("--traffic", type=number(0.1, 10_000), default=20.0, metavar="MINUTES", help=most)
    add_json(parser, "the result")


def _guard(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.matrix import guard
    from netplugin_zeroloss.report.guard_text import json_text, status, text

    of_run, command = (options.resume, options.quiet), tuple(sys.argv)
    asked = guard.GuardOptions(options.a, options.b, options.folder, 60 * options.traffic, *of_run, command)
    a, b, folder = map(str, (options.a, options.b, options.folder))
    with ends_cleanly("guard", a, b, "--folder", folder, "--resume"):
        found = guard.carry_out(asked, progress(options.quiet))
    write_out(options.json, text(found), json_text(found))
    return status(found)


def _add_evaluate(commands: Commands) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="compare search algorithms on simulated devices with known answers",
        description="Trials, traffic, error and spread of each search on each simulated device."
        " No traffic is sent. The same seed gives the same table.",
    )
    parser.set_defaults(command=_evaluate)
    known = ",".join((*CLASSES, *FAMILIES))
    parser.add_argument("--devices", metavar="NAME,...", default=known, help=_DEVICES)
    names, which = ",".join(searches.ALGORITHMS), "default: %(default)s; mlrsearch needs the extra [evaluate]"
    parser.add_argument("--algorithms", metavar="NAME,...", default=names, help=which)
    runs = "searches of each algorithm on each device (default: %(default)s)"
    parser.add_argument("--runs", type=whole(1, 100_000), default=100, metavar="N", help=runs)
    seed = "seed of the simulated devices (default: %(default)s)"
    parser.add_argument("--seed", type=whole(0, 2**63), default=1, metavar="N", help=seed)
    cpus, jobs = os.cpu_count() or 1, "number of processes (default: one per CPU)"
    parser.add_argument("--jobs", type=whole(1, 1024), default=cpus, metavar="N", help=jobs)
    form = "%(choices)s (default: %(default)s)"
    parser.add_argument("--format", choices=tuple(_FORMATS), default="table", metavar="FORMAT", help=form)
    add_quiet(parser)
    add_fields(parser, "line_rate_pps", "precision", "final_duration", "initial_duration")


def _evaluate(options: argparse.Namespace) -> int:
    devices, known = options.devices.split(","), (*CLASSES, *FAMILIES)
    for device in devices:
        if device not in known:
            raise UnusableInput("--devices", f"no {device!r}; there are {', '.join(known)}")
    names = options.algorithms.split(",")
    searches.usable(names)
    goal = headline(options.final_duration, options.initial_duration, options.precision)
    line = options.line_rate_pps or line_rate_pps(10e9, 64)
    plan = SearchPlan((goal,), line, warm_up_s=options.final_duration / 6)
    progress: Progress = (lambda done, of: None) if options.quiet else _progress
    rows = evaluate(plan, devices, names, options.runs, options.seed, options.jobs, progress)
    sys.stdout.write(_FORMATS[options.format](rows))
    return 0


def _progress(done: int, of: int) -> None:
    """Print progress: one line rewritten in place on a terminal, otherwise about ten lines."""
    if sys.stderr.isatty():
        print(f"\r{done} of {of} searches", end="\n" if done == of else "", file=sys.stderr)
    elif done == of or done * 10 // of != (done - 10) * 10 // of:
        print(f"{done} of {of} searches", file=sys.stderr, flush=True)

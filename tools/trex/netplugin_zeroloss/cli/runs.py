"""The sub-command ``matrix``: runs all cells of a YAML run description into a folder."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from netplugin_zeroloss.cli.options import add_goal, number, whole
from netplugin_zeroloss.evaluation import algorithms as searches
from netplugin_zeroloss.evaluation.evaluate import Progress, as_csv, as_json, as_table, evaluate
from netplugin_zeroloss.generators.sim import FAMILIES
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import UnusableInput, line_rate_pps, strict_goal


def add_matrix(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "matrix",
        help="run a search for every cell of a run description",
        description="Measure every cell of a run description (YAML). Every trial is written to the"
        " folder's journal when it ends; the table goes to standard output, progress to standard"
        " error. Exit status: 0 if every cell has a verdict, 1 if a cell failed.",
    )
    parser.set_defaults(command=_matrix)
    parser.add_argument("description", metavar="FILE", help="the run description")
    parser.add_argument(
        "--folder",
        metavar="FOLDER",
        help="folder of the run, new or empty (default: the name of the run)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume the run in the folder; no trial is repeated",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the cells and the estimated duration, and exit",
    )
    parser.add_argument("--quiet", action="store_true", help="do not print progress")


def _matrix(options: argparse.Namespace) -> int:
    # Imported here: the sub-command ``search`` works without these dependencies.
    try:
        from netplugin_zeroloss.matrix import session
    except ModuleNotFoundError as error:
        if str(error.name).startswith("netplugin"):
            raise
        raise UnusableInput(
            "matrix", f"{error.name} is missing: pip install ./tools/trex, in a checkout"
        ) from error
    asked = session.RunOptions(
        Path(options.description),
        Path(options.folder) if options.folder else None,
        options.resume,
        options.quiet,
        tuple(sys.argv),
    )
    if options.dry_run:
        sys.stdout.write(session.dry_run(asked))
        return 0
    with ends_cleanly():
        try:
            return session.carry_out(asked, sys.stdout)
        except KeyboardInterrupt:
            folder = session.folder_of(asked)
            again = ["netplugin-zeroloss", "matrix", options.description, "--folder", str(folder), "--resume"]
            print(
                "\nInterrupted; the settings of the host and of OVS are as before, and what was measured"
                f" is kept. To continue:\n  {shlex.join(again)}",
                file=sys.stderr,
            )
            raise


@contextmanager
def ends_cleanly() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first signal; later ones do not interrupt the cleanup."""
    interrupted = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            print("\nRestoring the host's settings ...", file=sys.stderr)
            return
        interrupted = True
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # The caller ignores this signal (nohup): keep ignoring it.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- The sub-commands ``report`` (table, plot and page of a run) and ``compare`` (regression check).


_EXTRA = "in a checkout, pip install ./tools/trex"


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
        "--output",
        metavar="DIR",
        type=Path,
        help="output directory (default: RUN/report)",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="add published figures, labelled as measured on other hardware; a description"
        " with `comparable_to: [zstack-4.4]` always adds them",
    )


def _report(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.journal import read_run
    from netplugin_zeroloss.report.figures import report_of
    from netplugin_zeroloss.report.published import PublishedRelation, relation_of, zstack
    from netplugin_zeroloss.report.table import status_text

    run = read_run(options.run)
    published = zstack()
    _needs("jinja2", "matplotlib", "ruamel")
    shown = relation_of(run, published, options.published)
    report = report_of(run, None if shown is PublishedRelation.NOT_SHOWN else published, shown)
    from netplugin_zeroloss.report.page import FILES, write

    paths = write(report, options.output or options.run / "report")
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
        "--tolerance",
        type=number(0, 0.5, inclusive=True),
        default=0.01,
        metavar="RATIO",
        help="smallest decrease that is a regression (default: %(default)s; at least the"
        " precision of the goal)",
    )
    parser.add_argument(
        "--noisy-tolerance",
        type=number(0, 0.9, inclusive=True),
        default=0.5,
        metavar="RATIO",
        help="the same for cells with random loss and too few repeats for a test;"
        " a decrease from half of it on is undecided (default: %(default)s)",
    )
    parser.add_argument(
        "--level",
        type=number(0, 0.5),
        default=0.05,
        metavar="P",
        help="probability of at least one false alarm among all tested cells (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the comparison as JSON (- : standard output)")


def _compare(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.journal import read_run
    from netplugin_zeroloss.report.compare import ComparisonLimits, compare
    from netplugin_zeroloss.report.comparison_text import json_text, text

    limits = ComparisonLimits(options.tolerance, options.noisy_tolerance, options.level)
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


# -- The sub-command ``evaluate``: compares search algorithms on simulated devices with known answers.


_FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}


def add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="compare search algorithms on simulated devices with known answers",
        description="Trials, traffic, error and spread of each search on each simulated device."
        " No traffic is sent. The same seed gives the same table.",
    )
    parser.set_defaults(command=_evaluate)
    parser.add_argument("--devices", metavar="NAME,...", default=",".join(FAMILIES), help="default: all")
    parser.add_argument(
        "--algorithms",
        metavar="NAME,...",
        default=",".join(searches.ALGORITHMS),
        help="default: %(default)s; mlrsearch needs the extra [evaluate]",
    )
    runs = "searches of each algorithm on each device (default: %(default)s)"
    parser.add_argument("--runs", type=whole(1, 100_000), default=100, metavar="N", help=runs)
    seed = "seed of the simulated devices (default: %(default)s)"
    parser.add_argument("--seed", type=whole(0, 2**63), default=1, metavar="N", help=seed)
    parser.add_argument(
        "--jobs",
        type=whole(1, 1024),
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of processes (default: one per CPU)",
    )
    form = "%(choices)s (default: %(default)s)"
    parser.add_argument("--format", choices=tuple(_FORMATS), default="table", metavar="FORMAT", help=form)
    parser.add_argument("--quiet", action="store_true", help="do not print progress")
    add_goal(parser)


def _evaluate(options: argparse.Namespace) -> int:
    devices = options.devices.split(",")
    for device in devices:
        if device not in FAMILIES:
            raise UnusableInput("--devices", f"no {device!r}; there are {', '.join(FAMILIES)}")
    names = options.algorithms.split(",")
    searches.usable(names)
    goal = strict_goal(options.final_duration, options.precision, options.initial_duration)
    plan = SearchPlan(
        (goal,),
        options.line_rate_pps or line_rate_pps(10e9, 64),
        warm_up_s=options.final_duration / 6,
    )
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

"""The sub-command ``guard``: is B worse than A? Measured in turn on one machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from netplugin.host.processes import printable
from netplugin_zeroloss.cli.options import number
from netplugin_zeroloss.cli.runs import ends_cleanly, write_out


def add_guard(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    folder = "folder of both runs, new or empty (default: %(default)s)"
    parser.add_argument("--folder", metavar="FOLDER", type=Path, default=Path("guard"), help=folder)
    parser.add_argument("--resume", action="store_true", help="resume the runs in the folder")
    parser.add_argument(
        "--traffic",
        type=number(0.1, 10_000),
        default=20.0,
        metavar="MINUTES",
        help="traffic of a cell, with its search, after which it is undecided (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="do not print progress")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON (- : standard output)")


def _guard(options: argparse.Namespace) -> int:
    from netplugin_zeroloss.matrix import guard
    from netplugin_zeroloss.report.guard_text import json_text, status, text

    asked = guard.GuardOptions(
        options.a,
        options.b,
        options.folder,
        60 * options.traffic,
        options.resume,
        options.quiet,
        tuple(sys.argv),
    )
    with ends_cleanly():
        try:
            found = guard.carry_out(asked, (lambda line: None) if options.quiet else _say)
        except KeyboardInterrupt:
            again = ["guard", str(options.a), str(options.b), "--folder", str(options.folder), "--resume"]
            print(
                f"\nInterrupted. To continue:\n  {shlex.join(['netplugin-zeroloss', *again])}",
                file=sys.stderr,
            )
            raise
    write_out(options.json, text(found), json_text(found))
    return status(found)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)

"""The sub-command ``guard``: is B worse than A? Measured in turn on one machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from netplugin_zeroloss.cli.frame import Commands, add_folder, add_json, ends_cleanly, progress, write_out
from netplugin_zeroloss.cli.options import number


def add_guard(commands: Commands) -> None:
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
    parser.add_argument(
        "--traffic",
        type=number(0.1, 10_000),
        default=20.0,
        metavar="MINUTES",
        help="traffic of a cell, with its search, after which it is undecided (default: %(default)s)",
    )
    add_json(parser, "the result")


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
    a, b, folder = map(str, (options.a, options.b, options.folder))
    with ends_cleanly("guard", a, b, "--folder", folder, "--resume"):
        found = guard.carry_out(asked, progress(options.quiet))
    write_out(options.json, text(found), json_text(found))
    return status(found)

"""The sub-command ``doctor``: says what is missing on this host for the table, and what mends it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from netplugin.calls import as_commands
from netplugin_zeroloss.values import UnusableInput

_MISSING = 1


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    # Imported here: the sub-command ``search`` works without these dependencies.
    try:
        from netplugin_zeroloss.matrix.doctor import examine
    except ModuleNotFoundError as error:
        if str(error.name).startswith("netplugin"):
            raise
        raise UnusableInput(
            "doctor", f"{error.name} is missing: pip install ./tools/trex, in a checkout"
        ) from error
    missing = 0
    for finding in examine(options.file):
        state = "missing" if finding.missing else "ok"
        print(f"{state:8} {finding.part:10} {finding.found}")
        if finding.missing:
            print(f"{'':19} fix: {as_commands(finding.fix or '')}")
            missing += 1
        sys.stdout.flush()
    if missing:
        print(f"\n{missing} missing")
        return _MISSING
    print(f"\nNothing is missing. Next: {_next(options.file)}")
    return 0


def _next(file: Path | None) -> str:
    if file is None:
        return "cp tools/trex/matrix.yaml mine.yaml, fill it in, and netplugin-zeroloss doctor mine.yaml"
    return f"netplugin-zeroloss matrix {file} --dry-run, which looks into the VM too"

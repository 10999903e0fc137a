"""The command ``netplugin-zeroloss``: sub-commands, error messages and exit status.

Exit status: 0 with a verdict, 1 without one (the search failed, a replay differs), 2 if the input or
the generator is unusable, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper

from netplugin.calls import as_commands
from netplugin.host.processes import printable
from netplugin.host.safe_files import keep_to_owner
from netplugin.spelling import Parser
from netplugin_zeroloss.cli import doctor, runs, search, vm
from netplugin_zeroloss.values import GeneratorError, UnusableInput

PROG = "netplugin-zeroloss"
UNUSABLE = 2
#: 128 + SIGINT, as shells report it.
_INTERRUPTED = 130

#: Each adds a sub-parser; its default ``command`` runs the sub-command and returns the exit status.
_COMMANDS: tuple[Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None], ...] = (
    search.add_search,
    search.add_replay,
    runs.add_matrix,
    runs.add_report,
    runs.add_compare,
    runs.add_evaluate,
    doctor.add_doctor,
    vm.add_vm,
)


def parser() -> argparse.ArgumentParser:
    whole: argparse.ArgumentParser = Parser(
        prog=PROG, description="Measure the highest frame rate that a backend forwards without loss."
    )
    whole.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = whole.add_subparsers(
        dest="name", required=True, metavar="COMMAND", help="each has a --help of its own"
    )
    for add in _COMMANDS:
        add(commands)
    return whole


def _version() -> str:
    try:
        return importlib.metadata.version(PROG)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "(a checkout, not installed)"


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    keep_to_owner()
    try:
        status: int = options.command(options)
        return status
    except UnusableInput as error:
        _report(options.name, str(error))
    except GeneratorError as error:
        _report(options.name, f"the generator cannot be used: {error}")
    except KeyboardInterrupt:
        _report(options.name, "interrupted")
        return _INTERRUPTED
    return UNUSABLE


def _report(command: str, text: str) -> None:
    """Print an error, which may contain text of generators and VMs."""
    print(f"{PROG} {command}: {printable(as_commands(text))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

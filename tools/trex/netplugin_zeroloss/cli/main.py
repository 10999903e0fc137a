"""The command ``netplugin-zeroloss``: sub-commands, error messages and exit status.

Exit status: 0 with a verdict, 1 without one (the search failed, a replay differs), 2 if the input or
the generator is unusable, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from netplugin.calls import as_commands
from netplugin.host.processes import printable
from netplugin.host.safe_files import keep_to_owner
from netplugin.spelling import Parser
from netplugin_zeroloss.cli import runs, search, vm
from netplugin_zeroloss.values import GeneratorError, UnusableInput

PROG = "netplugin-zeroloss"
UNUSABLE = 2
#: 128 + SIGINT, as shells report it.
_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    whole: argparse.ArgumentParser = Parser(
        prog=PROG, description="Measure the highest frame rate that a backend forwards without loss."
    )
    whole.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    each = "each has a --help of its own"
    commands = whole.add_subparsers(dest="name", required=True, metavar="COMMAND", help=each)
    # Each adds sub-parsers; their default ``command`` runs the sub-command and returns the exit status.
    for add in (search.add_search, search.add_replay, runs.add_commands, vm.add_vm):
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
        why = str(error)
    except GeneratorError as error:
        why = f"the generator cannot be used: {error}"
    except ModuleNotFoundError as error:
        if str(error.name).startswith("netplugin"):
            raise
        why = f"{error.name}: not installed; in a checkout, pip install ./tools/trex brings what this needs"
    except KeyboardInterrupt:
        _report(options.name, "interrupted")
        return _INTERRUPTED
    _report(options.name, why)
    return UNUSABLE


def _report(command: str, text: str) -> None:
    """Print an error, which may contain text of generators and VMs."""
    print(f"{PROG} {command}: {printable(as_commands(text))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

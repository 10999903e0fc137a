"""The sub-command ``matrix``: a run over many cells, from a YAML description into a folder."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from netplugin.acceptance.errors import UnusableInput


def add_matrix(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "matrix",
        help="a search for each cell of a run description",
        description="Measure every cell of a run description (YAML). What was measured is in the"
        " folder's journal as soon as it is; the table is on standard output, progress on standard"
        " error. Exit status: 0 if every cell has a verdict, 1 if one failed.",
    )
    parser.set_defaults(command=_matrix)
    parser.add_argument("description", metavar="FILE", help="the run description")
    parser.add_argument(
        "--folder", metavar="FOLDER",
        help="what the run writes to; new, or empty (default: the name of the run)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true",
        help="go on with the folder's run; no trial is repeated",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check everything, and say what would be measured and how long it would take",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _matrix(options: argparse.Namespace) -> int:
    # A search by itself does not need what this needs.
    try:
        from netplugin.acceptance.matrix import session
    except ModuleNotFoundError as error:
        if str(error.name).startswith("netplugin"):
            raise
        raise UnusableInput(
            "matrix", f"{error.name} is missing: pip install 'netplugin[acceptance]'"
        ) from error
    asked = session.Asked(
        Path(options.description), Path(options.folder) if options.folder else None,
        options.resume, options.quiet, tuple(sys.argv),
    )  # fmt: skip
    if options.dry_run:
        sys.stdout.write(session.dry_run(asked))
        return 0
    with _ends_cleanly():
        try:
            return session.carry_out(asked, sys.stdout)
        except KeyboardInterrupt:
            folder = session.folder_of(asked)
            again = ["zeroloss", "matrix", options.description, "--folder", str(folder), "--resume"]
            print(
                "\nInterrupted; everything was given back. Nothing measured is lost:"
                f" go on with\n  {shlex.join(again)}",
                file=sys.stderr,
            )
            raise


@contextmanager
def _ends_cleanly() -> Iterator[None]:
    """A signal ends the run once, and everything is given back; another one does not disturb that."""
    told = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:
            print("\nEverything is being given back; a moment.", file=sys.stderr)
            return
        told = True
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # Whoever started it (nohup) wants it to go on.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

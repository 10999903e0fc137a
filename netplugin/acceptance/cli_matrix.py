"""The sub-command ``matrix``: runs all cells of a YAML run description into a folder."""

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
        help="run a search for every cell of a run description",
        description="Measure every cell of a run description (YAML). Every trial is written to the"
        " folder's journal when it ends; the table goes to standard output, progress to standard"
        " error. Exit status: 0 if every cell has a verdict, 1 if a cell failed.",
    )
    parser.set_defaults(command=_matrix)
    parser.add_argument("description", metavar="FILE", help="the run description")
    parser.add_argument(
        "--folder", metavar="FOLDER",
        help="folder of the run, new or empty (default: the name of the run)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true",
        help="resume the run in the folder; no trial is repeated",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check everything, print the cells and the estimated duration, and exit",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="do not print progress")


def _matrix(options: argparse.Namespace) -> int:
    # Imported here: the sub-command ``search`` works without these dependencies.
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
    """Raise KeyboardInterrupt on the first signal; later ones do not interrupt the cleanup."""
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
        # The caller ignores this signal (nohup): keep ignoring it.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

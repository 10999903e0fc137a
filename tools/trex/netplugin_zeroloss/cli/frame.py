"""What sub-commands share: options for folder, progress and JSON, their output, and their end by a signal."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from netplugin.host.processes import printable
from netplugin_zeroloss.values import UnusableInput

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_folder(parser: argparse.ArgumentParser, what: str, default: Path | None = None) -> None:
    """Add the options of a run that can be resumed."""
    parser.add_argument("--folder", metavar="FOLDER", type=Path, default=default, help=what)
    parser.add_argument("--resume", action="store_true", help="resume what was interrupted in the folder")
    add_quiet(parser)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="do not print progress")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    help_ = f"write {what} as JSON (- : standard output)"
    parser.add_argument("--json", metavar="FILE", type=_writable, help=help_)


def _writable(name: str) -> str:
    """Check the output path before any traffic is sent."""
    if name != "-" and (Path(name).is_dir() or not Path(name).resolve().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"{name} cannot be written: is it in a directory that exists?")
    return name


def write_out(file: str | None, text: str, as_json: str) -> None:
    """Print the text, or the JSON if the file is ``-``; write the JSON to the file. Raises: UnusableInput."""
    sys.stdout.write(as_json if file == "-" else text)
    if file is not None and file != "-":
        try:
            Path(file).write_text(as_json, encoding="utf-8")
        except OSError as error:
            raise UnusableInput("--json", f"{file}: {error.strerror}") from error


def progress(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line of progress, or nothing if it is quiet."""

    def say(line: str) -> None:
        if not quiet:
            print(printable(line), file=sys.stderr, flush=True)

    return say


@contextmanager
def ends_cleanly(*resume: str) -> Iterator[None]:
    """Raise KeyboardInterrupt on the first signal; later ones do not interrupt the cleanup.

    ``resume``: arguments that continue what was interrupted, which are then printed.
    """
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
    except KeyboardInterrupt:
        if resume:
            kept = "the settings of the host and of OVS are as before, and what was measured is kept"
            again = shlex.join(["netplugin-zeroloss", *resume])
            print(f"\nInterrupted; {kept}. To continue:\n  {again}", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The commands ``netplugin host verify`` and ``host verify compare``; they do not contact the agent."""

from __future__ import annotations

import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from netplugin.api.errors import InvalidRequest
from netplugin.api.field_errors import valid
from netplugin.cli.host_tuning import add_intent, add_root, intent_of, libvirt_uri, read_machine
from netplugin.cli.show import Command, add_fields, add_form, given
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.verifying import plot, result
from netplugin.tuning.verifying.comparison import FigureVerdict, MeasurementComparison, compare
from netplugin.tuning.verifying.measure import measure, measure_guest
from netplugin.tuning.verifying.options import Options
from netplugin.tuning.verifying.result import MeasuredRun
from netplugin.tuning.verifying.show import comparison_json, comparison_text, run_json, run_text
from netplugin.tuning.verifying.vm import Say


class HostVerify(Command):
    """Measure wake-up latency and packet rate of this machine.

    The run is stored, to be compared with others.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        add_output(parser, plot=False)
        add_options(parser)
        add_root(parser)
        add_intent(parser)

    def take_action(self, parsed_args: Namespace) -> None:
        options = valid(Options, given(parsed_args, Options))
        if parsed_args.root != Path("/"):
            what = "root: only this machine can be measured"
            raise InvalidRequest(what, step="verify", fix="leave --root away")
        with ended_by_signals():
            path, run = measured(options, intent_of(parsed_args), parsed_args, self.say)
        if parsed_args.format == "json":
            self.app.stdout.write(run_json(run, path))
        else:
            self.app.stdout.write(f"{run_text(run)}\nStored in {path}\n")


class HostVerifyCompare(Command):
    """Compare two runs of host verify and the machine states.

    Exit status 1 if a figure is worse.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("before", metavar="BEFORE", help="a label (its newest run), or a file")
        parser.add_argument(
            "after", metavar="AFTER", help="the run to compare with BEFORE: a label or a file"
        )
        add_output(parser)

    def take_action(self, parsed_args: Namespace) -> int:
        if parsed_args.plot:
            plot.require_plot(parsed_args.plot)
        names = parsed_args.before, parsed_args.after
        found = compare(*(result.read(result.find(parsed_args.results, name)) for name in names))
        return concluded(found, comparison_text(found), parsed_args, self.app.stdout)


def concluded(found: MeasurementComparison, text: str, parsed_args: Namespace, stdout: TextIO) -> int:
    """Draw and print a comparison, which is ``text`` for people; return the exit status."""
    if parsed_args.plot:
        plot.draw_plot(found, parsed_args.plot)
    stdout.write(comparison_json(found) if parsed_args.format == "json" else text)
    return 1 if found.of(FigureVerdict.WORSE) else 0


def measured(
    options: Options, intent: HostIntent | None, parsed_args: Namespace, say: Say
) -> tuple[Path, MeasuredRun]:
    """Measure, and keep the run below ``--results``. Raises: NetpluginError."""
    facts, live = read_machine(parsed_args)
    machine = make_plan(facts, intent, live) if intent else None, facts, live
    folder: Path = parsed_args.results
    if options.guest is None:
        run = measure(options, *machine, folder, say)
    else:
        run = measure_guest(options, *machine, libvirt_uri(parsed_args), folder, say)
    return result.write(folder, run), run


_METAVARS = {"label": "WORD", "only": "PART", "cpus": "LIST", "loop_cpus": "A,B", "guest": "FOLDER"}


def add_options(parser: ArgumentParser) -> None:
    """Add an option for each field of ``Options``."""
    special: dict[str, dict[str, Any]] = {name: {"metavar": each} for name, each in _METAVARS.items()}
    for name, field in Options.model_fields.items():
        if field.default not in (None, False):
            special.setdefault(name, {})["help"] = f"{field.description} ({field.default})"
    add_fields(parser, Options, special)


def add_output(parser: ArgumentParser, plot: bool = True) -> None:
    add_form(parser, "json")
    words = f"directory with one file per run (default: {result.FOLDER})"
    parser.add_argument("--results", type=Path, default=result.FOLDER, metavar="DIR", help=words)
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot, .png or .svg")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP to SystemExit, so that child processes are terminated too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

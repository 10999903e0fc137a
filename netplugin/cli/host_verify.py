"""The commands ``netplugin host verify`` and ``host verify compare``; they do not contact the agent."""

from __future__ import annotations

import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from netplugin.api.errors import InvalidRequest
from netplugin.api.field_errors import valid
from netplugin.cli.host_tuning import add_intent, add_root, intent_of, libvirt_uri, read_machine
from netplugin.cli.show import Command, add_fields, add_form, given
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.verifying import result, show
from netplugin.tuning.verifying.comparison import FigureVerdict, compare
from netplugin.tuning.verifying.measure import Say, measure, measure_guest, require, require_guest
from netplugin.tuning.verifying.options import Options, asked_of, guest_asked_of
from netplugin.tuning.verifying.result import MeasuredRun
from netplugin.tuning.verifying.show import comparison_json, comparison_text, run_json, run_text


class HostVerify(Command):
    """Measure wake-up latency and packet rate of this machine.

    The run is stored, to be compared with others.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        add_output(parser)
        add_options(parser)
        add_root(parser)
        add_intent(parser)

    def take_action(self, parsed_args: Namespace) -> None:
        options = valid(Options, given(parsed_args, Options))
        if parsed_args.root != Path("/"):
            raise InvalidRequest(
                "root: only this machine can be measured", step="verify", fix="leave --root away"
            )
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
        parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot, .png or .svg")

    def take_action(self, parsed_args: Namespace) -> int:
        if parsed_args.plot is not None:
            show.require_plot(parsed_args.plot)
        names = parsed_args.before, parsed_args.after
        before, after = (result.read(result.find(parsed_args.results, name)) for name in names)
        found = compare(before, after)
        if parsed_args.plot is not None:
            show.draw_plot(found, parsed_args.plot)
        shown = comparison_json if parsed_args.format == "json" else comparison_text
        self.app.stdout.write(shown(found))
        return 1 if found.of(FigureVerdict.WORSE) else 0


def measured(
    options: Options, intent: HostIntent | None, parsed_args: Namespace, say: Say
) -> tuple[Path, MeasuredRun]:
    """Measure, and keep the run below ``--results``. Raises: NetpluginError."""
    facts, live = read_machine(parsed_args)
    plan = make_plan(facts, intent, live) if intent else None
    if options.guest is None:
        asked = asked_of(options, facts, live, plan)
        require(asked)
        result.prepare(parsed_args.results)
        run = measure(asked, facts, live, say)
    else:
        guest = guest_asked_of(options)
        require_guest(guest)
        result.prepare(parsed_args.results)
        placed_by = None if options.unplaced else plan
        run = measure_guest(guest, placed_by, facts, live, libvirt_uri(parsed_args), say)
    return result.write(parsed_args.results, run), run


_METAVARS = {"label": "WORD", "only": "PART", "cpus": "LIST", "loop_cpus": "A,B", "guest": "FOLDER"}


def add_options(parser: ArgumentParser) -> None:
    """Add an option for each field of ``Options``."""
    special: dict[str, dict[str, Any]] = {name: {"metavar": each} for name, each in _METAVARS.items()}
    for name, field in Options.model_fields.items():
        if field.default not in (None, False):
            special.setdefault(name, {})["help"] = f"{field.description} ({field.default})"
    add_fields(parser, Options, special)


def add_output(parser: ArgumentParser) -> None:
    add_form(parser, "json")
    parser.add_argument(
        "--results",
        type=Path,
        default=result.FOLDER,
        metavar="DIR",
        help=f"directory with one file per run (default: {result.FOLDER})",
    )


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

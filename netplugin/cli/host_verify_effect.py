"""The command ``netplugin host verify effect``: measures before and after ``host apply``, across a reboot."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.field_errors import valid
from netplugin.cli.host_apply import add_journal, boot_of, machine_to_tune, result_line
from netplugin.cli.host_tuning import add_intent, add_root, intent_of, option_of, read_machine, required
from netplugin.cli.host_verify import add_options, add_output, ended_by_signals, measured
from netplugin.cli.show import Command, given
from netplugin.host.locks import Locks
from netplugin.tuning.applying.apply import Result, apply
from netplugin.tuning.applying.journal import ApplyJournal
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.verifying import effect, result, show
from netplugin.tuning.verifying.comparison import FigureVerdict, MeasurementComparison
from netplugin.tuning.verifying.effect import EffectState, Waiting
from netplugin.tuning.verifying.options import Options
from netplugin.tuning.verifying.result import MeasuredRun
from netplugin.tuning.verifying.show import comparison_json, comparison_text, vm_text

#: Exit status if a reboot or a restart of OVS comes first.
WAITS = 3
_LOCK = "verify-effect"


class HostVerifyEffect(Command):
    """Measure before and after host apply, and compare.

    After a reboot the same command goes on. Exit status 1 if a figure is worse, 3 if a reboot or a restart
    of OVS comes first.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--yes", action="store_true", help="required to begin: the plan is applied to this machine"
        )
        parser.add_argument(
            "--go-on", action="store_true", help="measure now, without the reboot, what is in effect already"
        )
        parser.add_argument(
            "--discard", action="store_true", help="end the comparison that was begun; runs and settings stay"
        )
        add_journal(parser, "file with the values from before host apply")
        parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot, .png or .svg")
        add_output(parser)
        add_options(parser)
        add_root(parser)
        add_intent(parser)

    def take_action(self, parsed_args: Namespace) -> int:
        if parsed_args.root != Path("/"):
            raise InvalidRequest("root: only this machine can be measured", step=effect.STEP)
        if parsed_args.plot is not None:
            show.require_plot(parsed_args.plot)
        with closing(Locks()) as locks, ended_by_signals():
            if holder := locks.take(_LOCK):
                raise Conflict(f"{holder} measures the effect now", step=effect.STEP, fix="wait for it")
            result.prepare(parsed_args.results)
            state = _state(parsed_args)
            found = effect.carry_on(
                _ThisHost(parsed_args, self.say), parsed_args.results, state, parsed_args.go_on
            )
        if isinstance(found, Waiting):
            self.app.stdout.write(_next(found, state.intent, parsed_args.results))
            return WAITS
        self._report(found, state.intent, parsed_args)
        return 1 if found.of(FigureVerdict.WORSE) else 0

    def _report(self, found: MeasurementComparison, intent: HostIntent, parsed_args: Namespace) -> None:
        page = report(found, intent)
        path = parsed_args.results / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-effect.txt"
        result.write_text(path, page)
        if parsed_args.plot is not None:
            show.draw_plot(found, parsed_args.plot)
        if parsed_args.format == "json":
            self.app.stdout.write(comparison_json(found))
        else:
            self.app.stdout.write(f"{page}\nStored in {path}\n")


@dataclass(frozen=True)
class _ThisHost:
    parsed_args: Namespace
    say: Callable[[str], None]

    def measure(self, options: Options, intent: HostIntent) -> tuple[Path, MeasuredRun]:
        self.say(f"measuring: {options.label}")
        return measured(options, intent, self.parsed_args, self.say)

    def apply(self, intent: HostIntent) -> Sequence[Result]:
        facts, live = read_machine(self.parsed_args)
        plan = make_plan(facts, intent, live)
        boot = boot_of(self.parsed_args.root)
        results = []
        with (
            machine_to_tune(self.parsed_args, self.say) as machine,
            ApplyJournal(self.parsed_args.journal, boot) as journal,
        ):
            for each in apply(plan, machine, journal):
                self.say(result_line(each))
                results.append(each)
        return results


def _state(parsed_args: Namespace) -> EffectState:
    """What was begun, or what begins now. Raises: InvalidRequest, Conflict, HostError."""
    if parsed_args.discard:
        (parsed_args.results / effect.STATE).unlink(missing_ok=True)
    asked, intent = given(parsed_args, Options), intent_of(parsed_args)
    options = valid(Options, asked)
    state = effect.kept(parsed_args.results)
    if state is not None:
        effect.same(state, asked, intent)
        return state
    if not parsed_args.yes:
        raise InvalidRequest(
            "yes: this applies a plan to this machine between two measurements",
            step=effect.STEP,
            fix="see the plan with netplugin host apply, then add --yes",
        )
    return EffectState(options=options, intent=required(intent))


def _next(waiting: Waiting, intent: HostIntent, results: Path) -> str:
    """What the operator does next (pure)."""
    lines = ["Not in effect yet:"]
    lines += [f"  {result_line(each)}" for each in waiting.left]
    again = "netplugin host verify effect"
    if results != result.FOLDER:
        again += f" --results {shlex.quote(str(results.absolute()))}"
    lines += [
        "Next:",
        f"  netplugin host plan {options_text(intent)} -f ansible > tune.yml",
        "  ansible-playbook -i localhost, -c local tune.yml",
        "  reboot",
        f"  {again}",
        "The first run is stored; the last command measures the second. Without the reboot: --go-on.",
    ]
    return "\n".join(lines) + "\n"


def options_text(intent: HostIntent) -> str:
    """The options of the command line that give this intent (pure)."""
    words = []
    for name, value in intent.model_dump(exclude_defaults=True).items():
        option = option_of(name)
        if isinstance(value, bool):
            words.append(option)
        elif isinstance(value, tuple | list):
            words += [f"{option} {shlex.quote(str(each))}" for each in value]
        else:
            words.append(f"{option} {shlex.quote(str(value))}")
    return " ".join(words)


def report(found: MeasurementComparison, intent: HostIntent) -> str:
    """The page with both runs (pure)."""
    lines = [f"Effect of: netplugin host apply {options_text(intent)}", ""]
    for name, run in (("before", found.before), ("after", found.after)):
        if run.guest:
            lines.append(f"{name}: {vm_text(run.guest.vm)}")
    return "\n".join(lines) + "\n" + comparison_text(found)

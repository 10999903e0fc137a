"""The command ``netplugin host verify effect``: measures before and after ``host apply``, across a reboot."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from netplugin.api.errors import Conflict, HostError, InvalidRequest
from netplugin.api.field_errors import valid
from netplugin.cli.host_apply import add_journal, boot_of, machine_to_tune, result_line
from netplugin.cli.host_tuning import add_intent, add_root, intent_of, option_of, read_machine, required
from netplugin.cli.host_verify import add_options, add_output, concluded, ended_by_signals, measured
from netplugin.cli.show import Command, flag, given
from netplugin.host.locks import Locks
from netplugin.tuning.applying.apply import BAD, Result, StepOutcome, apply
from netplugin.tuning.applying.journal import ApplyJournal
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.verifying import effect, plot, result
from netplugin.tuning.verifying.comparison import MeasurementComparison, compare
from netplugin.tuning.verifying.effect import STEP, EffectState
from netplugin.tuning.verifying.options import Options
from netplugin.tuning.verifying.result import MeasuredRun
from netplugin.tuning.verifying.show import comparison_text, vm_text

#: Exit status if a reboot or a restart of OVS comes first.
WAITS = 3
_LATER = (StepOutcome.NEEDS_REBOOT, StepOutcome.NEEDS_OVS_RESTART)
_UNDO = "mend what the reasons above name, and call this again; or undo: netplugin host apply --undo"
_LOCK = "verify-effect"


class HostVerifyEffect(Command):
    """Measure before and after host apply, and compare.

    After a reboot the same command goes on. Exit status 1 if a figure is worse, 3 if a reboot or a restart
    of OVS comes first.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        flag(parser, "--yes", "required to begin: the plan is applied to this machine")
        flag(parser, "--go-on", "measure now, without the reboot, what is in effect already")
        flag(parser, "--discard", "end the comparison that was begun; runs and settings stay")
        add_journal(parser, "file with the values from before host apply")
        add_output(parser)
        add_options(parser)
        add_root(parser)
        add_intent(parser)

    def take_action(self, parsed_args: Namespace) -> int:
        if parsed_args.root != Path("/"):
            raise InvalidRequest("root: only this machine can be measured", step=STEP)
        if parsed_args.plot:
            plot.require_plot(parsed_args.plot)
        with closing(Locks()) as locks, ended_by_signals():
            if holder := locks.take(_LOCK):
                raise Conflict(f"{holder} measures the effect now", step=STEP, fix="wait for it")
            result.prepare(parsed_args.results)
            return self._carry_on(_ThisHost(parsed_args, self.say), parsed_args)

    def _carry_on(self, host: _ThisHost, parsed_args: Namespace) -> int:
        """Do what is next, and all after it that needs no reboot. If it fails, the state is kept."""
        folder: Path = parsed_args.results
        state = _state(parsed_args)
        first = state.options_before()  # its label is checked before anything is kept
        state.keep(folder)
        if state.before is None:
            path, before = host.measure(first, state.intent)
            state.model_copy(update={"before": path.name}).keep(folder)
        else:
            before = result.read(folder / state.before)
        results = host.apply(state.intent)
        if refused := [str(each.target) for each in results if each.outcome in BAD]:
            raise HostError(f"not set: {', '.join(refused)}", step=STEP, fix=_UNDO)
        left = [each for each in results if each.outcome in _LATER]
        if left and not parsed_args.go_on:
            self.app.stdout.write(_next(left, state.intent, folder))
            return WAITS
        _, after = host.measure(state.options_after(before), state.intent)
        (folder / effect.STATE).unlink(missing_ok=True)
        found = compare(before, after)
        page, path = report(found, state.intent), folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-effect.txt"
        result.write_text(path, page)
        return concluded(found, f"{page}\nStored in {path}\n", parsed_args, self.app.stdout)


@dataclass(frozen=True)
class _ThisHost:
    parsed_args: Namespace
    say: Callable[[str], None]

    def measure(self, options: Options, intent: HostIntent) -> tuple[Path, MeasuredRun]:
        self.say(f"measuring: {options.label}")
        return measured(options, intent, self.parsed_args, self.say)

    def apply(self, intent: HostIntent) -> Sequence[Result]:
        facts, live = read_machine(self.parsed_args)
        boot, results = boot_of(self.parsed_args.root), []
        with (
            machine_to_tune(self.parsed_args, self.say) as machine,
            ApplyJournal(self.parsed_args.journal, boot) as journal,
        ):
            for each in apply(make_plan(facts, intent, live), machine, journal):
                self.say(result_line(each))
                results.append(each)
        return results


def _state(parsed_args: Namespace) -> EffectState:
    """What was begun, or what begins now. Raises: InvalidRequest, Conflict, HostError."""
    if parsed_args.discard:
        (parsed_args.results / effect.STATE).unlink(missing_ok=True)
    asked, intent = given(parsed_args, Options), intent_of(parsed_args)
    if (state := effect.kept(parsed_args.results)) is not None:
        state.check(asked, intent)
        return state
    options = valid(Options, asked)
    if not parsed_args.yes:
        raise InvalidRequest(
            "yes: this applies a plan to this machine between two measurements",
            step=STEP,
            fix="see the plan with netplugin host apply, then add --yes",
        )
    return EffectState(options=options, intent=required(intent))


def _next(left: Sequence[Result], intent: HostIntent, results: Path) -> str:
    """What the operator does next (pure)."""
    again = "netplugin host verify effect"
    if results != result.FOLDER:
        again += f" --results {shlex.quote(str(results.absolute()))}"
    lines = [
        "Not in effect yet:",
        *(f"  {result_line(each)}" for each in left),
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
    words: list[str] = []
    for name, value in intent.model_dump(exclude_defaults=True).items():
        for each in value if isinstance(value, tuple | list) else [value]:
            words += [option_of(name)] if each is True else [option_of(name), str(each)]
    return shlex.join(words)


def report(found: MeasurementComparison, intent: HostIntent) -> str:
    """The page with both runs (pure)."""
    lines = [f"Effect of: netplugin host apply {options_text(intent)}", ""]
    for name, run in (("before", found.before), ("after", found.after)):
        if run.guest:
            lines.append(f"{name}: {vm_text(run.guest.vm)}")
    return "\n".join(lines) + "\n" + comparison_text(found)

"""The command ``netplugin host apply``: apply the part of a plan that takes effect at runtime, or undo it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from netplugin.api.client import Client
from netplugin.api.connection import nobody_listens
from netplugin.api.errors import BackendUnavailable, InvalidRequest
from netplugin.cli.host_tuning import add_intent, add_root, intent_of, ovs_sockets, read_machine, required
from netplugin.cli.show import READ_S, Command, add_form, flag
from netplugin.tuning.applying.accessor import WritableRoot
from netplugin.tuning.applying.apply import (
    BAD,
    Result,
    StepOutcome,
    TunedMachine,
    apply,
    preview,
    preview_undo,
    shown,
    undo,
)
from netplugin.tuning.applying.journal import DEFAULT, ApplyJournal, look
from netplugin.tuning.applying.ovs_config import RunningOvs
from netplugin.tuning.output.text import as_json
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.root import Root
from netplugin.tuning.steps import needed

_BOOT = "/proc/sys/kernel/random/boot_id"
_WORDS = {
    StepOutcome.WOULD_SET: "would be set",
    StepOutcome.NEEDS_OVS_RESTART: "left to do, with a restart of OVS",
    StepOutcome.NEEDS_REBOOT: "left to do, with a reboot",
    StepOutcome.WOULD_RESTORE: "would be put back",
    StepOutcome.RESTORED: "as before",
    StepOutcome.CHANGED_SINCE: "left as it is",
}


class HostApply(Command):
    """Apply the runtime settings of a plan, or undo them (--undo).

    Without --yes nothing is changed. Exit status 1 if a setting was refused or left unchanged.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        flag(parser, "--yes", "apply the changes; without it they are only printed")
        flag(parser, "--undo", "restore all values from before the first apply; needs no plan")
        flag(parser, "--force", "with --undo: also restore values that were changed since by something else")
        add_journal(parser, "file that keeps the previous values")
        add_form(parser, "json", words="text: a line per step as it is applied; json: all at the end")
        add_root(parser)
        add_intent(parser)

    def take_action(self, parsed_args: Namespace) -> None:
        with ExitStack() as opened:
            results = self._results(parsed_args, opened)
            self._print(results, parsed_args.format, parsed_args.yes)

    def _results(self, parsed_args: Namespace, opened: ExitStack) -> Iterator[Result]:
        if parsed_args.yes and parsed_args.root != Path("/"):
            raise _refused("root", "only this machine can be changed", "leave --yes or --root away")
        if parsed_args.force and not parsed_args.undo:
            raise _refused("force", "there is nothing to force", "give it with --undo")
        if not parsed_args.undo and not parsed_args.yes:
            return preview(_plan(parsed_args))
        machine = opened.enter_context(machine_to_tune(parsed_args, self.say))
        boot = boot_of(parsed_args.root)
        if not parsed_args.yes:
            return preview_undo(look(parsed_args.journal, boot), machine, parsed_args.force)
        journal = opened.enter_context(ApplyJournal(parsed_args.journal, boot))
        if parsed_args.undo:
            return undo(machine, journal, parsed_args.force)
        return apply(_plan(parsed_args), machine, journal)

    def _print(self, results: Iterable[Result], form: str, yes: bool) -> None:
        rows = []
        try:
            for result in results:
                if result.outcome in BAD:
                    self.status = 1
                rows.append(as_json(result))
                if form == "text":
                    self.app.stdout.write(f"{result_line(result)}\n")
                    self.app.stdout.flush()
            if form == "text" and not rows:
                self.app.stdout.write("Nothing to do.\n")
            elif form == "text" and not yes:
                self.app.stdout.write("Nothing was changed; --yes applies it.\n")
        finally:  # report what was done, however the loop ends
            if form == "json":
                self.app.stdout.write(json.dumps(rows, indent=2) + "\n")


def add_journal(parser: ArgumentParser, words: str) -> None:
    parser.add_argument(
        "--journal", type=Path, default=DEFAULT, metavar="FILE", help=f"{words} (default: {DEFAULT})"
    )


@contextmanager
def machine_to_tune(parsed_args: Namespace, note: Callable[[str], None]) -> Iterator[TunedMachine]:
    """The machine at ``--root``; for ``note`` see ``ports_with_vfs``."""
    with closing(RunningOvs(ovs_sockets(parsed_args))) as ovs:
        yield TunedMachine(WritableRoot(parsed_args.root), ovs, lambda: ports_with_vfs(note))


def ports_with_vfs(note: Callable[[str], None]) -> Mapping[str, str]:
    """The ports that VFs are assigned to, from the agent.

    If no agent is running, there are none, and ``note`` is called.
    """
    try:
        with Client.from_environment(timeout_s=READ_S) as client:
            return {vf.pci_address: vf.port_id for vf in client.list_vfs() if vf.port_id}
    except BackendUnavailable as absent:
        if not nobody_listens(absent):
            raise  # it is running, but the VFs of its ports are unknown
        note(f"netplugin: not asked which ports have VFs: {absent.detail}")
        return {}


def boot_of(root: Path) -> str:
    """The boot id of the machine at ``root``. Raises: HostError."""
    return needed(Root(root).text(_BOOT))


def _plan(parsed_args: Namespace) -> TuningPlan:
    intent = required(intent_of(parsed_args))
    facts, live = read_machine(parsed_args)
    return make_plan(facts, intent, live)


def result_line(result: Result) -> str:
    """One step of an apply or undo as text."""
    words = _WORDS.get(result.outcome, str(result.outcome))
    reason = f": {result.reason}" if result.reason else ""
    fix = f". Fix: {result.fix}" if result.fix else ""
    values = f"{shown(result.old)} -> {shown(result.new)}"
    return f"[{result.group}] {result.target}: {values}: {words}{reason}{fix}"


def _refused(field: str, message: str, fix: str) -> InvalidRequest:
    return InvalidRequest.of_field(field, message, step="apply", fix=fix)

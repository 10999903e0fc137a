"""The commands ``netplugin host facts``, ``host check`` and ``host plan``: they ask no agent."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cliff.command import Command
from cliff.lister import Lister
from cliff.show import ShowOne
from pydantic import ValidationError

from netplugin.cli import show
from netplugin.client import invalid_request
from netplugin.tuning.as_json import as_json
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import Intent
from netplugin.tuning.live import Live
from netplugin.tuning.live_ovs import RUNDIR, read_ovs
from netplugin.tuning.output.plan_json import plan_json
from netplugin.tuning.output.playbook import playbook
from netplugin.tuning.output.text import plan_text
from netplugin.tuning.planning.plan import Plan, make_plan
from netplugin.tuning.planning.refused import needed
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root


class HostFacts(ShowOne):
    """Show what this machine is, as far as packets care: cores, memory, kernel, NICs, OVS."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        _add_root(parser)
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        facts, live = _read(parsed_args)
        values: dict[str, Any] = {**as_json(facts), "live": as_json(live)}
        return tuple(values), tuple(show.Structure(value) for value in values.values())


class HostCheck(Lister):
    """List what is wrong with this machine, against a plan if --pmd-cores is given; exit status 1
    if something fails."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._status = 0

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        _add_root(parser)
        _add_intent(parser, required=False)
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        facts, live = _read(parsed_args)
        plan = None
        if parsed_args.pmd_cores is not None:
            plan = make_plan(facts, _intent(parsed_args), live)
        findings = check(Scene(facts, live, plan))
        self._status = 1 if any(finding.status == "fail" for finding in findings) else 0
        return ("id", "status", "found", "expected", "fix"), [
            (f.id, f.status, f.found, f.expected, show.Optional(f.fix)) for f in findings
        ]

    def run(self, parsed_args: Namespace) -> int:
        return super().run(parsed_args) or self._status


class HostPlan(Command):
    """Print what this machine should be set to, as text, JSON or an Ansible playbook."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "-f", "--format", choices=("text", "json", "ansible"), default="text",
            help="for people (the default), for programs, or as a playbook",
        )  # fmt: skip
        _add_root(parser)
        _add_intent(parser, required=True)
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        facts, live = _read(parsed_args)
        plan = make_plan(facts, _intent(parsed_args), live)
        self.app.stdout.write(_printed(plan, facts, parsed_args.format))


def _printed(plan: Plan, facts: Facts, form: str) -> str:
    if form == "json":
        return plan_json(plan)
    if form == "ansible":
        return playbook(plan, needed(facts.cpus.online))
    return plan_text(plan)


def _add_root(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--root", type=Path, default=Path("/"), metavar="DIR",
        help="read another machine's copy of /proc, /sys and /etc under this directory",
    )  # fmt: skip
    parser.add_argument(
        "--ovs-rundir", type=Path, default=RUNDIR, metavar="DIR", help="where OVS has its sockets"
    )


def _read(parsed_args: Namespace) -> tuple[Facts, Live]:
    """Another machine's OVS cannot be asked."""
    here = parsed_args.root == Path("/")
    live = Live(ovs=read_ovs(parsed_args.ovs_rundir)) if here else Live()
    return read_facts(Root(parsed_args.root)), live


def _add_intent(parser: ArgumentParser, required: bool) -> None:
    """An option for each field of the intent; what is not given is the field's default."""
    for name, field in Intent.model_fields.items():
        option = "--" + _OPTIONS.get(name, name).replace("_", "-")
        words: dict[str, Any] = {"dest": name, "help": field.description}
        if field.annotation is bool:
            words["action"] = "store_true"
        elif name in _SEVERAL:
            words |= {"action": "append", "metavar": "X"}
        else:
            words |= {"metavar": "N"}
        if name == "pmd_cores" and required:
            words["required"] = True
        parser.add_argument(option, default=None, **words)


#: Fields whose options are said several times, once for each entry.
_SEVERAL = ("nics", "mtus", "vfs")
_OPTIONS = {"nics": "nic", "mtus": "mtu"}


def _intent(parsed_args: Namespace) -> Intent:
    given = {name: getattr(parsed_args, name) for name in Intent.model_fields}
    try:
        return Intent.model_validate({n: value for n, value in given.items() if value is not None})
    except ValidationError as wrong:
        raise invalid_request(wrong) from None

"""The commands ``netplugin host facts``, ``host check`` and ``host plan``; they do not contact the agent."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oslo_config import cfg

from netplugin import options
from netplugin.api.errors import InvalidRequest
from netplugin.api.field_errors import valid
from netplugin.api.models import Finding
from netplugin.cli import show
from netplugin.cli.show import FindingLister
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.intent import HostIntent, given
from netplugin.tuning.output.playbook import playbook
from netplugin.tuning.output.summary import summary
from netplugin.tuning.output.text import as_json, plan_json, plan_text
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.read_live import URI, read_live
from netplugin.tuning.root import Root
from netplugin.tuning.steps import needed


class HostFacts(show.ShowOne):
    """Show the facts of this machine that affect packet forwarding.

    A summary, and all values of CPUs, memory, kernel, NICs, OVS and VMs.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        add_root(parser)

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        facts, live = read_machine(parsed_args)
        values: dict[str, Any] = {"summary": summary(facts, live), **as_json(facts), "live": as_json(live)}
        cells = {name: show.Structure(value) for name, value in values.items()}
        return tuple(cells), (show.Lines(values["summary"]), *list(cells.values())[1:])


class HostCheck(FindingLister):
    """Check this machine and list the findings.

    Exit status 1 if a check fails. With pmd_cores (--pmd-cores or --config-file) it is also compared with
    the plan.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        add_root(parser)
        add_intent(parser)

    def find(self, parsed_args: Namespace) -> Iterable[Finding]:
        facts, live = read_machine(parsed_args)
        intent = intent_of(parsed_args)
        if intent is None:
            self.note(f"no plan was given, so the machine is not compared with one; {_GIVE_A_PLAN}")
        plan = make_plan(facts, intent, live) if intent else None
        return check(Scene(facts, live, plan))


class HostPlan(show.Command):
    """Print the recommended settings for this machine.

    As text, JSON or an Ansible playbook.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        show.add_form(parser, "json", "ansible")
        show.flag(parser, "--explain", "print the source of each line, as in the JSON")
        add_root(parser)
        add_intent(parser)

    def take_action(self, parsed_args: Namespace) -> None:
        facts, live = read_machine(parsed_args)
        plan = make_plan(facts, required(intent_of(parsed_args)), live)
        self.app.stdout.write(_printed(plan, facts, parsed_args.format, parsed_args.explain))


_GIVE_A_PLAN = (
    "give --pmd-cores N (0 for a host without OVS-DPDK), or [host] pmd_cores in a file that "
    "--config-file names"
)


def required(intent: HostIntent | None) -> HostIntent:
    """Raises: InvalidRequest if there is no intent."""
    if intent is None:
        raise InvalidRequest("pmd_cores: there is no plan without it", step="plan", fix=_GIVE_A_PLAN)
    return intent


def _printed(plan: TuningPlan, facts: Facts, form: str, explain: bool) -> str:
    if form == "json":
        return plan_json(plan)
    if form == "ansible":
        return playbook(plan, needed(facts.cpus.online))
    return plan_text(plan, explain)


def add_root(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="read a copy of another machine's /proc, /sys and /etc below this directory",
    )
    parser.add_argument(
        "--ovs-rundir",
        type=Path,
        metavar="DIR",
        help="directory of all sockets of OVS; default: as [ovs] connection and rundir say",
    )
    parser.add_argument(
        "--libvirt-uri",
        metavar="URI",
        help=f"libvirt URI of this machine; default: [host] libvirt_uri, or {URI}",
    )
    parser.add_argument(
        "--config-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a configuration file of the agent, may be given several times; its group [host] supplies "
        "options that are not given",
    )


def read_machine(parsed_args: Namespace) -> tuple[Facts, Live]:
    """The facts of the machine at ``--root``; OVS and libvirt are queried only on this machine."""
    with show.progress("reading this machine"):
        facts = read_facts(Root(parsed_args.root))
        if parsed_args.root != Path("/"):
            return facts, Live()
        return facts, read_live(ovs_sockets(parsed_args), libvirt_uri(parsed_args))


def libvirt_uri(parsed_args: Namespace) -> str:
    """The URI of libvirt on this machine. Raises: InvalidRequest."""
    return str(parsed_args.libvirt_uri or _configured(parsed_args).uri)


def ovs_sockets(parsed_args: Namespace) -> OvsSockets:
    """Where OVS listens. Raises: InvalidRequest."""
    given: Path | None = parsed_args.ovs_rundir
    return OvsSockets.below(given) if given else _configured(parsed_args).sockets


@dataclass(frozen=True)
class _Configured:
    """The host settings from the configuration files; ``intent`` has only the fields that are set."""

    sockets: OvsSockets
    uri: str
    intent: dict[str, Any]


def _configured(parsed_args: Namespace) -> _Configured:
    """Raises: InvalidRequest naming the wrong file or option."""
    try:
        conf = options.load(parsed_args.config_file)
        return _Configured(OvsSockets.read(conf), conf.host.libvirt_uri, given(conf))
    except (cfg.Error, ValueError) as wrong:
        raise InvalidRequest(
            options.error_text(wrong), step="configuration", fix="correct what --config-file names"
        ) from None


def add_intent(parser: ArgumentParser) -> None:
    """Add an option for each field of the intent; the configuration supplies those that are not given."""
    several = {name: {"action": "append", "metavar": "X"} for name in _SEVERAL}
    show.add_fields(parser, HostIntent, several, option_of, BooleanOptionalAction)


#: Fields whose options may be given several times, once per entry.
_SEVERAL = ("nics", "mtus", "vfs")


def option_of(field: str) -> str:
    """The option of a field of the intent."""
    return show.option_of({"nics": "nic", "mtus": "mtu"}.get(field, field))


def intent_of(parsed_args: Namespace) -> HostIntent | None:
    """The intent from options and configuration; None without pmd_cores.

    Raises: InvalidRequest naming the field.
    """
    asked = _configured(parsed_args).intent | show.given(parsed_args, HostIntent)
    return valid(HostIntent, asked) if "pmd_cores" in asked else None

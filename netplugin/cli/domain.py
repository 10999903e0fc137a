"""The commands ``netplugin domain render|check`` and ``netplugin guest plan``."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from cliff.command import Command
from cliff.show import ShowOne

from netplugin.api.client import Client
from netplugin.api.domain_models import DomainPolicy
from netplugin.api.field_errors import valid
from netplugin.api.models import Finding
from netplugin.cli import show
from netplugin.cli.show import FindingLister
from netplugin.tuning.guest.plan import GuestPlan, guest_text, plan_guest
from netplugin.tuning.guest.playbook import guest_playbook
from netplugin.tuning.guest.settings import GuestOptions
from netplugin.tuning.output.text import as_json

# -- The commands ``netplugin domain render|check``. ----------------------------------------------


class DomainRender(ShowOne):
    """Complete a libvirt domain with the VM's interfaces.

    The elements that the interfaces require, such as shared memory, are added too.
    """

    @property
    def formatter_default(self) -> str:
        return "value"  # the XML only, for a pipe into virsh define

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("vm_id", metavar="VM_ID", help="ID of the VM")
        _add_xml(parser)
        parser.add_argument("--numa-node", type=int, metavar="N", help="place the VM on this NUMA node")
        parser.add_argument(
            "--pin",
            action="store_true",
            help="pin each vCPU to a CPU of its own, according to the host's CPU plan",
        )
        parser.add_argument("--realtime", action="store_true", help="pin, and apply real-time settings")
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        xml = show.read_text(parsed_args.xml)
        policy = valid(DomainPolicy, {name: getattr(parsed_args, name) for name in DomainPolicy.model_fields})
        with Client.from_environment() as client:
            return ("xml",), (client.render_domain(parsed_args.vm_id, xml, policy).xml,)


class DomainCheck(FindingLister):
    """Check a libvirt domain of a VM and list the findings.

    Exit status 1 if a check fails.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("vm_id", metavar="VM_ID", help="ID of the VM")
        _add_xml(parser)
        return parser

    def find(self, parsed_args: Namespace) -> Iterable[Finding]:
        xml = show.read_text(parsed_args.xml)
        with Client.from_environment() as client:
            return client.check_domain(parsed_args.vm_id, xml)


def _add_xml(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--xml", required=True, metavar="FILE", help="the libvirt domain; - reads standard input"
    )


# -- The command ``netplugin guest plan``; it contacts neither the agent nor the guest. -----------


class GuestPlanPrint(Command):
    """Print recommended DPDK settings for the guest of a domain.

    As text, JSON or an Ansible playbook.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        _add_xml(parser)
        show.add_form(parser, "json", "ansible")
        for name, field in GuestOptions.model_fields.items():
            words: dict[str, Any] = {"dest": name, "default": None, "help": field.description}
            if "bool" in str(field.annotation):
                words["action"] = "store_true"
            elif name == "dpdk":
                words |= {"action": "append", "metavar": "MAC"}
                words["help"] = f"{field.description}; may be given several times"
            else:
                words["metavar"] = "DRIVER" if name == "driver" else "N"
            parser.add_argument("--" + name.replace("_", "-"), **words)
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        given = {name: getattr(parsed_args, name) for name in GuestOptions.model_fields}
        options = valid(GuestOptions, {n: value for n, value in given.items() if value is not None})
        plan = plan_guest(show.read_text(parsed_args.xml), options)
        self.app.stdout.write(_FORMS[parsed_args.format](plan))


def _json(plan: GuestPlan) -> str:
    return json.dumps(as_json(plan), indent=2) + "\n"


_FORMS = {"text": guest_text, "json": _json, "ansible": guest_playbook}

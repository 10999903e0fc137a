"""The command ``netplugin guest plan``; it contacts neither the agent nor the guest."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from cliff.command import Command
from pydantic import ValidationError

from netplugin.cli import show
from netplugin.client import invalid_request
from netplugin.tuning.as_json import as_json
from netplugin.tuning.guest.options import GuestOptions
from netplugin.tuning.guest.plan import GuestPlan, plan_guest
from netplugin.tuning.guest.playbook import guest_playbook
from netplugin.tuning.guest.text import guest_text


class GuestPlanPrint(Command):
    """Print the recommended DPDK settings for the guest of a domain, as text, JSON or an Ansible playbook."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--xml",
            required=True,
            metavar="FILE",
            help="the libvirt domain; - reads standard input",
        )
        parser.add_argument(
            "-f", "--format", choices=("text", "json", "ansible"), default="text",
            help="text (default), JSON, or an Ansible playbook",
        )  # fmt: skip
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
        try:
            options = GuestOptions(**{n: value for n, value in given.items() if value is not None})
        except ValidationError as wrong:
            raise invalid_request(wrong) from None
        plan = plan_guest(show.read_text(parsed_args.xml), options)
        self.app.stdout.write(_FORMS[parsed_args.format](plan))


def _json(plan: GuestPlan) -> str:
    return json.dumps(as_json(plan), indent=2) + "\n"


_FORMS = {"text": guest_text, "json": _json, "ansible": guest_playbook}

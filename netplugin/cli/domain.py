"""The commands ``netplugin domain render|check`` and ``netplugin guest plan``."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.field_errors import valid
from netplugin.api.models import Finding
from netplugin.cli import show
from netplugin.cli.show import FindingLister
from netplugin.tuning.guest.plan import guest_text, plan_guest
from netplugin.tuning.guest.playbook import guest_playbook
from netplugin.tuning.guest.settings import GuestOptions
from netplugin.tuning.output.text import as_json

# -- The commands ``netplugin domain render|check``. ----------------------------------------------


class DomainRender(show.Asks, show.ShowOne):
    """Complete a libvirt domain with the VM's interfaces.

    The elements that the interfaces require, such as shared memory, are added too.
    """

    @property
    def formatter_default(self) -> str:
        return "value"  # the XML only, for a pipe into virsh define

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("vm_id", metavar="VM_ID", help="ID of the VM")
        _add_xml(parser)
        parser.add_argument("--numa-node", type=int, metavar="N", help="place the VM on this NUMA node")
        show.flag(parser, "--pin", "pin each vCPU to a CPU of its own, according to the host's CPU plan")
        show.flag(parser, "--realtime", "pin, and apply real-time settings")

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        xml = show.read_text(parsed_args.xml)
        policy = valid(DomainPolicy, show.given(parsed_args, DomainPolicy))
        return ("xml",), (self.agent.render_domain(parsed_args.vm_id, xml, policy).xml,)


class DomainCheck(show.Asks, FindingLister):
    """Check a libvirt domain of a VM and list the findings.

    Exit status 1 if a check fails.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("vm_id", metavar="VM_ID", help="ID of the VM")
        _add_xml(parser)

    def find(self, parsed_args: Namespace) -> Iterable[Finding]:
        xml = show.read_text(parsed_args.xml)
        return self.agent.check_domain(parsed_args.vm_id, xml)


def _add_xml(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--xml", required=True, metavar="FILE", help="the libvirt domain; - reads standard input"
    )


# -- The command ``netplugin guest plan``; it contacts neither the agent nor the guest. -----------


class GuestPlan(show.Command):
    """Print recommended DPDK settings for the guest of a domain.

    As text, JSON or an Ansible playbook.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        _add_xml(parser)
        show.add_form(parser, "json", "ansible")
        macs = f"{GuestOptions.model_fields['dpdk'].description}; may be given several times"
        special = {
            "dpdk": {"action": "append", "metavar": "MAC", "help": macs},
            "driver": {"metavar": "DRIVER"},
        }
        show.add_fields(parser, GuestOptions, special)

    def take_action(self, parsed_args: Namespace) -> None:
        options = valid(GuestOptions, show.given(parsed_args, GuestOptions))
        plan = plan_guest(show.read_text(parsed_args.xml), options)
        self.app.stdout.write(_FORMS[parsed_args.format](plan))


_FORMS = {
    "text": guest_text,
    "json": lambda plan: json.dumps(as_json(plan), indent=2) + "\n",
    "ansible": guest_playbook,
}

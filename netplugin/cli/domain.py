"""The commands ``netplugin domain render|check``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

from cliff.show import ShowOne
from pydantic import ValidationError

from netplugin.cli import show
from netplugin.cli.findings import FindingLister
from netplugin.client import Client, invalid_request
from netplugin.models import DomainPolicy, Finding


class DomainRender(ShowOne):
    """Complete a libvirt domain with the VM's interfaces and the elements they require, and print it."""

    @property
    def formatter_default(self) -> str:
        return "value"  # the XML only, for a pipe into virsh define

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("vm_id", metavar="VM_ID")
        _add_xml(parser)
        parser.add_argument(
            "--numa-node", type=int, metavar="N", help="place the VM on this NUMA node"
        )
        parser.add_argument(
            "--pin",
            action="store_true",
            help="pin each vCPU to a CPU of its own, according to the host's CPU plan",
        )
        parser.add_argument(
            "--realtime", action="store_true", help="pin, and apply real-time settings"
        )
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        xml = show.read_text(parsed_args.xml)
        try:
            policy = DomainPolicy(
                pin=parsed_args.pin,
                realtime=parsed_args.realtime,
                numa_node=parsed_args.numa_node,
            )
        except ValidationError as wrong:
            raise invalid_request(wrong) from None
        with Client.from_environment() as client:
            return ("xml",), (client.render_domain(parsed_args.vm_id, xml, policy).xml,)


class DomainCheck(FindingLister):
    """Check a libvirt domain of a VM and list the findings; exit status 1 if a check fails."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("vm_id", metavar="VM_ID")
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

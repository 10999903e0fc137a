"""The commands ``netplugin vf list|release``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

from cliff.command import Command
from cliff.lister import Lister

from netplugin.cli import show
from netplugin.client import Client
from netplugin.models import VfInfo


class VfList(Lister):
    """List the virtual functions with their states and ports."""

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            vfs = client.list_vfs()
        rows = (vf.model_dump(mode="json").values() for vf in vfs)
        return tuple(VfInfo.model_fields), [tuple(map(show.Optional, row)) for row in rows]


class VfRelease(Command):
    """End the quarantine of a virtual function, so that it can be assigned to a port again.

    A port that is being removed and waits for the NIC of this function is deleted from the store.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("pci_address", metavar="PCI-ADDRESS", help="such as 0000:03:10.1")
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        with Client.from_environment() as client:
            client.release_vf(parsed_args.pci_address)

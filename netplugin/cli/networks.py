"""The commands ``netplugin network list|put|delete``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

from cliff.command import Command
from cliff.lister import Lister
from cliff.show import ShowOne
from pydantic import ValidationError

from netplugin.cli import show
from netplugin.client import Client, invalid_request
from netplugin.models import NetworkInfo, NetworkSpec

_COLUMNS = ("network_id", "vni", "udp_port", "mtu", "peers", "local_vlan", "ports")


class NetworkList(Lister):
    """List the VXLAN networks of this host."""

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            networks = client.list_networks()
        return _COLUMNS, [_row(network) for network in networks]


class NetworkPut(ShowOne):
    """Create or update a VXLAN network; changing its peers does not affect its ports."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("network_id", metavar="ID")
        parser.add_argument(
            "--vni",
            type=int,
            required=True,
            metavar="N",
            help="VXLAN network identifier, 1 to 16777215",
        )
        parser.add_argument(
            "--peer",
            action="append",
            default=[],
            metavar="IP",
            help="tunnel address of another host with ports on the network; may be given several times",
        )
        parser.add_argument(
            "--udp-port", type=int, metavar="N", help="UDP port of the tunnel; default: 4789"
        )
        parser.add_argument(
            "--mtu", type=int, metavar="BYTES", help="MTU of the VMs; default: 1450"
        )
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        given = {"udp_port": parsed_args.udp_port, "mtu": parsed_args.mtu}
        try:
            spec = NetworkSpec(
                type="vxlan",
                vni=parsed_args.vni,
                peers=tuple(parsed_args.peer),
                **{name: value for name, value in given.items() if value is not None},
            )
        except ValidationError as wrong:
            raise invalid_request(wrong) from None
        with Client.from_environment() as client:
            return _COLUMNS, _row(client.put_network(parsed_args.network_id, spec))


class NetworkDelete(Command):
    """Delete a network without ports; no error if it does not exist."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("network_id", metavar="ID")
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        with Client.from_environment() as client:
            client.delete_network(parsed_args.network_id)


def _row(network: NetworkInfo) -> show.Row:
    spec = network.spec.model_dump(mode="json")
    return (
        network.network_id, spec["vni"], spec["udp_port"], spec["mtu"],
        show.Structure(spec["peers"]), network.local_vlan, network.ports,
    )  # fmt: skip

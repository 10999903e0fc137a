"""The commands ``netplugin service-port put|delete``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from netplugin.api.field_errors import valid
from netplugin.api.service_models import ServicePortSpec
from netplugin.cli import show
from netplugin.cli.ports import add_network_options, network_from


class ServicePortPut(show.Changes, show.ShowOne):
    """Put a device of the host on a network.

    Or change its rules. Repeating the same request changes nothing.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("port_id", metavar="ID", help="ID of the service port")
        parser.add_argument("--device", metavar="NAME", required=True, help="a veth, tap or dummy device")
        show.flag(parser, "--internal", "make an internal port of OVS with the name of --device")
        parser.add_argument("--mac", metavar="MAC", required=True, help="the MAC that the service sends from")
        parser.add_argument(
            "--backend", metavar="NAME", required=True, help="a backend of `netplugin backend list`"
        )
        add_network_options(parser)
        show.flag(parser, "--trusted", "allow it to send from any address")
        parser.add_argument(
            "--role",
            action="append",
            choices=["dhcp_server", "router"],
            help="lets it send what VMs may not; may be given several times",
        )
        show.several(parser, "--allowed-address", "IP", "address or prefix that it may send from")
        show.add_override(parser)

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        return show.fields(self.agent.put_service_port(parsed_args.port_id, spec_from(parsed_args)))


class ServicePortDelete(show.Changes, show.Command):
    """Take devices of the host off their networks.

    Internal ports of OVS are deleted. No error for ports that do not exist.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("port_ids", metavar="ID", nargs="+", help="IDs of the service ports")
        show.add_override(parser)

    def take_action(self, parsed_args: Namespace) -> None:
        for port_id in dict.fromkeys(parsed_args.port_ids):
            self.agent.delete_service_port(port_id)


def spec_from(options: Namespace) -> ServicePortSpec:
    """The spec from the options of ``service-port put``. Raises: InvalidRequest naming the fields."""
    security: dict[str, Any] = {}
    if options.role:
        security["roles"] = options.role
    if options.allowed_address:
        security["allowed_addresses"] = [{"ip": ip} for ip in options.allowed_address]
    spec = show.given(options, ServicePortSpec) | {"network": network_from(options, {})}
    if security:
        spec["port_security"] = security
    return valid(ServicePortSpec, spec)

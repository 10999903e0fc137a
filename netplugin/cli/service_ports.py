"""The commands ``netplugin service-port list|put|delete``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from netplugin.api.client import Client
from netplugin.api.field_errors import valid
from netplugin.api.service_models import ServicePort, ServicePortSpec
from netplugin.cli import show
from netplugin.cli.ports import add_network_options, network_from

_COLUMNS = ("port_id", "device", "backend", "mac", "network", "state", "error")


class ServicePortList(show.TableLister):
    """List the service ports of this host."""

    empty = "no service port: `netplugin service-port put` puts a device of the host on a network"

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            ports = client.list_service_ports()
        return _COLUMNS, [_row(port) for port in ports]


class ServicePortPut(show.ShowOne):
    """Put a device of the host on a network.

    Or change its rules. Repeating the same request changes nothing.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("port_id", metavar="ID", help="ID of the service port")
        parser.add_argument("--device", metavar="NAME", required=True, help="a veth, tap or dummy device")
        parser.add_argument(
            "--internal", action="store_true", help="make an internal port of OVS with the name of --device"
        )
        parser.add_argument("--mac", metavar="MAC", required=True, help="the MAC that the service sends from")
        parser.add_argument(
            "--backend", metavar="NAME", required=True, help="a backend of `netplugin backend list`"
        )
        add_network_options(parser)
        parser.add_argument("--trusted", action="store_true", help="allow it to send from any address")
        parser.add_argument(
            "--role",
            action="append",
            choices=["dhcp_server", "router"],
            help="lets it send what VMs may not; may be given several times",
        )
        parser.add_argument(
            "--allowed-address",
            action="append",
            metavar="IP",
            help="address or prefix that it may send from; may be given several times",
        )
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        spec = spec_from(parsed_args)
        with Client.from_environment() as client:
            return show.fields(client.put_service_port(parsed_args.port_id, spec))


class ServicePortDelete(show.Command):
    """Take devices of the host off their networks.

    Internal ports of OVS are deleted. No error for ports that do not exist.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("port_ids", metavar="ID", nargs="+", help="IDs of the service ports")
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        with Client.from_environment() as client:
            for port_id in dict.fromkeys(parsed_args.port_ids):
                client.delete_service_port(port_id)


def spec_from(options: Namespace) -> ServicePortSpec:
    """The spec from the options of ``service-port put``. Raises: InvalidRequest naming the fields."""
    security: dict[str, Any] = {}
    if options.role:
        security["roles"] = options.role
    if options.allowed_address:
        security["allowed_addresses"] = [{"ip": ip} for ip in options.allowed_address]
    spec: dict[str, Any] = {name: getattr(options, name) for name in ("device", "mac", "backend")}
    spec["network"] = network_from(options, {})
    spec |= {name: True for name in ("internal", "trusted") if getattr(options, name)}
    if security:
        spec["port_security"] = security
    return valid(ServicePortSpec, spec)


def _row(port: ServicePort) -> show.Row:
    values = port.model_dump(mode="json")
    spec = values["spec"]
    return (
        port.port_id,
        port.spec.device,
        port.spec.backend,
        port.spec.mac,
        show.NetworkColumn(spec["network"]),
        port.state.value,
        show.Error(values["error"]),
    )

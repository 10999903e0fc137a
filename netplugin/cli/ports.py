"""The commands ``netplugin port``, ``netplugin network`` and ``netplugin vf``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from netplugin.api.batch_models import Batch, Retag
from netplugin.api.client import Client
from netplugin.api.errors import Conflict, InvalidRequest, from_problem
from netplugin.api.field_errors import valid
from netplugin.api.models import (
    NetworkInfo,
    NetworkSpec,
    Port,
    PortSpec,
    PortState,
    VfInfo,
)
from netplugin.cli import show
from netplugin.programs import bounded

# -- The commands ``netplugin port list|show|put|delete``. ----------------------------------------


_COLUMNS = ("port_id", "vm_id", "backend", "mac", "network", "state", "error")


class PortList(show.TableLister):
    """List the ports of this host."""

    empty = (
        "no port found: `netplugin port put` creates one; without --vm-id, --state, --backend and "
        "--network all ports of this host are listed"
    )

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("--vm-id", metavar="ID", help="only the ports of this VM")
        parser.add_argument("--state", choices=[s.value for s in PortState], help="only ports in this state")
        parser.add_argument("--backend", metavar="NAME", help="only the ports of this backend")
        parser.add_argument(
            "--network", metavar="NAME", help="only the ports of this physical network or VXLAN network"
        )
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            ports = client.list_ports(
                vm_id=parsed_args.vm_id,
                state=parsed_args.state,
                backend=parsed_args.backend,
                network=parsed_args.network,
            )
        return _COLUMNS, [_row(port) for port in ports]


class PortShow(show.ShowOne):
    """Show a port: its spec, its binding and its observed state.

    Its `etag` is for `port put --if-match`.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("port_id", metavar="ID", help="ID of the port")
        parser.add_argument(
            "--xml", action="store_true", help="only the interface for the VM's libvirt domain, as XML"
        )
        return parser

    def run(self, parsed_args: Namespace) -> int:
        if parsed_args.xml and parsed_args.formatter == self.formatter_default:
            parsed_args.formatter = "value"
        return super().run(parsed_args)

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        with Client.from_environment() as client:
            port = client.read_port(parsed_args.port_id)
        if parsed_args.xml:
            if port.value.binding is None:
                state = f"the port is {port.value.state.value} and has no interface"
                raise Conflict(state, step="show", fix=f"see its error: GET /v1/ports/{port.value.port_id}")
            return ("interface_xml",), (port.value.binding.interface_xml,)
        columns, row = show.fields(port.value)
        return (*columns, "etag"), (*row, port.tag)


class PortPut(show.ShowOne):
    """Create or change a port.

    Repeating the same request changes nothing. The spec comes from --spec, from the other options, or both;
    options override the file.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("port_id", metavar="ID", help="ID of the port")
        parser.add_argument("--spec", metavar="FILE", help="the spec as JSON; - reads standard input")
        parser.add_argument("--vm-id", metavar="ID", help="ID of the VM")
        parser.add_argument("--mac", metavar="MAC", help="MAC address of the VM's NIC")
        parser.add_argument("--backend", metavar="NAME", help="a backend of `netplugin backend list`")
        add_network_options(parser)
        parser.add_argument("--queues", type=show.whole, metavar="N", help="queue pairs; default: 1")
        parser.add_argument(
            "--ingress-kbps",
            type=show.whole,
            metavar="N",
            help="maximum rate that the VM receives, in kbit/s",
        )
        parser.add_argument(
            "--egress-kbps", type=show.whole, metavar="N", help="maximum rate that the VM sends, in kbit/s"
        )
        parser.add_argument(
            "--no-port-security", action="store_true", help="allow the VM to send from any address"
        )
        parser.add_argument(
            "--allowed-address",
            action="append",
            metavar="IP",
            help="address or prefix that the VM may send from; may be given several times",
        )
        parser.add_argument(
            "--port-name", metavar="NAME", help="name of the tap, or of the port in OVS; default: derived"
        )
        parser.add_argument(
            "--vhost-user-socket",
            metavar="PATH",
            help="path of the vhost-user socket, below a directory that the agent's options allow",
        )
        condition = parser.add_mutually_exclusive_group()
        condition.add_argument(
            "--if-match", metavar="ETAG", help="only if nobody has changed the port since it was shown"
        )
        condition.add_argument("--create-only", action="store_true", help="only if there is no such port")
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        spec = spec_from(parsed_args)
        with Client.from_environment() as client:
            port = client.put_port(
                parsed_args.port_id, spec, if_match=parsed_args.if_match, create_only=parsed_args.create_only
            )
            return show.fields(port)


class PortDelete(show.Command):
    """Delete ports; no error for ports that do not exist."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("port_ids", metavar="ID", nargs="+", help="IDs of the ports")
        return parser

    def take_action(self, parsed_args: Namespace) -> int:
        batch = valid(Batch, {"delete": tuple(dict.fromkeys(parsed_args.port_ids))})
        with Client.from_environment() as client:
            results = client.batch(batch).results
        failed = [result for result in results if result.error is not None]
        for result in failed:
            if result.error is not None:
                self.app.LOG.error("%s: %s", result.port_id, from_problem(result.error))
        return 1 if failed else 0


class PortRetag(show.TableLister):
    """Change the VLAN of ports while VMs use them.

    Of the ports given, or of all on a VLAN of a physical network. Exit status 1 if one could not be changed.
    """

    empty = "no port was changed: none is on this VLAN of the network (see `netplugin port list --network`)"

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("port_ids", metavar="ID", nargs="*", help="IDs of the ports")
        parser.add_argument("--network", metavar="NAME", help="physical network of the ports")
        parser.add_argument("--from-vlan", type=show.whole, metavar="N", help="VLAN that the ports are on")
        parser.add_argument("--to-vlan", type=show.whole, metavar="N", required=True, help="their new VLAN")
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        fields = {name: getattr(parsed_args, name) for name in ("network", "from_vlan", "to_vlan")}
        request = valid(Retag, {"ports": tuple(dict.fromkeys(parsed_args.port_ids)), **fields})
        with Client.from_environment() as client:
            results = client.retag(request).results
        self.status = 1 if any(result.error for result in results) else 0
        return ("port_id", "state", "error"), [
            (
                result.port_id,
                result.port and result.port.state.value,
                show.Error(result.error.model_dump(mode="json") if result.error else None),
            )
            for result in results
        ]


def add_network_options(parser: ArgumentParser) -> None:
    """Add the options that name the network of a port."""
    parser.add_argument(
        "--network-type",
        choices=["flat", "vlan", "vxlan"],
        help="default: vlan with --vlan-id, vxlan with --network-id, else flat",
    )
    parser.add_argument("--physical-network", metavar="NAME", help="of a flat or vlan network")
    parser.add_argument("--vlan-id", type=show.whole, metavar="N", help="VLAN, 1 to 4094")
    parser.add_argument("--network-id", metavar="ID", help="VXLAN network of the port")
    parser.add_argument("--mtu", type=show.whole, metavar="BYTES", help="MTU of the network")


def network_from(options: Namespace, network: dict[str, Any]) -> dict[str, Any]:
    """Set the options of ``add_network_options`` in the network of a spec, and return it."""
    for name in ("physical_network", "vlan_id", "network_id", "mtu"):
        _set(network, name, getattr(options, name))
    _set(network, "type", options.network_type or _network_type(network))
    return network


def spec_from(options: Namespace) -> PortSpec:
    """The spec from the options of ``port put``. Raises: InvalidRequest naming the fields."""
    spec = read_spec(options.spec) if options.spec else {}
    for name in ("vm_id", "mac", "backend", "queues", "port_name", "vhost_user_socket"):
        _set(spec, name, getattr(options, name))
    network_from(options, _part(spec, "network"))
    for name in ("ingress_kbps", "egress_kbps"):
        if getattr(options, name) is not None:
            _part(spec, "qos")[name] = getattr(options, name)
    if options.no_port_security:
        _part(spec, "port_security")["enabled"] = False
    if options.allowed_address:
        addresses = [{"ip": ip} for ip in options.allowed_address]
        _part(spec, "port_security")["allowed_addresses"] = addresses
    return valid(PortSpec, spec)


def read_spec(name: str) -> dict[str, Any]:
    """A spec from a file, or from standard input (-). Raises: InvalidRequest."""
    fix = "give the spec as one JSON object (see the API's PortSpec)"
    try:
        spec = bounded.parse(show.read_text(name))
    except bounded.Unreadable as wrong:
        raise InvalidRequest(f"{name}: {wrong}", step="read", fix=fix) from None
    if not isinstance(spec, dict):
        raise InvalidRequest(f"{name} is not a JSON object", step="read", fix=fix)
    return spec


def _part(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """A nested object of the spec, created if missing. Validation refuses it later if it is not an object."""
    if spec.get(name) is None:
        spec[name] = {}
    part = spec[name]
    return part if isinstance(part, dict) else {}


def _set(target: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        target[name] = value


def _network_type(network: dict[str, Any]) -> str | None:
    if "type" in network:
        return None
    if network.get("vlan_id") is not None:
        return "vlan"
    return "vxlan" if network.get("network_id") is not None else "flat"


def _row(port: Port) -> show.Row:
    values = port.model_dump(mode="json")
    spec = values["spec"]
    return (
        port.port_id,
        port.spec.vm_id,
        port.spec.backend,
        port.spec.mac,
        show.NetworkColumn(spec["network"]),
        port.state.value,
        show.Error(values["error"]),
    )


# -- The commands ``netplugin network list|put|delete``. ------------------------------------------


_NETWORK_COLUMNS = ("network_id", "vni", "udp_port", "mtu", "peers", "local_vlan", "ports")


class NetworkList(show.TableLister):
    """List the VXLAN networks of this host."""

    empty = "no VXLAN network: `netplugin network put` creates one"

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            networks = client.list_networks()
        return _NETWORK_COLUMNS, [_network_row(network) for network in networks]


class NetworkPut(show.ShowOne):
    """Create or change a VXLAN network.

    Changing its peers does not affect its ports.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("network_id", metavar="ID", help="ID of the network")
        parser.add_argument(
            "--vni",
            type=show.whole,
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
            "--udp-port", type=show.whole, metavar="N", help="UDP port of the tunnel; default: 4789"
        )
        parser.add_argument("--mtu", type=show.whole, metavar="BYTES", help="MTU of the VMs; default: 1450")
        return parser

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], show.Row]:
        fields: dict[str, Any] = {"type": "vxlan", "peers": tuple(parsed_args.peer)}
        for name in ("vni", "udp_port", "mtu"):
            _set(fields, name, getattr(parsed_args, name))
        spec = valid(NetworkSpec, fields)
        with Client.from_environment() as client:
            return _NETWORK_COLUMNS, _network_row(client.put_network(parsed_args.network_id, spec))


class NetworkDelete(show.Command):
    """Delete a network without ports; no error if it does not exist."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("network_id", metavar="ID", help="ID of the network")
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        with Client.from_environment() as client:
            client.delete_network(parsed_args.network_id)


def _network_row(network: NetworkInfo) -> show.Row:
    spec = network.spec.model_dump(mode="json")
    return (
        network.network_id,
        spec["vni"],
        spec["udp_port"],
        spec["mtu"],
        show.Structure(spec["peers"]),
        network.local_vlan,
        network.ports,
    )


# -- The commands ``netplugin vf list|release``. --------------------------------------------------


class VfList(show.TableLister):
    """List the virtual functions with their states and ports."""

    empty = (
        "no virtual function: create some on a NIC, and name the NIC in [sriov] devices of the "
        "agent's configuration"
    )

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            vfs = client.list_vfs()
        rows = (vf.model_dump(mode="json").values() for vf in vfs)
        return tuple(VfInfo.model_fields), [tuple(row) for row in rows]


class VfRelease(show.Command):
    """End the quarantine of a virtual function.

    It can be assigned to a port again. A port that is being removed and waits for the NIC of this function
    is deleted from the store.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("pci_address", metavar="PCI-ADDRESS", help="such as 0000:03:10.1")
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        with Client.from_environment() as client:
            client.release_vf(parsed_args.pci_address)

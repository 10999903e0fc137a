"""The commands that change ports and VXLAN networks, release VFs, and repair: ``netplugin reconcile``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from netplugin.api.batch_models import Batch, Retag
from netplugin.api.errors import InvalidRequest, from_problem
from netplugin.api.field_errors import valid
from netplugin.api.models import Network, NetworkSpec, PortSpec, Qos, ReconcileRequest
from netplugin.cli import show
from netplugin.programs import bounded


class PortPut(show.Changes, show.ShowOne):
    """Create or change a port.

    Repeating the same request changes nothing. The spec comes from --spec, from the other options, or both;
    options override the file.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("port_id", metavar="ID", help="ID of the port")
        parser.add_argument("--spec", metavar="FILE", help="the spec as JSON; - reads standard input")
        parser.add_argument("--vm-id", metavar="ID", help="ID of the VM")
        parser.add_argument("--mac", metavar="MAC", help="MAC address of the VM's NIC")
        parser.add_argument("--backend", metavar="NAME", help="a backend of `netplugin backend list`")
        add_network_options(parser)
        show.number(parser, "--queues", "N", "queue pairs; default: 1")
        show.number(parser, "--ingress-kbps", "N", "maximum rate that the VM receives, in kbit/s")
        show.number(parser, "--egress-kbps", "N", "maximum rate that the VM sends, in kbit/s")
        show.flag(parser, "--no-port-security", "allow the VM to send from any address")
        show.several(parser, "--allowed-address", "IP", "address or prefix that the VM may send from")
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
        show.flag(condition, "--create-only", "only if there is no such port")
        show.add_override(parser)

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        condition = {"if_match": parsed_args.if_match, "create_only": parsed_args.create_only}
        return show.fields(self.agent.put_port(parsed_args.port_id, spec_from(parsed_args), **condition))


class PortDelete(show.Changes, show.Command):
    """Delete ports; no error for ports that do not exist."""

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("port_ids", metavar="ID", nargs="+", help="IDs of the ports")
        show.add_override(parser)

    def take_action(self, parsed_args: Namespace) -> int:
        ids = tuple(dict.fromkeys(parsed_args.port_ids))
        # An agent of before fleets does not know the field.
        batch = valid(Batch, {"delete": ids, **({"override": True} if parsed_args.override else {})})
        results = self.agent.batch(batch).results
        failed = [result for result in results if result.error is not None]
        for result in failed:
            if result.error is not None:
                self.app.LOG.error("%s: %s", result.port_id, from_problem(result.error))
        return 1 if failed else 0


class PortRetag(show.Changes, show.TableLister):
    """Change the VLAN of ports while VMs use them.

    Of the ports given, or of all on a VLAN of a physical network. Exit status 1 if one could not be changed.
    """

    empty = "no port was changed: none is on this VLAN of the network (see `netplugin port list --network`)"

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("ports", metavar="ID", nargs="*", help="IDs of the ports")
        parser.add_argument("--network", metavar="NAME", help="physical network of the ports")
        show.number(parser, "--from-vlan", "N", "VLAN that the ports are on")
        parser.add_argument("--to-vlan", type=show.whole, metavar="N", required=True, help="their new VLAN")

    def take_action(self, parsed_args: Namespace) -> show.Listed:
        fields = show.given(parsed_args, Retag) | {"ports": tuple(dict.fromkeys(parsed_args.ports))}
        request = valid(Retag, fields)
        results = self.agent.retag(request).results
        self.status = 1 if any(result.error for result in results) else 0
        values = [each.model_dump(mode="json") for each in results]
        states = [{**each, "state": each["port"] and each["port"]["state"]} for each in values]
        return show.rows(states, ("port_id", "state", "error"))


def add_network_options(parser: ArgumentParser) -> None:
    """Add the options that name the network of a port."""
    parser.add_argument(
        "--network-type",
        dest="type",
        choices=["flat", "vlan", "vxlan"],
        help="default: vlan with --vlan-id, vxlan with --network-id, else flat",
    )
    parser.add_argument("--physical-network", metavar="NAME", help="of a flat or vlan network")
    show.number(parser, "--vlan-id", "N", "VLAN, 1 to 4094")
    parser.add_argument("--network-id", metavar="ID", help="VXLAN network of the port")
    show.number(parser, "--mtu", "BYTES", "MTU of the network")


def network_from(options: Namespace, network: dict[str, Any]) -> dict[str, Any]:
    """Set the options of ``add_network_options`` in the network of a spec, and return it."""
    network |= show.given(options, Network)
    network.setdefault("type", _network_type(network))
    return network


def spec_from(options: Namespace) -> PortSpec:
    """The spec from the options of ``port put``. Raises: InvalidRequest naming the fields."""
    spec = read_spec(options.spec) if options.spec else {}
    spec |= show.given(options, PortSpec)
    network_from(options, _part(spec, "network"))
    if qos := show.given(options, Qos):
        _part(spec, "qos").update(qos)
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


def _network_type(network: dict[str, Any]) -> str:
    if network.get("vlan_id") is not None:
        return "vlan"
    return "vxlan" if network.get("network_id") is not None else "flat"


class NetworkPut(show.Changes, show.ShowOne):
    """Create or change a VXLAN network.

    Changing its peers does not affect its ports.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("network_id", metavar="ID", help="ID of the network")
        words = "VXLAN network identifier, 1 to 16777215"
        parser.add_argument("--vni", type=show.whole, required=True, metavar="N", help=words)
        parser.add_argument(
            "--peer",
            dest="peers",
            action="append",
            default=[],
            metavar="IP",
            help="tunnel address of another host with ports on the network; may be given several times",
        )
        show.number(parser, "--udp-port", "N", "UDP port of the tunnel; default: 4789")
        show.number(parser, "--mtu", "BYTES", "MTU of the VMs; default: 1450")
        show.add_override(parser)

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        spec = valid(NetworkSpec, {"type": "vxlan", **show.given(parsed_args, NetworkSpec)})
        network = self.agent.put_network(parsed_args.network_id, spec)
        return show.NETWORK, show.row(network, show.NETWORK)


class NetworkDelete(show.Changes, show.Command):
    """Delete a network without ports; no error if it does not exist."""

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("network_id", metavar="ID", help="ID of the network")
        show.add_override(parser)

    def take_action(self, parsed_args: Namespace) -> None:
        self.agent.delete_network(parsed_args.network_id)


class VfRelease(show.Changes, show.Command):
    """End the quarantine of a virtual function.

    It can be assigned to a port again. A port that is being removed and waits for the NIC of this function
    is deleted from the store.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("pci_address", metavar="PCI-ADDRESS", help="such as 0000:03:10.1")

    def take_action(self, parsed_args: Namespace) -> None:
        self.agent.release_vf(parsed_args.pci_address)


class Reconcile(show.Changes, show.ShowOne):
    """Reconcile the host with the stored intents, or show the plan.

    Exit status 1 if something could not be repaired.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        show.flag(parser, "--dry-run", "print the plan without applying it")
        show.flag(
            parser,
            "--remove-orphans",
            "also remove marked ports without an intent, after the agent's store was lost",
        )

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        request = ReconcileRequest(dry_run=parsed_args.dry_run, remove_orphans=parsed_args.remove_orphans)
        report = self.agent.reconcile(request)
        self.status = 1 if report.errors else 0
        return show.fields(report)

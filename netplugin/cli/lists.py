"""The commands that list or show what the agent has. They print its answers as they are, without models."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any, ClassVar

from netplugin.api.connection import path_of
from netplugin.api.errors import Conflict
from netplugin.cli import show
from netplugin.cli.watch import Watches

_STATES = ("pending", "active", "degraded", "failed", "removing")


class _List(show.Asks, show.TableLister):
    """Prints these columns of what is at a path of the API."""

    path: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    def take_action(self, parsed_args: Namespace) -> show.Listed:
        return show.rows(self.read(self.path).rows(), self.columns)


class PortList(Watches, show.TableLister):
    """List the ports of this host."""

    columns = ("port_id", "vm_id", "backend", "mac", "network", "state", "error")
    empty = (
        "no port found: `netplugin port put` creates one; without --vm-id, --state, --backend and "
        "--network all ports of this host are listed"
    )

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("--vm-id", metavar="ID", help="only the ports of this VM")
        parser.add_argument("--state", choices=_STATES, help="only ports in this state")
        parser.add_argument("--backend", metavar="NAME", help="only the ports of this backend")
        parser.add_argument(
            "--network", metavar="NAME", help="only the ports of this physical network or VXLAN network"
        )

    def take_action(self, parsed_args: Namespace) -> show.Listed:
        asked = {name: getattr(parsed_args, name) for name in ("vm_id", "state", "backend", "network")}
        return show.rows(self.read("/v1/ports", **asked).rows(), self.columns)


class PortShow(Watches, show.ShowOne):
    """Show a port: its spec, its binding and its observed state.

    Its `etag` is for `port put --if-match`.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("port_id", metavar="ID", help="ID of the port")
        show.flag(parser, "--xml", "only the interface for the VM's libvirt domain, as XML")

    def events(self, parsed_args: Namespace) -> dict[str, Any]:
        return {"port_id": parsed_args.port_id}

    def run(self, parsed_args: Namespace) -> int:
        if parsed_args.xml and parsed_args.formatter == self.formatter_default:
            parsed_args.formatter = "value"
        return super().run(parsed_args)

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        answer = self.read(path_of("ports", parsed_args.port_id))
        port = answer.values()
        if not parsed_args.xml:
            columns, row = show.fields(port)
            return (*columns, "etag"), (*row, answer.headers.get("ETag"))
        if not (binding := port.get("binding")):
            state = f"the port is {port.get('state')} and has no interface"
            raise Conflict(state, step="show", fix=f"see its error: GET /v1/ports/{parsed_args.port_id}")
        return ("interface_xml",), (binding["interface_xml"],)


class ServicePortList(_List):
    """List the service ports of this host."""

    path, columns = "/v1/service-ports", ("port_id", "device", "backend", "mac", "network", "state", "error")
    empty = "no service port: `netplugin service-port put` puts a device of the host on a network"


class NetworkList(_List):
    """List the VXLAN networks of this host."""

    path = "/v1/networks"
    columns = show.NETWORK
    empty = "no VXLAN network: `netplugin network put` creates one"


class VfList(_List):
    """List the virtual functions with their states and ports."""

    path = "/v1/vfs"
    columns = (
        *("pci_address", "pf", "vf_index", "numa_node", "physical_network", "driver", "state", "port_id"),
        *("reason", "max_queues", "left_out"),
    )
    empty = (
        "no virtual function: create some on a NIC, and name the NIC in [sriov] devices of the "
        "agent's configuration"
    )


class BackendList(_List):
    """List the backends with their usability and features."""

    path, columns = "/v1/backends", ("name", "usable", "reason", "fix", "features", "facts")
    empty = "no backend: name some in [agent] enabled_backends of the agent's configuration"


class BackendCheck(show.Asks, show.FindingLister):
    """List the findings of the agent about the host.

    Exit status 1 if a check fails.
    """

    def find(self, parsed_args: Namespace) -> Iterable[show.Values]:
        return self.read("/v1/host/checks").rows()


class PhysicalNetworkList(_List):
    """List the physical networks of this host.

    Those of the agent's configuration, and those that were put.
    """

    path = "/v1/physical-networks"
    columns = ("name", "origin", "bridge", "mtu", "keep", "devices", "ports", "findings")
    empty = "no physical network: `netplugin physical-network put` creates one"

    def take_action(self, parsed_args: Namespace) -> show.Listed:
        return show.rows(map(_with_devices, self.read(self.path).rows()), self.columns)


class PhysicalNetworkShow(show.Asks, show.ShowOne):
    """Show a physical network and what is wrong with it."""

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="name of the physical network")

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        return show.fields(self.read(path_of("physical-networks", parsed_args.name)).values())


def _with_devices(network: show.Values) -> show.Values:
    """With all devices of its backends in one column, and of findings what was found."""
    ovs, bridge, sriov = (network.get(name) or {} for name in ("ovs", "linuxbridge", "sriov"))
    interface = [bridge["interface"]] if bridge.get("interface") else []
    devices = [*ovs.get("devices", ()), *interface, *sriov.get("devices", ())]
    findings = [finding["found"] for finding in network.get("findings", ())]
    return {**network, "devices": devices, "findings": findings}

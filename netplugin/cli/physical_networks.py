"""The commands ``netplugin physical-network put|delete``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from netplugin.api.field_errors import valid
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.cli import show


class PhysicalNetworkPut(show.Changes, show.ShowOne):
    """Create or change a physical network.

    For the backends whose options are given. The bridge, its devices and an interface cannot change while
    ports use them.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        _add_name(parser)
        show.flag(parser, "--keep", "keep bridge and uplink also without ports")
        show.number(parser, "--mtu", "BYTES", "MTU of the uplink")
        show.flag(parser, "--ovs", "a bridge of OVS, also without --ovs-device")
        parser.add_argument(
            "--bridge",
            metavar="NAME",
            help="name of the OVS bridge; without OVS, of the Linux bridge of the flat network",
        )
        parser.add_argument(
            "--ovs-device",
            action="append",
            default=[],
            metavar="DEVICE",
            help="DPDK device of the OVS bridge, such as 0000:03:00.0; several are a bond",
        )
        parser.add_argument(
            "--bond",
            choices=["active-backup", "lacp", "balance-slb"],
            help="mode of the bond; default: active-backup",
        )
        show.flag(parser, "--linuxbridge", "Linux bridges, with or without uplink")
        parser.add_argument("--interface", metavar="NAME", help="uplink interface of Linux bridges")
        show.several(
            parser, "--sriov-device", "DEVICE", "NIC whose virtual functions ports get, as in [sriov] devices"
        )
        show.add_override(parser)

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        return show.fields(self.agent.put_physical_network(parsed_args.name, _spec(parsed_args)))


class PhysicalNetworkDelete(show.Changes, show.Command):
    """Delete a physical network without ports.

    No error if it does not exist.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        _add_name(parser)
        show.add_override(parser)

    def take_action(self, parsed_args: Namespace) -> None:
        self.agent.delete_physical_network(parsed_args.name)


def _add_name(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the physical network")


def _spec(options: Namespace) -> PhysicalNetworkSpec:
    spec: dict[str, Any] = {"bridge": options.bridge, "mtu": options.mtu, "keep": options.keep}
    on_linux = options.linuxbridge or options.interface
    if options.ovs or options.ovs_device or options.bond or (options.bridge and not on_linux):
        spec["ovs"] = {"devices": options.ovs_device, "bond": options.bond}
    if on_linux:
        spec["linuxbridge"] = {"interface": options.interface}
    if options.sriov_device:
        spec["sriov"] = {"devices": options.sriov_device}
    return valid(PhysicalNetworkSpec, spec)

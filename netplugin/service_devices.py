"""Devices of the host as the NICs of service ports: which can be one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.host.link_values import Link
from netplugin.host.names import is_our_device

#: Kinds of devices that have another end on this host. Of a physical NIC, others may depend.
_KINDS = {"veth": "veth", "tun": "tap", "dummy": "dummy"}
#: The internal port of OVS's userspace datapath: a tap that vswitchd makes.
_OVS_INTERNAL = "ovs-netdev"


def fit_device(name: str, mtu: int, uplinks: Mapping[str, str], read: Callable[[str], Link | None]) -> Link:
    """Return the device of a service port on a network with this layer-3 MTU in bytes.

    ``uplinks`` are devices that networks use, each with what uses it. ``read`` reads a link.

    Raises: InvalidRequest if it cannot be one, what ``read`` raises.
    """
    refuse_our_name(name)
    if name in uplinks:
        raise _invalid(f"{name} is used by {uplinks[name]}", "name a device that is no uplink")
    link = read(name)
    if link is None:
        fix = f"make it, for example: ip link add {name} type veth peer name <its other end>"
        raise _invalid(f"there is no device {name} on this host", fix)
    if name == _OVS_INTERNAL:
        raise _invalid(f"{name} is Open vSwitch's own", "name one end of a veth pair")
    if link.kind == "tun" and not link.address:
        raise _invalid(f"{name} is a tun device, which has no Ethernet frames", "make it a tap device")
    if link.kind == "tun" and not link.use.persistent:
        # As libvirt and QEMU make those of VMs.
        fix = f"a service's tap is there before the service: ip tuntap add {name} mode tap"
        raise _invalid(f"{name} is the tap of the program that made it and has it open", fix)
    if link.kind not in _KINDS:
        kinds = ", ".join(_KINDS.values())
        found = f"a device of kind {link.kind}" if link.kind else "no virtual device"
        raise _invalid(f"{name} is {found}; a service port is one of {kinds}", "name one end of a veth pair")
    if link.mtu < mtu:
        fix = f"ip link set {name} mtu {mtu}, and the same at its other end"
        raise _invalid(f"{name} has MTU {link.mtu}, and its network {mtu}", fix)
    return link


def refuse_our_name(name: str) -> None:
    """Refuse a name that the agent may choose itself. Raises: InvalidRequest."""
    if is_our_device(name):
        raise _invalid(f"{name} is a name of netplugin's own devices", "choose another name")


def refuse_enslaved(link: Link) -> None:
    """Refuse a device that is on a bridge. Raises: Conflict."""
    if link.master:
        raise Conflict(
            f"device {link.name} is on bridge {link.master}",
            step="validate",
            fix=f"take it off: ip link set {link.name} nomaster",
        )


def _invalid(message: str, fix: str) -> InvalidRequest:
    return InvalidRequest.of_field("device", message, fix=fix)

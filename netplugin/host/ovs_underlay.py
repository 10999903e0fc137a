"""The underlay of VXLAN tunnels: local address, its bridge, and the MTU of each hop.

OVS's userspace datapath encapsulates by itself and uses the kernel's routing table. The address
must be on the internal port of a netdev bridge that also has the NIC (OVS's guide "Connecting VMs
Using Tunnels (Userspace)"). If any of this is missing, OVS drops the packets and reports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netplugin.api.errors import BackendUnavailable, HostError, NetpluginError, OperationTimeout, Unsupported
from netplugin.host.link_values import Link
from netplugin.host.links import Links
from netplugin.host.ovs_view import OvsView
from netplugin.host.vxlan import overhead

STEP = "underlay"


@dataclass(frozen=True)
class Underlay:
    """The observed state of the tunnels' local address. ``device`` is None if no interface has it."""

    local_ip: str
    device: str | None = None
    up: bool = False
    #: Whether the device is the internal port of a bridge of the userspace datapath.
    is_bridge: bool = False
    #: The bridge's internal port and its NICs, each with its current MTU.
    hops: tuple[tuple[str, int], ...] = ()
    #: The error text of OVS about the bridge's NICs, if none of them works.
    broken: str | None = None
    #: Why the host's addresses could not be read. Then the other fields are unknown.
    unread: str | None = None


def problem(underlay: Underlay | None, mtu: int | None = None) -> NetpluginError | None:
    """Why the tunnels cannot carry a network (of this MTU), with the fix; None if they can (pure)."""
    if underlay is None:
        return _unusable(
            "[ovs] local_ip is not set: this host has no address for VXLAN tunnels",
            "set it to an address on a netdev bridge that has a DPDK NIC, restart the agent",
        )
    address, device = f"{underlay.local_ip} ([ovs] local_ip)", underlay.device
    if underlay.unread:
        return _unusable(
            f"whether this host has {address} is not known: {underlay.unread}",
            "the agent looks again by itself; if it stays so, read its log",
        )
    if device is None:
        return _unusable(
            f"no interface of this host has {address}",
            f"ip address add {underlay.local_ip}/<prefix> dev <the netdev bridge with the DPDK NIC>",
        )
    if not underlay.is_bridge:
        return _unusable(
            f"{address} is on {device}, which is no netdev bridge of this OVS: its userspace datapath "
            "cannot send from there",
            "make one (ovs-vsctl add-br br-underlay -- set bridge br-underlay "
            "datapath_type=netdev), put the DPDK NIC on it and move the address to it",
        )
    if not underlay.up:
        return _unusable(f"{device}, which has {address}, is down", f"ip link set {device} up")
    if underlay.broken:
        return _unusable(
            f"no NIC of {device}, which has {address}, works: {underlay.broken}",
            "read ovs-vswitchd's log; does the NIC take its mtu_request?",
        )
    return None if mtu is None else too_narrow(underlay.hops, mtu, overhead(underlay.local_ip))


def _unusable(reason: str, fix: str) -> BackendUnavailable:
    return BackendUnavailable(reason, step=STEP, fix=fix)


def too_narrow(hops: Sequence[tuple[str, int]], mtu: int, encapsulation: int = 0) -> NetpluginError | None:
    """The error for the first hop whose MTU is below the network's plus ``encapsulation`` (bytes)."""
    needed = mtu + encapsulation
    for name, found in hops:
        if found < needed:
            why = f" ({mtu} and {encapsulation} for VXLAN)" if encapsulation else ""
            what = f"the network needs an MTU of {needed}{why} on every hop, and {name} has {found}"
            fix = (
                f"ovs-vsctl set Interface {name} mtu_request={needed}, and the same for the switch behind it"
            )
            return Unsupported(what, step="mtu", fix=fix)
    return None


def read_underlay(local_ip: str, view: OvsView) -> Underlay:
    """Read the underlay in the network namespace of the calling thread.

    A read error is returned in ``unread``, because only tunnels depend on it.
    """
    try:
        found = _device(local_ip)
    except (HostError, OperationTimeout) as refused:
        return Underlay(local_ip, unread=refused.detail)
    if found is None:
        return Underlay(local_ip)
    bridge = view.bridge(found.name)
    if bridge is None or bridge.datapath_type != "netdev":
        return Underlay(local_ip, found.name, found.up)
    interfaces = (each for port in view.unmanaged_on(bridge) for each in port.interfaces)
    nics = [each for each in interfaces if each.type not in ("internal", "patch")]
    broken = [f"{nic.name}: {nic.error}" for nic in nics if nic.works_at is None]
    return Underlay(
        local_ip,
        device=found.name,
        up=found.up,
        is_bridge=True,
        hops=((found.name, found.mtu), *sorted((nic.name, nic.mtu) for nic in nics if nic.mtu)),
        broken=", ".join(sorted(broken)) if nics and len(broken) == len(nics) else None,
    )


def _device(local_ip: str) -> Link | None:
    """The device that has the address; None if there is none."""
    links = Links()
    for name, addresses in links.addresses().items():
        if any(address.partition("/")[0] == local_ip for address in addresses):
            return links.get(name)
    return None

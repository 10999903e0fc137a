"""Check the uplink path of a segment: the state and MTU of the interface that its frames leave by."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from drivers.linuxbridge.model import BridgeObservation, ObservedInterface
from drivers.linuxbridge.segments import Segment
from netplugin.api.errors import BackendUnavailable, Conflict, NetpluginError
from netplugin.backend import Overlay
from netplugin.host.link_values import Vlan, Vxlan
from netplugin.host.vxlan import overhead


@dataclass(frozen=True)
class UplinkPath:
    """The operator's interface that a segment's frames leave by, and the MTU in bytes they need there."""

    name: str
    interface: ObservedInterface | None
    mtu: int
    step: str


def way_out(segment: Segment, seen: BridgeObservation) -> str | None:
    """Return the uplink interface of a segment; empty if it has none, None if it is not configured.

    While the segment has ports, this is the interface it uses, even if the configuration has changed.
    """
    configured = seen.settings.physical_interfaces.get(segment.physical_network)
    return configured if configured is None else _in_use(segment, seen) or configured


def _in_use(segment: Segment, seen: BridgeObservation) -> str:
    bridge, made = seen.bridges.get(segment.bridge), seen.uplinks.get(segment.device)
    if bridge is None or not any(seen.needed_mtu(*member) for member in bridge.members.items()):
        return ""
    if not segment.device:
        return bridge.uplink if bridge.uplink in bridge.members else ""
    on_it = made is not None and made.master == segment.bridge
    return made.data.parent if made and on_it and isinstance(made.data, Vlan) else ""


def interface_conflict(segment: Segment, seen: BridgeObservation) -> Conflict | None:
    """Return the error if a segment uses another interface than the configured one."""
    has = way_out(segment, seen)
    configured = seen.settings.physical_interfaces.get(segment.physical_network)
    if has == configured:
        return None
    free = f"ip link delete {segment.device}" if segment.device else f"ip link set {has} nomaster"
    return Conflict(
        f"{segment} leaves by {has}, as its ports were made, and [linuxbridge] physical_interfaces has "
        f"{configured or 'no interface'} for {segment.physical_network} now",
        step="plan",
        fix=f"name {has} there again and restart the agent; or move all ports of {segment} at once: "
        f"{free}, and then POST /v1/reconcile",
    )


def uplink_path_of(segment: Segment, mtu: int, seen: BridgeObservation) -> UplinkPath | None:
    """Return the uplink path for frames of this MTU in bytes; None if the segment ends on this host."""
    if not segment.network_id:
        name = way_out(segment, seen)
        return UplinkPath(name, seen.interfaces.get(name), mtu, "uplink") if name else None
    if not seen.settings.local_ip:
        return None
    name = seen.underlay.link.name if seen.underlay else ""
    return UplinkPath(name, seen.underlay, mtu + overhead(seen.settings.local_ip), "local_ip")


def uplink_problem(segment: Segment, mtu: int, seen: BridgeObservation) -> NetpluginError | None:
    """Return why frames of this MTU cannot use the segment's uplink; None if they can or it has none."""
    if segment.network_id and not seen.settings.local_ip:
        return no_local_ip()
    path = uplink_path_of(segment, mtu, seen)
    if path is None:
        return None
    if path.interface is None:
        return _missing(segment, path, seen.settings.local_ip)
    if not segment.device and (error := _not_free(path.interface, segment)):
        return error
    return _unfit(path, path.interface, segment)


def no_local_ip() -> BackendUnavailable:
    return BackendUnavailable(
        "this host has no address for VXLAN tunnels",
        step="local_ip",
        fix="set [linuxbridge] local_ip and restart the agent",
    )


def _missing(segment: Segment, path: UplinkPath, local_ip: str) -> NetpluginError:
    if segment.network_id:
        return BackendUnavailable(
            f"[linuxbridge] local_ip {local_ip} is on no interface of this host",
            step=path.step,
            fix=f"ip addr add {local_ip}/<prefix length> dev <interface>, or correct it",
        )
    return BackendUnavailable(
        f"interface {path.name} of {segment} is not there",
        step=path.step,
        fix=f"bring {path.name} back, or correct [linuxbridge] physical_interfaces",
    )


def _not_free(interface: ObservedInterface, segment: Segment) -> NetpluginError | None:
    """A flat network takes over the whole interface: the bridge receives all of its frames."""
    link, name = interface.link, interface.link.name
    if link.master not in (None, segment.bridge):
        return Conflict(
            f"interface {name} of {segment} is on {link.master} already",
            step="uplink",
            fix=f"ip link set {name} nomaster, or name another interface for {segment}",
        )
    if link.master is None and interface.addresses:
        return Conflict(
            f"interface {name} of {segment} has addresses "
            f"({', '.join(interface.addresses)}) that would stop working on a bridge",
            step="uplink",
            fix=f"ip addr flush dev {name}, or name another interface for {segment}",
        )
    return None


def _unfit(path: UplinkPath, interface: ObservedInterface, segment: Segment) -> NetpluginError | None:
    """Return what is wrong with an interface that the operator has to correct."""
    name, link, bond = path.name, interface.link, interface.bond
    if not link.up:
        return BackendUnavailable(
            f"interface {name} of {segment} is down", step=path.step, fix=f"ip link set {name} up"
        )
    if small := small_mtu(path):
        return Conflict(
            f"interface {name} of {segment} has {small}",
            step=path.step,
            fix=f"ip link set {name} mtu {path.mtu}, or give the network a smaller MTU",
        )
    if bond is not None and bond.members and not any(member.up for member in bond.members):
        states = ", ".join(f"{member.name} {member.state}" for member in bond.members)
        return BackendUnavailable(
            f"bond {bond.name} of {segment} has no link left ({states})",
            step=path.step,
            fix=f"look at cables and switch: cat /proc/net/bonding/{bond.name}",
        )
    return None


def small_mtu(path: UplinkPath) -> str | None:
    """Describe how the MTU of a path's interface is too small; None if it is not."""
    if path.interface is None or path.interface.link.mtu >= path.mtu:
        return None
    return f"MTU {path.interface.link.mtu}, and the network wants {path.mtu} there"


def in_the_way(segment: Segment, overlay: Overlay | None, seen: BridgeObservation) -> NetpluginError | None:
    """Return the error if an unmanaged device has the VLAN or VNI: the kernel allows one device each."""
    for name, link in sorted(seen.others.items()):
        match link.data:
            case Vlan(parent, tag) if segment.vlan_id is not None:
                if (parent, tag) != (way_out(segment, seen), segment.vlan_id):
                    continue
            case Vxlan(vni=vni, port=port) if overlay is not None:
                if (vni, port) != (overlay.spec.vni, overlay.spec.udp_port):
                    continue
            case _:
                continue
        return Conflict(
            f"{name} is there for {segment} already, and is not ours",
            step="plan",
            fix=f"ip link delete {name}",
        )
    return None


def wrong_family(overlay: Overlay | None, local_ip: str) -> NetpluginError | None:
    """Return the error if peers are not of the address family of ``local_ip``."""
    if overlay is None or not local_ip:
        return None
    own = ipaddress.ip_address(local_ip).version
    bad = [peer for peer in overlay.spec.peers if ipaddress.ip_address(peer).version != own]
    if not bad:
        return None
    return Conflict(
        f"network {overlay.network_id} has peers that are not IPv{own} ({', '.join(bad[:3])}), and "
        f"[linuxbridge] local_ip is {local_ip}",
        step="plan",
        fix=f"PUT /v1/networks/{overlay.network_id} with the IPv{own} addresses of its peers",
    )

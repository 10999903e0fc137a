"""Physical networks that the API makes on Linux bridges: what is refused, what others have on a bridge."""

from __future__ import annotations

from drivers.linuxbridge.commands import device_in_the_way
from drivers.linuxbridge.model import BridgeObservation
from drivers.linuxbridge.segments import Segment, bridge_mark, is_ours
from drivers.linuxbridge.uplink_path import uplink_problem
from netplugin.api.errors import Conflict, HostError, InvalidRequest, NetpluginError
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.host.links import Links
from netplugin.host.names import is_our_device

_FIELD = "linuxbridge.interface"
#: The address of the loopback interface.
_NO_ADDRESS = "00:00:00:00:00:00"


def check_network(links: Links, name: str, spec: PhysicalNetworkSpec) -> None:
    """See ``netplugin.optional.UsesPhysicalNetworks``; the interface as it is now.

    One that is not there may come later. One with addresses serves VLANs and the host's own traffic,
    so it is refused only if its flat network is kept: that takes over the whole interface.
    """
    interface = spec.linuxbridge.interface if spec.linuxbridge else None
    if interface is None:
        return
    if is_our_device(interface):
        raise _unfit(f"{interface} is, or looks like, a name of the agent's own devices")
    link = links.get(interface)
    if link is None:
        return
    if link.kind == "bridge" or link.address == _NO_ADDRESS:
        kind = "a bridge" if link.kind == "bridge" else "the loopback interface"
        raise _unfit(f"{interface} is {kind}, which cannot be on a bridge")
    if link.master is not None and not _is_own(links, link.master, name):
        fix = f"ip link set {interface} nomaster, or name another interface"
        raise Conflict.of_field(_FIELD, f"{interface} is on {link.master} already", fix=fix)
    addresses = links.addresses().get(interface, ()) if spec.keep and link.master is None else ()
    if addresses:
        message = f"{interface} has addresses ({', '.join(addresses)}) that would stop working on a bridge"
        fix = f"ip addr flush dev {interface}; or name another interface; or use VLANs alone, without keep"
        raise Conflict.of_field(_FIELD, message, fix=fix)


def _unfit(message: str) -> InvalidRequest:
    return InvalidRequest.of_field(_FIELD, message, fix="name a NIC, a bond, or a VLAN device")


def _is_own(links: Links, bridge: str, name: str) -> bool:
    """Whether a bridge is that of the flat network, which may have a name that the caller chose."""
    link = links.get(bridge)
    mark = bridge_mark(link.alias) if link else None
    return bridge == Segment(name).bridge or (mark is not None and mark[0] == Segment(name))


def holders(links: Links, name: str) -> list[str]:
    """See ``netplugin.optional.UsesPhysicalNetworks``: devices of others, and addresses of the host.

    Tunnels leave by interfaces of the operator, which stay.
    """
    bridge = links.get(Segment(name).bridge)
    mark = bridge_mark(bridge.alias) if bridge else None
    if bridge is None or mark is None:
        return []
    members = sorted(links.bridge_members(bridge) - {mark[1]})
    unmanaged = [each for each in members if (link := links.get(each)) is not None and not is_ours(link)]
    addresses = links.addresses().get(bridge.name, ())
    return [f"device {each}" for each in unmanaged] + [f"address {address}" for address in addresses]


def network_faults(seen: BridgeObservation) -> dict[str, NetpluginError]:
    """See ``netplugin.optional.UsesPhysicalNetworks``: its flat segment is what a network keeps."""
    found = {name: _fault(name, seen) for name in sorted(seen.settings.kept)}
    return {name: fault for name, fault in found.items() if fault is not None}


def _fault(name: str, seen: BridgeObservation) -> NetpluginError | None:
    segment, mtu = Segment(name), seen.settings.kept[name]
    shown = seen.settings.bridge_names.get(segment.bridge, segment.bridge)
    if segment.bridge in seen.taken_names:
        return device_in_the_way(shown)
    if (problem := uplink_problem(segment, mtu, seen)) is not None:
        return problem
    bridge, interface = seen.bridges.get(segment.bridge), seen.settings.physical_interfaces[name]
    if bridge is None:
        return HostError(f"bridge {shown} is not there", step="verify")
    if interface and interface not in bridge.members:
        return HostError(f"{interface} is not on bridge {shown}", step="verify")
    return None


def network_remains(name: str, seen: BridgeObservation) -> list[str]:
    """See ``netplugin.optional.UsesPhysicalNetworks``."""
    bridge = seen.bridges.get(Segment(name).bridge)
    if bridge is None:
        return []
    with_members = f" with {', '.join(sorted(bridge.members))}" if bridge.members else ""
    return [f"bridge {bridge.given or bridge.link.name}{with_members}"]

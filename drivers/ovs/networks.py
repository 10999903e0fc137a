"""Networks on OVS: what is refused, whether physical ones are as they should be, and what uses them."""

from __future__ import annotations

from drivers.ovs.findings import of_interface
from drivers.ovs.model import OvsObservation
from drivers.ovs.uplinks import OvsUplink
from drivers.ovs.usability import refuse_tunnels
from netplugin.api.errors import Conflict, HostError, InvalidRequest, NetpluginError
from netplugin.api.physical_models import PhysicalNetworkSpec, identity_of
from netplugin.host.links import Links
from netplugin.host.names import UPLINK, device_name, is_our_device
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import BRIDGE_MARK, TUNNEL_MARK, UPLINK_MARK, VF_PORT_MARK, OvsRoot
from netplugin.host.ovs_underlay import problem, read_underlay
from netplugin.host.ovs_view import OvsView
from netplugin.host.physical_networks import bridge_of
from netplugin.host.uplink_devices import has_interface


def check_network(view: OvsView, name: str, spec: PhysicalNetworkSpec) -> None:
    """See ``netplugin.optional.UsesPhysicalNetworks``; what is in OVS now, as far as it is known."""
    bridge = bridge_of(name, spec)
    if bridge is None or spec.ovs is None:
        return
    if is_our_device(bridge) and bridge != bridge_of(name, spec.model_copy(update={"bridge": None})):
        message = f"{bridge} is, or looks like, a name of the agent's own devices"
        raise InvalidRequest.of_field("bridge", message)
    _check_bridge(view, name, spec, bridge)
    if view.root.next_cfg and view.bridge(bridge) is None and has_interface(bridge):
        message = f"the host has an interface named {bridge}, and a bridge has one too"
        raise Conflict.of_field("bridge", message, fix="name the bridge differently")
    used = {identity_of(device): port for device, port in view.devices("dpdk-devargs").items()}
    for device in spec.ovs.devices:
        port = used.get(identity_of(device))
        if port is not None and port != device_name(UPLINK, device):
            fix = f"remove the port: ovs-vsctl del-port {port}; or name another device"
            raise Conflict.of_field("ovs.devices", f"{device} is that of port {port} in OVS", fix=fix)


def check_vxlan(settings: OvsSettings, root: OvsRoot) -> None:
    """Refuse a port on a VXLAN network where no tunnels can be. The rest depends on the network's MTU:
    ``plan`` checks it before the host is changed.

    Raises: BackendUnavailable, Unsupported.
    """
    refusal = (None if settings.local_ip else problem(None)) or refuse_tunnels(root)
    if refusal:
        raise refusal


def network_holders(settings: OvsSettings, view: OvsView, name: str) -> list[str]:
    """See ``netplugin.optional.UsesPhysicalNetworks``; a bridge of an operator stays in any case."""
    mapped = settings.bridge_mappings.get(name, "")
    underlay = read_underlay(settings.local_ip, view) if settings.local_ip else None
    bridge = view.bridge(mapped)
    holders: list[str] = []
    if bridge is not None and bridge.external_ids.get(BRIDGE_MARK) == name:
        ours = {UPLINK_MARK, TUNNEL_MARK, VF_PORT_MARK}
        foreign_ports = [p.name for p in view.unmanaged_on(bridge) if not ours & p.external_ids.keys()]
        holders += [f"port {port}" for port in sorted(foreign_ports) if port != bridge.name]
        holders += [f"address {address}" for address in Links().addresses().get(bridge.name, ())]
    if underlay is not None and mapped and underlay.device == mapped:
        holders += [f"VXLAN network {network}" for network in sorted(view.networks().values())]
    return holders


def network_remains(name: str, seen: OvsObservation) -> list[str]:
    """See ``netplugin.optional.UsesPhysicalNetworks``; for the backend that keeps bridges."""
    remains = []
    for _, bridge in sorted(seen.bridges.items()):
        if bridge.ours and bridge.mark == name:
            ports = sorted({*bridge.uplinks, *(port.name for port in bridge.unmanaged)})
            remains.append(f"bridge {bridge.name}{' with ' if ports else ''}{', '.join(ports)}")
    return remains


def _check_bridge(view: OvsView, name: str, spec: PhysicalNetworkSpec, bridge: str) -> None:
    """Refuse a bridge that is another network's, or an operator's that cannot be used."""
    there = view.bridge(bridge)
    if there is None:
        if view.port(bridge) is not None:
            message = f"OVS has a port named {bridge}"
            raise Conflict.of_field("bridge", message, fix="name the bridge differently")
        return
    mark = there.external_ids.get(BRIDGE_MARK)
    if mark not in (None, name):
        raise Conflict.of_field("bridge", f"{bridge} was made for {mark}", fix="name another bridge")
    if there.datapath_type != "netdev":
        kind = there.datapath_type or "system"
        message = f"{bridge} has datapath_type {kind!r} and cannot have DPDK ports"
        raise Conflict.of_field("bridge", message, fix="name another bridge")
    if mark is None and spec.bridge is None:
        message = f"{bridge}, the default for {name}, is there and is not ours"
        fix = "name it in bridge if the network is on it, or name another"
        raise Conflict.of_field("bridge", message, fix=fix)
    if mark is None and spec.ovs is not None and spec.ovs.devices:
        message = f"bridge {bridge} is not ours, and the agent adds no uplink to it"
        fix = "leave ovs.devices out and use the uplink that the bridge has, or name another bridge"
        raise Conflict.of_field("ovs.devices", message, fix=fix)


def network_faults(settings: OvsSettings, seen: OvsObservation) -> dict[str, NetpluginError]:
    """See ``netplugin.optional.UsesPhysicalNetworks``; for the backend that keeps bridges."""
    found = {name: _fault(settings, name, seen) for name in sorted(settings.made)}
    return {name: fault for name, fault in found.items() if fault is not None}


def _fault(settings: OvsSettings, name: str, seen: OvsObservation) -> NetpluginError | None:
    bridge = settings.bridge_mappings[name]
    there = seen.bridges.get(bridge)
    if there is None:
        return HostError(f"bridge {bridge} is not there", step="verify") if name in settings.kept else None
    if not there.ours or not (name in settings.kept or seen.is_used(bridge, ())):
        return None
    if there.mark != name:
        return HostError(f"bridge {bridge} was made for {there.mark}", step="verify")
    uplink = OvsUplink.of(settings, bridge, name)
    if uplink is not None and uplink.name not in there.uplinks:
        return HostError(f"bridge {bridge} has no uplink {uplink.name}", step="verify")
    interfaces = [i for _, row in sorted(there.uplinks.items()) for i in row.interfaces]
    for interface in interfaces:
        if broken := of_interface(interface):
            return HostError(f"uplink of {bridge}: {broken}", step="uplink")
        if uplink is not None and uplink.sets_mtu and interface.mtu and interface.mtu < uplink.mtu:
            return HostError(
                f"uplink {interface.name} of {bridge} has MTU {interface.mtu}: its NIC takes no {uplink.mtu}",
                step="mtu",
                fix=f"PUT /v1/physical-networks/{name} with a smaller mtu",
            )
    return None

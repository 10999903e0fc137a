"""The columns that OVS needs for each kind of port, by its own documentation and by ours of the marks.

Not by the code that writes them: what it leaves out, or writes otherwise, is a difference that
planning finds in the rows of the model. Sources: ovs-vswitchd.conf.db(5); for ``iface-id``,
``attached-mac`` and ``vm-uuid`` OVS's Documentation/topics/integration.rst; for the marks
docs/architecture/ownership.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from drivers.ovs.overlays import TunnelPort
from drivers.ovs.ports import RelayVfPort, VhostPort
from drivers.ovs.uplinks import OvsUplink
from netplugin.host.names import device_name
from netplugin.host.ovs_rows import OvsInterface, OvsPort

Columns = dict[str, Any]
#: Port, and the interfaces by name.
PortColumns = tuple[Columns, dict[str, Columns]]

LOCAL_IP = "10.9.0.1"
_PATCHES = {"np-to-tunnels": {"peer": "np-to-overlay"}, "np-to-overlay": {"peer": "np-to-tunnels"}}
#: Values of [ovs] bonds: bond_mode and lacp.
_MODES = {
    None: (None, None),
    "active-backup": ("active-backup", "off"),
    "balance-slb": ("balance-slb", "off"),
    "lacp": ("balance-tcp", "active"),
}


def of_port(
    desired: VhostPort | OvsUplink | RelayVfPort | TunnelPort, known: Collection[str] = ()
) -> PortColumns:
    """``known`` are the interfaces that the port has already."""
    match desired:
        case VhostPort():
            return _of_vm(desired)
        case OvsUplink():
            return _of_uplink(desired, known)
        case RelayVfPort():
            marks = {"netplugin-vf-port": desired.port_id, "netplugin-backend": "vdpa"}
            interface = {
                "type": "dpdk",
                "options": {"dpdk-devargs": desired.device, "n_rxq": str(desired.queues)},
                "mtu_request": desired.mtu,
                "external_ids": {"netplugin-vf-port": desired.port_id}
                | ({"netplugin-opened-with": desired.opened_with} if desired.opened_with else {}),
            }
            return {"external_ids": marks}, {desired.name: interface}
        case TunnelPort():
            return _of_tunnel(desired)


def of_qos(port: VhostPort) -> Columns | None:
    """``egress-policer``: ``cir`` in bytes per second, ``cbs`` in bytes."""
    if port.receives is None:
        return None
    return {
        "type": "egress-policer",
        "other_config": {
            "cir": str(port.receives.kbps * 1000 // 8),
            "cbs": str(port.receives.burst_kbit * 1000 // 8),
        },
        "external_ids": {"netplugin-port": port.port_id, "netplugin-backend": port.backend},
    }


def _of_vm(port: VhostPort) -> PortColumns:
    ids = {"netplugin-port": port.port_id, "netplugin-backend": port.backend}
    if port.overlay:
        udp_port = str(port.overlay.spec.udp_port)
        ids |= {"netplugin-network": port.overlay.network_id, "netplugin-udp-port": udp_port}
    if port.mapped_network:
        ids["netplugin-mapping"] = f"{port.spec.network.physical_network}:{port.bridge}"
    if port.stamp:
        ids["netplugin-store"] = port.stamp
    # A port with an empty tag would be a trunk of all VLANs; tag 0 is that of a flat network.
    columns = {"tag": port.tag, "vlan_mode": "access", "external_ids": ids}
    of_vm = {"vm-id": port.spec.vm_id, "vm-uuid": port.spec.vm_id, "netplugin-queues": str(port.spec.queues)}
    of_service = {} if port.spec.internal else {"netplugin-mtu": str(port.spec.network.mtu)}
    interface = {
        "type": port.type,
        "options": _options(port),
        "mtu_request": None if port.spec.device and not port.spec.internal else port.spec.network.mtu,
        "ingress_policing_rate": port.sends.kbps if port.sends else 0,  # kbps
        "ingress_policing_burst": port.sends.burst_kbit if port.sends else 0,  # kb
        "external_ids": {
            "iface-id": port.port_id,
            "attached-mac": port.spec.mac,
            "netplugin-port": port.port_id,
            **(of_service if port.spec.device else of_vm),
        },
    }
    return columns, {port.name: interface}


def _options(port: VhostPort) -> Mapping[str, str]:
    if port.type == "dpdkvhostuserclient":
        of_vduse = "/dev/vduse/" in port.socket and port.spec.queues > 1
        pairs = {"vhost-max-queue-pairs": str(port.spec.queues)} if of_vduse else {}
        return {"vhost-server-path": port.socket, **pairs}
    if port.spec.device:
        assert port.type == ("internal" if port.spec.internal else "") and port.name == port.spec.device
        return {}
    assert port.type in ("dpdkvdpa", "dummy")  # the tests of vdpa have the options of the vendor's OVS
    return dict(port.options)


def _of_uplink(uplink: OvsUplink, known: Collection[str]) -> PortColumns:
    mode, lacp = _MODES[uplink.bond]
    mark = {"netplugin-uplink": uplink.physical_network}
    interfaces: dict[str, Columns] = {
        device_name("npu", device): {
            "type": "dpdk",
            "options": {"dpdk-devargs": device},
            "external_ids": mark,
        }
        for device in uplink.devices
    }
    # Later the MTU is the operator's, unless the API made the network with it.
    for name in interfaces.keys() - (set() if uplink.sets_mtu else set(known)):
        interfaces[name]["mtu_request"] = uplink.mtu
    return {"bond_mode": mode, "lacp": lacp, "external_ids": mark}, interfaces


def _of_tunnel(port: TunnelPort) -> PortColumns:
    """Without a tag: a trunk."""
    mark = {"netplugin-tunnel": port.type}
    interface = {"type": port.type, "options": _PATCHES.get(port.name), "external_ids": mark}
    if port.type == "vxlan":
        udp_port = port.name.removeprefix("npx")
        interface["options"] = {
            "remote_ip": "flow",
            "key": "flow",
            "local_ip": LOCAL_IP,
            "dst_port": udp_port,
        }
    return {"tag": None, "vlan_mode": None, "external_ids": mark}, {port.name: interface}


def wrong(row: OvsPort, made: PortColumns) -> list[str]:
    """The columns of a port and its interfaces that are not so; maps may have other keys."""
    port, interfaces = made
    found = {interface.name: interface for interface in row.interfaces}
    if found.keys() != interfaces.keys():
        return ["interfaces"]
    return _wrong(row, port) + [w for name in found for w in _wrong(found[name], interfaces[name])]


def _wrong(row: OvsPort | OvsInterface, columns: Columns) -> list[str]:
    there = {column: getattr(row, column) for column in columns}
    return [
        f"{row.name} {column}: {there[column]} is not {value}"
        for column, value in columns.items()
        if (
            there[column] != value
            if not isinstance(value, dict)
            else not value.items() <= there[column].items()
        )
    ]

"""Findings on bridges, unmanaged ports and sockets, and the faults of ports as OVS reports them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drivers.ovs import sockets, usability
from drivers.ovs.model import ObservedOvsBridge, OvsObservation
from drivers.ovs.overlays import OVERLAY, vxlan_name
from drivers.ovs.ports import QUEUES_MARK, SERVICE_TYPE
from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.host.names import MAX_SOCKET_PATH, fits_socket, vhost_socket
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import NETWORK_MARK, OvsInterface, OvsPort
from netplugin.host.ovs_underlay import problem, too_narrow
from netplugin.host.ovs_versions import keeps_old_actions

#: Begins the error of OVS for a NIC or VF that DPDK cannot take (lib/netdev-dpdk.c).
_NOT_ATTACHED = "Error attaching device"
#: DPDK looks for vfio once, when it starts (rte_vfio_enable in lib/eal/linux/eal_vfio.c).
_LATE_VFIO = (
    " (see ovs-vswitchd.log; if vfio-pci was loaded after ovs-vswitchd started, restart ovs-vswitchd)"
)

# -- Findings on our bridges and on unmanaged ports (pure). ---------------------------------------


def of_bridges(seen: OvsObservation) -> list[Finding]:
    """All findings; ``seen`` must cover the whole host."""
    bridges = [seen.bridges[name] for name in sorted(seen.bridges)]
    found = [_service(port) for bridge in bridges for port in _sorted(bridge.services)]
    if bridges and keeps_old_actions(seen.root.version):
        found.append(usability.old_actions_finding(seen.root))
    found += _unmanaged([port for bridge in bridges for port in _sorted(bridge.unmanaged)])
    found += [_tunnel_ends(bridge) for bridge in bridges if bridge.tunnel_ends]
    found += [_flows_of_others(bridge) for bridge in bridges if bridge.flows_of_others]
    return found + [_fragments(b) for b in bridges if not b.ours and b.matches_fragments is False]


def _sorted(ports: Iterable[OvsPort]) -> list[OvsPort]:
    return sorted(ports, key=lambda port: port.name)


def _service(port: OvsPort) -> Finding:
    """A port of ``[ovs] service_ports`` has no filter; without a tag it is on all networks."""
    where = f"{port.name} on {port.bridge} is listed in [ovs] service_ports and has no filter"
    expected = "a service port is an access port of the one network that it serves"
    if port.tag is not None and port.vlan_mode in (None, "access"):
        return Finding(
            id=f"service-port-{port.name}",
            status="ok",
            expected=expected,
            found=f"{where}: VLAN {port.tag}",
        )
    return Finding(
        id=f"service-port-{port.name}",
        status="warn",
        expected=expected,
        found=f"{where}, and is a trunk: it sends to every network of the bridge and receives from them",
        fix=f"ovs-vsctl set Port {port.name} tag=<its VLAN> vlan_mode=access",
    )


def _unmanaged(ports: list[OvsPort]) -> list[Finding]:
    if not ports:
        return []
    names = ", ".join(f"{port.name} on {port.bridge}" for port in ports[:5])
    more = f" and {len(ports) - 5} others" if len(ports) > 5 else ""
    return [
        Finding(
            id="unmanaged-ports",
            status="warn",
            found=f"not made by netplugin, or without its mark any more: {names}{more}",
            expected="all ports of netplugin's bridges are netplugin's or in [ovs] service_ports; the "
            "bridge takes no frame from any other, and forwards none to it",
            fix="remove the port (ovs-vsctl del-port), or name it in [ovs] service_ports and restart "
            "the agent",
        )
    ]


def _flows_of_others(bridge: ObservedOvsBridge) -> Finding:
    return Finding(
        id=f"flows-of-others-{bridge.name}",
        status="warn",
        found=f"{bridge.flows_of_others} flows of {bridge.name} are not netplugin's: they may admit what the "
        "filters of ports drop",
        expected="all flows of netplugin's bridges are netplugin's",
        fix=f"look at those whose cookie does not begin with 0x6e70 (ovs-ofctl dump-flows {bridge.name}), "
        "delete them (ovs-ofctl --strict del-flows), and end what adds them: a controller, if ovs-vsctl "
        f"get-controller {bridge.name} shows one",
    )


def _fragments(bridge: ObservedOvsBridge) -> Finding:
    return Finding(
        id=f"fragments-{bridge.name}",
        status="warn",
        found=f"{bridge.name} is not netplugin's, and its flows do not see the ports of fragments: a VM "
        "may send answers of a DHCP server, or router advertisements, in fragments",
        expected="the filters of VMs see the ports of first fragments",
        fix=f"ovs-ofctl set-frags {bridge.name} nx-match, after each start of vswitchd",
    )


def _tunnel_ends(bridge: ObservedOvsBridge) -> Finding:
    """OVS ends tunnels, and learns where their hosts are, at all ports that have an address."""
    names = ", ".join(bridge.tunnel_ends)
    may = "answer for the hosts that tunnels lead to"
    may = may if bridge.ours else f"send into the tunnels of this OVS, and {may}"
    own = (
        ""
        if bridge.ours
        else f"ovs-ofctl mod-port {bridge.name} <port> no-forward after each start of vswitchd; or "
    )
    return Finding(
        id=f"tunnel-ends-{bridge.name}",
        status="warn",
        found=f"{names} on {bridge.name} can have an address and receives the frames of VMs, which may {may}",
        expected="no port with an address receives frames of VMs where OVS has tunnels",
        fix=f"{own}have VMs served from another network namespace, with no address on the port here (IPv6 "
        "off), and tunnels on a bridge without VMs",
    )


def of_underlay(seen: OvsObservation, local_ip: str | None) -> list[Finding]:
    """The finding about the path of tunnels, if they are configured or ports need them."""
    if local_ip is None and all(row.bridge != OVERLAY for row in seen.rows.values()):
        return []
    underlay = seen.tunnels.underlay
    mtus = [
        (row.interface and row.interface.needed_mtu) or 0
        for row in seen.rows.values()
        if row.bridge == OVERLAY
    ]
    error = problem(underlay, max(mtus, default=None))
    expected = "[ovs] local_ip is on a netdev bridge that is up, with room for VXLAN on every hop"
    if error is None and underlay is not None:
        hops = ", ".join(f"{name} {mtu}" for name, mtu in underlay.hops)
        found = f"{underlay.local_ip} is on {underlay.device} (MTU: {hops})"
        return [Finding(id="underlay", status="ok", found=found, expected=expected)]
    found = error.detail if error else "the tunnels' address was not looked for"
    fix = error.fix if error else None
    return [Finding(id="underlay", status="fail", found=found, expected=expected, fix=fix)]


# -- Findings on vhost-user sockets (pure). ---------------------------------------------------------


def of_sockets(
    settings: OvsSettings, rows: Mapping[str, OvsPort], seen: sockets.ObservedSockets
) -> list[Finding]:
    """Findings on the sockets of all ports of a backend (pure)."""
    socket_paths = {port_id: sockets.path_of(row) for port_id, row in rows.items()}
    paths = {port_id: Path(path) for port_id, path in socket_paths.items() if path}
    base = settings.vhost_socket_dir
    old = sorted(i for i, path in paths.items() if path.parent.parent != base and sockets.fits(str(path), i))
    found = _too_long(base)
    if old:
        found.append(
            Finding(
                id="vhost-socket-dir",
                status="warn",
                found=f"{len(old)} ports have their sockets elsewhere, as they were made: {some(old)}",
                expected=f"every port has a directory of its own below [ovs] vhost_socket_dir, {base}",
                fix="none is needed: the VMs have the sockets by their paths. A port gets a new path "
                "when it is deleted and requested again, with its VM stopped",
            )
        )
    alike = {
        (row.interface and row.interface.external_ids.get("vm-uuid")) or port_id
        for port_id, row in rows.items()
        if (path := paths.get(port_id)) and _is_of_group(seen, path.parent)
    }
    if len(alike) > 1:
        found.append(
            Finding(
                id="qemu-user",
                status="warn",
                found=f"the sockets of {len(alike)} VMs are for group {settings.vhost_socket_group}: a "
                "QEMU that is broken into can replace its neighbours' sockets, unless sVirt holds it",
                expected="each VM's QEMU runs as a user of its own (qemu_user)",
                fix="run each QEMU as a user of its own and name that in its ports; or see that "
                "libvirt confines it (SELinux, AppArmor)",
            )
        )
    if seen.stuck:
        left, why = next(iter(seen.stuck.items()))
        found.append(
            Finding(
                id="vhost-socket-remains",
                status="warn",
                found=f"{len(seen.stuck)} directories of what VMs left cannot be removed: {left}: {why}",
                expected="what is left in the directory of a port that is gone is removed within a while",
                fix=f"look for a mount, and for files that nobody may remove: findmnt -R {left}; "
                f"lsattr -R {left}; then rm -r {left}",
            )
        )
    return found


def _too_long(base: Path) -> list[Finding]:
    """A base path that is too long for new ports. Those below another one stay."""
    socket = vhost_socket(base, "any")  # all port ids give names of the same length
    if fits_socket(socket):
        return []
    has = len(os.fsencode(base))
    most = MAX_SOCKET_PATH - (len(os.fsencode(socket)) - has)
    return [
        Finding(
            id="vhost-socket-path",
            status="fail",
            found=f"[ovs] vhost_socket_dir {base} has {has} bytes: no new port can come",
            expected=f"{most} bytes at most, so that the path of a port's socket has no more than the "
            f"{MAX_SOCKET_PATH} of a UNIX socket",
            fix="shorten it and restart the agent; ports that are there keep their paths",
        )
    ]


def _is_of_group(seen: sockets.ObservedSockets, directory: Path) -> bool:
    found = seen.directories.get(str(directory))
    return found is not None and bool(found.mode & 0o020)


# -- Faults of a port and its bridge as reported by OVS, the same for all backends. ---------------


def details(row: OvsPort) -> dict[str, Any]:
    """The details of a port's status for the API."""
    interface = row.interface
    asked = interface.external_ids.get(QUEUES_MARK, "") if interface else ""
    return {
        "device": row.name,
        "bridge": row.bridge,
        "tag": row.tag,
        "ofport": interface.ofport if interface else None,
        "mtu": interface.mtu if interface else None,
        "link_state": interface.link_state if interface else None,
        "connected": bool(interface and interface.connection),
        "queues_asked": int(asked) if asked.isdecimal() else None,
        "queues_found": interface.queues if interface else None,
        **({} if interface is None or interface.moved is None else {"moved": interface.moved}),
        **({"network_id": row.external_ids[NETWORK_MARK]} if NETWORK_MARK in row.external_ids else {}),
    }


def of_port(row: OvsPort, seen: OvsObservation) -> str | None:
    """The fault of the port itself; None if there is none."""
    interface = row.interface
    if interface is None:
        return "the port has no interface"
    broken = of_interface(interface)
    if interface.type == SERVICE_TYPE and (broken or interface.other_ifindex == 0):
        error_text = f" ({broken})" if broken else ""
        return f"device {row.name} is not on this host any more, or OVS cannot use it{error_text}"
    if broken:
        return broken
    if row.name in seen.starved:
        return (
            f"the VM is connected and OVS has not set up {row.name}: it found no memory for its "
            "buffers (look for 'memory pool' in ovs-vswitchd.log; more dpdk-socket-mem, or "
            "per-port-memory)"
        )
    asked = interface.needed_mtu
    if interface.type == SERVICE_TYPE and interface.mtu and interface.mtu < asked:
        fix = f"ip link set {row.name} mtu {asked}"
        return f"{row.name} has MTU {interface.mtu}, and its network {asked} ({fix})"
    if interface.connection and interface.mtu and interface.mtu < asked:
        return f"{row.name} has MTU {interface.mtu}, not {asked}: OVS found no memory for larger buffers"
    return None


def without_link(row: OvsPort) -> str | None:
    """Why a service port's device carries no frames although OVS has it; None for other ports."""
    interface = row.interface
    if interface is None or not interface.has_no_link:
        return None
    return f"{row.name} is down, or its other end is (ip link set {row.name} up)"


def of_interface(interface: OvsInterface) -> str | None:
    """The fault of a device that vswitchd could not create; None if there is none."""
    if interface.error:
        late = _LATE_VFIO if interface.error.startswith(_NOT_ATTACHED) else ""
        return f"OVS says of {interface.name}: {interface.error}{late}"
    if interface.works_at is None:
        return f"OVS could not make {interface.name} (ofport {interface.ofport})"
    return None


def of_segments(interface: OvsInterface, seen: OvsObservation) -> str | None:
    """The fault of a NIC that drops large segments; None if there is none."""
    if interface.name not in seen.cannot_segment:
        return None
    return (
        f"userspace-tso-enable is on, the NIC of {interface.name} cannot segment, and OVS "
        f"{seen.root.ovs_version} drops what it cannot (OVS 3.3 segments by itself)"
    )


def of_path(row: OvsPort, seen: OvsObservation) -> str | None:
    """The fault of the uplinks of the port's bridge, or of the tunnels of its VXLAN network; None if there
    is none."""
    return of_uplinks(row, seen) or (_of_tunnels(row, seen) if row.bridge == OVERLAY else None)


def _of_tunnels(row: OvsPort, seen: OvsObservation) -> str | None:
    if row.network:
        _, udp_port = row.network
        tunnel = seen.tunnels.ports.get(vxlan_name(udp_port))
        broken = of_interface(tunnel.interface) if tunnel and tunnel.interface else None
        if broken:
            return f"{broken} (has somebody else tunnels on UDP port {udp_port}?)"
    mtu = (row.interface and row.interface.needed_mtu) or None
    error = problem(seen.tunnels.underlay, mtu) or usability.refuse_tunnels(seen.root)
    return f"{error.detail}. Fix: {error.fix}" if error else None


def of_uplinks(row: OvsPort, seen: OvsObservation) -> str | None:
    """The fault of the uplinks of the port's bridge; None if there is none."""
    if (bridge := seen.bridges.get(str(row.bridge))) is None:
        return None
    mtu = (row.interface and row.interface.needed_mtu) or 0
    for _, uplink in sorted(bridge.uplinks.items()):
        for interface in uplink.interfaces:
            broken = of_interface(interface)
            if broken:
                return f"uplink of {bridge.name}: {broken}"
            segments = of_segments(interface, seen)
            if segments:
                return f"uplink of {bridge.name}: {segments}"
    uplinks = [i for uplink in bridge.uplinks.values() for i in uplink.interfaces]
    hops: list[tuple[str, int]] = [(i.name, i.mtu) for i in uplinks if i.mtu] + list(bridge.nics)
    narrow = too_narrow(sorted(hops), mtu)
    return f"uplink of {bridge.name}: {narrow.detail}; its NIC takes no more" if narrow else None

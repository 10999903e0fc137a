"""What OVS itself says does not work of a port that is as wanted, and of what it stands on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivers.dpdkvhostuser import offload
from drivers.dpdkvhostuser.plan_networks import network_of
from drivers.dpdkvhostuser.seen import Seen, SeenBridge
from drivers.dpdkvhostuser.wanted import OVERLAY, QUEUES_MARK, vxlan_name
from netplugin.host import ovs_bonds
from netplugin.host.ovs_rows import NETWORK_MARK, OvsInterface, OvsPort, OvsRoot
from netplugin.host.ovs_underlay import problem, too_narrow


@dataclass(frozen=True)
class HostWord:
    """What the database does not tell of the ports in question."""

    root: OvsRoot
    #: Ports that no PMD thread polls, with a VM on the socket.
    starved: frozenset[str] = frozenset()
    #: NICs that cannot cut up large segments where they would have to.
    cannot_segment: frozenset[str] = frozenset()


def details(row: OvsPort) -> Mapping[str, Any]:
    """What a platform is told of a port as it is."""
    interface = row.interface
    asked = interface.external_ids.get(QUEUES_MARK, "") if interface else ""
    found: dict[str, Any] = {
        "device": row.name,
        "bridge": row.bridge,
        "tag": row.tag,
        "ofport": interface.ofport if interface else None,
        "mtu": interface.mtu if interface else None,
        "link_state": interface.link_state if interface else None,
        "connected": interface.connected if interface else False,
        "queues_asked": int(asked) if asked.isdigit() else None,
        "queues_found": interface.queues if interface else None,
    }
    if NETWORK_MARK in row.external_ids:
        found["network_id"] = row.external_ids[NETWORK_MARK]
    return found


def fault(row: OvsPort, seen: Seen, word: HostWord) -> str | None:
    """Why the port does not work; None if OVS says nothing against it."""
    bridge = seen.bridges.get(str(row.bridge))
    return (
        _of_port(row, word)
        or (_of_uplinks(row, bridge, word) if bridge else None)
        or (_of_tunnels(row, seen, word) if row.bridge == OVERLAY else None)
        or _of_bonds(row, seen)
    )


def _of_port(row: OvsPort, word: HostWord) -> str | None:
    interface = row.interface
    if interface is None:
        return "the port has no interface"
    broken = _of_interface(interface)
    if broken:
        return broken
    if row.name in word.starved:
        return (
            f"the VM is connected and OVS has not set up {row.name}: it found no memory for its "
            "buffers (look for 'memory pool' in ovs-vswitchd.log; more dpdk-socket-mem, or "
            "per-port-memory)"
        )
    asked = interface.mtu_request or 0
    if interface.connected and interface.mtu and interface.mtu < asked:
        return f"{row.name} has MTU {interface.mtu}, not {asked}: OVS found no memory for larger buffers"
    return None


def _of_interface(interface: OvsInterface) -> str | None:
    if interface.error:
        return f"OVS says of {interface.name}: {interface.error}"
    if interface.works_at is None:
        return f"OVS could not make {interface.name} (ofport {interface.ofport})"
    return None


def _of_uplinks(row: OvsPort, bridge: SeenBridge, word: HostWord) -> str | None:
    mtu = (row.interface and row.interface.mtu_request) or 0
    for _, uplink in sorted(bridge.uplinks.items()):
        for interface in uplink.interfaces:
            broken = _of_interface(interface)
            if broken:
                return f"uplink of {bridge.name}: {broken}"
            if interface.name in word.cannot_segment:
                return (
                    f"uplink of {bridge.name}: userspace-tso-enable is on, the NIC of "
                    f"{interface.name} cannot segment, and OVS {word.root.ovs_version} drops what it "
                    "cannot (OVS 3.3 segments by itself)"
                )
    uplinks = [i for uplink in bridge.uplinks.values() for i in uplink.interfaces]
    hops = [(i.name, i.mtu) for i in uplinks if i.mtu] + list(bridge.nics)
    narrow = too_narrow(sorted(hops), mtu)
    return f"uplink of {bridge.name}: {narrow.detail}; its NIC takes no more" if narrow else None


def _of_tunnels(row: OvsPort, seen: Seen, word: HostWord) -> str | None:
    for udp_port in network_of(row.external_ids).values():
        tunnel = seen.tunnels.ports.get(vxlan_name(udp_port))
        broken = _of_interface(tunnel.interface) if tunnel and tunnel.interface else None
        if broken:
            return f"{broken} (has somebody else tunnels on UDP port {udp_port}?)"
    mtu = (row.interface and row.interface.mtu_request) or None
    error = problem(seen.tunnels.underlay, mtu) or offload.refuse_tunnels(word.root)
    return f"{error.detail}. Fix: {error.fix}" if error else None


def _of_bonds(row: OvsPort, seen: Seen) -> str | None:
    """Told in a look at the whole host only: a bond that has just come may negotiate for a while."""
    for use in seen.bonds:
        if row.bridge == use.bridge or (row.bridge == OVERLAY and use.tunnels):
            dead = ovs_bonds.fault(use.bond)
            if dead:
                return dead
    return None

"""Faults of a port and its bridge as reported by OVS, the same for all backends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from drivers.ovs.ports import QUEUES_MARK
from drivers.ovs.seen import SeenBridge
from netplugin.host.ovs_rows import OvsInterface, OvsPort, OvsRoot
from netplugin.host.ovs_underlay import too_narrow


@dataclass(frozen=True)
class HostWord:
    """Facts from ovs-vswitchd about the ports in scope that the database does not hold."""

    root: OvsRoot
    #: Ports with a connected VM that no PMD thread polls.
    starved: frozenset[str] = frozenset()
    #: NICs without segmentation offload, where OVS would need it.
    cannot_segment: frozenset[str] = frozenset()


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
        "connected": interface.connected if interface else False,
        "queues_asked": int(asked) if asked.isdigit() else None,
        "queues_found": interface.queues if interface else None,
    }


def of_port(row: OvsPort, starved: Collection[str]) -> str | None:
    """The fault of the port itself; None if there is none."""
    interface = row.interface
    if interface is None:
        return "the port has no interface"
    broken = of_interface(interface)
    if broken:
        return broken
    if row.name in starved:
        return (
            f"the VM is connected and OVS has not set up {row.name}: it found no memory for its "
            "buffers (look for 'memory pool' in ovs-vswitchd.log; more dpdk-socket-mem, or "
            "per-port-memory)"
        )
    asked = interface.mtu_request or 0
    if interface.connected and interface.mtu and interface.mtu < asked:
        return f"{row.name} has MTU {interface.mtu}, not {asked}: OVS found no memory for larger buffers"
    return None


def of_interface(interface: OvsInterface) -> str | None:
    """The fault of a device that vswitchd could not create; None if there is none."""
    if interface.error:
        return f"OVS says of {interface.name}: {interface.error}"
    if interface.works_at is None:
        return f"OVS could not make {interface.name} (ofport {interface.ofport})"
    return None


def of_segments(interface: OvsInterface, word: HostWord) -> str | None:
    """The fault of a NIC that drops large segments; None if there is none."""
    if interface.name not in word.cannot_segment:
        return None
    return (
        f"userspace-tso-enable is on, the NIC of {interface.name} cannot segment, and OVS "
        f"{word.root.ovs_version} drops what it cannot (OVS 3.3 segments by itself)"
    )


def of_uplinks(row: OvsPort, bridge: SeenBridge, word: HostWord) -> str | None:
    """The fault of the uplinks of the port's bridge; None if there is none."""
    mtu = (row.interface and row.interface.mtu_request) or 0
    for _, uplink in sorted(bridge.uplinks.items()):
        for interface in uplink.interfaces:
            broken = of_interface(interface)
            if broken:
                return f"uplink of {bridge.name}: {broken}"
            segments = of_segments(interface, word)
            if segments:
                return f"uplink of {bridge.name}: {segments}"
    uplinks = [i for uplink in bridge.uplinks.values() for i in uplink.interfaces]
    hops: list[tuple[str, int]] = [(i.name, i.mtu) for i in uplinks if i.mtu] + list(bridge.nics)
    narrow = too_narrow(sorted(hops), mtu)
    return f"uplink of {bridge.name}: {narrow.detail}; its NIC takes no more" if narrow else None

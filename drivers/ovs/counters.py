"""The counters of ports and uplinks on OVS: what OpenFlow has of them, by place (pure), and their reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from drivers.ovs import filters
from netplugin.api.counter_models import Place, Traffic
from netplugin.backend import Intent
from netplugin.counters import Key, Reading, Readings, Source
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import UPLINK_MARK, OvsPort
from netplugin.host.port_stats import FlowStats, PortStats

#: Counters of OVS and of DPDK (``port_stats.CUSTOM``) that are places, by direction. OVS counts nearly all of
#: them as dropped as well.
_TO_VM = {
    "ovs_tx_failure_drops": Place.GUEST_RING_FULL,
    "ovs_tx_mtu_exceeded_drops": Place.TOO_LARGE,
    "ovs_tx_qos_drops": Place.POLICER_TO_VM,
    "ovs_tx_invalid_hwol_drops": Place.BAD_OFFLOAD,
}
_FROM_VM = {"ovs_rx_qos_drops": Place.POLICER_FROM_VM}
_SENT = {**_TO_VM, "ovs_tx_failure_drops": Place.SEND_DROPPED}
_RECEIVED = {"rx_missed_errors": Place.MISSED, "rx_mbuf_allocation_errors": Place.NO_BUFFER}


def of_vm(stats: PortStats) -> dict[str, Source]:
    """The counters of the port of a VM, or of a device of the host that is a service port, by source.

    Those of a vhost-user port's traffic begin with each connection of its guest, and those of drops with the
    port. OVS shows nothing of what it drops while no guest is connected.
    """
    to_vm, from_vm = _places(stats, _TO_VM), _places(stats, _FROM_VM)
    others: dict[Key, int] = {
        Place.DEVICE_TO_VM: _rest(stats.tx_dropped, to_vm),
        Place.DEVICE_FROM_VM: _rest(stats.rx_dropped, from_vm),
        Place.RECEIVE_ERROR: stats.rx_errors or 0,
        Place.SEND_ERROR: stats.tx_errors or 0,
        Traffic.RING_RETRIES: stats.custom.get("ovs_tx_retries", 0),
    }
    return {"port": _traffic(stats), "drops": _source(stats, to_vm | from_vm | others)}


def of_nic(stats: PortStats) -> dict[str, Source]:
    """The counters of a DPDK device: an uplink, or the VF of a relayed port."""
    sent, received = _places(stats, _SENT), _places(stats, _RECEIVED)
    rest = _rest(stats.tx_dropped, sent)
    sent[Place.SEND_DROPPED] = sent.get(Place.SEND_DROPPED, 0) + rest
    errors: dict[Key, int] = {
        Place.RECEIVE_ERROR: stats.rx_errors or 0,
        Place.SEND_ERROR: stats.tx_errors or 0,
    }
    return {"device": _traffic(stats), "drops": _source(stats, sent | received | errors)}


def _places(stats: PortStats, places: Mapping[str, Place]) -> dict[Key, int]:
    return {places[name]: value for name, value in stats.custom.items() if name in places}


def _rest(dropped: int | None, places: Mapping[Key, int]) -> int:
    """What was dropped at no place that has a counter."""
    return 0 if dropped is None else max(0, dropped - sum(places.values()))


_DERIVED: frozenset[Key] = frozenset({Place.DEVICE_TO_VM, Place.DEVICE_FROM_VM, Place.SEND_DROPPED})


def _source(stats: PortStats, values: Mapping[Key, int]) -> Source:
    found = {key: value for key, value in values.items() if value}
    return Source(found, str(stats.ofport), stats.age_s, derived=_DERIVED)


def _traffic(stats: PortStats) -> Source:
    values = {
        Traffic.PACKETS_FROM_VM: stats.rx_packets,
        Traffic.PACKETS_TO_VM: stats.tx_packets,
        Traffic.BYTES_FROM_VM: stats.rx_bytes,
        Traffic.BYTES_TO_VM: stats.tx_bytes,
    }
    found: dict[Key, int] = {key: value for key, value in values.items() if value is not None}
    return Source(found, str(stats.ofport), stats.age_s)


def of_filter(intent: Intent, ofport: int, flows: Sequence[FlowStats]) -> Source:
    """What the flows of a port have dropped. All were made together, so the last one has the age of all."""
    if intent.spec is None or not flows:
        return Source({})
    places = filters.places(intent.port_id, ofport, intent.spec)
    found: dict[Key, int] = defaultdict(int)
    for each in flows:
        if place := places.get(each.flow.identity):
            found[place] += each.packets
    return Source(found, str(ofport), min(each.age_s for each in flows))


def read_counters(ovs: OvsHost, backend: str, intents: Sequence[Intent], deadline: float) -> Readings:
    """The counters of these ports and of the uplinks of their bridges, by one exchange with each bridge.

    Raises: HostError, BackendUnavailable, OperationTimeout.
    """
    rows = ovs.view.all_owned(backend)
    on: dict[str, list[tuple[Intent, OvsPort]]] = defaultdict(list)
    for intent in intents:
        row = rows.get(intent.port_id)
        if row is not None and row.bridge and row.works_at:
            on[row.bridge].append((intent, row))
    ports: dict[str, Reading] = {}
    uplinks: dict[str, Reading] = {}
    vf_ports = ovs.view.vf_ports(backend)
    for bridge, those in sorted(on.items()):
        cookies = {filters.port_cookie(intent.port_id): intent.port_id for intent, _ in those}
        counted, flows = ovs.flows.counters(bridge, cookies, deadline)
        by_number = {each.ofport: each for each in counted}
        by_port: dict[str, list[FlowStats]] = defaultdict(list)
        for each in flows:
            by_port[cookies[each.flow.cookie]].append(each)
        there = _uplinks(ovs, bridge, by_number)
        uplinks |= there
        for intent, row in those:
            stats = by_number.get(row.works_at or 0)
            if stats is None:
                continue
            sources = of_vm(stats)
            sources["filter"] = of_filter(intent, stats.ofport, by_port[intent.port_id])
            vf_port = vf_ports.get(intent.port_id)
            if vf_port and (vf := by_number.get(vf_port.works_at or 0)):
                sources["relay"] = of_nic(vf)["drops"]
            ports[intent.port_id] = Reading(sources, tuple(sorted(there)))
    return Readings(ports, uplinks)


def _uplinks(ovs: OvsHost, bridge: str, counted: Mapping[int, PortStats]) -> dict[str, Reading]:
    """The DPDK devices by which the frames of a bridge leave it, with the members of a bond."""
    row = ovs.view.bridge(bridge)
    found = {}
    for port in ovs.view.unmanaged_on(row) if row else ():
        network = port.external_ids.get(UPLINK_MARK, "")
        for interface in port.interfaces:
            stats = counted.get(interface.works_at or 0)
            if stats is not None and (network or interface.type == "dpdk"):
                found[interface.name] = Reading(of_nic(stats), network=network)
    return found

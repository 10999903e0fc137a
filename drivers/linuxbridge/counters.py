"""The counters of taps, qdiscs and rules, by place (pure), and their reading with few requests."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from drivers.linuxbridge import filters
from drivers.linuxbridge.model import tap_name
from drivers.linuxbridge.options import Settings
from netplugin.api.counter_models import Place, Traffic
from netplugin.backend import Intent
from netplugin.counters import Key, Reading, Readings, Source
from netplugin.host import device_counters
from netplugin.host.device_counters import DeviceCounters
from netplugin.host.names import SHAPER, TAP, device_name
from netplugin.host.nftables import Nftables
from netplugin.host.tc import QdiscDrops, Tc

#: tc counts drops in 32 bits (``struct gnet_stats_queue``).
_TC_BITS = 32


def of_tap(counted: DeviceCounters) -> dict[str, Source]:
    """What the kernel receives from a tap is what its VM sends.

    A tap drops what the VM has no room for as ``tx_dropped`` (``tun_net_xmit`` in drivers/net/tun.c).
    """
    origin = str(counted.index)
    traffic: dict[Key, int] = {
        Traffic.PACKETS_FROM_VM: counted.rx_packets,
        Traffic.PACKETS_TO_VM: counted.tx_packets,
        Traffic.BYTES_FROM_VM: counted.rx_bytes,
        Traffic.BYTES_TO_VM: counted.tx_bytes,
    }
    drops: dict[Key, int] = {
        Place.GUEST_RING_FULL: counted.tx_dropped,
        Place.DEVICE_FROM_VM: counted.rx_dropped,
        Place.RECEIVE_ERROR: counted.rx_errors,
        Place.SEND_ERROR: counted.tx_errors,
    }
    return {"port": Source(traffic, origin), "drops": Source(drops, origin)}


def of_qdiscs(tap: QdiscDrops, shaper: QdiscDrops) -> dict[str, Source]:
    """The buckets of both directions, and the guard: it drops in the qdisc of what comes in."""
    found: dict[str, tuple[Place, int | None]] = {
        "guard": (Place.FILTER_GUARD, tap.ingress),
        "to_vm": (Place.POLICER_TO_VM, tap.bucket),
        "from_vm": (Place.POLICER_FROM_VM, shaper.bucket),
    }
    return {
        name: Source({place: drops}, bits=_TC_BITS)
        for name, (place, drops) in found.items()
        if drops is not None
    }


def of_uplink(name: str, counted: DeviceCounters) -> dict[str, Source]:
    more = device_counters.detail(name, "rx_missed_errors", "rx_fifo_errors")
    source = of_tap(counted)["port"]
    drops: dict[Key, int] = {
        Place.MISSED: sum(more.values()),
        Place.RECEIVE_ERROR: max(0, counted.rx_errors - more.get("rx_fifo_errors", 0)),
        Place.SEND_ERROR: counted.tx_errors,
        Place.SEND_DROPPED: counted.tx_dropped,
    }
    derived: frozenset[Key] = frozenset({Place.RECEIVE_ERROR})
    return {"device": source, "drops": Source(drops, source.origin, derived=derived)}


class CounterReader:
    """Reads with sockets of its own, because the backend's are used by one thread at a time."""

    def __init__(self) -> None:
        self._tc = Tc()
        self._nft = Nftables(filters.FAMILY, filters.TABLE)

    def read(self, settings: Settings, intents: Sequence[Intent], deadline: float) -> Readings:
        """Four reads: of all devices, their indices, all qdiscs, all rules.

        Raises: HostError, BackendUnavailable, OperationTimeout.
        """
        devices = device_counters.read_all()
        qdiscs = self._tc.drops()
        rules = self._nft.counters(max(deadline, time.monotonic()))
        none = QdiscDrops()
        uplinks = {
            name: Reading(of_uplink(name, devices[name]), network=network)
            for network, name in settings.physical_interfaces.items()
            if name in devices
        }
        by_network: dict[str, list[str]] = defaultdict(list)
        for name, reading in uplinks.items():
            by_network[reading.network].append(name)
        ports = {}
        for intent in intents:
            if (spec := intent.spec) is None or (tap := devices.get(tap_name(intent.port_id, spec))) is None:
                continue
            shaper = devices.get(device_name(SHAPER, intent.port_id))
            chain = rules.get(device_name(TAP, intent.port_id), {})
            sources = of_tap(tap) | of_qdiscs(
                qdiscs.get(tap.index, none), qdiscs.get(shaper.index, none) if shaper else none
            )
            sources["filter"] = of_filter(intent, chain)
            of_network = by_network.get(spec.network.physical_network or "", ())
            ports[intent.port_id] = Reading(sources, tuple(of_network))
        return Readings(ports, uplinks)


def of_filter(intent: Intent, chain: Mapping[bytes, int]) -> Source:
    """What the rules of a port have dropped, by the code of the rule."""
    assert intent.spec is not None
    found: dict[Key, int] = defaultdict(int)
    for place, code in filters.counted_rules(intent.spec):
        found[place] += chain.get(code, 0)
    return Source(found)

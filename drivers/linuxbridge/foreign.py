"""Which packet filters of other programs the frames of our ports meet."""

from __future__ import annotations

from collections.abc import Mapping

from drivers.linuxbridge import filters
from drivers.linuxbridge.model import BridgeObservation, ObservedBridge
from drivers.linuxbridge.obstacles import Device, Obstacle, Obstacles, PortPath, Tunnels
from drivers.linuxbridge.options import Settings
from netplugin.host import vxlan_filter
from netplugin.host.foreign_filters import ForeignReader
from netplugin.host.link_values import Bridge, Link, Vlan, Vxlan
from netplugin.host.names import TAP, device_name

_OURS = frozenset({(filters.FAMILY, filters.TABLE), (vxlan_filter.FAMILY, vxlan_filter.TABLE)})


class ObstacleReader:
    """Reads the filters of other programs. What was judged is kept while they stay the same."""

    def __init__(self) -> None:
        self.reader = ForeignReader(_OURS)
        self._last: Obstacles | None = None

    def read(self, deadline: float, *, anew: bool) -> Obstacles:
        """``anew`` False: what was read last will do."""
        found = self.reader.read(deadline, anew=anew)
        if self._last is None or self._last.filters != found:
            self._last = Obstacles(found)
        return self._last


def obstacles_of(
    obstacles: Obstacles, settings: Settings, seen: BridgeObservation
) -> Mapping[str, tuple[Obstacle, ...]]:
    """Return the obstacles of each port that has some (pure)."""
    found = {}
    for port_id, tap in seen.taps.items() if obstacles.filters.chains else ():
        bridge = seen.bridges.get(tap.master or "")
        if bridge is None:
            continue
        met = obstacles.of_port(_path(port_id, tap, bridge, seen))
        tunnels = _tunnels(settings, bridge, seen)
        met = (*(obstacles.of_tunnels(tunnels) if tunnels else ()), *met)
        if met:
            found[port_id] = met
    return found


def _path(port_id: str, tap: Link, bridge: ObservedBridge, seen: BridgeObservation) -> PortPath:
    segment, options = bridge.segment, bridge.link.data
    made = seen.uplinks.get(segment.device) if segment else None
    whole = seen.interfaces.get(bridge.uplink)
    uplink = made or (whole.link if whole else None)
    parent = seen.interfaces.get(made.data.parent) if made and isinstance(made.data, Vlan) else None
    chain = seen.table.chains.get(device_name(TAP, port_id)) if seen.table else None
    return PortPath(
        _device(tap),
        Device(bridge.given or bridge.link.name, bridge.link.index),
        _device(uplink) if uplink else None,
        _device(parent.link) if parent else None,
        options.nf_call if isinstance(options, Bridge) else frozenset(),
        filters.versions(chain),
    )


def _device(link: Link) -> Device:
    return Device(link.name, link.index)


def _tunnels(settings: Settings, bridge: ObservedBridge, seen: BridgeObservation) -> Tunnels | None:
    made = seen.uplinks.get(bridge.segment.device) if bridge.segment else None
    if made is None or not isinstance(made.data, Vxlan) or seen.underlay is None:
        return None
    peers = tuple(sorted(seen.peers.get(made.name, ())))
    return Tunnels(_device(seen.underlay.link), settings.local_ip, made.data.port, peers)

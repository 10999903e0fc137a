"""Plan bridges and uplinks: create them with the first port, remove them with the last."""

from __future__ import annotations

from collections.abc import Mapping

from drivers.ovs import changes as c
from drivers.ovs.layout import Layout
from drivers.ovs.mapping import uplinks_stay
from drivers.ovs.ports import Uplink, VhostPort
from drivers.ovs.seen import SeenBridge, SeenOvs
from netplugin.backend import Change
from netplugin.host.ovs import OvsSettings


def bridge_changes(
    settings: OvsSettings,
    layout: Layout,
    wanted: Mapping[str, VhostPort],
    leaving: set[str],
    seen: SeenOvs,
) -> tuple[list[Change], list[Change]]:
    """The changes of bridges to apply before those of the ports, and those to apply after."""
    before: list[Change] = []
    after: list[Change] = []
    planned = leaving | wanted.keys()
    needed = {port.bridge for port in wanted.values()}
    needed |= {name for name, home in layout.homes.items() if home in needed}
    networks = {bridge: network for network, bridge in settings.bridge_mappings.items()}
    for name in sorted({*seen.bridges, *needed}):
        home, fixed = layout.home(name), layout.base.get(name)
        users = {i: port for i, port in wanted.items() if port.bridge == home}
        ids = tuple(sorted(users))
        bridge = seen.bridges.get(name)
        if bridge and bridge.stray_cookies:
            after.append(c.DropFlows(ids, name, tuple(sorted(bridge.stray_cookies))))
        used = bool(users) or seen.is_used(home, planned)
        if bridge is None:
            before.append(c.CreateBridge(ids, name, layout.marks.get(name) or networks[name]))
            after.append(c.SetBridgeFlows(ids, name, fixed))
        elif not bridge.ours:
            continue
        elif not used and not bridge.has_strangers:
            after.append(c.RemoveBridge(tuple(sorted(leaving)), name))
            continue
        else:
            # A bridge kept only by unmanaged ports is closed to those as well.
            if bridge.fail_mode != "secure":
                before.append(c.SecureBridge(ids, name))
            stale = bridge.flows is not None and bridge.flows != bridge.wanted_flows
            if stale or bridge.matches_fragments is False:
                after.append(c.SetBridgeFlows(ids, name, fixed))
            if not used:
                continue
        network = networks.get(name)
        if bridge is not None and bridge.mark != network:
            continue  # the mapping has changed: ports on this bridge keep their uplink
        if bridge is not None and uplinks_stay(settings, bridge, seen):
            continue
        wish = Uplink.of(settings, name, network) if network else None
        uplinks = _uplink_changes(wish, ids, bridge)
        before += uplinks
        if uplinks and bridge is not None:
            after.append(c.SetBridgeFlows(ids, name, fixed))
    if seen.purge_failed:
        after.append(c.PurgeDatapath(tuple(sorted(wanted))))
    return before, list(dict.fromkeys(after))


def _uplink_changes(
    wish: Uplink | None, ids: tuple[str, ...], bridge: SeenBridge | None
) -> list[Change]:
    """A device becomes a bond, or a bond changes, in the transaction that releases the NIC."""
    found = bridge.uplinks if bridge else {}
    changes: list[Change] = [
        c.RemoveUplink(ids, str(row.bridge), name)
        for name, row in sorted(found.items())
        if wish is None or name != wish.name
    ]
    if wish is not None:
        row = found.get(wish.name)
        if row is None:
            changes.append(c.AddUplink(ids, wish))
        elif wish.differs(row):
            changes.append(c.SetUplink(ids, wish))
    return changes

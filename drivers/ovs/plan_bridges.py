"""Which bridges and uplinks there must be: they come with the first port and go with the last."""

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
    """What must be done to bridges before the ports, and what after them."""
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
            # One that is kept by the ports of others alone stays shut to those too.
            if bridge.fail_mode != "secure":
                before.append(c.SecureBridge(ids, name))
            stale = bridge.flows is not None and bridge.flows != bridge.wanted_flows
            if stale or bridge.matches_fragments is False:
                after.append(c.SetBridgeFlows(ids, name, fixed))
            if not used:
                continue
        network = networks.get(name)
        if bridge is not None and bridge.mark != network:
            continue  # the configuration has changed: its live ports keep their way out
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
    """One device becomes a bond, and a bond another, in the transaction that lets go of the NIC."""
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

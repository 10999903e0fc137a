"""Physical networks that the API makes on Linux bridges: what others have on the bridge of one."""

from __future__ import annotations

from drivers.linuxbridge.segments import Segment, bridge_mark, is_ours
from netplugin.host.links import Links


def holders(links: Links, name: str) -> list[str]:
    """See ``netplugin.optional.UsesPhysicalNetworks``: devices of others, and addresses of the host.

    Tunnels leave by interfaces of the operator, which stay.
    """
    bridge = links.get(Segment(name).bridge)
    mark = bridge_mark(bridge.alias) if bridge else None
    if bridge is None or mark is None:
        return []
    members = sorted(links.bridge_members().get(bridge.name, {}).keys() - {mark[1]})
    strangers = [each for each in members if (link := links.get(each)) is not None and not is_ours(link)]
    addresses = links.addresses().get(bridge.name, ())
    return [f"device {each}" for each in strangers] + [f"address {address}" for address in addresses]

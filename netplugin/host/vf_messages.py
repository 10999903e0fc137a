"""Messages of rtnetlink about VFs: their attributes as values, requests, and what an answer says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from netplugin.api.models import VfCounters
from netplugin.host.rtnetlink import nest
from netplugin.host.rtnetlink_messages import Attributes, Message

#: The length of an attribute's header, in bytes.
_HEADER = 4
_LIST, _INFO, _MAC = "IFLA_VFINFO_LIST", 1, 1  # IFLA_VF_INFO, IFLA_VF_MAC
_UNKNOWN = 0xFFFFFFFF
_IFF_UP = 1
# include/uapi/linux/if_ether.h
_ETH_P_8021AD = 0x88A8

NO_MAC = "00:00:00:00:00:00"
LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_AUTO and following


@dataclass(frozen=True, slots=True)
class VfAttributes:
    """The attributes of a VF that its PF holds. Rates are in Mbit/s, and 0 is no limit.

    ``spoofchk``, ``trusted`` and ``rss_query`` are None if the NIC does not support them. GUIDs are
    empty if it has none (they belong to InfiniBand). ``vlan_stacked``: the VLAN is 802.1ad (QinQ).
    """

    mac: str = NO_MAC
    vlan: int = 0
    vlan_qos: int = 0
    spoofchk: bool | None = None
    trusted: bool | None = None
    link_state: str = "auto"
    min_mbps: int = 0
    max_mbps: int = 0
    vlan_stacked: bool = False
    rss_query: bool | None = None
    node_guid: str = ""
    port_guid: str = ""


#: Groups of attributes that are written together, in the order of writing, with their fields.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mac": ("mac",),
        "vlan": ("vlan", "vlan_qos", "vlan_stacked"),
        "spoofchk": ("spoofchk",),
        "trust": ("trusted",),
        "rate": ("min_mbps", "max_mbps"),
        "link_state": ("link_state",),
        "rss_query": ("rss_query",),
        "node_guid": ("node_guid",),
        "port_guid": ("port_guid",),
    }
)


def differing(have: VfAttributes, want: VfAttributes) -> tuple[str, ...]:
    """The groups to write so that a VF becomes ``want``; an unsupported switch counts as off."""
    return tuple(
        group
        for group, names in GROUPS.items()
        if any((getattr(have, n) or 0) != (getattr(want, n) or 0) for n in names)
    )


@dataclass(frozen=True, slots=True)
class NicLink:
    """The network interface of a PCI device. A PF's also has the attributes of its VFs by number."""

    index: int
    name: str
    #: The PCI address of its device.
    parent: str = ""
    mtu: int = 0
    up: bool = False
    carrier: bool = False
    permanent_mac: str | None = None
    vfs: Mapping[int, VfAttributes] = field(default_factory=dict)


def setting(number: int, group: str, want: VfAttributes) -> tuple[str, Any]:
    """The attribute of a PF that sets one of ``GROUPS`` of one VF."""

    def of_vf(**values: Any) -> dict[str, Any]:
        return {"vf": number, **values}

    match group:
        case "mac":
            value: Any = of_vf(mac=want.mac)
        case "vlan" if want.vlan_stacked:
            tagged = of_vf(vlan=want.vlan, qos=want.vlan_qos, proto=_ETH_P_8021AD)
            group, value = "vlan_list", nest([("IFLA_VF_VLAN_INFO", tagged)])
        case "vlan":  # 802.1Q (do_setvfinfo in net/core/rtnetlink.c)
            value = of_vf(vlan=want.vlan, qos=want.vlan_qos)
        case "spoofchk":
            value = of_vf(spoofchk=bool(want.spoofchk))
        case "trust":
            value = of_vf(trust=bool(want.trusted))
        case "rate":
            value = of_vf(min_tx_rate=want.min_mbps, max_tx_rate=want.max_mbps)
        case "link_state":
            value = of_vf(link_state=LINK_STATES.index(want.link_state))
        case "rss_query":
            group, value = "rss_query_en", of_vf(rss_query_en=bool(want.rss_query))
        case "node_guid" | "port_guid":
            guid = getattr(want, group)
            group = f"ib_{group}"
            value = of_vf(**{group: guid})
        case _:
            raise AssertionError(group)
    return _LIST, nest([("IFLA_VF_INFO", nest([(f"IFLA_VF_{group.upper()}", value)]))])


# -- answers ---------------------------------------------------------------------------------------


def parse_link(message: Message) -> NicLink | None:
    """Parse a link message; None if the interface belongs to no PCI device."""
    found, vfs = _parts(message)
    of_pci = found.text("IFLA_PARENT_DEV_BUS_NAME") == "pci"
    if not of_pci and not vfs:
        return None
    permanent = found.mac("IFLA_PERM_ADDRESS")
    return NicLink(
        index=message["index"],
        name=found.text("IFLA_IFNAME"),
        parent=found.text("IFLA_PARENT_DEV_NAME") if of_pci else "",
        mtu=found.number("IFLA_MTU"),
        up=bool(message["flags"] & _IFF_UP),
        carrier=found.number("IFLA_CARRIER") == 1,
        permanent_mac=permanent if len(permanent) == len(NO_MAC) else None,
        vfs=dict(map(_attributes, vfs)),
    )


def parse_counters(message: Message) -> dict[int, VfCounters]:
    """The statistics of a PF's VFs, by VF number."""
    found = {}
    for vf in _parts(message)[1]:
        counted = vf.nest("IFLA_VF_STATS")
        values = {name: counted.number(f"IFLA_VF_STATS_{name.upper()}") for name in VfCounters.model_fields}
        found[vf.fields("IFLA_VF_MAC")["vf"]] = VfCounters.model_validate(values)
    return found


def _parts(message: Message) -> tuple[Attributes, list[Attributes]]:
    """The attributes of a link, and those of each of its VFs.

    The length of an attribute has 16 bits, and the kernel truncates a larger one (``nla_nest_end``
    in include/net/netlink.h). 222 VFs with statistics exceed it, and older kernels always send
    statistics. The lengths of the individual VFs in the list are correct: they tell where it ends.
    """
    data, listed = message.data, message.attributes.place(_LIST)
    if listed is None:
        return message.attributes, []

    def number(offset: int) -> int:
        return int.from_bytes(data[offset : offset + 2], sys.byteorder)

    vfs, at = [], listed[0]
    while (number(at + 2), number(at + 6)) == (_INFO, _MAC):  # each VF has its MAC as the first attribute
        end = at + number(at)
        if end > len(data):
            raise ValueError(f"a VF is longer than the message: {number(at)}")
        vfs.append(Attributes(ifinfmsg.vflist.vfinfo, data, (at + _HEADER, end)))
        at = end + 3 & ~3
    return Attributes(ifinfmsg, data, (message.begin, listed[0] - _HEADER), (at, len(data))), vfs


def _attributes(vf: Attributes) -> tuple[int, VfAttributes]:
    def number(name: str, default: int = 0, of: str = "") -> int:
        return int(vf.fields(f"IFLA_VF_{of or name}".upper()).get(name, default))

    def switch(name: str) -> bool | None:
        value = number(name, _UNKNOWN)
        return None if value == _UNKNOWN else bool(value)

    def guid(name: str) -> str:
        return str(vf.fields(f"IFLA_VF_{name}".upper()).get(name, ""))

    mac, link_state = vf.fields("IFLA_VF_MAC"), number("link_state")
    vlans = vf.nest("IFLA_VF_VLAN_LIST").fields("IFLA_VF_VLAN_INFO")
    return mac["vf"], VfAttributes(
        mac=mac["mac"],
        vlan=number("vlan"),
        vlan_qos=number("qos", of="vlan"),
        spoofchk=switch("spoofchk"),
        trusted=switch("trust"),
        link_state=LINK_STATES[link_state] if link_state < len(LINK_STATES) else "auto",
        min_mbps=number("min_tx_rate", of="rate"),
        max_mbps=number("max_tx_rate", of="rate"),
        vlan_stacked=vlans.get("proto") == _ETH_P_8021AD,  # mlx5 reports none
        rss_query=switch("rss_query_en"),
        node_guid=guid("ib_node_guid"),
        port_guid=guid("ib_port_guid"),
    )

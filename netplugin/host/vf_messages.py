"""Messages of rtnetlink about VFs: their attributes as values, requests, and what an answer says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP, ifinfmsg

from netplugin.api.models import VfCounters
from netplugin.host.netlink import attributes, places
from netplugin.host.rtnetlink import nest
from netplugin.host.rtnetlink_messages import Attributes, Message

#: The length of an attribute's header, in bytes.
_HEADER = 4
_LIST, _INFO, _MAC = 22, 1, 1  # IFLA_VFINFO_LIST, IFLA_VF_INFO, IFLA_VF_MAC
_UNKNOWN = 0xFFFFFFFF
# include/uapi/linux/if_ether.h
_ETH_P_8021AD = 0x88A8

NO_MAC = "00:00:00:00:00:00"
LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_AUTO and following


@dataclass(frozen=True, slots=True)
class VfAttributes:
    """The attributes of a VF that its PF holds. Rates are in Mbit/s, and 0 is no limit.

    ``spoofchk`` and ``trusted`` are None if the NIC does not support them. ``vlan_stacked``: the VLAN is
    802.1ad (QinQ). The query of its RSS key, and GUIDs (of InfiniBand), stay as the operator has set them.
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


#: Groups of attributes that are written together, in the order of writing: the kernel's name of each
#: (IFLA_VF_*), and our fields, each with its name in the kernel's structure (``proto`` is in that of 802.1ad
#: alone).
_KERNELS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "mac": ("MAC", {"mac": "mac"}),
    "vlan": ("VLAN", {"vlan": "vlan", "vlan_qos": "qos", "vlan_stacked": "proto"}),
    "spoofchk": ("SPOOFCHK", {"spoofchk": "spoofchk"}),
    "trust": ("TRUST", {"trusted": "trust"}),
    "rate": ("RATE", {"min_mbps": "min_tx_rate", "max_mbps": "max_tx_rate"}),
    "link_state": ("LINK_STATE", {"link_state": "link_state"}),
}
#: The fields of each group.
GROUPS: Mapping[str, tuple[str, ...]] = {group: tuple(names) for group, (_, names) in _KERNELS.items()}
_SWITCHES = ("spoofchk", "trusted")


def differing(have: VfAttributes, want: VfAttributes) -> tuple[str, ...]:
    """The groups to write so that a VF becomes ``want``; an unsupported switch counts as off."""
    return tuple(
        group
        for group, names in GROUPS.items()
        if any((getattr(have, n) or 0) != (getattr(want, n) or 0) for n in names)
    )


@dataclass(frozen=True, slots=True)
class NicLink:
    """The network interface of a PF, with the attributes of its VFs by number."""

    index: int
    name: str
    mtu: int = 0
    up: bool = False
    carrier: bool = False
    permanent_mac: str | None = None
    vfs: Mapping[int, VfAttributes] = field(default_factory=dict)


def setting(number: int, group: str, want: VfAttributes) -> tuple[str, Any]:
    """The attribute of a PF that sets one of ``GROUPS`` of one VF."""
    kernels, names = _KERNELS[group]
    values = {"vf": number, **{to: getattr(want, name) or 0 for name, to in names.items()}}
    if group == "link_state":
        values["link_state"] = LINK_STATES.index(want.link_state)
    attribute = f"IFLA_VF_{kernels}", values
    if group == "vlan" and want.vlan_stacked:  # without it, 802.1Q (do_setvfinfo in net/core/rtnetlink.c)
        values["proto"] = _ETH_P_8021AD
        attribute = "IFLA_VF_VLAN_LIST", nest([("IFLA_VF_VLAN_INFO", values)])
    return "IFLA_VFINFO_LIST", nest([("IFLA_VF_INFO", nest([attribute]))])


def parse_link(message: Message) -> NicLink:
    found, vfs = _parts(message)
    permanent = found.mac("IFLA_PERM_ADDRESS")
    return NicLink(
        index=message["index"],
        name=found.text("IFLA_IFNAME"),
        mtu=found.number("IFLA_MTU"),
        up=bool(message["flags"] & IFF_UP),
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
    data = message.data
    listed = [begin for kind, begin, _ in places(data, message.begin, len(data)) if kind == _LIST]
    if not listed:
        return message.attributes, []

    def number(offset: int) -> int:
        return int.from_bytes(data[offset : offset + 2], sys.byteorder)

    vfs, at = [], listed[0]
    while (number(at + 2), number(at + 6)) == (_INFO, _MAC):  # each VF has its MAC as the first attribute
        end = at + number(at)
        if end > len(data):
            raise ValueError(f"a VF is longer than the message: {number(at)}")
        vfs.append(Attributes(ifinfmsg.vflist.vfinfo, attributes(data[:end], at + _HEADER)))
        at = end + 3 & ~3
    others = chain(attributes(data[: listed[0] - _HEADER], message.begin), attributes(data, at))
    return Attributes(ifinfmsg, others), vfs


def _attributes(vf: Attributes) -> tuple[int, VfAttributes]:
    found: dict[str, Any] = {}
    for kernels, names in _KERNELS.values():
        values = vf.fields(f"IFLA_VF_{kernels}")
        found |= {name: values[of] for name, of in names.items() if of in values}
    for switch in _SWITCHES:
        state = found.get(switch, _UNKNOWN)
        found[switch] = None if state == _UNKNOWN else bool(state)
    link_state = found.pop("link_state", 0)
    if link_state < len(LINK_STATES):
        found["link_state"] = LINK_STATES[link_state]
    vlans = vf.nest("IFLA_VF_VLAN_LIST").fields("IFLA_VF_VLAN_INFO")
    found["vlan_stacked"] = vlans.get("proto") == _ETH_P_8021AD  # mlx5 reports none
    return vf.fields("IFLA_VF_MAC")["vf"], VfAttributes(**found)

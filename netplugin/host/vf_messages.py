"""rtnetlink messages about VFs: their attributes as values, requests, and parsers for answers."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from netplugin.api.models import VfCounters
from netplugin.host.netlink import attribute, attributes, number, text

# include/uapi/linux/rtnetlink.h
_IFINFO, _NUMBER = struct.Struct("=BxHiII"), struct.Struct("=I")
_ATTRIBUTE, _VF_START = struct.Struct("=HH"), struct.Struct("=HHHH")
# include/uapi/linux/if_link.h
_IFNAME, _MTU, _VFINFO_LIST, _EXT_MASK, _CARRIER = 3, 4, 22, 29, 33
_PERMANENT_ADDRESS, _PARENT, _PARENT_BUS, _VF_INFO = 54, 56, 57, 1
_VF_MAC, _VF_VLAN, _VF_SPOOFCHK, _VF_LINK_STATE, _VF_RATE, _VF_RSS_QUERY = 1, 2, 4, 5, 6, 7
_VF_TRUST, _VF_NODE_GUID, _VF_PORT_GUID, _VF_VLAN_LIST, _VF_VLAN_INFO = 9, 10, 11, 12, 1
_VF_STATS = 8
_COUNTERS = {
    "rx_packets": 0,
    "tx_packets": 1,
    "rx_bytes": 2,
    "tx_bytes": 3,
    "rx_dropped": 7,
    "tx_dropped": 8,
}
_UNKNOWN = 0xFFFFFFFF
#: The size of the attribute with struct ifla_vf_mac, in bytes.
_VF_MAC_BYTES = 40
# Older kernels apply it only to the interface's own statistics, not to those of its VFs.
_EXT_VF, _EXT_SKIP_STATISTICS = 1, 8
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


# -- requests --------------------------------------------------------------------------------------


def get_links(*, index: int = 0, vfs: bool = True, statistics: bool = False) -> bytes:
    """A request (RTM_GETLINK) for one interface, or a dump of all; with VFs, and with their statistics."""
    mask = (_EXT_VF if statistics else _EXT_VF | _EXT_SKIP_STATISTICS) if vfs else 0
    return _IFINFO.pack(0, 0, index, 0, 0) + attribute(_EXT_MASK, _NUMBER.pack(mask))


def set_vf(pf_index: int, vf_number: int, group: str, want: VfAttributes) -> bytes:
    """A request (RTM_SETLINK) that writes one of ``GROUPS`` of one VF."""
    info = attribute(_VF_INFO, _setting(vf_number, group, want))
    return _IFINFO.pack(0, 0, pf_index, 0, 0) + attribute(_VFINFO_LIST, info)


def _setting(vf_number: int, group: str, want: VfAttributes) -> bytes:
    """Build the structures of include/uapi/linux/if_link.h: the VF number, then the values."""

    def words_of(kind: int, *values: int) -> bytes:
        return attribute(kind, struct.pack(f"={1 + len(values)}I", vf_number, *values))

    match group:
        case "mac":
            mac = bytes.fromhex(want.mac.replace(":", ""))
            return attribute(_VF_MAC, struct.pack("=I32s", vf_number, mac))
        case "vlan" if want.vlan_stacked:
            tag = struct.pack("=III", vf_number, want.vlan, want.vlan_qos)
            info = attribute(_VF_VLAN_INFO, tag + struct.pack(">H2x", _ETH_P_8021AD))
            return attribute(_VF_VLAN_LIST, info)
        case "vlan":  # 802.1Q (do_setvfinfo in net/core/rtnetlink.c)
            return words_of(_VF_VLAN, want.vlan, want.vlan_qos)
        case "spoofchk":
            return words_of(_VF_SPOOFCHK, bool(want.spoofchk))
        case "trust":
            return words_of(_VF_TRUST, bool(want.trusted))
        case "rate":
            return words_of(_VF_RATE, want.min_mbps, want.max_mbps)
        case "link_state":
            return words_of(_VF_LINK_STATE, LINK_STATES.index(want.link_state))
        case "rss_query":
            return words_of(_VF_RSS_QUERY, bool(want.rss_query))
        case "node_guid" | "port_guid":
            kind = _VF_NODE_GUID if group == "node_guid" else _VF_PORT_GUID
            guid = int(getattr(want, group).replace(":", ""), 16)
            return attribute(kind, struct.pack("=I4xQ", vf_number, guid))
    raise AssertionError(group)


# -- answers ---------------------------------------------------------------------------------------


def parse_link(payload: bytes) -> NicLink | None:
    """Parse a link message; None if the interface belongs to no PCI device."""
    _, _, index, flags, _ = _IFINFO.unpack_from(payload)
    found = dict(_link_attributes(payload))
    of_pci = text(found.get(_PARENT_BUS, b"")) == "pci"
    if not of_pci and _VFINFO_LIST not in found:
        return None
    permanent = found.get(_PERMANENT_ADDRESS, b"")
    return NicLink(
        index=index,
        name=text(found[_IFNAME]),
        parent=text(found.get(_PARENT, b"")) if of_pci else "",
        mtu=number(found.get(_MTU)),
        up=bool(flags & _IFF_UP),
        carrier=number(found.get(_CARRIER)) == 1,
        permanent_mac=_mac(permanent) if len(permanent) == 6 else None,
        vfs=parse_vfs(found.get(_VFINFO_LIST, b"")),
    )


def _link_attributes(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and value of a link's attributes, with the whole list of its VFs.

    The length of an attribute has 16 bits, and the kernel truncates a larger one (``nla_nest_end``
    in include/net/netlink.h). 222 VFs with statistics exceed it, and older kernels always send
    statistics. The lengths of the individual VFs in the list are correct.
    """
    offset = _IFINFO.size
    while offset + 4 <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, offset)
        if kind & 0x3FFF == _VFINFO_LIST:
            length = _end_of_vfs(payload, offset + 4) - offset
        if length < 4:
            return
        yield kind & 0x3FFF, payload[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def _end_of_vfs(payload: bytes, offset: int) -> int:
    """The end of the list of VFs that begins at ``offset``: after the last entry with a VF's MAC."""
    while offset + _VF_START.size <= len(payload):
        length, kind, mac_length, mac_kind = _VF_START.unpack_from(payload, offset)
        if (kind, mac_length, mac_kind) != (_VF_INFO, _VF_MAC_BYTES, _VF_MAC):
            break
        offset += (length + 3) & ~3
    return offset


def listed_vfs(payload: bytes) -> bytes:
    """The list of VFs in a link message, for ``parse_counters``."""
    return dict(_link_attributes(payload)).get(_VFINFO_LIST, b"")


def parse_vfs(data: bytes) -> dict[int, VfAttributes]:
    """Parse IFLA_VFINFO_LIST: for each VF, attributes that begin with its number."""
    vfs: dict[int, VfAttributes] = {}
    for _, info in attributes(data):
        of = dict(attributes(info))
        vf_number, mac = struct.unpack_from("=I6s", of[_VF_MAC])
        _, vlan, qos = _words_of(of, _VF_VLAN, 3)
        _, least, most = _words_of(of, _VF_RATE, 3)
        link_state = _words_of(of, _VF_LINK_STATE, 2)[1]
        vfs[vf_number] = VfAttributes(
            mac=_mac(mac),
            vlan=vlan,
            vlan_qos=qos,
            spoofchk=_switch(_words_of(of, _VF_SPOOFCHK, 2, _UNKNOWN)[1]),
            trusted=_switch(_words_of(of, _VF_TRUST, 2, _UNKNOWN)[1]),
            link_state=LINK_STATES[link_state] if link_state < len(LINK_STATES) else "auto",
            min_mbps=least,
            max_mbps=most,
            vlan_stacked=_vlan_protocol(of.get(_VF_VLAN_LIST, b"")) == _ETH_P_8021AD,
            rss_query=_switch(_words_of(of, _VF_RSS_QUERY, 2, _UNKNOWN)[1]),
            node_guid=_guid(of.get(_VF_NODE_GUID)),
            port_guid=_guid(of.get(_VF_PORT_GUID)),
        )
    return vfs


def parse_counters(data: bytes) -> dict[int, VfCounters]:
    """Parse the statistics in IFLA_VFINFO_LIST, by VF number."""
    found: dict[int, VfCounters] = {}
    for _, info in attributes(data):
        of = dict(attributes(info))
        counted = {kind: number(value) for kind, value in attributes(of.get(_VF_STATS, b""))}
        values = {name: counted.get(kind, 0) for name, kind in _COUNTERS.items()}
        found[struct.unpack_from("=I", of[_VF_MAC])[0]] = VfCounters.model_validate(values)
    return found


def _vlan_protocol(data: bytes) -> int:
    """The protocol in the struct ifla_vf_vlan_info of the list; 0 if the driver reports none (mlx5)."""
    info = dict(attributes(data)).get(_VF_VLAN_INFO, b"")
    return int(struct.unpack_from(">H", info, 12)[0]) if len(info) >= 14 else 0


def _guid(data: bytes | None) -> str:
    """Format a struct ifla_vf_guid like ``ip link``."""
    return "" if data is None else struct.unpack_from("=I4xQ", data)[1].to_bytes(8, "big").hex(":")


def _words_of(of: Mapping[int, bytes], kind: int, count: int, default: int = 0) -> tuple[int, ...]:
    value = of.get(kind)
    return (default,) * count if value is None else struct.unpack_from(f"={count}I", value)


def _switch(value: int) -> bool | None:
    return None if value == _UNKNOWN else bool(value)


def _mac(data: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in data)

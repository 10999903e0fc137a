"""rtnetlink messages about network devices: builders for requests, parsers for answers."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from netplugin.host.link_values import (
    BondMember,
    Bridge,
    BridgePort,
    Ifb,
    Link,
    LinkEvent,
    LinuxBond,
    Made,
    PortOptions,
    TapUse,
    Vlan,
    Vxlan,
)
from netplugin.host.netlink import attribute, attributes, number, text

# include/uapi/linux: rtnetlink.h, if_link.h, if_addr.h
NEWLINK, DELLINK, GETLINK, SETLINK, GETADDR, NEWLINKPROP = 16, 17, 18, 19, 22, 108
_ADDRESS, _IFNAME, _MTU, _LINK, _QDISC, _MASTER = 1, 3, 4, 5, 6, 10
_LINKINFO, _IFALIAS, _AF_SPEC, _GROUP, _EXT_MASK, _CARRIER = 18, 20, 26, 27, 29, 33
_LINK_NETNSID, _XDP, _PROP_LIST, _ALT_IFNAME = 37, 43, 52, 53
_XDP_ATTACHED = 2
_INFO_KIND, _INFO_DATA, _INFO_SLAVE_KIND, _INFO_SLAVE_DATA = 1, 2, 4, 5
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SKIP_STATISTICS = 8
_IFF_UP = 1
_INET6_CONF, _DISABLE_IPV6 = 2, 26  # index of DEVCONF_DISABLE_IPV6 (include/uapi/linux/ipv6.h)
_IFINFO, _IFADDR = struct.Struct("=BxHiII"), struct.Struct("=BBBBI")
_TUN_OWNER, _TUN_GROUP, _TUN_PERSIST, _TUN_MULTI_QUEUE = 1, 2, 6, 7
#: The options of a bridge that are numbers, with the format of each; a limit of learned MACs is not on each
#: kernel. IFLA_BR_MULTI_BOOLOPT has values and a mask.
_BRIDGE_OPTIONS = {
    "stp_state": (5, "=I"),
    "forward_delay": (1, "=I"),
    "mcast_snooping": (23, "=B"),
    "fdb_max_learned": (49, "=I"),
    "group_fwd_mask": (9, "=H"),
    "ageing_time": (4, "=I"),
    "vlan_filtering": (7, "=B"),
    "nf_call_iptables": (36, "=B"),
    "nf_call_ip6tables": (37, "=B"),
    "nf_call_arptables": (38, "=B"),
}
_BR_BOOLEANS = 46
_PROTINFO, _BRPORT_LEARNING, _NESTED = 12, 8, 0x8000
_BRPORT_FLUSH = 24
_FLOODS = {"flood": 9, "mcast_flood": 27, "bcast_flood": 30}  # of unknown unicast, multicast, broadcast
#: The other options of a bridge port, which a new one has as 0, by iproute2's names.
_PORT_OPTIONS = {
    "hairpin": (4, "=B"),
    "guard": (5, "=B"),
    "root_block": (6, "=B"),
    "fastleave": (7, "=B"),
    "proxy_arp": (10, "=B"),
    "proxy_arp_wifi": (12, "=B"),
    "mcast_to_unicast": (28, "=B"),
    "vlan_tunnel": (29, "=B"),
    "group_fwd_mask": (31, "=H"),
    "neigh_suppress": (32, "=B"),
    "isolated": (33, "=B"),
    "backup_port": (34, "=I"),
    "locked": (39, "=B"),
    "mab": (40, "=B"),
    "neigh_vlan_suppress": (43, "=B"),
    "backup_nhid": (44, "=I"),
}
_BRPORT_STATE, _FORWARDING = 1, 3
#: Those that a new port has otherwise.
_PORT_DEFAULTS = {
    "state": (_BRPORT_STATE, _FORWARDING),
    "learning": (_BRPORT_LEARNING, 1),
    **{name: (kind, 1) for name, kind in _FLOODS.items()},
}
_OPERSTATE, _CARRIES = 16, (0, 6)  # IF_OPER_UNKNOWN, IF_OPER_UP: the bridge sets such a port to forward
_VLAN_ID, _VLAN_PROTOCOL = 1, 5
_VXLAN_ID, _VXLAN_LOCAL, _VXLAN_TTL, _VXLAN_LEARNING = 1, 4, 5, 7
_VXLAN_PORT, _VXLAN_LOCAL6, _VXLAN_DF = 15, 17, 29
_BOND_MODE, _BOND_HASH_POLICY, _BOND_AD_INFO, _AD_PARTNER_MAC = 1, 14, 23, 5
_BOND_SLAVE_STATE, _BOND_SLAVE_MII_STATUS = 1, 2
# drivers/net/bonding: bond_opts in bond_options.c
_BOND_MODES = (
    "balance-rr",
    "active-backup",
    "balance-xor",
    "broadcast",
    "802.3ad",
    "balance-tlb",
    "balance-alb",
)
_HASH_POLICIES = ("layer2", "layer3+4", "layer2+3", "encap2+3", "encap3+4", "vlan+srcmac")
_MII_STATES = ("up", "going down", "down", "coming back")


# -- requests --------------------------------------------------------------------------------------


def all_links() -> bytes:
    return _IFINFO.pack(0, 0, 0, 0, 0) + attribute(_EXT_MASK, struct.pack("=I", _SKIP_STATISTICS))


def by_name(name: str) -> bytes:
    return all_links() + attribute(_IFNAME, name.encode()[:15] + b"\0")


def by_kind(kind: str) -> bytes:
    return all_links() + attribute(_LINKINFO, attribute(_INFO_KIND, kind.encode()))


def by_master(index: int) -> bytes:
    return all_links() + attribute(_MASTER, struct.pack("=I", index))


def bridge_ports() -> bytes:
    return _IFINFO.pack(socket.AF_BRIDGE, 0, 0, 0, 0)


def unmakeable(kind: str) -> bytes:
    """A probe whether the kernel supports the kind: its multicast MAC is always refused."""
    return (
        _IFINFO.pack(0, 0, 0, 0, 0)
        + attribute(_IFNAME, b"npbprobe\0")
        + attribute(_ADDRESS, b"\x01" + bytes(5))
        + attribute(_LINKINFO, attribute(_INFO_KIND, kind.encode()))
    )


def bridge_options(index: int, bridge: Bridge, found: Bridge, names: Sequence[str]) -> bytes:
    """A request that sets these options of a bridge as ``bridge`` has them; ``found``: as they are."""
    values = []
    for name in names:
        if name == "booleans":
            changed = bridge.booleans ^ found.booleans
            values.append(attribute(_BR_BOOLEANS, _u32(bridge.booleans & changed) + _u32(changed)))
        else:
            kind, form = _BRIDGE_OPTIONS[name]
            values.append(attribute(kind, struct.pack(form, getattr(bridge, name))))
    info = attribute(_INFO_KIND, b"bridge") + attribute(_INFO_DATA, *values)
    return _IFINFO.pack(0, 0, index, 0, 0) + attribute(_LINKINFO, info)


def creation(name: str, address: str, made: Made, parent: int = 0) -> bytes:
    """A request that creates a device, down. ``parent``: the index of a VLAN's interface.

    A bridge's options are set by another request.
    """
    match made:
        case Bridge() | Ifb():
            kind, data, link = type(made).__name__.lower(), [], b""
        case Vlan():
            data = [attribute(_VLAN_ID, struct.pack("=H", made.id))]
            data += [attribute(_VLAN_PROTOCOL, struct.pack(">H", made.protocol))]
            kind, link = "vlan", attribute(_LINK, _u32(parent))
        case Vxlan():
            kind, data, link = "vxlan", _vxlan_options(made), b""
    info = [attribute(_INFO_KIND, kind.encode() + b"\0"), *([attribute(_INFO_DATA, *data)] if data else [])]
    return (
        _IFINFO.pack(0, 0, 0, 0, 0)
        + attribute(_IFNAME, name.encode() + b"\0")
        + attribute(_ADDRESS, bytes.fromhex(address.replace(":", "")))
        + link
        + attribute(_LINKINFO, *info)
    )


def _vxlan_options(made: Vxlan) -> list[bytes]:
    local = ipaddress.ip_address(made.local)
    return [
        attribute(_VXLAN_ID, _u32(made.vni)),
        attribute(_VXLAN_LOCAL6 if local.version == 6 else _VXLAN_LOCAL, local.packed),
        attribute(_VXLAN_PORT, struct.pack(">H", made.port)),
        attribute(_VXLAN_TTL, struct.pack("=B", made.ttl)),
        attribute(_VXLAN_LEARNING, struct.pack("=B", made.learning)),
        attribute(_VXLAN_DF, struct.pack("=B", made.df)),
    ]


def change(index: int, *attributes_: bytes, up: bool | None = None) -> bytes:
    """A request (RTM_NEWLINK) that changes attributes of a device, and (``up``) its state."""
    flags, mask = (_IFF_UP * bool(up), _IFF_UP) if up is not None else (0, 0)
    return _IFINFO.pack(0, 0, index, flags, mask) + b"".join(attributes_)


def new_name(name: str) -> bytes:
    return attribute(_IFNAME, name.encode() + b"\0")


def new_mtu(mtu: int) -> bytes:
    return attribute(_MTU, _u32(mtu))


def new_address(address: str) -> bytes:
    return attribute(_ADDRESS, bytes.fromhex(address.replace(":", "")))


def new_alias(alias: str) -> bytes:
    return attribute(_IFALIAS, alias.encode())


def new_group(group: int) -> bytes:
    return attribute(_GROUP, _u32(group))


def new_master(index: int) -> bytes:
    """``index`` 0: none."""
    return attribute(_MASTER, _u32(index))


def port_flags(index: int, learning: bool, flooding: bool | None) -> bytes:
    """A request (RTM_SETLINK) that turns MAC learning on a bridge port, and flooding to it, on or off.

    Without flooding, the bridge forgets what it has learned on the port.
    """
    flags = attribute(_BRPORT_LEARNING, struct.pack("=B", learning))
    if flooding is not None:
        flags += b"".join(attribute(kind, struct.pack("=B", flooding)) for kind in _FLOODS.values())
    if flooding is False:
        flags += attribute(_BRPORT_FLUSH, b"")
    return _of_port(index, flags)


def port_option(index: int, name: str) -> bytes:
    """A request (RTM_SETLINK) that sets an option of a bridge port as the kernel does for a new one."""
    if name in _PORT_OPTIONS:
        kind, form = _PORT_OPTIONS[name]
        return _of_port(index, attribute(kind, struct.pack(form, 0)))
    kind, value = _PORT_DEFAULTS[name]
    return _of_port(index, attribute(kind, struct.pack("=B", value)))


def _of_port(index: int, options: bytes) -> bytes:
    head = _IFINFO.pack(socket.AF_BRIDGE, 0, index, 0, 0)
    return head + attribute(_PROTINFO | _NESTED, options)


def alternative_name(index: int, name: str) -> bytes:
    names = attribute(_PROP_LIST | _NESTED, attribute(_ALT_IFNAME, name.encode() + b"\0"))
    return _IFINFO.pack(0, 0, index, 0, 0) + names


def _u32(value: int) -> bytes:
    return struct.pack("=I", value)


def any_address() -> bytes:
    return _IFADDR.pack(0, 0, 0, 0, 0)


# -- answers ---------------------------------------------------------------------------------------


def identity(payload: bytes) -> tuple[str, str, str]:
    """Name, alias and kind of a device, without parsing the rest."""
    name, alias, kind = "", "", ""
    for number_, value in attributes(payload, _IFINFO.size):
        if number_ == _IFNAME:
            name = text(value)
        elif number_ == _IFALIAS:
            alias = text(value)
        elif number_ == _LINKINFO:
            kind = text(dict(attributes(value)).get(_INFO_KIND))
    return name, alias, kind


def read_link(payload: bytes) -> Link:
    _, _, index, flags, _ = _IFINFO.unpack_from(payload)
    found = dict(attributes(payload, _IFINFO.size))
    info = dict(attributes(found.get(_LINKINFO, b"")))
    kind = text(info.get(_INFO_KIND))
    data = dict(attributes(info.get(_INFO_DATA, b"")))
    tun = data if kind == "tun" else {}
    return Link(
        index=index,
        name=text(found.get(_IFNAME)),
        kind=kind,
        mtu=number(found.get(_MTU)),
        up=bool(flags & _IFF_UP),
        carrier=bool(number(found.get(_CARRIER))),
        master=name_of(number(found[_MASTER])) if _MASTER in found else None,
        alias=text(found[_IFALIAS]) if _IFALIAS in found else None,
        address=_mac(found.get(_ADDRESS, b"")) or None,
        altnames=tuple(text(v) for k, v in attributes(found.get(_PROP_LIST, b"")) if k == _ALT_IFNAME),
        group=number(found.get(_GROUP)),
        ipv6=_runs_ipv6(found.get(_AF_SPEC, b"")),
        qdisc=text(found.get(_QDISC)),
        multi_queue=bool(number(tun.get(_TUN_MULTI_QUEUE))),
        use=_tap_use(tun),
        port=_port_of(info, found) or PortOptions(),
        xdp=bool(number(dict(attributes(found.get(_XDP, b""))).get(_XDP_ATTACHED))),
        data=_data(kind, data, found),
    )


def _tap_use(tun: Mapping[int, bytes]) -> TapUse:
    owner, group = (number(tun[kind]) if kind in tun else None for kind in (_TUN_OWNER, _TUN_GROUP))
    return TapUse(owner, group, bool(number(tun.get(_TUN_PERSIST))))


def _port_of(info: Mapping[int, bytes], link: Mapping[int, bytes]) -> PortOptions | None:
    """The options of a bridge port; None of what is none."""
    if text(info.get(_INFO_SLAVE_KIND)) != "bridge":
        return None
    return _port_options(dict(attributes(info.get(_INFO_SLAVE_DATA, b""))), link)


def _port_options(port: Mapping[int, bytes], link: Mapping[int, bytes]) -> PortOptions:
    floods = {bool(number(port.get(flag))) for flag in _FLOODS.values()}
    others = {name for name, (kind, _) in _PORT_OPTIONS.items() if number(port.get(kind))}
    if number(link.get(_OPERSTATE)) in _CARRIES and number(port.get(_BRPORT_STATE)) != _FORWARDING:
        others.add("state")
    return PortOptions(
        bool(number(port.get(_BRPORT_LEARNING))),
        floods.pop() if len(floods) == 1 else None,
        frozenset(others),
    )


def _data(kind: str, data: Mapping[int, bytes], link: Mapping[int, bytes]) -> Made | LinuxBond | None:
    match kind:
        case "bridge":
            return _bridge(data)
        case "vlan":
            # With this attribute, the parent's index belongs to another namespace.
            parent = "" if _LINK_NETNSID in link else name_of(number(link.get(_LINK)))
            protocol = int.from_bytes(data.get(_VLAN_PROTOCOL, b""), "big")
            return Vlan(parent, number(data.get(_VLAN_ID)), protocol)
        case "vxlan":
            return _vxlan(data)
        case "ifb":
            return Ifb()
        case "bond":
            return _bond(data)
    return None


def _bridge(data: Mapping[int, bytes]) -> Bridge:
    options = {name: number(data.get(kind)) for name, (kind, _) in _BRIDGE_OPTIONS.items()}
    has_limit = _BRIDGE_OPTIONS["fdb_max_learned"][0] in data
    found = Bridge(**options, booleans=number(data.get(_BR_BOOLEANS, b"")[:4]))
    return found if has_limit else replace(found, fdb_max_learned=None)


def _vxlan(data: Mapping[int, bytes]) -> Vxlan:
    local = data.get(_VXLAN_LOCAL) or data.get(_VXLAN_LOCAL6)
    return Vxlan(
        vni=number(data.get(_VXLAN_ID)),
        local=str(ipaddress.ip_address(local)) if local else "",
        port=int.from_bytes(data.get(_VXLAN_PORT, b""), "big"),
        learning=bool(number(data.get(_VXLAN_LEARNING))),
        ttl=number(data.get(_VXLAN_TTL)),
        df=number(data.get(_VXLAN_DF)),
    )


def _bond(data: Mapping[int, bytes]) -> LinuxBond:
    partner = dict(attributes(data.get(_BOND_AD_INFO, b""))).get(_AD_PARTNER_MAC, b"")
    return LinuxBond(
        _one_of(_BOND_MODES, number(data.get(_BOND_MODE))),
        _one_of(_HASH_POLICIES, number(data.get(_BOND_HASH_POLICY))),
        _mac(partner) if any(partner) else "",
    )


def read_bridge_port(payload: bytes) -> tuple[int, BridgePort]:
    """The index of a bridge port, and what it is."""
    name, mtu, master = "", 0, 0
    for kind, value in attributes(payload, _IFINFO.size):
        if kind == _IFNAME:
            name = text(value)
        elif kind == _MTU:
            mtu = number(value)
        elif kind == _MASTER:
            master = number(value)
        if name and mtu and master:
            break  # the kernel writes these first, and the rest is long
    return _IFINFO.unpack_from(payload)[2], BridgePort(name, mtu, master)


def bridge_port_event(kind: int, payload: bytes) -> tuple[int, BridgePort | None] | None:
    """The index of a device that has changed, and what it is on a bridge (None: nothing).

    None for messages that are no notifications of devices. See ``link_event``.
    """
    if not _is_of_device(kind, payload):
        return None
    index, found = _IFINFO.unpack_from(payload)[2], dict(attributes(payload, _IFINFO.size))
    if kind == DELLINK or _MASTER not in found:
        return index, None
    info = dict(attributes(found.get(_LINKINFO, b"")))
    if text(info.get(_INFO_SLAVE_KIND)) != "bridge":
        return index, None
    return index, BridgePort(text(found.get(_IFNAME)), number(found.get(_MTU)), number(found[_MASTER]))


def read_bond_member(payload: bytes) -> BondMember:
    found = dict(attributes(payload, _IFINFO.size))
    info = dict(attributes(found.get(_LINKINFO, b"")))
    data = dict(attributes(info.get(_INFO_SLAVE_DATA, b"")))
    return BondMember(
        text(found.get(_IFNAME)),
        _one_of(_MII_STATES, number(data.get(_BOND_SLAVE_MII_STATUS))),
        number(data.get(_BOND_SLAVE_STATE)) == 0,
    )


def read_address(payload: bytes) -> tuple[int, str]:
    """The index of the device and the address with its prefix length."""
    _, length, _, _, index = _IFADDR.unpack_from(payload)
    found = dict(attributes(payload, _IFADDR.size))
    # For a point-to-point device, IFA_ADDRESS is the peer's address.
    address = ipaddress.ip_address(found.get(_IFA_LOCAL) or found[_IFA_ADDRESS])
    return index, f"{address}/{length}"


def link_event(kind: int, payload: bytes) -> LinkEvent | None:
    """Parse a message of the group RTNLGRP_LINK; None for other messages.

    A bridge's notifications of its members are skipped, because they have fewer attributes.
    """
    if not _is_of_device(kind, payload):
        return None
    *_, flags, _ = _IFINFO.unpack_from(payload)
    found = dict(attributes(payload, _IFINFO.size))
    info = dict(attributes(found.get(_LINKINFO, b"")))
    kind_of, data = text(info.get(_INFO_KIND)), dict(attributes(info.get(_INFO_DATA, b"")))
    return LinkEvent(
        gone=kind == DELLINK,
        name=text(found.get(_IFNAME)),
        alias=text(found[_IFALIAS]) if _IFALIAS in found else None,
        up=bool(flags & _IFF_UP),
        mtu=number(found.get(_MTU)),
        master=number(found.get(_MASTER)),
        carrier=bool(number(found.get(_CARRIER))),
        address=_mac(found.get(_ADDRESS, b"")) or None,
        bridge=_bridge(data) if kind_of == "bridge" else None,
        use=_tap_use(data) if kind_of == "tun" else None,
        port=_port_of(info, found),
    )


def port_event(kind: int, payload: bytes) -> tuple[str, PortOptions] | None:
    """Parse a bridge's notification of its port, its name and its options; None for other messages."""
    if kind != NEWLINK or len(payload) < _IFINFO.size or payload[0] != socket.AF_BRIDGE:
        return None
    found = dict(attributes(payload, _IFINFO.size))
    options = found.get(_PROTINFO) or found.get(_PROTINFO | _NESTED)
    if options is None:
        return None
    return text(found.get(_IFNAME)), _port_options(dict(attributes(options)), found)


def _is_of_device(kind: int, payload: bytes) -> bool:
    """Whether a message is a whole notification of a device, and not one of a bridge about its port."""
    if kind not in (NEWLINK, DELLINK) or len(payload) < _IFINFO.size:
        return False
    return bool(_IFINFO.unpack_from(payload)[0] == socket.AF_UNSPEC)


def _runs_ipv6(families: bytes) -> bool:
    inet6 = dict(attributes(families)).get(socket.AF_INET6, b"")
    conf = dict(attributes(inet6)).get(_INET6_CONF, b"")
    at = 4 * _DISABLE_IPV6
    return len(conf) > at and not number(conf[at : at + 4])


def _mac(value: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in value)


def _one_of(names: tuple[str, ...], index: int) -> str:
    return names[index] if index < len(names) else f"unknown ({index})"


def name_of(index: int) -> str:
    """The name of a device."""
    try:
        return socket.if_indextoname(index)
    except (OSError, OverflowError):
        return f"device {index}"  # removed meanwhile, or no number of a device

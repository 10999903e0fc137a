"""Messages of rtnetlink about network devices as values."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pyroute2.netlink.rtnl import RTM_DELLINK, RTM_NEWLINK
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP, ifinfmsg, protinfo_bridge

from netplugin.host import link_values as values
from netplugin.host.rtnetlink_messages import Attributes, Message

#: RTEXT_FILTER_SKIP_STATS of include/uapi/linux/rtnetlink.h.
SKIP_STATISTICS = 8
FLOODS = ("flood", "mcast_flood", "bcast_flood")  # of unknown unicast, multicast, broadcast
_FORWARDING = 3  # BR_STATE_FORWARDING
#: Options of a bridge port by iproute2's names: the kernel's name (IFLA_BRPORT_*), and what a new port has.
PORT_OPTIONS = {
    "hairpin": ("MODE", 0),
    "root_block": ("PROTECT", 0),
    "fastleave": ("FAST_LEAVE", 0),
    "proxy_arp": ("PROXYARP", 0),
    "proxy_arp_wifi": ("PROXYARP_WIFI", 0),
    "mcast_to_unicast": ("MCAST_TO_UCAST", 0),
    **{name: (name.upper(), 0) for name in ("guard", "isolated", "locked", "mab", "backup_port")},
    **{name: (name.upper(), 0) for name in ("backup_nhid", "vlan_tunnel", "group_fwd_mask")},
    **{name: (name.upper(), 0) for name in ("neigh_suppress", "neigh_vlan_suppress")},
    "state": ("STATE", _FORWARDING),
    "flood": ("UNICAST_FLOOD", 1),
    **{name: (name.upper(), 1) for name in ("learning", "mcast_flood", "bcast_flood")},
}
_CARRIES = ("UNKNOWN", "UP", None)  # the bridge sets such a port to forward
#: The attributes of devices that are plain numbers, by our fields.
OPTIONS: Mapping[type[values.Made], Mapping[str, str]] = {
    values.Vlan: {"id": "IFLA_VLAN_ID", "protocol": "IFLA_VLAN_PROTOCOL"},
    values.Vxlan: {
        "vni": "IFLA_VXLAN_ID",
        "port": "IFLA_VXLAN_PORT",
        "learning": "IFLA_VXLAN_LEARNING",
        "ttl": "IFLA_VXLAN_TTL",
        "df": "IFLA_VXLAN_DF",
    },
}
#: The options of ``Bridge`` that are plain numbers (IFLA_BR_*).
_BRIDGE_OPTIONS = tuple(each.name for each in fields(values.Bridge) if each.name != "booleans")
# drivers/net/bonding: bond_opts in bond_options.c
_BOND_MODES = tuple("balance-rr active-backup balance-xor broadcast 802.3ad balance-tlb balance-alb".split())
_HASH_POLICIES = ("layer2", "layer3+4", "layer2+3", "encap2+3", "encap3+4", "vlan+srcmac")
_MII_STATES = ("up", "going down", "down", "coming back")


def kind_of(message: Message) -> str:
    return message.attributes.nest("IFLA_LINKINFO").text("IFLA_INFO_KIND")


def identity(message: Message) -> tuple[str, str, str]:
    """Name, alias and kind of a device, without decoding the rest."""
    found = message.attributes
    return found.text("IFLA_IFNAME"), found.text("IFLA_IFALIAS"), kind_of(message)


def read_link(message: Message) -> values.Link:
    found = message.attributes
    info = found.nest("IFLA_LINKINFO")
    # The names of the options depend on the kind.
    kind = info.text("IFLA_INFO_KIND")
    data = info.nest_as("IFLA_INFO_DATA", ifinfmsg.ifinfo.data_map.get(kind))
    tun = data if kind == "tun" else None
    return values.Link(
        index=message["index"],
        name=found.text("IFLA_IFNAME"),
        kind=kind,
        mtu=found.number("IFLA_MTU"),
        up=bool(message["flags"] & IFF_UP),
        carrier=bool(found.number("IFLA_CARRIER")),
        master=name_of(found.number("IFLA_MASTER")) if "IFLA_MASTER" in found else None,
        alias=found.text("IFLA_IFALIAS") if "IFLA_IFALIAS" in found else None,
        address=found.mac("IFLA_ADDRESS") or None,
        altnames=found.nest("IFLA_PROP_LIST").texts("IFLA_ALT_IFNAME"),
        group=found.number("IFLA_GROUP"),
        ipv6=_runs_ipv6(found),
        qdisc=found.text("IFLA_QDISC"),
        multi_queue=bool(tun and tun.number("IFLA_TUN_MULTI_QUEUE")),
        use=_tap_use(tun) if tun else values.TapUse(),
        port=_port_of(info, found),
        xdp=bool(found.nest("IFLA_XDP").value("IFLA_XDP_ATTACHED")),
        data=_data(kind, data, found),
    )


def _tap_use(tun: Attributes) -> values.TapUse:
    names = ("IFLA_TUN_OWNER", "IFLA_TUN_GROUP")
    owner, group = (tun.number(name) if name in tun else None for name in names)
    return values.TapUse(owner, group, bool(tun.number("IFLA_TUN_PERSIST")))


def _port_of(info: Attributes, link: Attributes) -> values.PortOptions:
    """The options of a bridge port; those of a new one for what is none."""
    if info.text("IFLA_INFO_SLAVE_KIND") != "bridge":
        return values.PortOptions()
    return _port_options(info.nest_as("IFLA_INFO_SLAVE_DATA", protinfo_bridge), link)


def _port_options(port: Attributes, link: Attributes) -> values.PortOptions:
    has = {name: port.number(f"IFLA_BRPORT_{kernels}") for name, (kernels, _) in PORT_OPTIONS.items()}
    floods = {bool(has[name]) for name in FLOODS}
    others = {name for name, (_, new) in PORT_OPTIONS.items() if has[name] and not new}
    if link.value("IFLA_OPERSTATE") in _CARRIES and has["state"] != _FORWARDING:
        others.add("state")
    flooding = floods.pop() if len(floods) == 1 else None
    return values.PortOptions(bool(has["learning"]), flooding, frozenset(others))


def _data(kind: str, data: Attributes, link: Attributes) -> values.Made | values.LinuxBond | None:
    match kind:
        case "bridge":
            return _bridge(data)
        case "vlan":
            # With this attribute, the parent's index belongs to another namespace.
            parent = "" if "IFLA_LINK_NETNSID" in link else name_of(link.number("IFLA_LINK"))
            return values.Vlan(parent, **_options(values.Vlan, data))
        case "vxlan":
            local = data.address("IFLA_VXLAN_LOCAL") or data.address("IFLA_VXLAN_LOCAL6")
            return values.Vxlan(local=local, **_options(values.Vxlan, data))
        case "ifb":
            return values.Ifb()
        case "bond":
            partner = data.nest("IFLA_BOND_AD_INFO").mac("IFLA_BOND_AD_INFO_PARTNER_MAC")
            return values.LinuxBond(
                _one_of(_BOND_MODES, data.number("IFLA_BOND_MODE")),
                _one_of(_HASH_POLICIES, data.number("IFLA_BOND_XMIT_HASH_POLICY")),
                partner if partner.strip("0:") else "",
            )
    return None


def _options(kind: type[values.Made], data: Attributes) -> dict[str, Any]:
    return {name: data.number(attribute) for name, attribute in OPTIONS[kind].items()}


def _bridge(data: Attributes) -> values.Bridge:
    options: dict[str, Any] = {name: data.number(f"IFLA_BR_{name.upper()}") for name in _BRIDGE_OPTIONS}
    if "IFLA_BR_FDB_MAX_LEARNED" not in data:
        options["fdb_max_learned"] = None
    return values.Bridge(**options, booleans=data.fields("IFLA_BR_MULTI_BOOLOPT").get("optval", 0))


def read_bridge_port(message: Message) -> tuple[int, values.BridgePort]:
    """The index of a bridge port, and what it is."""
    found = message.attributes
    port = values.BridgePort(found.text("IFLA_IFNAME"), found.number("IFLA_MTU"), found.number("IFLA_MASTER"))
    return message["index"], port


def bridge_port_event(message: Message) -> tuple[int, values.BridgePort | None] | None:
    """The index of a device that has changed, and what it is on a bridge (None: nothing).

    None for messages that are no notifications of devices. See ``link_event``.
    """
    if not _is_of_device(message):
        return None
    info = message.attributes.nest("IFLA_LINKINFO")
    if message.kind == RTM_DELLINK or info.text("IFLA_INFO_SLAVE_KIND") != "bridge":
        return message["index"], None
    return read_bridge_port(message)


def read_bond_member(message: Message) -> values.BondMember:
    found = message.attributes
    info = found.nest("IFLA_LINKINFO")
    data = info.nest_as("IFLA_INFO_SLAVE_DATA", ifinfmsg.ifinfo.bond_slave_data)
    return values.BondMember(
        found.text("IFLA_IFNAME"),
        _one_of(_MII_STATES, data.number("IFLA_BOND_SLAVE_MII_STATUS")),
        data.number("IFLA_BOND_SLAVE_STATE") == 0,
    )


def read_address(message: Message) -> tuple[int, str]:
    """The index of the device and the address with its prefix length."""
    found = message.attributes
    # For a point-to-point device, IFA_ADDRESS is the peer's address.
    address = found.address("IFA_LOCAL") or found.address("IFA_ADDRESS")
    return message["index"], f"{address}/{message['prefixlen']}"


def link_event(message: Message) -> values.LinkEvent | None:
    """Parse a message of the group RTNLGRP_LINK; None for other messages.

    A bridge's notifications of its members are skipped, because they have fewer attributes.
    """
    if not _is_of_device(message):
        return None
    return values.LinkEvent(read_link(message), message.kind == RTM_DELLINK)


def port_event(message: Message) -> tuple[str, values.PortOptions] | None:
    """Parse a bridge's notification of its port, its name and its options; None for other messages."""
    if message.kind != RTM_NEWLINK or message["family"] != socket.AF_BRIDGE:
        return None
    found = message.attributes
    if "IFLA_PROTINFO" not in found:
        return None
    return found.text("IFLA_IFNAME"), _port_options(found.nest_as("IFLA_PROTINFO", protinfo_bridge), found)


def _is_of_device(message: Message) -> bool:
    """Whether a message is a whole notification of a device, and not one of a bridge about its port."""
    is_of_link = message.kind in (RTM_NEWLINK, RTM_DELLINK)
    return bool(is_of_link and message["family"] == socket.AF_UNSPEC)


def _runs_ipv6(link: Attributes) -> bool:
    inet6 = link.nest_as("IFLA_AF_SPEC", ifinfmsg.af_spec_inet).nest("AF_INET6")
    return bool(inet6.fields("IFLA_INET6_CONF").get("disable_ipv6", 1) == 0)


def _one_of(names: tuple[str, ...], index: int) -> str:
    return names[index] if index < len(names) else f"unknown ({index})"


def name_of(index: int) -> str:
    """The name of a device. Raises: OSError if the kernel cannot say it."""
    try:
        return socket.if_indextoname(index)
    except OverflowError:
        pass
    except OSError as refused:
        if refused.errno not in (errno.ENXIO, errno.ENODEV):
            raise
    return f"device {index}"  # removed meanwhile, or no number of a device

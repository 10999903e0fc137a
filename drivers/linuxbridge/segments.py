"""Segments: the devices that a network has on this host.

A segment is a bridge with at most one uplink: none, the operator's interface (flat), a VLAN device on
that interface (vlan), or a VXLAN device (vxlan). The agent creates the last two. All network types use
this mechanism rather than one VLAN-filtering bridge for all networks:

- Segments are isolated by construction: no path leads from one bridge to another, and there is no VLAN
  list or PVID to misconfigure.
- A flat network and VLANs can share an interface. The kernel passes a tagged frame to the VLAN device
  before the bridge on the interface sees it (``__netif_receive_skb_core`` in net/core/dev.c calls
  ``vlan_do_receive`` before ``rx_handler``), and tags sent frames in the NIC if the NIC supports it.
- A VXLAN network needs a device of its own in either design.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from netplugin.api.models import Network
from netplugin.host.link_values import Bridge, Ifb, Link, Made
from netplugin.host.names import (
    BRIDGE,
    SHAPER,
    TAP,
    UPLINK,
    VXLAN,
    device_name,
    is_our_device,
    provisional_mac,
)

PORT_MARK = "netplugin-port="
SERVICE_MARK = "netplugin-service-port="
BRIDGE_MARK = "netplugin-bridge="
UPLINK_MARK = "netplugin-uplink="
SHAPER_MARK = "netplugin-shaper="
_WITH_UPLINK = " uplink="
_WITH_STAMP = " store="
_OVERLAY = "vxlan/"
_SERVICE = re.compile(rf"{SERVICE_MARK}(?P<port>\S+) device=(?P<device>\S+) mtu=(?P<mtu>[0-9]{{1,5}})")

_KINDS = {BRIDGE: "bridge", UPLINK: "vlan", VXLAN: "vxlan", SHAPER: "ifb"}


@dataclass(frozen=True, order=True)
class Segment:
    """One network on this host, identified by its key.

    Keys are ``physnet1``, ``physnet1:100`` or ``vxlan/blue``: names contain neither colon nor slash.
    """

    physical_network: str = ""
    vlan_id: int | None = None
    network_id: str = ""

    @classmethod
    def of(cls, network: Network) -> Self:
        if network.type == "vxlan":
            return cls(network_id=str(network.network_id))
        return cls(str(network.physical_network), network.vlan_id)

    @classmethod
    def parse(cls, key: str) -> Self | None:
        """Parse a key; None if it is invalid."""
        if key.startswith(_OVERLAY):
            return cls(network_id=key.removeprefix(_OVERLAY))
        network, is_vlan, tag = key.partition(":")
        if is_vlan and not tag.isdecimal():
            return None
        return cls(network, int(tag) if is_vlan else None)

    @property
    def key(self) -> str:
        if self.network_id:
            return _OVERLAY + self.network_id
        return self.physical_network + (f":{self.vlan_id}" if self.vlan_id is not None else "")

    @property
    def bridge(self) -> str:
        return device_name(BRIDGE, self.key)

    @property
    def device(self) -> str:
        """The name of the uplink device that the agent makes; empty for a flat network."""
        if self.network_id:
            return device_name(VXLAN, self.key)
        return device_name(UPLINK, self.key) if self.vlan_id is not None else ""

    def __str__(self) -> str:
        if self.network_id:
            return f"network {self.network_id}"
        vlan = f"VLAN {self.vlan_id} of " if self.vlan_id is not None else ""
        return vlan + self.physical_network


@dataclass(frozen=True)
class SegmentDevice:
    """The desired state of one device of ours other than a tap."""

    name: str
    alias: str
    made: Made
    mtu: int
    #: The name that the caller chose for a bridge, which then has ``name`` as its alternative one.
    given: str = ""

    @property
    def address(self) -> str:
        return provisional_mac(self.name)

    def must_be_remade(self, link: Link) -> bool:
        """Whether the device must be recreated: only a bridge's options can be changed live."""
        same_kind = isinstance(link.data, type(self.made))
        return not same_kind or (link.data != self.made and not isinstance(self.made, Bridge))

    def differs(self, link: Link) -> bool:
        """Whether an attribute that can be changed live differs from the desired state."""
        return (link.mtu, link.up, link.ipv6, link.alias) != (self.mtu, True, False, self.alias)


def bridge_of(segment: Segment, uplink: str, mtu: int, given: str = "") -> SegmentDevice:
    """Return the desired bridge. Its mark names the uplink that we attached and may detach."""
    mark = BRIDGE_MARK + segment.key + (_WITH_UPLINK + uplink) * bool(uplink)
    return SegmentDevice(segment.bridge, mark, Bridge(), mtu, given)


def shaper_of(port_id: str, mtu: int) -> SegmentDevice:
    """Return the desired shaper: the ifb whose queue limits what the port's VM sends."""
    return SegmentDevice(device_name(SHAPER, port_id), SHAPER_MARK + port_id, Ifb(), mtu)


def bridge_mark(alias: str | None) -> tuple[Segment, str] | None:
    """Return the segment and the uplink that a bridge's alias names; None if it is no mark."""
    if alias is None or not alias.startswith(BRIDGE_MARK):
        return None
    key, _, uplink = alias.removeprefix(BRIDGE_MARK).partition(_WITH_UPLINK)
    segment = Segment.parse(key)
    return (segment, uplink) if segment else None


def is_ours(link: Link) -> bool:
    """Whether a link has our mark and the matching name. A link without an alias, left by an agent that
    died before it set one, is recognized by kind, name and MAC address."""
    alias = link.alias or ""
    if link.alias is None:
        kind = _KINDS.get(link.name[:3])
        return kind == link.kind and link.address == provisional_mac(link.name)
    if alias.startswith(BRIDGE_MARK):
        mark = bridge_mark(alias)
        return mark is not None and mark[0].bridge in (link.name, *link.altnames)
    if alias.startswith(UPLINK_MARK):
        segment = Segment.parse(alias.removeprefix(UPLINK_MARK))
        return segment is not None and link.name == segment.device
    return port_of(link) is not None or service_of(link) is not None


@dataclass(frozen=True)
class ServiceMark:
    """The mark of a service port's device, which other programs made: its alias.

    ``mtu`` is that of the network: the device may have a larger one.
    """

    port_id: str
    device: str
    mtu: int

    @property
    def alias(self) -> str:
        return f"{SERVICE_MARK}{self.port_id} device={self.device} mtu={self.mtu}"


def service_of(link: Link) -> ServiceMark | None:
    """Return the mark of a service port's device if the link has the name that the mark gives."""
    found = _SERVICE.fullmatch(without_stamp(link.alias))
    if found is None or link.name != found["device"] or is_our_device(link.name):
        return None
    return ServiceMark(found["port"], found["device"], int(found["mtu"]))


def port_of(link: Link) -> str | None:
    """Return the port of a tap or shaper, from its mark if the link has the matching name.

    A tap whose name was chosen has this name as an alternative one."""
    for mark, prefix in ((PORT_MARK, TAP), (SHAPER_MARK, SHAPER)):
        port_id = marked_port(link.alias or "", mark)
        if port_id and device_name(prefix, port_id) in (link.name, *link.altnames):
            return port_id
    return None


def marked_port(alias: str, mark: str) -> str:
    """Return the port ID that an alias names after this mark; empty if none."""
    return alias.removeprefix(mark).partition(" ")[0] if alias.startswith(mark) else ""


def with_stamp(mark: str, stamp: str) -> str:
    """Return the alias of a port's device, including the mark of the store if there is one."""
    return mark + (_WITH_STAMP + stamp) * bool(stamp)


def without_stamp(alias: str | None) -> str:
    return (alias or "").partition(_WITH_STAMP)[0]


def stamp_of(link: Link) -> str:
    """Return the mark of the store that wrote the alias of a port's device; empty if none."""
    return (link.alias or "").partition(_WITH_STAMP)[2]

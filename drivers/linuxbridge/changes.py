"""What the linuxbridge backend can do to a host, each step as a value."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from netplugin.backend import Change
from netplugin.host.links import BRIDGE_OPTIONS, Link
from netplugin.models import PortSpec

BACKEND = "linuxbridge"
PORT_MARK = "netplugin-port="
BRIDGE_MARK = "netplugin-bridge="
_UPLINK_MARK = " uplink="


@dataclass(frozen=True)
class Tap:
    """All that is wanted of one port's tap; made from its spec alone."""

    port_id: str
    name: str
    bridge: str
    mtu: int
    multi_queue: bool

    @property
    def alias(self) -> str:
        return PORT_MARK + self.port_id

    def must_be_remade(self, link: Link) -> bool:
        """Whether the tap must go and come again: the kernel changes neither on a live one."""
        return link.kind != "tun" or link.multi_queue != self.multi_queue

    def differs(self, link: Link) -> bool:
        """Whether what can be changed live is not as wanted.

        ``vnet_hdr`` is not looked at: whoever opens the tap sets it as it needs it.
        """
        return (link.mtu, link.up, link.master, link.ipv6) != (self.mtu, True, self.bridge, False)


@dataclass(frozen=True)
class Bridge:
    """All that is wanted of one bridge. ``uplink`` is empty for a network of this host alone."""

    name: str
    physical_network: str
    uplink: str
    mtu: int

    @property
    def alias(self) -> str:
        """The mark also tells which interface we put on the bridge, and so may take off again."""
        return (
            BRIDGE_MARK + self.physical_network + (_UPLINK_MARK + self.uplink) * bool(self.uplink)
        )

    @property
    def address(self) -> str:
        """A bridge is known by it before it has its alias, should its maker die in between.

        Locally administered, and unlike the members' addresses it stays as ports come and go.
        """
        digest = hashlib.sha256(self.physical_network.encode()).digest()
        return ":".join(f"{byte:02x}" for byte in (0x0E, *digest[:5]))

    def differs(self, link: Link) -> bool:
        return (
            (link.mtu, link.up, link.ipv6, link.alias) != (self.mtu, True, False, self.alias)
            or dict(link.options) != dict(BRIDGE_OPTIONS)
        )  # fmt: skip


def bridge_mark(alias: str | None) -> tuple[str, str] | None:
    """The physical network and the uplink that a bridge's alias names; None if it is no mark."""
    if alias is None or not alias.startswith(BRIDGE_MARK):
        return None
    network, _, uplink = alias.removeprefix(BRIDGE_MARK).partition(_UPLINK_MARK)
    return network, uplink


@dataclass(frozen=True)
class CreateBridge(Change):
    bridge: Bridge

    def describe(self) -> str:
        return f"create bridge {self.bridge.name} for {self.bridge.physical_network}"


@dataclass(frozen=True)
class SetBridge(Change):
    bridge: Bridge

    def describe(self) -> str:
        return f"set bridge {self.bridge.name}: MTU {self.bridge.mtu}, up, no STP, no IPv6, mark"


@dataclass(frozen=True)
class RemoveBridge(Change):
    name: str
    physical_network: str

    def describe(self) -> str:
        return f"remove bridge {self.name}, which no port needs any more"


@dataclass(frozen=True)
class AddUplink(Change):
    bridge: str
    interface: str

    def describe(self) -> str:
        return f"put {self.interface} on {self.bridge}"


@dataclass(frozen=True)
class RemoveUplink(Change):
    bridge: str
    interface: str

    def describe(self) -> str:
        return f"take {self.interface} off {self.bridge}"


@dataclass(frozen=True)
class CreateTap(Change):
    """The tap is down and on no bridge: its filter comes first."""

    tap: Tap

    def describe(self) -> str:
        queues = "several queues" if self.tap.multi_queue else "one queue"
        return f"create tap {self.tap.name} with {queues}"


@dataclass(frozen=True)
class SetTap(Change):
    tap: Tap

    def describe(self) -> str:
        return f"put tap {self.tap.name} on {self.tap.bridge}, MTU {self.tap.mtu}, up, no IPv6"


@dataclass(frozen=True)
class RemoveTap(Change):
    name: str
    port_id: str

    def describe(self) -> str:
        return f"remove tap {self.name}"


@dataclass(frozen=True)
class FilterChange(Change):
    """A change of nftables: those that follow each other share a transaction."""


@dataclass(frozen=True)
class SetBase(FilterChange):
    """Put the table and its base chains right. ``remake`` are chains whose hook is wrong."""

    remake: tuple[str, ...] = ()

    def describe(self) -> str:
        return "set the base of nftables table bridge netplugin"


@dataclass(frozen=True)
class SetFilter(FilterChange):
    """Replace the rules of one port. ``relink``: its entry in the map leads elsewhere."""

    name: str
    port_id: str
    spec: PortSpec
    relink: bool = False

    def describe(self) -> str:
        count = len(self.spec.port_security.allowed_addresses)
        what = f"{count} addresses" if self.spec.port_security.enabled else "no filter"
        return f"set nftables chain {self.name} ({what})"


@dataclass(frozen=True)
class RemoveFilter(FilterChange):
    """Remove a chain and its entry in the map, whichever of them is there."""

    name: str
    chain: bool
    linked: bool

    def describe(self) -> str:
        return f"remove nftables chain {self.name}"


@dataclass(frozen=True)
class RemoveTable(FilterChange):
    def describe(self) -> str:
        return "remove nftables table bridge netplugin, which no port needs any more"

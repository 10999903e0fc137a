"""Changes of nftables that the backend can make: rules of ports, and who may send into VXLAN networks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from drivers.linuxbridge import filters
from drivers.linuxbridge.commands import BridgeChange, BridgeKernel
from netplugin.api.models import PortSpec
from netplugin.host.nftables import (
    AddElement,
    AddMap,
    AddTable,
    Command,
    DeleteChain,
    DeleteElement,
    DeleteTable,
    SetChain,
)
from netplugin.host.vxlan_filter import VxlanKey


@dataclass(frozen=True)
class FilterChange(BridgeChange, ABC):
    """A change of the table of ports. Consecutive ones share a transaction."""

    part: ClassVar[str] = "nftables"

    @abstractmethod
    def commands(self) -> list[Command]:
        """Return the commands, as a part of a transaction."""

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        kernel.nft.commit(self.commands(), deadline)


@dataclass(frozen=True)
class SetBase(FilterChange):
    """Create or correct the table and its base chains. ``remake``: chains with a wrong hook."""

    described_as = "set the base of nftables table bridge netplugin"
    closes, blocks = True, True
    remake: tuple[str, ...] = ()

    def commands(self) -> list[Command]:
        return [
            AddTable(),
            *(AddMap(name) for name in filters.MAPS),
            *(DeleteChain(name) for name in self.remake),
            *(SetChain(name, chain) for name, chain in filters.BASE.items()),
        ]


@dataclass(frozen=True)
class SetFilter(FilterChange):
    """Replace the rules of one port, in the chain ``name``, which frames from ``device`` meet.

    ``relink``: the device's map entry points to another chain.
    """

    closes, blocks = True, True
    name: str
    port_id: str
    spec: PortSpec
    device: str
    relink: bool = False

    def describe(self) -> str:
        count = len(self.spec.port_security.allowed_addresses)
        what = f"{count} addresses" if self.spec.port_security.enabled else "no filter"
        return f"set nftables chain {self.name} ({what})"

    def commands(self) -> list[Command]:
        return [
            SetChain(self.name, filters.port_chain(self.port_id, self.spec)),
            *[DeleteElement(filters.PORTS, self.device)] * self.relink,
            AddElement(filters.PORTS, self.device, self.name),
            *[AddElement(filters.SERVICES, self.device, None)] * (self.spec.device is not None),
        ]


@dataclass(frozen=True)
class ShutOut(FilterChange):
    """Drop what comes from a device that others put on a bridge of ours. ``relink``: it has a map entry."""

    described_as = "drop what enters a bridge of ours from {self.name}, which is no port of ours"
    closes, blocks = True, True
    name: str
    relink: bool

    def commands(self) -> list[Command]:
        unlink = [DeleteElement(filters.PORTS, self.name)] * self.relink
        return [*unlink, AddElement(filters.PORTS, self.name, None)]


@dataclass(frozen=True)
class RemoveFilter(FilterChange):
    """Remove a chain (unless its name is empty), and entries of maps: their keys, each with its map."""

    name: str
    entries: tuple[tuple[str, str], ...]

    def describe(self) -> str:
        keys = ", ".join(sorted({key for _, key in self.entries}))
        chain = [f"nftables chain {self.name}"] * bool(self.name)
        return "remove " + " and ".join([*chain, *[f"the nftables rules of device {keys}"] * bool(keys)])

    def commands(self) -> list[Command]:
        unlink = [DeleteElement(name, key) for name, key in self.entries]
        return [*unlink, *([DeleteChain(self.name)] if self.name else [])]


@dataclass(frozen=True)
class RemoveTable(FilterChange):
    described_as = "remove nftables table bridge netplugin, which no port needs any more"

    def commands(self) -> list[Command]:
        return [DeleteTable()]


@dataclass(frozen=True)
class SetStoreMark(FilterChange):
    """Write the mark of the store; it goes with every other change of the table."""

    described_as = "set the mark of the store in nftables table bridge netplugin"
    mark: str

    def commands(self) -> list[Command]:
        return [SetChain(filters.STORE, filters.store_chain(self.mark))]


# -- who may send into VXLAN networks: one transaction per network, since few change at a time -----


@dataclass(frozen=True)
class AllowPeers(BridgeChange):
    """Accept VXLAN packets of a network from its peers only; ``gone``: peers to remove.

    ``base``: the table is missing, or its rules are not as intended.
    """

    part, closes, blocks = "nftables", True, True
    network: VxlanKey
    peers: frozenset[str]
    gone: frozenset[str] = frozenset()
    base: bool = True

    def describe(self) -> str:
        vni, port = self.network.vni, self.network.udp_port
        return f"let {len(self.peers)} peers alone send to VNI {vni} on UDP port {port}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        kernel.vxlan.allow(self.network, self.peers, self.gone, deadline, base=self.base)


@dataclass(frozen=True)
class ForgetPeers(BridgeChange):
    described_as = "forget who may send to VNI {self.network.vni} on UDP port {self.network.udp_port}"
    part = "nftables"
    network: VxlanKey
    peers: frozenset[str]

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        kernel.vxlan.forget(self.network, self.peers, deadline)


@dataclass(frozen=True)
class RemoveVxlanTable(BridgeChange):
    described_as, part = "remove nftables table inet netplugin, which no network needs any more", "nftables"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        kernel.vxlan.remove(deadline)

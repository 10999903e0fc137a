"""The changes that the linuxbridge backend can make to a host: what each does, and to which devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from drivers.linuxbridge import filters
from drivers.linuxbridge.model import Tap
from drivers.linuxbridge.obstacles import ObstacleReader
from drivers.linuxbridge.segments import PORT_MARK, SegmentDevice, is_ours, marked_port, service_of
from netplugin.api.errors import Conflict
from netplugin.api.models import PortSpec
from netplugin.backend import Change
from netplugin.host.bridge_members import BridgeMembers
from netplugin.host.cbpf import BpfProgram
from netplugin.host.fdb import Fdb
from netplugin.host.link_values import Bridge, Ifb, Link, Vlan, Vxlan
from netplugin.host.links import Links
from netplugin.host.nfnetlink import Nfnetlink
from netplugin.host.nftables import (
    AddElement,
    AddMap,
    AddTable,
    Command,
    DeleteChain,
    DeleteElement,
    DeleteTable,
    Nftables,
    SetChain,
)
from netplugin.host.tc import Tbf, Tc
from netplugin.host.vxlan_filter import VxlanFilter


@dataclass(frozen=True)
class BridgeKernel:
    """The kernel interfaces that the backend uses. Tests substitute models."""

    links: Links = field(default_factory=Links)
    fdb: Fdb = field(default_factory=Fdb)
    tc: Tc = field(default_factory=Tc)
    nft: Nftables = field(default_factory=lambda: Nftables(filters.FAMILY, filters.TABLE))
    vxlan: VxlanFilter = field(default_factory=lambda: VxlanFilter(""))
    members: BridgeMembers = field(default_factory=lambda: BridgeMembers(Links()))
    obstacles: ObstacleReader = field(default_factory=lambda: ObstacleReader(Nfnetlink()))

    @classmethod
    def make(cls, local_ip: str) -> BridgeKernel:
        """``local_ip``: where the tunnels of this host end; empty if it has none."""
        kernel = Nfnetlink()
        return cls(
            nft=Nftables(filters.FAMILY, filters.TABLE, kernel),
            vxlan=VxlanFilter(local_ip, kernel),
            obstacles=ObstacleReader(kernel),
        )

    def ours(self, name: str) -> Link | None:
        """Return the link, read just before it is changed; None if it is missing or not ours."""
        link = self.links.get(name)
        return link if link is not None and is_ours(link) else None


@dataclass(frozen=True)
class BridgeChange(Change, ABC):
    """One change of the host. A device that is missing or not ours is left alone: the read-back tells."""

    #: Where its time counts in ``Applied.timings_ms``.
    part: ClassVar[str] = "netlink"
    #: Whether no port that it is for may be opened if it fails: what follows is skipped unless it ``closes``.
    blocks: ClassVar[bool] = False

    def touches(self) -> frozenset[str]:
        """Return the names of the devices whose events the change causes."""
        return frozenset()

    @abstractmethod
    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        """Make the change before ``deadline`` (monotonic, seconds).

        Raises: BackendUnavailable, Conflict, HostError, OperationTimeout.
        """


def device_in_the_way(name: str) -> Conflict:
    """The error for a name that a device of others has."""
    return Conflict(
        f"a device named {name} exists and is not ours",
        step="plan",
        fix=f"rename or remove it: ip link delete {name}",
    )


# -- bridges, uplinks and shapers ------------------------------------------------------------------


@dataclass(frozen=True)
class CreateDevice(BridgeChange):
    """Create a bridge, an uplink or a shaper. It is no member of a bridge, and an uplink is down."""

    device: SegmentDevice

    def describe(self) -> str:
        match self.device.made:
            case Bridge():
                what = "bridge"
            case Vlan(parent, tag):
                what = f"VLAN {tag} of {parent} as"
            case Vxlan(vni, local, port):
                what = f"VXLAN {vni} from {local} port {port} as"
            case Ifb():
                what = "shaper"
        return f"create {what} {self.device.given or self.device.name}, MTU {self.device.mtu}"

    def touches(self) -> frozenset[str]:
        return frozenset({self.device.name})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        device = self.device
        kernel.links.create(
            device.given or device.name,
            device.made,
            alias=device.alias,
            address=device.address,
            mtu=device.mtu,
            altname=device.name if device.given else "",
        )
        if isinstance(device.made, Bridge | Ifb):
            kernel.links.set(device.name, up=True)


@dataclass(frozen=True)
class SetDevice(BridgeChange):
    device: SegmentDevice

    def describe(self) -> str:
        return f"set {self.device.name}: MTU {self.device.mtu}, up, options, no IPv6, mark"

    def touches(self) -> frozenset[str]:
        return frozenset({self.device.name})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        device = self.device
        if (link := kernel.ours(device.name)) is None:
            return
        kernel.links.refuse_ipv6(link.name)
        kernel.links.set(device.name, mtu=device.mtu, alias=device.alias, up=True)


@dataclass(frozen=True)
class SetBridge(BridgeChange):
    """Set one option of a bridge: one that cannot be set keeps no other from it."""

    closes = True
    name: str
    desired: Bridge
    option: str

    def describe(self) -> str:
        return f"set {self.option} of bridge {self.name} to {getattr(self.desired, self.option)}"

    def touches(self) -> frozenset[str]:
        return frozenset({self.name})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.ours(self.name) is not None:
            kernel.links.set_bridge_option(self.name, self.desired, self.option)


@dataclass(frozen=True)
class ResetPort(BridgeChange):
    """Set one option of a port of a bridge of ours as the bridge sets it for a new port."""

    closes = True
    name: str
    bridge: str
    option: str

    def describe(self) -> str:
        return f"set {self.option} of {self.name} on {self.bridge} back"

    def touches(self) -> frozenset[str]:
        return frozenset({self.name})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        port, bridge = kernel.links.get(self.name), kernel.ours(self.bridge)
        if port is not None and bridge is not None and port.master == bridge.name:
            kernel.links.reset_port_option(self.name, self.option)


@dataclass(frozen=True)
class RemoveDevice(BridgeChange):
    name: str

    def describe(self) -> str:
        return f"remove {self.name}, which nothing needs any more"

    def touches(self) -> frozenset[str]:
        return frozenset({self.name})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        link = kernel.ours(self.name)
        if link is not None and service_of(link) is None:
            kernel.links.delete(self.name)


@dataclass(frozen=True)
class UplinkChange(BridgeChange, ABC):
    """A change of the membership of an uplink, which may be the operator's."""

    bridge: str
    interface: str

    def touches(self) -> frozenset[str]:
        return frozenset({self.bridge, self.interface})


@dataclass(frozen=True)
class AddUplink(UplinkChange):
    def describe(self) -> str:
        return f"put {self.interface} on {self.bridge}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.ours(self.bridge) is not None:
            kernel.links.set(self.interface, master=self.bridge)


@dataclass(frozen=True)
class RemoveUplink(UplinkChange):
    def describe(self) -> str:
        return f"take {self.interface} off {self.bridge}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        interface, bridge = kernel.links.get(self.interface), kernel.links.get(self.bridge)
        if interface is not None and bridge is not None and interface.master == bridge.name:
            kernel.links.set(self.interface, master="")


# -- what a device of ours has: peers, a guard, a rate ---------------------------------------------


@dataclass(frozen=True)
class AttributeChange(BridgeChange, ABC):
    """A change of what a device of ours has in addition to its link attributes."""

    device: str

    def touches(self) -> frozenset[str]:
        return frozenset({self.device})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if (link := kernel.ours(self.device)) is not None:
            self.write(kernel, link.index)

    @abstractmethod
    def write(self, kernel: BridgeKernel, index: int) -> None:
        """Make the change to the device with this index. Raises: see ``apply``."""


@dataclass(frozen=True)
class SetAddress(AttributeChange):
    """Give a device its own MAC back: a bridge keeps the frames to the MACs of its ports for the host."""

    closes = True
    address: str

    def describe(self) -> str:
        return f"give {self.device} its own MAC {self.address} back"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.links.set(self.device, address=self.address)


@dataclass(frozen=True)
class SetTapAddress(SetAddress):
    """A process that has a tap open can set its MAC (SIOCSIFHWADDR), and takes that of another VM so."""

    def describe(self) -> str:
        return f"{super().describe()}, which the process that has it open, or another, has changed"


@dataclass(frozen=True)
class AddPeer(AttributeChange):
    peer: str

    def describe(self) -> str:
        return f"send unknown destinations of {self.device} to {self.peer} too"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.fdb.add_peer(index, self.peer)


@dataclass(frozen=True)
class RemovePeer(AttributeChange):
    peer: str

    def describe(self) -> str:
        return f"send nothing of {self.device} to {self.peer} any more"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.fdb.remove_peer(index, self.peer)


@dataclass(frozen=True)
class SetGuard(AttributeChange):
    """Attach a BPF program to the ingress of a tap, or of a bridge to keep its frames from the host."""

    closes, blocks = True, True
    program: BpfProgram

    def describe(self) -> str:
        return f"guard what enters {self.device} ({self.program.length} instructions)"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.tc.set_guard(index, self.program)


@dataclass(frozen=True)
class SetRate(AttributeChange):
    """Limit what leaves the device: a tap for what the VM receives, a shaper for what it sends."""

    rate: Tbf

    def describe(self) -> str:
        return f"let {self.rate.kbps} kbit/s leave {self.device}"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.tc.set_root(index, self.rate)


@dataclass(frozen=True)
class RemoveRate(AttributeChange):
    def describe(self) -> str:
        return f"let what leaves {self.device} have any rate"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.tc.delete_root(index)


@dataclass(frozen=True)
class SetRedirect(AttributeChange):
    shaper: str

    def describe(self) -> str:
        return f"turn what enters {self.device} to {self.shaper} first"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        if (shaper := kernel.ours(self.shaper)) is not None:
            kernel.tc.set_redirect(index, shaper.index)


@dataclass(frozen=True)
class RemoveRedirect(AttributeChange):
    def describe(self) -> str:
        return f"turn what enters {self.device} to no other device"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.tc.delete_redirect(index)


# -- taps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TapChange(BridgeChange, ABC):
    tap: Tap

    def touches(self) -> frozenset[str]:
        return frozenset({self.tap.name, self.tap.bridge})


@dataclass(frozen=True)
class CreateTap(TapChange):
    """Create the tap, down and on no bridge: its filter and its rates are set first."""

    def describe(self) -> str:
        queues = "several queues" if self.tap.multi_queue else "one queue"
        return f"create tap {self.tap.name} with {queues}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        tap, links = self.tap, kernel.links
        there = links.get(tap.name)
        if there is None:
            links.create_tap(
                tap.name,
                tap.alias,
                address=tap.address,
                multi_queue=tap.multi_queue,
                mtu=tap.mtu,
                altname=tap.derived if tap.is_named else "",
                group=tap.group or 0,
            )
        elif tap.is_named and marked_port(there.alias or "", PORT_MARK) == tap.port_id:
            links.add_altname(tap.name, tap.derived)  # it is only not found by the port's ID
        else:
            raise device_in_the_way(tap.name)


@dataclass(frozen=True)
class RenameTap(TapChange):
    """Give a tap its name back."""

    found: str

    def describe(self) -> str:
        return f"rename {self.found} to {self.tap.name}"

    def touches(self) -> frozenset[str]:
        return super().touches() | {self.found}

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.links.get(self.tap.name) is not None:
            raise device_in_the_way(self.tap.name)
        if kernel.ours(self.found) is not None:
            kernel.links.rename(self.found, self.tap.name)


@dataclass(frozen=True)
class KeepForRoot(TapChange):
    """Let root alone open the tap, after a process that had it open has changed that."""

    def describe(self) -> str:
        return f"let root alone open tap {self.tap.name}, and keep it"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.ours(self.tap.name) is not None:
            kernel.links.keep_for_root(self.tap.name, multi_queue=self.tap.multi_queue)


@dataclass(frozen=True)
class SetMacs(TapChange):
    """Set what the bridge knows of a tap: the MACs that are there, and what it sends to it."""

    closes = True

    def describe(self) -> str:
        return f"let {self.tap.bridge} have at tap {self.tap.name}: {_macs(self.tap)}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if (link := kernel.ours(self.tap.name)) is not None:
            set_macs(kernel, link.index, self.tap)


@dataclass(frozen=True)
class MoveMac(SetMacs):
    """Only where the bridge has the MAC changes, because the VM took its VF or gave it back."""

    follows_guest = True


@dataclass(frozen=True)
class SetTap(TapChange):
    def describe(self) -> str:
        where = f"put tap {self.tap.name} on {self.tap.bridge}"
        return f"{where}, MTU {self.tap.mtu}, up, no IPv6, {_macs(self.tap)}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        tap, links = self.tap, kernel.links
        link, bridge = kernel.ours(tap.name), kernel.ours(tap.bridge)
        if link is None or bridge is None:
            return
        links.refuse_ipv6(tap.name)
        alias = tap.alias if tap.stamp else None
        links.set(tap.name, mtu=tap.mtu, alias=alias, group=tap.group, master=tap.bridge)
        set_macs(kernel, link.index, tap)
        links.set(tap.name, up=True)


def _macs(tap: Tap) -> str:
    macs = f"MAC {tap.mac} fixed" if tap.mac else "MACs learned"
    if tap.left_to_vf:
        macs = f"MAC {tap.left_to_vf} left to the VF"
    if tap.vf_unknown:
        macs = "MACs as they are"
    return macs + (", closed to what it is not known to have" if tap.shut else "")


def set_macs(kernel: BridgeKernel, index: int, tap: Tap) -> None:
    """Set what the bridge knows of a tap on it, with this index."""
    if tap.vf_unknown:
        return
    learning = tap.learns(fix_mac(kernel, index, tap.mac))
    kernel.links.set(tap.name, learning=learning, flooding=not tap.shut)
    if tap.left_to_vf:
        kernel.fdb.release(index, tap.left_to_vf)


@dataclass(frozen=True)
class RemoveTap(RemoveDevice):
    def describe(self) -> str:
        return f"remove tap {self.name}"


@dataclass(frozen=True)
class CutOff(RemoveTap):
    """Take the tap from a process that changes its MAC again and again, faster than it is set back."""

    closes = True

    def describe(self) -> str:
        return f"{super().describe()}: its MAC is changed again and again. Start its VM again"


def fix_mac(kernel: BridgeKernel, index: int, mac: str) -> frozenset[str]:
    """Fix a MAC at a bridge port, unless it is empty or another port has it; return what is fixed there."""
    fdb = kernel.fdb
    for other in fdb.fixed(index) - {mac}:
        fdb.release(index, other)
    if mac == "" or fdb.holder(index, mac) not in (None, index):
        return frozenset()
    fdb.fix(index, mac)
    return frozenset({mac})


# -- the nftables rules of ports -------------------------------------------------------------------


@dataclass(frozen=True)
class FilterChange(BridgeChange, ABC):
    """A change of our nftables table. Consecutive ones share a transaction."""

    closes, blocks = True, True
    part: ClassVar[str] = "nftables"

    @abstractmethod
    def commands(self) -> list[Command]:
        """Return the commands, as a part of a transaction."""

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        kernel.nft.commit(self.commands(), deadline)


@dataclass(frozen=True)
class SetBase(FilterChange):
    """Create or correct the table and its base chains. ``remake``: chains with a wrong hook."""

    remake: tuple[str, ...] = ()

    def describe(self) -> str:
        return "set the base of nftables table bridge netplugin"

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

    name: str
    relink: bool

    def describe(self) -> str:
        return f"drop what enters a bridge of ours from {self.name}, which is no port of ours"

    def commands(self) -> list[Command]:
        unlink = [DeleteElement(filters.PORTS, self.name)] * self.relink
        return [*unlink, AddElement(filters.PORTS, self.name, None)]


@dataclass(frozen=True)
class RemoveFilter(FilterChange):
    """Remove a chain (unless its name is empty), and entries of maps: their keys, each with its map."""

    closes, blocks = False, False
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
    closes, blocks = False, False

    def describe(self) -> str:
        return "remove nftables table bridge netplugin, which no port needs any more"

    def commands(self) -> list[Command]:
        return [DeleteTable()]


@dataclass(frozen=True)
class SetStoreMark(FilterChange):
    """Write the mark of the store; it goes with every other change of the table."""

    mark: str

    def describe(self) -> str:
        return "set the mark of the store in nftables table bridge netplugin"

    def commands(self) -> list[Command]:
        return [SetChain(filters.STORE, filters.store_chain(self.mark))]

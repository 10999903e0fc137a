"""Changes that the backend can make to bridges, uplinks and shapers, and to what a device has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from drivers.linuxbridge import filters
from drivers.linuxbridge.obstacles import ObstacleReader
from drivers.linuxbridge.segments import SegmentDevice, is_ours, service_of
from netplugin.api.errors import Conflict
from netplugin.backend import Change
from netplugin.host.bridge_members import BridgeMembers
from netplugin.host.cbpf import BpfProgram
from netplugin.host.fdb import Fdb
from netplugin.host.link_values import Bridge, Ifb, Link, Vlan, Vxlan
from netplugin.host.links import Links
from netplugin.host.nfnetlink import Nfnetlink
from netplugin.host.nftables import Nftables
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
    obstacles: ObstacleReader = field(default_factory=ObstacleReader)

    @classmethod
    def make(cls, local_ip: str) -> BridgeKernel:
        """``local_ip``: where the tunnels of this host end; empty if it has none."""
        kernel = Nfnetlink()
        return cls(nft=Nftables(filters.FAMILY, filters.TABLE, kernel), vxlan=VxlanFilter(local_ip, kernel))

    def ours(self, name: str) -> Link | None:
        """Return the link, read just before it is changed; None if it is missing or not ours."""
        link = self.links.get(name)
        return link if link is not None and is_ours(link) else None

    def is_on(self, name: str, bridge: Link | None) -> bool:
        """Whether a device is there, and on this bridge."""
        link = self.links.get(name)
        return link is not None and bridge is not None and link.master == bridge.name


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


@dataclass(frozen=True)
class DeviceChange(BridgeChange, ABC):
    """A change of one device."""

    name: str

    def touches(self) -> frozenset[str]:
        return frozenset({self.name})


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
    described_as = "set {self.device.name}: MTU {self.device.mtu}, up, options, no IPv6, mark"
    device: SegmentDevice

    def touches(self) -> frozenset[str]:
        return frozenset({self.device.name})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        device = self.device
        if (link := kernel.ours(device.name)) is None:
            return
        kernel.links.refuse_ipv6(link.name)
        kernel.links.set(device.name, mtu=device.mtu, alias=device.alias, up=True)


@dataclass(frozen=True)
class SetBridge(DeviceChange):
    """Set one option of a bridge: one that cannot be set keeps no other from it."""

    closes = True
    desired: Bridge
    option: str

    def describe(self) -> str:
        return f"set {self.option} of bridge {self.name} to {getattr(self.desired, self.option)}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.ours(self.name) is not None:
            kernel.links.set_bridge_option(self.name, self.desired, self.option)


@dataclass(frozen=True)
class ResetPort(DeviceChange):
    """Set one option of a port of a bridge of ours as the bridge sets it for a new port."""

    described_as, closes = "set {self.option} of {self.name} on {self.bridge} back", True
    bridge: str
    option: str

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.is_on(self.name, kernel.ours(self.bridge)):
            kernel.links.reset_port_option(self.name, self.option)


@dataclass(frozen=True)
class RemoveDevice(DeviceChange):
    described_as = "remove {self.name}, which nothing needs any more"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        link = kernel.ours(self.name)
        if link is not None and service_of(link) is None:
            kernel.links.delete(self.name)


@dataclass(frozen=True)
class AddUplink(DeviceChange):
    """Put an uplink on a bridge: it may be the operator's."""

    described_as = "put {self.name} on {self.bridge}"
    bridge: str

    def touches(self) -> frozenset[str]:
        return frozenset({self.bridge, self.name})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.ours(self.bridge) is not None:
            kernel.links.set(self.name, master=self.bridge)


@dataclass(frozen=True)
class RemoveUplink(AddUplink):
    described_as = "take {self.name} off {self.bridge}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.is_on(self.name, kernel.links.get(self.bridge)):
            kernel.links.set(self.name, master="")


# -- what a device of ours has: peers, a guard, a rate ---------------------------------------------


@dataclass(frozen=True)
class AttributeChange(DeviceChange, ABC):
    """A change of what a device of ours has in addition to its link attributes."""

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if (link := kernel.ours(self.name)) is not None:
            self.write(kernel, link.index)

    @abstractmethod
    def write(self, kernel: BridgeKernel, index: int) -> None:
        """Make the change to the device with this index. Raises: see ``apply``."""


@dataclass(frozen=True)
class SetAddress(AttributeChange):
    """Give a device its own MAC back: a bridge keeps the frames to the MACs of its ports for the host."""

    described_as, closes = "give {self.name} its own MAC {self.address} back", True
    address: str

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.links.set(self.name, address=self.address)


@dataclass(frozen=True)
class SetTapAddress(SetAddress):
    """A process that has a tap open can set its MAC (SIOCSIFHWADDR), and takes that of another VM so."""

    described_as = f"{SetAddress.described_as}, which the process that has it open, or another, has changed"


@dataclass(frozen=True)
class AddPeer(AttributeChange):
    described_as = "send unknown destinations of {self.name} to {self.peer} too"
    peer: str

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.fdb.add_peer(index, self.peer)


@dataclass(frozen=True)
class RemovePeer(AttributeChange):
    described_as = "send nothing of {self.name} to {self.peer} any more"
    peer: str

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.fdb.remove_peer(index, self.peer)


@dataclass(frozen=True)
class SetGuard(AttributeChange):
    """Attach a BPF program to the ingress of a tap, or of a bridge to keep its frames from the host."""

    described_as = "guard what enters {self.name} ({self.program.length} instructions)"
    closes, blocks = True, True
    program: BpfProgram

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.tc.set_guard(index, self.program)


@dataclass(frozen=True)
class SetRate(AttributeChange):
    """Limit what leaves the device: a tap for what the VM receives, a shaper for what it sends."""

    described_as = "let {self.rate.kbps} kbit/s leave {self.name}"
    rate: Tbf

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.tc.set_root(index, self.rate)


@dataclass(frozen=True)
class RemoveRate(AttributeChange):
    described_as = "let what leaves {self.name} have any rate"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.tc.delete_root(index)


@dataclass(frozen=True)
class SetRedirect(AttributeChange):
    described_as = "turn what enters {self.name} to {self.shaper} first"
    shaper: str

    def write(self, kernel: BridgeKernel, index: int) -> None:
        if (shaper := kernel.ours(self.shaper)) is not None:
            kernel.tc.set_redirect(index, shaper.index)


@dataclass(frozen=True)
class RemoveRedirect(AttributeChange):
    described_as = "turn what enters {self.name} to no other device"

    def write(self, kernel: BridgeKernel, index: int) -> None:
        kernel.tc.delete_redirect(index)

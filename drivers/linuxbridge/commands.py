"""The changes that the linuxbridge backend can make to a host, as values."""

from __future__ import annotations

from dataclasses import dataclass

from drivers.linuxbridge.guard import port_guard
from drivers.linuxbridge.segments import Segment, SegmentDevice, stamp_of, tap_mark
from netplugin.api.models import PortSpec
from netplugin.backend import Change
from netplugin.host.cbpf import BpfProgram
from netplugin.host.link_messages import Bridge, Ifb, Link, Vlan, Vxlan
from netplugin.host.names import TAP, device_name
from netplugin.host.tc import Tbf
from netplugin.host.vxlan import VxlanKey

# The maximum frame is the payload plus two MAC addresses, the EtherType and one VLAN tag, in bytes.
_FRAME_HEADER = 18


@dataclass(frozen=True)
class ObservedMacs:
    """Static MACs that a bridge has on a tap, and on its other ports (``netplugin.host.fdb``).

    ``elsewhere`` is read only if ``here`` is empty.
    """

    here: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Tap:
    """The desired state of one port's tap, with its rate limits."""

    port_id: str
    name: str
    bridge: str
    mtu: int
    multi_queue: bool
    #: The classic BPF program that filters frames entering from the VM.
    guard: BpfProgram
    #: The only MAC that the VM may use; empty if it may use others: the bridge then learns.
    mac: str = ""
    #: Rate limits of what the VM receives (ingress) and sends (egress).
    ingress: Tbf | None = None
    egress: Tbf | None = None
    #: The mark of the store; empty: leave the existing mark.
    stamp: str = ""

    @classmethod
    def of(cls, port_id: str, spec: PortSpec, stamp: str = "") -> Tap:
        """Make the desired tap of a spec. ``stamp``: the mark of the store to write to it."""
        mtu = spec.network.mtu

        def rate(kbps: int | None) -> Tbf | None:
            return Tbf.of(kbps, mtu + _FRAME_HEADER) if kbps else None

        return cls(
            port_id=port_id,
            name=device_name(TAP, port_id),
            bridge=Segment.of(spec.network).bridge,
            mtu=mtu,
            multi_queue=spec.queues > 1,
            guard=port_guard(spec),
            mac=_only_mac(spec),
            ingress=rate(spec.qos.ingress_kbps),
            egress=rate(spec.qos.egress_kbps),
            stamp=stamp,
        )

    @property
    def alias(self) -> str:
        return tap_mark(self.port_id, self.stamp)

    def must_be_remade(self, link: Link) -> bool:
        """Whether the tap must be recreated: the kernel cannot change its kind or multi-queue mode."""
        return link.kind != "tun" or link.multi_queue != self.multi_queue

    def differs(self, link: Link, macs: ObservedMacs) -> bool:
        """Whether anything that can be changed on a live tap differs from the desired state.

        ``vnet_hdr`` is ignored: the process that opens the tap sets it.
        """
        # If two ports of a network have the same MAC, the bridge keeps the entry of the first.
        fixed = frozenset({self.mac} - {""} - macs.elsewhere)
        found = (link.mtu, link.up, link.master, link.ipv6, link.learning, macs.here)
        stamped = not self.stamp or stamp_of(link) == self.stamp
        return not stamped or found != (self.mtu, True, self.bridge, False, not fixed, fixed)


def _only_mac(spec: PortSpec) -> str:
    """Return the port's MAC if it is the only allowed one; otherwise empty, and the bridge learns.

    Another MAC of the list may belong, or move, to another port, so the bridge must not fix it."""
    security = spec.port_security
    macs = {spec.mac, *(a.mac for a in security.allowed_addresses if a.mac)}
    return spec.mac if security.enabled and macs == {spec.mac} else ""


@dataclass(frozen=True)
class CreateDevice(Change):
    """Create a bridge, an uplink or a shaper. It is down, and no member of a bridge."""

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
        return f"create {what} {self.device.name}, MTU {self.device.mtu}"


@dataclass(frozen=True)
class SetDevice(Change):
    device: SegmentDevice

    def describe(self) -> str:
        return f"set {self.device.name}: MTU {self.device.mtu}, up, options, no IPv6, mark"


@dataclass(frozen=True)
class RemoveDevice(Change):
    name: str

    def describe(self) -> str:
        return f"remove {self.name}, which no port needs any more"


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
class AddPeer(Change):
    device: str
    peer: str

    def describe(self) -> str:
        return f"send unknown destinations of {self.device} to {self.peer} too"


@dataclass(frozen=True)
class RemovePeer(Change):
    device: str
    peer: str

    def describe(self) -> str:
        return f"send nothing of {self.device} to {self.peer} any more"


@dataclass(frozen=True)
class CreateTap(Change):
    """Create the tap, down and on no bridge: its filter and its rates are set first."""

    tap: Tap

    def describe(self) -> str:
        queues = "several queues" if self.tap.multi_queue else "one queue"
        return f"create tap {self.tap.name} with {queues}"


@dataclass(frozen=True)
class SetTap(Change):
    tap: Tap

    def describe(self) -> str:
        macs = f"MAC {self.tap.mac} fixed" if self.tap.mac else "MACs learned"
        where = f"put tap {self.tap.name} on {self.tap.bridge}"
        return f"{where}, MTU {self.tap.mtu}, up, no IPv6, {macs}"


@dataclass(frozen=True)
class RemoveTap(Change):
    name: str
    port_id: str

    def describe(self) -> str:
        return f"remove tap {self.name}"


@dataclass(frozen=True)
class SetGuard(Change):
    """Attach a BPF program to the ingress of a tap, or of a bridge to keep its frames from the host."""

    device: str
    program: BpfProgram

    def describe(self) -> str:
        return f"guard what enters {self.device} ({self.program.length} instructions)"


@dataclass(frozen=True)
class SetRate(Change):
    """Limit what leaves the device: a tap for what the VM receives, a shaper for what it sends."""

    device: str
    rate: Tbf

    def describe(self) -> str:
        return f"let {self.rate.kbps} kbit/s leave {self.device}"


@dataclass(frozen=True)
class RemoveRate(Change):
    device: str

    def describe(self) -> str:
        return f"let what leaves {self.device} have any rate"


@dataclass(frozen=True)
class SetRedirect(Change):
    tap: str
    shaper: str

    def describe(self) -> str:
        return f"turn what enters {self.tap} to {self.shaper} first"


@dataclass(frozen=True)
class RemoveRedirect(Change):
    tap: str

    def describe(self) -> str:
        return f"turn what enters {self.tap} to no other device"


@dataclass(frozen=True)
class FilterChange(Change):
    """A change to nftables. Consecutive ones share a transaction."""


@dataclass(frozen=True)
class SetBase(FilterChange):
    """Create or correct the table and its base chains. ``remake``: chains with a wrong hook."""

    remake: tuple[str, ...] = ()

    def describe(self) -> str:
        return "set the base of nftables table bridge netplugin"


@dataclass(frozen=True)
class SetFilter(FilterChange):
    """Replace the rules of one port. ``relink``: the port's map entry points to another chain."""

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
    """Remove a chain and its map entry, if they exist."""

    name: str
    chain: bool
    linked: bool

    def describe(self) -> str:
        return f"remove nftables chain {self.name}"


@dataclass(frozen=True)
class RemoveTable(FilterChange):
    def describe(self) -> str:
        return "remove nftables table bridge netplugin, which no port needs any more"


@dataclass(frozen=True)
class SourcesChange(FilterChange):
    """A change to the nftables table that filters the senders of VXLAN networks."""


@dataclass(frozen=True)
class AllowPeers(SourcesChange):
    """Accept VXLAN packets of a network from its peers only; ``gone``: peers to remove."""

    network: VxlanKey
    peers: frozenset[str]
    gone: frozenset[str] = frozenset()

    def describe(self) -> str:
        vni, port = self.network.vni, self.network.udp_port
        return f"let {len(self.peers)} peers alone send to VNI {vni} on UDP port {port}"


@dataclass(frozen=True)
class ForgetPeers(SourcesChange):
    network: VxlanKey
    peers: frozenset[str]

    def describe(self) -> str:
        return f"forget who may send to VNI {self.network.vni} on UDP port {self.network.udp_port}"


@dataclass(frozen=True)
class RemoveVxlanTable(SourcesChange):
    def describe(self) -> str:
        return "remove nftables table inet netplugin, which no network needs any more"

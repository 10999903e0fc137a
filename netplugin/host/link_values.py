"""Network devices of the kernel as values: what they are, and how the agent wants those that it makes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

_DOT1Q = 0x8100


@dataclass(frozen=True)
class Bridge:
    """Bridge options: no STP, no forward delay, no multicast snooping.

    The operator avoids loops, a new port forwards at once, and multicast reaches every VM without a querier.

    The bridge learns nothing from frames to reserved group addresses, which no rule filters. The number of
    learned entries is limited, as in OVS (``mac-table-size`` in ovs-vswitchd.conf.db(5)): otherwise a sender
    of many MACs fills the host's memory. None: the kernel has no such limit (added in 6.8).

    The others are the kernel's defaults: it forwards no frames to reserved groups, keeps what it learns
    for 300 s (in 1/100 s), has no VLANs, and hands nothing to the host's iptables. What matters only with
    STP, snooping or VLANs is left out.

    They can be set in the order of the fields: STP allows no delay of 0.
    """

    stp_state: int = 0
    forward_delay: int = 0
    mcast_snooping: int = 0
    #: BR_BOOLOPT_*, as bits: only that it learns nothing from frames to reserved groups.
    booleans: int = 1
    fdb_max_learned: int | None = 8192
    group_fwd_mask: int = 0
    ageing_time: int = 30000
    vlan_filtering: int = 0
    nf_call_iptables: int = 0
    nf_call_ip6tables: int = 0
    nf_call_arptables: int = 0

    @property
    def nf_call(self) -> frozenset[str]:
        """The families to whose rules br_netfilter adds the frames of this bridge: nft's names."""
        calls = {"ip": self.nf_call_iptables, "ip6": self.nf_call_ip6tables, "arp": self.nf_call_arptables}
        return frozenset(family for family, called in calls.items() if called)

    def differences(self, found: Bridge) -> tuple[str, ...]:
        """The options that a bridge has otherwise, except those that its kernel does not support."""
        both = ((each.name, getattr(self, each.name), getattr(found, each.name)) for each in fields(self))
        return tuple(name for name, desired, has in both if has not in (desired, None))


@dataclass(frozen=True)
class Vlan:
    """A VLAN subinterface (IEEE 802.1Q)."""

    parent: str
    id: int
    protocol: int = _DOT1Q


@dataclass(frozen=True)
class Vxlan:
    """A VXLAN tunnel endpoint.

    ``ttl`` 0 uses the host's default; an inherited one would let the VM set the reach of the
    tunnel. ``df`` 1 sets DF: RFC 7348, section 4.3, forbids a VTEP to fragment, so a packet that
    exceeds the MTU of a hop causes an ICMP error instead of fragments.
    """

    vni: int
    local: str
    port: int
    learning: bool = True
    ttl: int = 0
    df: int = 1


@dataclass(frozen=True)
class Ifb:
    """An ifb device, used only for its queue (drivers/net/ifb.c)."""


Made = Bridge | Vlan | Vxlan | Ifb


@dataclass(frozen=True)
class LinuxBond:
    """A kernel bond. ``partner`` is the MAC of the LACP partner; empty if there is none."""

    mode: str
    hash_policy: str
    partner: str = ""


@dataclass(frozen=True)
class TapUse:
    """What a process that has a tap open can set: who may open it without capabilities (``owner``, a user,
    and ``group``; if it has neither, everyone), and whether it stays when the process ends."""

    owner: int | None = None
    group: int | None = None
    persistent: bool = False

    @property
    def is_for_root(self) -> bool:
        """Whether it stays, and root alone may open it."""
        return self == TapUse(0, 0, True)


@dataclass(frozen=True)
class PortOptions:
    """Options of a bridge port.

    ``flooding`` is None if it floods some kinds of frames. ``others``: those that are not as the kernel sets
    them, by the names in ``netplugin.host.link_messages``.
    """

    learning: bool = True
    flooding: bool | None = True
    others: frozenset[str] = frozenset()

    def deviations(self) -> list[str]:
        """The options that are not as the kernel sets them for a new port."""
        floods = [] if self.flooding else ["flood", "mcast_flood", "bcast_flood"]
        return sorted(self.others) + floods + ["learning"] * (not self.learning)


@dataclass(frozen=True)
class Link:
    """A network device as reported by the kernel."""

    index: int
    name: str
    kind: str = ""
    mtu: int = 1500
    up: bool = False
    carrier: bool = False
    master: str | None = None
    alias: str | None = None
    address: str | None = None
    #: Further names that the kernel finds it by.
    altnames: tuple[str, ...] = ()
    #: Its interface group; 0 is the default.
    group: int = 0
    #: Whether IPv6 of the host is enabled on it.
    ipv6: bool = False
    #: The kind of its root qdisc.
    qdisc: str = ""
    #: Of a tap.
    multi_queue: bool = False
    use: TapUse = field(default_factory=TapUse)
    #: Of a bridge port.
    port: PortOptions = field(default_factory=PortOptions)
    #: Whether an XDP program is attached.
    xdp: bool = False
    #: The attributes of its kind.
    data: Made | LinuxBond | None = None


@dataclass(frozen=True)
class BondMember:
    """A bond member: ``state`` is its MII status, ``active`` whether it is an active slave."""

    name: str
    state: str
    active: bool

    @property
    def up(self) -> bool:
        return self.state == "up"


@dataclass(frozen=True)
class BridgePort:
    """A device on a bridge, with its MTU in bytes and the index of the bridge."""

    name: str
    mtu: int
    bridge: int


@dataclass(frozen=True)
class LinkEvent:
    """A link notification: a device has changed or (``gone``) was removed.

    Of changes of the options of a bridge port, the bridge has notifications of its own.
    """

    link: Link
    gone: bool = False

"""Network devices of the kernel as values: what they are, and how the agent wants those that it makes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

_DOT1Q = 0x8100


@dataclass(frozen=True)
class Bridge:
    """Bridge options: no STP, no forward delay, no multicast snooping.

    The operator avoids loops, a new port forwards at once, and multicast reaches every VM without a
    querier.

    The bridge learns nothing from frames to reserved group addresses, which no rule filters. The
    number of learned entries is limited, as in OVS (``mac-table-size`` in ovs-vswitchd.conf.db(5)):
    otherwise a sender of many MACs fills the host's memory. None: the kernel has no such limit
    (added in 6.8).
    """

    stp_state: int = 0
    forward_delay: int = 0
    mcast_snooping: int = 0
    no_linklocal_learn: int = 1
    fdb_max_learned: int | None = 8192

    def fits(self, found: object) -> bool:
        """Whether a bridge has these options, ignoring those that its kernel does not support."""
        if not isinstance(found, Bridge):
            return False
        limit = self.fdb_max_learned if found.fdb_max_learned is not None else None
        return found == replace(self, fdb_max_learned=limit)


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
    persistent: bool = False
    #: Of a bridge port: whether the bridge learns MACs on it, and floods frames to it (None: some kinds).
    learning: bool = True
    flooding: bool | None = True
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
    """A link notification: a device has changed or (``gone``) was removed."""

    gone: bool
    name: str
    alias: str | None
    up: bool
    mtu: int
    master: int
    carrier: bool = field(default=False, compare=False)

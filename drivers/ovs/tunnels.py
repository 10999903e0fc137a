"""OpenFlow flows that map between a VXLAN network's local VLAN on the overlay bridge and its VNI.

The tunnel bridge has ``fail_mode=secure`` and no NORMAL action. A frame takes one of two paths:

- from a tunnel: table 0 matches the VNI and the peer and drops frames from anyone else. Table 5 learns
  the host of the sender's MAC in table 10, pushes the network's local VLAN, and outputs the frame to
  the overlay bridge.
- from the overlay bridge: table 0 translates the VLAN to the VNI. Table 10 sends the frame to the host
  learned for its destination; otherwise table 20 floods it to all peers of the network.

Frames from a tunnel are never sent to a tunnel (split horizon), because peers form a full mesh. The
peer is identified by the outer source address, which is not authenticated.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable

from drivers.ovs import filters
from netplugin.backend import Overlay
from netplugin.host import flow_actions as do
from netplugin.host.flow import COOKIE_MARK, Flow

_FROM_PEER, _LEARNED, _FLOOD = 5, 10, 20
_PRIORITY = filters.PORT
#: The default MAC aging time of OVS (vswitch.xml, mac-aging-time), in seconds.
_FORGET_S = 300
#: The limit of learned senders per network. Frames to any further MAC are flooded to all peers. The
#: limit stops a VM that forges source MACs from filling vswitchd's memory.
_MOST_LEARNED = 4096

#: The cookie bit that distinguishes learned flows from a network's own flows.
LEARNED_BIT = 1


def network_cookie(network_id: str) -> int:
    """Return the cookie of a network's own flows: our mark and some bits of the id's hash, never zero."""
    digest = hashlib.sha256(network_id.encode()).digest()
    return COOKIE_MARK | (int.from_bytes(digest[:6], "big") & ~LEARNED_BIT or 2)


def with_learned(cookie: int) -> tuple[int, int]:
    """Return the cookies of a network's own flows and of its learned flows, which vswitchd adds."""
    return cookie, cookie | LEARNED_BIT


#: The flows common to all networks: a frame to an unknown destination is flooded.
BASE_FLOWS = frozenset(
    {filters.DROP_THE_REST, Flow.make(COOKIE_MARK, 0, f"table={_LEARNED}", do.resubmit(_FLOOD))}
)


def peers(overlay: Overlay, local_ip: str) -> list[str]:
    """Return the other hosts, sorted."""
    return sorted(peer for peer in overlay.spec.peers if peer != local_ip)


def network_flows(overlay: Overlay, local_ip: str, tunnel: int, patch: int) -> frozenset[Flow]:
    """Return the flows of one network. ``tunnel`` and ``patch`` are ofports."""
    cookie, vni = network_cookie(overlay.network_id), f"{overlay.spec.vni:#x}"
    others, family = peers(overlay, local_ip), "tun_ipv6" if _is_ipv6(local_ip) else "tun"
    flows = {
        Flow.make(
            cookie,
            _PRIORITY,
            f"in_port={tunnel},tun_id={vni},{family}_src={peer}",
            do.resubmit(_FROM_PEER),
        )
        for peer in others
    } | {
        # A frame with a group address as its source is invalid (IEEE 802.3, 3.2.3) and would be
        # learned. An inner VLAN tag is not allowed (RFC 7348, section 6.1).
        Flow.make(
            cookie,
            _PRIORITY,
            f"table={_FROM_PEER},in_port={tunnel},tun_id={vni},vlan_tci=0x0000/0x1000,"
            "dl_src=00:00:00:00:00:00/01:00:00:00:00:00",
            _learn(overlay, local_ip)
            + do.PUSH_VLAN
            + do.set_field(f"dl_vlan={overlay.local_vlan}")
            + do.output(patch),
        ),
        Flow.make(
            cookie,
            _PRIORITY,
            f"in_port={patch},dl_vlan={overlay.local_vlan}",
            do.POP_VLAN + do.set_field(f"tun_id={vni}") + do.resubmit(_LEARNED),
        ),
    }
    if others:
        to = b"".join(do.set_field(f"{family}_dst={peer}") + do.output(tunnel) for peer in others)
        flows.add(Flow.make(cookie, _PRIORITY, f"table={_FLOOD},tun_id={vni}", to))
    return frozenset(flows)


def _learn(overlay: Overlay, local_ip: str) -> bytes:
    """Return the action that learns a flow towards the sender; each frame from it refreshes the flow.

    The learned flow matches the VNI, not the VLAN, so it never applies to another network that is
    assigned the same local VLAN later.
    """
    _, cookie = with_learned(network_cookie(overlay.network_id))
    source = do.TUN_IPV6_SRC if _is_ipv6(local_ip) else do.TUN_IPV4_SRC
    return do.learn(
        do.learn_match(do.TUN_ID, do.TUN_ID),
        do.learn_match(do.ETH_SRC, do.ETH_DST),
        do.learn_load(source, _destination(local_ip)),
        do.learn_output(do.IN_PORT),
        table=_LEARNED,
        hard_timeout=_FORGET_S,
        priority=_PRIORITY,
        cookie=cookie,
        limit=_MOST_LEARNED,
    )


def stale(learned: Iterable[Flow], overlay: Overlay, local_ip: str, tunnel: int) -> list[Flow]:
    """Return learned flows that lead to a host that is not a peer, or to another tunnel port."""
    target = _destination(local_ip)
    there = {
        do.load(target, int(ipaddress.ip_address(peer))) + do.output(tunnel)
        for peer in peers(overlay, local_ip)
    }
    return [flow for flow in learned if flow.actions not in there]


def _destination(local_ip: str) -> int:
    """Return the field with the address of the host to which a frame is sent."""
    return do.TUN_IPV6_DST if _is_ipv6(local_ip) else do.TUN_IPV4_DST


def _is_ipv6(address: str) -> bool:
    return ":" in address

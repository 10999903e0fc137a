"""VXLAN as OpenFlow: between the local VLAN of a network on the overlay bridge and its VNI.

The tunnel bridge is ``fail_mode=secure`` and has no NORMAL. A frame takes one of two ways:

- from a tunnel: table 0 knows the VNI and its peers, and drops what is from no peer of it; table 5
  learns in table 10 at which host the sender is, and puts the frame with the network's local VLAN
  onto the overlay bridge;
- from the overlay bridge: table 0 turns the VLAN into the VNI; table 10 sends it to the host that
  was learned for its destination; else table 20 sends it to every peer of the network.

What came from a tunnel never goes into one (split horizon): peers form a full mesh. Who a frame is
from is what its outer header says: nothing here shows that it is true.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable

from drivers.dpdkvhostuser.wanted import BACKEND, BRIDGE_MARKS, OVERLAY, TUNNELS
from drivers.ovs.layout import Layout
from netplugin.backend import Overlay
from netplugin.host.openflow import COOKIE_MARK, Flow

BRIDGE = TUNNELS
_FROM_PEER, _LEARNED, _FLOOD = 5, 10, 20
_PRIORITY = 100
#: As long as OVS itself remembers a MAC it has not heard of (vswitch.xml, mac-aging-time).
_FORGET_S = 300
#: Above this many senders of one network, frames to the others go to all its peers: a VM that
#: invents senders must not fill vswitchd's memory.
_MOST_LEARNED = 4096

#: The bit of the cookie that tells what was learned from a network's own flows.
LEARNED_BIT = 1


def network_cookie(network_id: str) -> int:
    """The cookie of a network's own flows: our mark and bits of the id's hash, never all clear."""
    digest = hashlib.sha256(network_id.encode()).digest()
    return COOKIE_MARK | (int.from_bytes(digest[:6], "big") & ~LEARNED_BIT or 2)


def with_learned(cookie: int) -> tuple[int, int]:
    """A network's cookie, and that of what was learned: vswitchd writes those flows, not we."""
    return cookie, cookie | LEARNED_BIT


def base_flows() -> frozenset[Flow]:
    """What all networks share: a destination that was not learned is sent to all peers."""
    return frozenset({Flow.make(COOKIE_MARK, 0, f"table={_LEARNED}", f"resubmit(,{_FLOOD})")})


#: The bridge of the tunnels is there for the ports on that of the VMs.
LAYOUT = Layout(BACKEND, BRIDGE_MARKS, homes={TUNNELS: OVERLAY}, base={TUNNELS: base_flows()})


def peers(overlay: Overlay, local_ip: str) -> list[str]:
    """The other hosts, each once."""
    return sorted(peer for peer in overlay.spec.peers if peer != local_ip)


def network_flows(overlay: Overlay, local_ip: str, tunnel: int, patch: int) -> frozenset[Flow]:
    """The flows of one network, as ovs-ofctl prints them. ``tunnel`` and ``patch`` are ofports."""
    cookie, vni = network_cookie(overlay.network_id), f"{overlay.spec.vni:#x}"
    others, family = peers(overlay, local_ip), "tun_ipv6" if _is_ipv6(local_ip) else "tun"
    flows = {
        Flow.make(
            cookie, _PRIORITY, f"in_port={tunnel},tun_id={vni},{family}_src={peer}",
            f"resubmit(,{_FROM_PEER})",
        )
        for peer in others
    } | {
        # A group address as the sender's is no frame (IEEE 802.3, 3.2.3), and would be learned. A
        # VLAN tag inside a tunnel is not to be (RFC 7348, section 6.1).
        Flow.make(
            cookie, _PRIORITY,
            f"table={_FROM_PEER},in_port={tunnel},tun_id={vni},vlan_tci=0x0000/0x1000,"
            "dl_src=00:00:00:00:00:00/01:00:00:00:00:00",
            f"{_learn(overlay, local_ip)},push_vlan:0x8100,"
            f"set_field:{overlay.local_vlan | 0x1000}->vlan_vid,output:{patch}",
        ),
        Flow.make(
            cookie, _PRIORITY, f"in_port={patch},dl_vlan={overlay.local_vlan}",
            f"pop_vlan,set_field:{vni}->tun_id,resubmit(,{_LEARNED})",
        ),
    }  # fmt: skip
    if others:
        to = ",".join(f"set_field:{peer}->{family}_dst,output:{tunnel}" for peer in others)
        flows.add(Flow.make(cookie, _PRIORITY, f"table={_FLOOD},tun_id={vni}", to))
    return frozenset(flows)


def _learn(overlay: Overlay, local_ip: str) -> str:
    """A flow for frames to this sender, refreshed by each frame that comes from it.

    It matches the VNI and not the VLAN: a number that another network gets later leads nowhere.
    """
    family = "IPV6" if _is_ipv6(local_ip) else "IPV4"
    _, cookie = with_learned(network_cookie(overlay.network_id))
    return (
        f"learn(table={_LEARNED},hard_timeout={_FORGET_S},priority={_PRIORITY},"
        f"cookie={cookie:#x},limit={_MOST_LEARNED},"
        "NXM_NX_TUN_ID[],NXM_OF_ETH_DST[]=NXM_OF_ETH_SRC[],"
        f"load:NXM_NX_TUN_{family}_SRC[]->NXM_NX_TUN_{family}_DST[],output:OXM_OF_IN_PORT[])"
    )


def stale(learned: Iterable[Flow], overlay: Overlay, local_ip: str, tunnel: int) -> list[Flow]:
    """What was learned that leads to a host which is no peer, or to a port that is not there."""
    there = {int(ipaddress.ip_address(peer)) for peer in peers(overlay, local_ip)}
    return [
        flow
        for flow in learned
        if _destination(flow) not in there or not flow.actions.endswith(f",output:{tunnel}")
    ]


# ovs-ofctl prints an IPv6 address as two loads of 64 bits.
_LOAD = re.compile(r"load:(0x[0-9a-f]+|0)->NXM_NX_TUN_IPV[46]_DST\[(?:(\d+)\.\.\d+)?\]")


def _destination(flow: Flow) -> int:
    loads = _LOAD.findall(flow.actions)
    return sum(int(value, 16) << int(offset or 0) for value, offset in loads)


def _is_ipv6(address: str) -> bool:
    return ":" in address

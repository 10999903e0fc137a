"""Port security as OpenFlow: which frames of a VM enter the bridge. Everything else is dropped.

A bridge of ours is ``fail_mode=secure`` and has no flow that takes just any frame: a port without
flows is shut, so it is never open before its filter is there, nor while vswitchd restarts.

What is let in the bridge switches; or, of a port that is relayed, it goes to the one port beside it.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable

from netplugin.addresses import link_local
from netplugin.host.openflow import COOKIE_MARK, Flow
from netplugin.models import PortSpec

_PORT = 100
_ARP = 110
# No tag, or one of priority alone (IEEE 802.1Q, 9.6: VLAN 0), as OVS lets into an access port.
_UNTAGGED = "vlan_tci=0x0000/0x0fff"
LOCAL = 65534  # OFPP_LOCAL as ovs-ofctl prints it with --no-names: the bridge's internal port


def port_cookie(port_id: str) -> int:
    """The cookie of a port's flows: our mark and 48 bits of the port id's hash, never all clear."""
    digest = hashlib.sha256(port_id.encode()).digest()
    return COOKIE_MARK | (int.from_bytes(digest[:6], "big") or 1)


def bridge_flows(ofports: Iterable[int]) -> frozenset[Flow]:
    """What a bridge of ours forwards by itself: frames from the ports that are no VM's."""
    return frozenset(Flow.make(COOKIE_MARK, _PORT, f"in_port={_in_port(p)}") for p in ofports)


def relay_flows(port_id: str, ofport: int, beside: int, spec: PortSpec) -> frozenset[Flow]:
    """The flows of a VM's port that is joined to the port ``beside`` it, and to no other.

    As on an access port, nothing with a VLAN tag passes: the tag is the NIC's to give.
    """
    out = {
        flow if flow.actions == "drop" else _relayed(flow.match, flow, beside)
        for flow in port_flows(port_id, ofport, spec)
    }
    back = Flow.make(port_cookie(port_id), _PORT, "")
    return frozenset(out | {_relayed(f"in_port={beside}", back, ofport)})


def _relayed(match: str, flow: Flow, to: int) -> Flow:
    return Flow.make(flow.cookie, flow.priority, f"{match},{_UNTAGGED}", f"output:{to}")


def port_flows(port_id: str, ofport: int, spec: PortSpec) -> frozenset[Flow]:
    """The flows that let in what the port may send."""
    cookie = port_cookie(port_id)
    security = spec.port_security
    if not security.enabled:
        return frozenset({Flow.make(cookie, _PORT, f"in_port={ofport}")})
    if not security.allowed_addresses:
        return frozenset(_own_mac(cookie, ofport, spec.mac))
    flows: set[Flow] = set()
    for address in security.allowed_addresses:
        flows |= set(_address(cookie, ofport, address.mac or spec.mac, address.ip))
    flows |= set(_dhcp(cookie, ofport, spec.mac))
    return frozenset(flows)


def _in_port(ofport: int) -> str:
    return "LOCAL" if ofport == LOCAL else str(ofport)


def _own_mac(cookie: int, ofport: int, mac: str) -> Iterable[Flow]:
    yield Flow.make(cookie, _PORT, f"in_port={ofport},dl_src={mac}")
    # An ARP frame names a MAC once more inside: one that lies there would poison neighbours.
    yield Flow.make(cookie, _ARP, f"arp,in_port={ofport},dl_src={mac},arp_sha={mac}")
    yield Flow.make(cookie, _ARP - 1, f"arp,in_port={ofport}", "drop")


def _address(cookie: int, ofport: int, mac: str, ip: str) -> Iterable[Flow]:
    network = ipaddress.ip_network(ip)
    source = f"in_port={ofport},dl_src={mac}"
    if network.version == 4:
        yield Flow.make(cookie, _PORT, f"ip,{source},nw_src={ip}")
        yield Flow.make(cookie, _PORT, f"arp,{source},arp_sha={mac},arp_spa={ip}")
        # RFC 5227: whoever takes an address first asks for it from 0.0.0.0.
        yield Flow.make(cookie, _PORT, f"arp,{source},arp_op=1,arp_sha={mac},arp_spa=0.0.0.0")
        return
    yield Flow.make(cookie, _PORT, f"ipv6,{source},ipv6_src={ip}")
    # RFC 4861, 4862: neighbours are found, and addresses tried, from the link-local address and
    # from the unspecified one; an advertisement may tell of an allowed address only.
    own_link = link_local(mac)
    for own in (ip, own_link):
        yield Flow.make(
            cookie, _PORT, f"icmp6,{source},ipv6_src={own_link},icmp_type=136,nd_target={own}"
        )
        yield Flow.make(cookie, _PORT, f"icmp6,{source},ipv6_src=::,icmp_type=135,nd_target={own}")
        if own == ip:
            # Above the plain source rule, so that an allowed source cannot advertise another's.
            yield Flow.make(
                cookie, _ARP, f"icmp6,{source},ipv6_src={ip},icmp_type=136,nd_target={ip}"
            )
    yield Flow.make(cookie, _ARP - 1, f"icmp6,in_port={ofport},ipv6_src={ip},icmp_type=136", "drop")
    for kind in (133, 135, 143):  # router and neighbour solicitation, MLDv2 report
        yield Flow.make(cookie, _PORT, f"icmp6,{source},ipv6_src={own_link},icmp_type={kind}")
    yield Flow.make(cookie, _PORT, f"icmp6,{source},ipv6_src=::,icmp_type=143")
    # RFC 8415, section 7.2: so does a DHCPv6 client ask.
    yield Flow.make(cookie, _PORT, f"udp6,{source},ipv6_src={own_link},tp_src=546,tp_dst=547")


def _dhcp(cookie: int, ofport: int, mac: str) -> Iterable[Flow]:
    """A client asks for its address before it has one (RFC 2131, section 4.1)."""
    yield Flow.make(
        cookie, _PORT,
        f"udp,in_port={ofport},dl_src={mac},nw_src=0.0.0.0,nw_dst=255.255.255.255,tp_src=68,tp_dst=67",
    )  # fmt: skip

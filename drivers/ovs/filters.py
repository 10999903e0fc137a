"""Port security as OpenFlow: which frames of a VM enter the bridge. Everything else is dropped.

A bridge of ours is ``fail_mode=secure`` and has no flow that takes just any frame: a port without
flows is shut, so it is never open before its filter is there, nor while vswitchd restarts.

What is let in the bridge switches; or, of a port that is relayed, it goes to the one port beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import replace

from netplugin.addresses import link_local
from netplugin.host.openflow import COOKIE_MARK, Flow
from netplugin.models import PortSpec, Role

_PORT = 100
_ARP = 110
_REFUSED = 120
#: Above what an operator has on a bridge of his own.
_HIGHEST = 65535
#: No tag at all. One of VID 0 (priority alone, IEEE 802.1Q, 9.6) OVS would take into an access port,
#: and what stands behind it, another tag too, would leave by the uplink: OVS looks at one tag only.
_UNTAGGED = "vlan_tci=0x0000/0x1fff"
#: As the NIC may give it to a VM: without a tag, or with one of priority alone.
_NO_VLAN = "vlan_tci=0x0000/0x0fff"
#: The group bit (IEEE 802, 8.4): broadcast and multicast.
_GROUP = "dl_dst=01:00:00:00:00:00/01:00:00:00:00:00"
#: Addresses that no bridge forwards (IEEE 802.1Q, table 8-1). OVS drops them itself where it switches,
#: unless the bridge has ``forward-bpdu``, and not where a flow names the port.
_LINK_LOCAL = "dl_dst=01:80:c2:00:00:00/ff:ff:ff:ff:ff:f0"
#: What switches send to each other: to those addresses, and to those of MRP, GARP and CFM behind them
#: (IEEE 802.1Q); to Cisco's for PVST+, CDP, VTP, DTP, UDLD and others, which have one prefix.
_OF_SWITCHES = (
    "dl_dst=01:80:c2:00:00:00/ff:ff:ff:ff:ff:c0",
    "dl_dst=01:00:0c:00:00:00/ff:ff:ff:00:00:00",
)
#: RFC 4861: router advertisement and redirect.
_OF_ROUTERS = ("134", "137")
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

    As on an access port, nothing with a VLAN tag passes: the tag is the NIC's to give. What comes
    back is for the VM's MAC or for a group, unless ``vf.trusted`` is wanted without port security:
    the device may be promiscuous, as OVS sets every DPDK port (``dpdk_eth_dev_init`` in
    lib/netdev-dpdk.c).
    """
    cookie = port_cookie(port_id)
    out = {
        flow if flow.actions == "drop" else replace(flow, actions=f"output:{beside}")
        for flow in port_flows(port_id, ofport, spec)
    }
    takes_all = spec.vf.trusted and not spec.port_security.enabled
    for match in ("",) if takes_all else (f",dl_dst={spec.mac}", f",{_GROUP}"):
        out.add(Flow.make(cookie, _PORT, f"in_port={beside},{_NO_VLAN}{match}", f"output:{ofport}"))
    return frozenset(out)


def foreign_flows(port_id: str, ofport: int) -> frozenset[Flow]:
    """Of a port without a filter on a bridge that is not ours, whose own flows decide on the rest."""
    cookie, source = port_cookie(port_id), f"in_port={ofport}"
    return frozenset(
        {
            Flow.make(cookie, _HIGHEST, f"{source},vlan_tci=0x1000/0x1000", "drop"),
            Flow.make(cookie, _HIGHEST, f"{source},{_LINK_LOCAL}", "drop"),
        }
    )


def port_flows(port_id: str, ofport: int, spec: PortSpec) -> frozenset[Flow]:
    """The flows that let in what the port may send."""
    cookie, security = port_cookie(port_id), spec.port_security
    port = f"in_port={ofport}"
    if not security.enabled:
        open_port = Flow.make(cookie, _PORT, f"{port},{_UNTAGGED}")
        return frozenset({open_port, Flow.make(cookie, _REFUSED, f"{port},{_LINK_LOCAL}", "drop")})
    flows = {
        Flow.make(cookie, _REFUSED, f"{match},{port}", "drop") for match in _refused(security.roles)
    }
    flows |= {
        Flow.make(cookie, priority, f"{match},{port},{_UNTAGGED}")
        for priority, match in _allowed(spec)
    }
    if not security.allowed_addresses:
        # An ARP frame names a MAC once more inside: one that lies there would poison neighbours.
        flows |= {Flow.make(cookie, _ARP - 1, f"{kind},{port}", "drop") for kind in ("arp", "rarp")}
    for address in security.allowed_addresses:
        if ":" in address.ip:
            # Below what it may advertise, and above all that it may send from the address.
            advert = f"icmp6,{port},ipv6_src={address.ip},icmp_type=136"
            flows.add(Flow.make(cookie, _ARP - 1, advert, "drop"))
    return frozenset(flows)


def _in_port(ofport: int) -> str:
    return "LOCAL" if ofport == LOCAL else str(ofport)


def _refused(roles: Collection[Role]) -> Iterable[str]:
    """What no VM sends, or none without the role, whatever it may send from its addresses.

    A client of DHCP looks at the port that an answer comes to, not at the one that it is from. The
    bridge is set to match the ports of first fragments too (``OpenFlow.match_fragments``). Where OVS
    cannot follow the headers of IPv6 to the last, as in a first fragment that holds only some of them
    (an evasion in RFC 7113, section 2), ``nw_proto`` is 0; RFC 7112, section 5, has them discarded.
    """
    yield from _OF_SWITCHES
    yield "ipv6,nw_proto=0"
    if "router" not in roles:
        yield from (f"icmp6,icmp_type={kind}" for kind in _OF_ROUTERS)
    if "dhcp_server" not in roles:
        yield "udp,tp_dst=68"
        yield "udp6,tp_dst=546"


def _allowed(spec: PortSpec) -> Iterable[tuple[int, str]]:
    """What the VM may send, as priorities and matches."""
    security = spec.port_security
    # So QEMU and DPDK's vhost library tell where a VM has been migrated to.
    announced = f"rarp,dl_src={spec.mac},arp_op=3,arp_sha={spec.mac},arp_spa=0.0.0.0"
    yield _ARP, announced
    if not security.allowed_addresses:
        yield _PORT, f"dl_src={spec.mac}"
        yield _ARP, f"arp,dl_src={spec.mac},arp_sha={spec.mac}"
        return
    for address in security.allowed_addresses:
        mac = address.mac or spec.mac
        if ":" in address.ip:
            yield from _ipv6(mac, address.ip, security.roles)
        else:
            yield from _ipv4(mac, address.ip)
    # A client asks for its address before it has one (RFC 2131, section 4.1).
    yield (
        _PORT,
        f"udp,dl_src={spec.mac},nw_src=0.0.0.0,nw_dst=255.255.255.255,tp_src=68,tp_dst=67",
    )


def _ipv4(mac: str, ip: str) -> Iterable[tuple[int, str]]:
    yield _PORT, f"ip,dl_src={mac},nw_src={ip}"
    yield _PORT, f"arp,dl_src={mac},arp_sha={mac},arp_spa={ip}"
    # RFC 5227: whoever takes an address first asks for it from 0.0.0.0.
    yield _PORT, f"arp,dl_src={mac},arp_op=1,arp_sha={mac},arp_spa=0.0.0.0,arp_tpa={ip}"


def _ipv6(mac: str, ip: str, roles: Collection[Role]) -> Iterable[tuple[int, str]]:
    """RFC 4861, 4862: neighbours are found, and addresses tried, from the link-local address and
    from the unspecified one; an advertisement may tell of an allowed address only."""
    source, own_link = f"dl_src={mac}", link_local(mac)
    yield _PORT, f"ipv6,{source},ipv6_src={ip}"
    for own in (ip, own_link):
        yield _PORT, f"icmp6,{source},ipv6_src={own_link},icmp_type=136,nd_target={own}"
        yield _PORT, f"icmp6,{source},ipv6_src=::,icmp_type=135,nd_target={own}"
    # Above the plain source rule, so that an allowed source cannot advertise another's.
    yield _ARP, f"icmp6,{source},ipv6_src={ip},icmp_type=136,nd_target={ip}"
    kinds = ["133", "135", "143"]  # router and neighbour solicitation, MLDv2 report
    kinds += _OF_ROUTERS if "router" in roles else ()
    for kind in kinds:
        yield _PORT, f"icmp6,{source},ipv6_src={own_link},icmp_type={kind}"
    yield _PORT, f"icmp6,{source},ipv6_src=::,icmp_type=143"
    # RFC 8415, section 7.2: so does a DHCPv6 client ask, and so is it answered.
    yield _PORT, f"udp6,{source},ipv6_src={own_link},tp_src=546,tp_dst=547"
    if "dhcp_server" in roles:
        yield _PORT, f"udp6,{source},ipv6_src={own_link},tp_src=547,tp_dst=546"

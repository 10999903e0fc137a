"""Port security as OpenFlow: flows that admit the permitted frames of a VM; all others are dropped.

Our bridges are ``fail_mode=secure`` and drop what no flow of ours admits. A port without flows is closed, so
it is never open before its filter is installed or while vswitchd restarts.

Admitted frames go to a table of the bridge that drops what would end in a tunnel of this OVS and switches
the rest (NORMAL), or they go to the VF port of a relayed port.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address

from netplugin.api.counter_models import Place
from netplugin.api.models import PortSecurity, PortSpec, Role
from netplugin.host.announcement import group_of
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.flow_actions import DROP, POP_VLAN, output, resubmit, set_field, take_as_from
from netplugin.host.names import link_local
from netplugin.host.ovs_rows import TUNNEL_TYPES, OvsInterface
from netplugin.host.oxm import fields_of

# Above what is added by hand without a priority (OFP_DEFAULT_PRIORITY in OVS is 32768), and what OVS adds
# to a bridge that is not fail_mode=secure (``connmgr_flushed`` in ofproto/connmgr.c).
_CLOSED = 40000
PORT = _CLOSED + 100
_ARP = PORT + 10
_REFUSED = PORT + 20
#: A base flow of each bridge of ours.
DROP_THE_REST = Flow.make(COOKIE_MARK, _CLOSED, "", DROP)
#: Above the flows that an operator has on their own bridge.
_HIGHEST = 65535
#: No VLAN tag at all. OVS would admit a priority tag (VID 0, IEEE 802.1Q, 9.6) on an access port,
#: and a second tag behind it would leave by the uplink, because OVS checks only the outer tag.
_UNTAGGED = "vlan_tci=0x0000/0x1fff"
_TAGGED = "vlan_tci=0x1000/0x1000"
#: As a NIC may deliver it to a VM: untagged or priority-tagged.
_NO_VLAN = "vlan_tci=0x0000/0x0fff"
#: The group bit (IEEE 802, 8.4): broadcast and multicast.
_GROUP = "dl_dst=01:00:00:00:00:00/01:00:00:00:00:00"
#: Addresses that no bridge forwards (IEEE 802.1Q, table 8-1). With NORMAL OVS drops them, unless
#: the bridge has ``forward-bpdu``; with an output action it does not.
_LINK_LOCAL = "dl_dst=01:80:c2:00:00:00/ff:ff:ff:ff:ff:f0"
#: Protocols between switches: the addresses above and those of MRP, GARP and CFM that follow them
#: (IEEE 802.1Q), and Cisco's prefix for PVST+, CDP, VTP, DTP, UDLD and others.
_OF_SWITCHES = (
    "dl_dst=01:80:c2:00:00:00/ff:ff:ff:ff:ff:c0",
    "dl_dst=01:00:0c:00:00:00/ff:ff:ff:00:00:00",
)
#: The type of a tag (IEEE 802.1Q, 802.1ad) in a frame that OVS takes for untagged: one that ends in its tag,
#: or that has this type in a SNAP header. With NORMAL OVS drops it, with an output action it does not.
_PARTS_OF_TAGS = ("dl_type=0x8100", "dl_type=0x88a8")
#: A match of a port alone: its first 4 bytes name the field.
_A_PORT = fields_of(["in_port=1"])
#: RFC 4861: router advertisement and redirect.
_OF_ROUTERS = ("134", "137")


#: The table of a bridge of ours that switches what its ports may send (``bridge_flows``).
_SWITCHING = 1
TO_SWITCH = resubmit(_SWITCHING)


def port_cookie(port_id: str) -> int:
    """The cookie of a port's flows: our mark and 48 bits of the hash of the port id, never all zero."""
    digest = hashlib.sha256(port_id.encode()).digest()
    return COOKIE_MARK | (int.from_bytes(digest[:6], "big") or 1)


def bridge_flows(ofports: Iterable[int], tunnels: Iterable[OvsInterface] = ()) -> frozenset[Flow]:
    """The base flows of our bridges that switch: admit frames from ``ofports``, which do not belong to a VM,
    drop what no other flow admits, and switch what the ports of VMs and services may send, without what
    would end in one of ``tunnels``.
    """
    flows = {DROP_THE_REST, *(Flow.make(COOKIE_MARK, PORT, f"in_port={p}") for p in ofports)}
    flows.add(Flow.make(COOKIE_MARK, PORT, f"table={_SWITCHING}"))
    for tunnel in tunnels:
        for match in _ends(tunnel):
            flows.add(Flow.make(COOKIE_MARK, _REFUSED, f"table={_SWITCHING},{match}", DROP))
    return frozenset(flows)


def _ends(tunnel: OvsInterface) -> Iterator[str]:
    """The frames that come out of a tunnel of this OVS, wherever on the host they are sent to.

    OVS looks in each frame that it outputs to a port whose device has an address, an IPv6 link-local one
    too, for any address of the host (``terminate_native_tunnel`` in ofproto/ofproto-dpif-xlate.c). The
    tunnel then takes what is for its ``local_ip``; without one, what is for any address.
    """
    protocols, port = TUNNEL_TYPES[tunnel.type]
    dst_port = tunnel.options.get("dst_port", "")
    to_port = f",tp_dst={dst_port if dst_port.isdecimal() else port}" if port else ""
    local_ip = _address(tunnel.options.get("local_ip", ""))
    for protocol in protocols:
        if local_ip is None or local_ip.version == 4:
            to = f",nw_dst={local_ip}" if local_ip else ""
            yield f"ip,nw_proto={protocol}{to}{to_port}"
        if local_ip is None or local_ip.version == 6:
            to = f",ipv6_dst={local_ip}" if local_ip else ""
            yield f"ipv6,nw_proto={protocol}{to}{to_port}"


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """An address; None for ``flow``, which leaves it to flows."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def relay_flows(port_id: str, ofport: int, vf_ofport: int, spec: PortSpec) -> frozenset[Flow]:
    """The flows of a VM's port that exchanges frames only with the relay's VF port (``vf_ofport``).

    As on an access port, frames with a VLAN tag are dropped: the NIC sets the tag. Frames to the VM
    must have its MAC or a group address, unless the port has ``vf.trusted`` and no port security,
    because the device may be promiscuous: OVS sets every DPDK port so (``dpdk_eth_dev_init`` in
    lib/netdev-dpdk.c).
    """
    cookie = port_cookie(port_id)
    out = {*port_flows(port_id, ofport, spec, output(vf_ofport))}
    takes_all = spec.vf.trusted and not spec.port_security.enabled
    for match in ("",) if takes_all else (f",dl_dst={spec.mac}", f",{_GROUP}"):
        out.add(Flow.make(cookie, PORT, f"in_port={vf_ofport},{_NO_VLAN}{match}", output(ofport)))
    return frozenset(out)


def foreign_flows(port_id: str, ofport: int) -> frozenset[Flow]:
    """Flows of a port without a filter on a bridge that is not ours; the bridge's flows do the rest."""
    cookie, source = port_cookie(port_id), f"in_port={ofport}"
    return frozenset(
        {
            Flow.make(cookie, _HIGHEST, f"{source},{match}", DROP)
            for match in (_TAGGED, _LINK_LOCAL, *_PARTS_OF_TAGS)
        }
    )


def miss_flows(port_id: str, ofport: int, spec: PortSpec) -> Mapping[Flow, Place]:
    """The flows that drop what no flow of a port admits, each with the rule by which it is dropped.

    The bridge drops it too (``DROP_THE_REST``), but does not count it by port. A bridge that is not ours
    does not drop it otherwise. They are below what admits frames and above what operators add.
    """
    cookie, port, security = port_cookie(port_id), f"in_port={ofport}", spec.port_security
    if not security.enabled:
        return {Flow.make(cookie, _CLOSED + 1, port, DROP): Place.FILTER_VLAN_TAG}
    macs = {address.mac or spec.mac for address in security.allowed_addresses}
    return {
        Flow.make(cookie, _CLOSED + 3, f"{port},{_TAGGED}", DROP): Place.FILTER_VLAN_TAG,
        **{
            Flow.make(cookie, _CLOSED + 2, f"{port},dl_src={mac}", DROP): Place.FILTER_SOURCE_IP
            for mac in sorted(macs)
        },
        Flow.make(cookie, _CLOSED + 1, port, DROP): Place.FILTER_SOURCE_MAC,
    }


def places(port_id: str, ofport: int, spec: PortSpec) -> Mapping[tuple[int, int, bytes], Place]:
    """Where a port's flows drop frames, by the identity of the flow."""
    cookie, port = port_cookie(port_id), f"in_port={ofport}"
    found = {flow.identity: place for flow, place in miss_flows(port_id, ofport, spec).items()}
    for place, priority, match in _drops(spec.port_security):
        found[Flow.make(cookie, priority, f"{match},{port}", DROP).identity] = place
    for flow in closed_flows(port_id, ofport):
        found[flow.identity] = Place.NOT_FORWARDED
    for flow in foreign_flows(port_id, ofport):
        link_local = flow.match.startswith("dl_dst")
        found[flow.identity] = Place.FILTER_SWITCH_PROTOCOL if link_local else Place.FILTER_VLAN_TAG
    return found


def closed_flows(port_id: str, *ofports: int) -> frozenset[Flow]:
    """The flows of a port that is closed, above all others: what comes from it or its relay VF is dropped.

    Flows cannot select the frames that a bridge switches to a port: ``OpenFlow.forward`` stops these.
    """
    cookie = port_cookie(port_id)
    return frozenset(Flow.make(cookie, _HIGHEST, f"in_port={ofport}", DROP) for ofport in ofports)


def handover_flows(
    port_id: str, ofport: int, spec: PortSpec, tag: int, doors: Iterable[int]
) -> frozenset[Flow]:
    """Flows of a port that follows its guest: the bridge announces the VM when the host that it left asks.

    That host's request (``netplugin.host.announcement.handover``) is passed on to a group address, as if
    this port had received it. So the network has learned where the VM is before it runs, and
    without the agent or the main loop of vswitchd. ``doors`` are the ports of the bridge that belong to
    no VM, so no other VM can ask; ``tag`` is the VLAN of the port, 0 without one. Only a broadcast is a
    request, so two hosts that wait for the VM do not answer each other. (OVS rewrites no field of a
    RARP's body: ``commit_set_nw_action`` in lib/odp-util.c.)
    """
    cookie, target = port_cookie(port_id), "arp_tha=00:00:00:00:00:00"
    vlan = f"dl_vlan={tag}" if tag else _UNTAGGED
    asked = f"{_announced(spec.mac)},dl_dst=ff:ff:ff:ff:ff:ff,{target},{vlan}"
    does = (POP_VLAN if tag else b"") + set_field(f"dl_dst={group_of(spec.mac)}")
    does += take_as_from(ofport) + resubmit(0)
    return frozenset(Flow.make(cookie, _HIGHEST, f"in_port={door},{asked}", does) for door in doors)


def are_closed(flows: Collection[Flow]) -> bool:
    """Whether these are the flows of a port that is closed."""
    return bool(flows) and all(flow.priority == _HIGHEST and _is_of_port(flow) for flow in flows)


def _is_of_port(flow: Flow) -> bool:
    is_match = len(flow.fields) == len(_A_PORT) and flow.fields[:4] == _A_PORT[:4]
    return flow.actions == DROP and flow.table == 0 and is_match


def port_flows(port_id: str, ofport: int, spec: PortSpec, admitted: bytes = TO_SWITCH) -> frozenset[Flow]:
    """The flows that admit the frames that the port may send; ``admitted`` is what is done with these."""
    cookie, security = port_cookie(port_id), spec.port_security
    port = f"in_port={ofport}"
    allowed = _allowed(spec) if security.enabled else [(PORT, "")]
    return frozenset(
        {
            *(Flow.make(cookie, priority, f"{m},{port}", DROP) for _, priority, m in _drops(security)),
            *(Flow.make(cookie, priority, f"{m},{port},{_UNTAGGED}", admitted) for priority, m in allowed),
        }
    )


def _drops(security: PortSecurity) -> Iterable[tuple[Place, int, str]]:
    """What a port may not send whatever it may send otherwise, as (place, priority, match)."""
    if not security.enabled:
        yield Place.FILTER_SWITCH_PROTOCOL, _REFUSED, _LINK_LOCAL
        yield from ((Place.FILTER_VLAN_TAG, _REFUSED, match) for match in _PARTS_OF_TAGS)
        return
    yield from ((place, _REFUSED, match) for place, match in _refused(security.roles))
    if not security.allowed_addresses:
        # The ARP payload has a MAC as well; a forged one would poison the caches of neighbours.
        yield from ((Place.FILTER_ARP, _ARP - 1, kind) for kind in ("arp", "rarp"))
    if any(":" in address.ip for address in security.allowed_addresses):
        # Below the permitted advertisements, and above everything else from an address.
        yield Place.FILTER_NEIGHBOUR, _ARP - 1, "icmp6,icmp_type=136"


def _refused(roles: Collection[Role]) -> Iterable[tuple[Place, str]]:
    """What no VM, or no VM without the role, may send, whatever its addresses.

    A DHCP client checks the destination port of an answer, not the source port. The bridge matches
    the L4 ports of first fragments too (``OpenFlow.match_fragments``). What a packet does not have is
    matched as 0 (``miniflow_extract`` in lib/flow.c): the protocol, if OVS cannot follow its IPv6 headers to
    the last one; port or type, if that one is not in it whole, as in a first fragment that ends before it
    (an evasion in RFC 7113, section 2). RFC 7112, section 5, permits dropping such fragments. Of IPv4 the
    first fragment has all 8 bytes of a UDP header, because fragments are cut at multiples of 8 bytes.
    """
    yield from ((Place.FILTER_SWITCH_PROTOCOL, match) for match in _OF_SWITCHES)
    yield from ((Place.FILTER_VLAN_TAG, match) for match in _PARTS_OF_TAGS)
    incomplete = "ipv6,nw_proto=0", "icmp6,icmp_type=0", "udp6,tp_dst=0", "tcp6,tcp_dst=0"
    yield from ((Place.FILTER_IPV6_HEADER, match) for match in incomplete)
    if "router" not in roles:
        yield from ((Place.FILTER_ROUTER, f"icmp6,icmp_type={kind}") for kind in _OF_ROUTERS)
    if "dhcp_server" not in roles:
        yield from ((Place.FILTER_DHCP_SERVER, match) for match in ("udp,tp_dst=68", "udp6,tp_dst=546"))


def _allowed(spec: PortSpec) -> Iterable[tuple[int, str]]:
    """The permitted frames of the VM, as (priority, match)."""
    security = spec.port_security
    yield _ARP, _announced(spec.mac)
    if not security.allowed_addresses:
        yield PORT, f"dl_src={spec.mac}"
        yield _ARP, f"arp,dl_src={spec.mac},arp_sha={spec.mac}"
        return
    for address in security.allowed_addresses:
        mac = address.mac or spec.mac
        if ":" in address.ip:
            yield from _ipv6(mac, address.ip, security.roles)
        else:
            yield from _ipv4(mac, address.ip)
    # A DHCP client sends from 0.0.0.0 until it has an address (RFC 2131, section 4.1).
    yield (
        PORT,
        f"udp,dl_src={spec.mac},nw_src=0.0.0.0,nw_dst=255.255.255.255,tp_src=68,tp_dst=67",
    )


def _announced(mac: str) -> str:
    """The RARP by which QEMU and DPDK's vhost library announce a migrated VM."""
    return f"rarp,dl_src={mac},arp_op=3,arp_sha={mac},arp_spa=0.0.0.0"


def _ipv4(mac: str, ip: str) -> Iterable[tuple[int, str]]:
    yield PORT, f"ip,dl_src={mac},nw_src={ip}"
    yield PORT, f"arp,dl_src={mac},arp_sha={mac},arp_spa={ip}"
    # RFC 5227: a host probes an address from 0.0.0.0 before it uses it.
    yield PORT, f"arp,dl_src={mac},arp_op=1,arp_sha={mac},arp_spa=0.0.0.0,arp_tpa={ip}"


def _ipv6(mac: str, ip: str, roles: Collection[Role]) -> Iterable[tuple[int, str]]:
    """Flows for neighbour discovery and duplicate address detection (RFC 4861, RFC 4862).

    They use the link-local and the unspecified source address. An advertisement must name an
    allowed address.
    """
    source, own_link = f"dl_src={mac}", link_local(mac)
    yield PORT, f"ipv6,{source},ipv6_src={ip}"
    for own in (ip, own_link):
        yield _ARP, f"icmp6,{source},ipv6_src={own_link},icmp_type=136,nd_target={own}"
        yield PORT, f"icmp6,{source},ipv6_src=::,icmp_type=135,nd_target={own}"
    # Above the plain source rule, so an allowed source cannot advertise another address.
    yield _ARP, f"icmp6,{source},ipv6_src={ip},icmp_type=136,nd_target={ip}"
    kinds = ["133", "135", "143"]  # router and neighbour solicitation, MLDv2 report
    kinds += _OF_ROUTERS if "router" in roles else ()
    for kind in kinds:
        yield PORT, f"icmp6,{source},ipv6_src={own_link},icmp_type={kind}"
    yield PORT, f"icmp6,{source},ipv6_src=::,icmp_type=143"
    # RFC 8415, section 7.2: ports of DHCPv6 clients and servers.
    yield PORT, f"udp6,{source},ipv6_src={own_link},tp_src=546,tp_dst=547"
    if "dhcp_server" in roles:
        yield PORT, f"udp6,{source},ipv6_src={own_link},tp_src=547,tp_dst=546"

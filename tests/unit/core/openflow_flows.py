"""Flows of all that the product writes, and the flow statistics that a switch would send of them."""

from __future__ import annotations

import struct

from drivers.ovs import tunnels
from drivers.ovs.filters import bridge_flows, foreign_flows, handover_flows, port_flows, relay_flows
from netplugin.api.models import NetworkSpec, PortSpec
from netplugin.backend import Overlay
from netplugin.host import openflow_messages as m
from netplugin.host.flow import Flow
from netplugin.host.ovs_rows import OvsInterface

ADDRESSES = [
    {"ip": "10.0.0.5"},
    {"ip": "10.1.0.0/16"},
    {"ip": "2001:db8::/64"},
    {"ip": "2001:db8::7"},
    {"ip": "fe80::1", "mac": "52:54:00:00:00:09"},
]
EVERY_MODE = [
    {**security, "roles": roles}
    for security in ({}, {"enabled": False}, {"allowed_addresses": ADDRESSES})
    for roles in ([], ["router"], ["dhcp_server"])
]


def tunnel(type_: str, **options: str) -> OvsInterface:
    """A tunnel's interface as the database has it."""
    values = {"name": "tun", "type": type_, "options": options, "external_ids": {}}
    return OvsInterface(**values, mtu_request=None, mtu=None, ofport=1, error=None, link_state=None)  # type: ignore[arg-type]


TUNNELS = [
    tunnel("vxlan", local_ip="10.9.0.1", dst_port="4790"),
    tunnel("geneve", local_ip="fd00::1"),
    tunnel("gre"),
    tunnel("srv6", local_ip="flow"),
]


def spec_of(**security: object) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": "52:54:00:00:00:01",
            "backend": "dpdkvhostuser",
            "network": {"type": "flat", "physical_network": "net1"},
            "port_security": security,
        }
    )


def of_filters() -> set[Flow]:
    """Each port has an ofport of its own."""
    flows = {*bridge_flows([0xFFFE, 900], TUNNELS), *foreign_flows("foreign", 901)}
    for number, security in enumerate(EVERY_MODE, 1):
        flows |= port_flows(f"p{number}", number, spec_of(**security))
        flows |= relay_flows(f"r{number}", 100 + number, 200 + number, spec_of(**security))
    for tag in (0, 7):
        flows |= handover_flows(f"h{tag}", 300 + tag, spec_of(), tag, [0xFFFE, 400 + tag])
    return flows


def of_tunnels() -> set[Flow]:
    flows = {*tunnels.BASE_FLOWS}
    for number, peers in enumerate((("10.9.0.1", "10.9.0.2", "10.9.0.3"), ("fd00::1", "fd00::2"))):
        overlay = Overlay(f"n{number}", NetworkSpec(type="vxlan", vni=5001 + number, peers=peers), 7 + number)
        flows |= tunnels.network_flows(overlay, peers[0], 2, 1)
    return flows


def statistics(*flows: Flow, xid: int = 1, more: bool = False) -> bytes:
    """The part of a multipart reply (OFPMP_FLOW) with these flows."""
    body = struct.pack(">HH4x", 1, int(more))
    for flow in flows:
        rule = m.add(flow)[40:]
        head = (48 + len(rule), flow.table, 1, 2, flow.priority, *flow.options, flow.cookie, 3, 4)
        body += struct.pack(">HBxIIHHHHH2xQQQ", *head) + rule
    return m.message(19, xid, body)


def messages(data: bytes, size: int) -> list[m.OpenFlowMessage]:
    """The messages in bytes that come in parts of this size."""
    received, found = bytearray(), list[m.OpenFlowMessage]()
    for at in range(0, len(data), size):
        received += data[at : at + size]
        found += m.split(received)
    return found

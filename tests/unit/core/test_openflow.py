"""Flows in ovs-ofctl's words."""

from __future__ import annotations

from typing import Any

import pytest

from drivers.ovs.filters import foreign_flows, port_cookie, port_flows
from netplugin.api.models import PortSpec
from netplugin.host.openflow import COOKIE_MARK, Flow, parse_flows

DUMP = """NXST_FLOW reply (xid=0x4):
 cookie=0x6e70000000000000, priority=100,in_port=LOCAL actions=NORMAL
 cookie=0x6e70123456789abc, reset_counts in_port=1 actions=NORMAL
 cookie=0x6e70123456789abd, table=5, priority=1 actions=drop
 cookie=0x6e70123456789abe, idle_timeout=9, priority=7,ip,in_port=2,nw_src=10.0.0.0/24 actions=output:3
"""


def test_a_dump_is_read_whatever_flags_a_flow_has() -> None:
    flows = parse_flows(DUMP)
    assert flows == [
        Flow.make(COOKIE_MARK, 100, "in_port=LOCAL"),
        Flow(0x6E70123456789ABC, 32768, "in_port=1,reset_counts", "NORMAL"),
        Flow(0x6E70123456789ABD, 1, "table=5", "drop"),
        Flow(
            0x6E70123456789ABE,
            7,
            "idle_timeout=9,in_port=2,ip,nw_src=10.0.0.0/24",
            "output:3",
        ),
    ]


def test_equal_matches_are_equal_flows() -> None:
    assert Flow.make(1, 2, "b,a=1,c") == Flow.make(1, 2, "c,b,a=1")


def _spec(**security: object) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": "52:54:00:00:00:01",
            "backend": "dpdkvhostuser",
            "network": {"type": "flat", "physical_network": "net1"},
            "port_security": security,
        }
    )


ADDRESSES = [
    {"ip": "10.0.0.5"},
    {"ip": "2001:db8::/64"},
    {"ip": "fe80::1", "mac": "52:54:00:00:00:09"},
]
EVERY_MODE: list[dict[str, Any]] = [
    {**security, "roles": roles}
    for security in ({}, {"enabled": False}, {"allowed_addresses": ADDRESSES})
    for roles in ([], ["router"], ["dhcp_server"])
]


@pytest.mark.parametrize("security", EVERY_MODE)
def test_every_filter_is_about_its_port_alone(security: dict[str, Any]) -> None:
    """A flow without in_port would be about all; one that allows without dl_src trusts the VM."""
    flows = port_flows("p1", 7, _spec(**security))
    assert flows
    for flow in flows:
        fields = flow.match.split(",")
        assert "in_port=7" in fields and flow.cookie == port_cookie("p1")
        if flow.actions != "drop":
            assert "vlan_tci=0x0000/0x1fff" in fields, f"a tag would enter: {flow}"
        if flow.actions != "drop" and security.get("enabled", True):
            assert any(field.startswith("dl_src=") for field in fields), flow


@pytest.mark.parametrize("security", EVERY_MODE)
def test_what_is_refused_is_looked_at_before_what_is_allowed(security: dict[str, Any]) -> None:
    flows = port_flows("p1", 7, _spec(**security))
    refused = {f.match: f.priority for f in flows if f.actions == "drop" and f.priority >= 120}
    assert max(f.priority for f in flows if f.actions != "drop") < 120
    roles = security["roles"] if security.get("enabled", True) else ["router", "dhcp_server"]
    assert ("icmp6,icmp_type=134,in_port=7" in refused) == ("router" not in roles)
    assert ("in_port=7,tp_dst=68,udp" in refused) == ("dhcp_server" not in roles)
    assert any("dl_dst=01:80:c2:00:00:00/" in match for match in refused)


def test_a_port_without_a_filter_has_few_flows_and_they_are_not_of_roles() -> None:
    plain, router = (port_flows("p1", 7, _spec(enabled=False, roles=r)) for r in ([], ["router"]))
    assert plain == router and len(plain) == 2
    assert len(port_flows("p1", 7, _spec())) <= 13, "each port has them: they must stay few"


def test_on_a_bridge_that_is_not_ours_only_drops_are_added_for_a_port_without_a_filter() -> None:
    flows = foreign_flows("p1", 7)
    assert {flow.actions for flow in flows} == {"drop"}
    assert any("vlan_tci=0x1000/0x1000" in flow.match for flow in flows)


def test_no_two_flows_of_a_port_are_one_to_the_bridge() -> None:
    for security in EVERY_MODE:
        flows = port_flows("p1", 7, _spec(**security))
        assert len({flow.identity for flow in flows}) == len(flows)


def test_an_address_filter_lets_no_other_protocol_by() -> None:
    flows = port_flows("p1", 7, _spec(allowed_addresses=[{"ip": "10.0.0.5"}]))
    allowed = [flow.match.split(",") for flow in flows if flow.actions != "drop"]
    assert all({"ip", "arp", "rarp", "udp"} & set(fields) for fields in allowed)
    assert all(any(f.startswith(("nw_src=", "arp_spa=")) for f in fields) for fields in allowed)
    probes = [fields for fields in allowed if "arp" in fields and "arp_spa=0.0.0.0" in fields]
    assert probes and all("arp_tpa=10.0.0.5" in fields for fields in probes)


def test_cookies_are_ours_and_never_the_bridge_s() -> None:
    cookies = {port_cookie(f"p{n}") for n in range(5000)}
    assert len(cookies) == 5000 and COOKIE_MARK not in cookies
    assert all(cookie >> 48 == COOKIE_MARK >> 48 for cookie in cookies)

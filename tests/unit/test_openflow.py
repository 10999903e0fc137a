"""Flows in ovs-ofctl's words."""

from __future__ import annotations

from drivers.ovs.filters import port_cookie, port_flows
from netplugin.host.openflow import COOKIE_MARK, Flow, parse_flows
from netplugin.models import PortSpec

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
            0x6E70123456789ABE, 7, "idle_timeout=9,in_port=2,ip,nw_src=10.0.0.0/24",
            "output:3",
        ),
    ]  # fmt: skip


def test_equal_matches_are_equal_flows() -> None:
    assert Flow.make(1, 2, "b,a=1,c") == Flow.make(1, 2, "c,b,a=1")


def _spec(**security: object) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm", "mac": "52:54:00:00:00:01", "backend": "dpdkvhostuser",
            "network": {"type": "flat", "physical_network": "net1"}, "port_security": security,
        }
    )  # fmt: skip


def test_every_filter_is_about_its_port_alone() -> None:
    """A flow without in_port would be about all; one that allows without dl_src trusts the VM."""
    addresses = [
        {"ip": "10.0.0.5"},
        {"ip": "2001:db8::/64"},
        {"ip": "fe80::1", "mac": "52:54:00:00:00:09"},
    ]
    for security in ({}, {"enabled": False}, {"allowed_addresses": addresses}):
        flows = port_flows("p1", 7, _spec(**security))
        assert flows
        for flow in flows:
            fields = flow.match.split(",")
            assert "in_port=7" in fields and flow.cookie == port_cookie("p1")
            if flow.actions != "drop" and security.get("enabled", True):
                assert any(field.startswith("dl_src=") for field in fields), flow


def test_an_address_filter_lets_no_other_protocol_by() -> None:
    flows = port_flows("p1", 7, _spec(allowed_addresses=[{"ip": "10.0.0.5"}]))
    allowed = [flow.match.split(",") for flow in flows if flow.actions != "drop"]
    assert all({"ip", "arp", "udp"} & set(fields) for fields in allowed)
    assert all(any(f.startswith(("nw_src=", "arp_spa=")) for f in fields) for fields in allowed)


def test_cookies_are_ours_and_never_the_bridge_s() -> None:
    cookies = {port_cookie(f"p{n}") for n in range(5000)}
    assert len(cookies) == 5000 and COOKIE_MARK not in cookies
    assert all(cookie >> 48 == COOKIE_MARK >> 48 for cookie in cookies)

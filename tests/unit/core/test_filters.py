"""The flows of filters, as values."""

from __future__ import annotations

from typing import Any

import pytest

from drivers.ovs.filters import foreign_flows, port_cookie, port_flows
from netplugin.host.flow import COOKIE_MARK
from netplugin.host.flow_actions import DROP
from tests.unit.core.openflow_flows import EVERY_MODE, spec_of


@pytest.mark.parametrize("security", EVERY_MODE)
def test_every_filter_is_about_its_port_alone(security: dict[str, Any]) -> None:
    """A flow without in_port would be about all; one that allows without dl_src trusts the VM."""
    flows = port_flows("p1", 7, spec_of(**security))
    assert flows
    for flow in flows:
        fields = flow.match.split(",")
        assert "in_port=7" in fields and flow.cookie == port_cookie("p1")
        if flow.actions != DROP:
            assert "vlan_tci=0x0000/0x1fff" in fields, f"a tag would enter: {flow}"
        if flow.actions != DROP and security.get("enabled", True):
            assert any(field.startswith("dl_src=") for field in fields), flow


@pytest.mark.parametrize("security", EVERY_MODE)
def test_what_is_refused_is_looked_at_before_what_is_allowed(security: dict[str, Any]) -> None:
    flows = port_flows("p1", 7, spec_of(**security))
    highest = max(f.priority for f in flows if f.actions != DROP)
    refused = {f.match for f in flows if f.actions == DROP and f.priority > highest}
    assert highest > 32768, "what is added by hand without a priority admits nothing more"
    roles = security["roles"] if security.get("enabled", True) else ["router", "dhcp_server"]
    assert ("icmp6,icmp_type=134,in_port=7" in refused) == ("router" not in roles)
    assert ("in_port=7,tp_dst=68,udp" in refused) == ("dhcp_server" not in roles)
    assert any("dl_dst=01:80:c2:00:00:00/" in match for match in refused)


def test_a_port_without_a_filter_has_few_flows_and_they_are_not_of_roles() -> None:
    plain, router = (port_flows("p1", 7, spec_of(enabled=False, roles=r)) for r in ([], ["router"]))
    assert plain == router and len(plain) == 4
    assert len(port_flows("p1", 7, spec_of())) <= 18, "each port has them: they must stay few"


def test_on_a_bridge_that_is_not_ours_only_drops_are_added_for_a_port_without_a_filter() -> None:
    flows = foreign_flows("p1", 7)
    assert {flow.actions for flow in flows} == {DROP}
    assert any("vlan_tci=0x1000/0x1000" in flow.match for flow in flows)


def test_no_two_flows_of_a_port_are_one_to_the_bridge() -> None:
    for security in EVERY_MODE:
        flows = port_flows("p1", 7, spec_of(**security))
        assert len({flow.identity for flow in flows}) == len(flows)


def test_an_address_filter_lets_no_other_protocol_by() -> None:
    flows = port_flows("p1", 7, spec_of(allowed_addresses=[{"ip": "10.0.0.5"}]))
    allowed = [flow.match.split(",") for flow in flows if flow.actions != DROP]
    assert all({"ip", "arp", "rarp", "udp"} & set(fields) for fields in allowed)
    assert all(any(f.startswith(("nw_src=", "arp_spa=")) for f in fields) for fields in allowed)
    probes = [fields for fields in allowed if "arp" in fields and "arp_spa=0.0.0.0" in fields]
    assert probes and all("arp_tpa=10.0.0.5" in fields for fields in probes)


@pytest.mark.parametrize(("prefix", "each"), [("10.0.0.", 3), ("2001:db8::", 4)])
def test_flows_of_addresses_add_and_do_not_multiply(prefix: str, each: int) -> None:
    """A thousand ports with 64 addresses each are read in one look."""

    def count(addresses: int) -> int:
        ips = [{"ip": f"{prefix}{n}"} for n in range(1, addresses + 1)]
        return len(port_flows("p1", 7, spec_of(allowed_addresses=ips)))

    assert count(64) - count(1) == 63 * each


def test_cookies_are_ours_and_never_the_bridge_s() -> None:
    cookies = {port_cookie(f"p{n}") for n in range(5000)}
    assert len(cookies) == 5000 and COOKIE_MARK not in cookies
    assert all(cookie >> 48 == COOKIE_MARK >> 48 for cookie in cookies)

"""Which neighbour discovery a filter with IPv6 addresses admits, as vswitchd decides it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drivers.ovs.filters import bridge_flows, port_cookie, port_flows
from netplugin.host.names import link_local
from netplugin.host.ovs import OvsHost
from tests.lab.ovs import PrivateOvs
from tests.unit.core.openflow_flows import spec_of
from tests.unit.ovs import bridge, port, settings_of, soon, started

BRIDGE = "adverts"
MAC, OTHER_MAC, THIRD_MAC = "52:54:00:00:00:01", "52:54:00:00:00:09", "52:54:00:00:00:08"
OWN, ALSO, INSIDE, OTHERS = "2001:db8::5", "2001:db8::6", "2001:db8:1::7", "2001:db8::99"
ADDRESSES = [{"ip": OWN}, {"ip": ALSO, "mac": OTHER_MAC}, {"ip": "2001:db8:1::/64"}, {"ip": "10.0.0.5"}]
SOLICITATION, ADVERTISEMENT = 135, 136


@pytest.fixture(scope="module")
def filtered(switch: PrivateOvs) -> Iterator[PrivateOvs]:
    with started(settings_of(switch)) as ovs:
        _fill(ovs)
        yield switch
    switch.vsctl("del-br", BRIDGE)


def _fill(ovs: OvsHost) -> None:
    ovs.db.write([bridge(BRIDGE), port(BRIDGE, "adverts-1"), port(BRIDGE, "adverts-2")], soon())
    flows = port_flows("p1", 1, spec_of(allowed_addresses=ADDRESSES))
    ovs.flows.replace(BRIDGE, [port_cookie("p1")], {*flows, *bridge_flows([])}, soon())


@pytest.mark.parametrize(
    ("kind", "mac", "source", "target", "passes"),
    [
        (ADVERTISEMENT, MAC, OWN, OWN, True),
        (ADVERTISEMENT, MAC, link_local(MAC), OWN, True),
        (ADVERTISEMENT, MAC, link_local(MAC), link_local(MAC), True),
        (ADVERTISEMENT, MAC, "2001:db8:1::1", INSIDE, True),
        (ADVERTISEMENT, OTHER_MAC, ALSO, ALSO, True),
        (ADVERTISEMENT, OTHER_MAC, link_local(OTHER_MAC), ALSO, True),
        (ADVERTISEMENT, MAC, OWN, OTHERS, False),
        (ADVERTISEMENT, MAC, link_local(MAC), OTHERS, False),
        (ADVERTISEMENT, MAC, OTHERS, OWN, False),
        (ADVERTISEMENT, MAC, OTHERS, OTHERS, False),
        (ADVERTISEMENT, MAC, "2001:db8:1::1", OTHERS, False),
        (ADVERTISEMENT, MAC, OWN, INSIDE, False),
        (ADVERTISEMENT, MAC, ALSO, ALSO, False),
        (ADVERTISEMENT, THIRD_MAC, OWN, OWN, False),
        (ADVERTISEMENT, MAC, "::", OWN, False),
        (SOLICITATION, MAC, OWN, OTHERS, True),
        (SOLICITATION, MAC, link_local(MAC), OTHERS, True),
        (SOLICITATION, MAC, "::", OWN, True),
        (SOLICITATION, MAC, "::", OTHERS, False),
        (SOLICITATION, MAC, OTHERS, OWN, False),
    ],
)
def test_an_advertisement_is_of_an_allowed_address_and_from_one(
    filtered: PrivateOvs, kind: int, mac: str, source: str, target: str, passes: bool
) -> None:
    frame = (
        f"in_port=1,dl_src={mac},dl_dst=33:33:00:00:00:01,icmp6,ipv6_src={source},ipv6_dst=ff02::1,"
        f"icmpv6_type={kind},nd_target={target}"
    )
    shown = filtered.appctl("ofproto/trace", BRIDGE, frame)
    assert ("Datapath actions: drop" not in shown) == passes, shown

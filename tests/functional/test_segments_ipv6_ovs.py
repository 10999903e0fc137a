"""VXLAN between two hypervisors whose tunnels' addresses are IPv6."""

from __future__ import annotations

from tests.functional.hosts_ovs import host, let_in_by_peers_alone, spec_on
from tests.lab.processes import wait_for
from tests.lab.switch import switch


def test_tunnels_over_ipv6() -> None:
    with switch(), host(1, family=6) as one, host(2, family=6) as other:
        for each in (one, other):
            each.network("blue", 5001, one.address, other.address, mtu=1430)
        with (
            one.vm("a", spec_on("blue", 1), "10.0.0.1") as a,
            other.vm("b", spec_on("blue", 2), "10.0.0.2") as b,
        ):
            wait_for(lambda: a.pings(b.address), 20, "one VM reaches the other")
            wait_for(lambda: b.pings(a.address), 20, "and the other way")
            assert one.planned() == [], "what was learned is no drift"
        let_in_by_peers_alone(one, other, family=6)

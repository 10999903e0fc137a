"""Jumbo frames from VM to VM across hosts: the MTU passes, more does not, a narrow hop is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.functional.conftest import make_spec
from tests.functional.hosts_ovs import UNDERLAY, Host, clean, host, spec_on
from tests.lab.processes import wait_for
from tests.lab.switch import switch
from tests.lab.vm import Vm

MTU, VXLAN_MTU = 9000, 8950
#: OVS leaves room for one VLAN tag in a frame (netdev-dpdk.c, MTU_TO_MAX_FRAME_LEN).
TAG = 4


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Host, Host]]:
    more = {"uplink_mtu": f"physnet1:{MTU}"}
    with (
        switch(),
        host(1, uplinks=["eth2"], memory_mb=192, underlay_mtu=MTU, more=more) as one,
        host(2, uplinks=["eth2"], memory_mb=192, underlay_mtu=MTU, more=more) as other,
    ):
        yield one, other


@pytest.fixture
def hosts(pair: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    with clean(*pair):
        yield pair


def _passes_exactly(a: Vm, b: Vm, mtu: int) -> None:
    wait_for(lambda: a.pings(b.address), 30, "one VM reaches the other")
    wait_for(lambda: a.pings(b.address, mtu - 28), 30, f"{mtu} bytes pass")
    assert not any(a.pings(b.address, mtu + TAG + 1 - 28) for _ in range(3)), "and no more"


def test_a_vlan_carries_its_mtu(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    spec = {"network": {"mtu": MTU}}
    with (
        one.vm("a", make_spec(1, vlan_id=100, **spec), "10.0.0.1") as a,
        other.vm("b", make_spec(2, vlan_id=100, **spec), "10.0.0.2") as b,
    ):
        _passes_exactly(a, b, MTU)
        # On the uplink the frame has its tag: there it is exact to the byte.
        assert not any(a.pings(b.address, MTU + 1 - 28) for _ in range(3))
        one.repair()
        assert one.agent.get("/v1/ports/a")[1]["observed"]["mtu"] == MTU


def test_vxlan_carries_its_mtu(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    for each in hosts:
        each.network("blue", 5001, one.address, other.address, mtu=VXLAN_MTU)
    with (
        one.vm("a", spec_on("blue", 1), "10.0.0.1") as a,
        other.vm("b", spec_on("blue", 2), "10.0.0.2") as b,
    ):
        _passes_exactly(a, b, VXLAN_MTU)


def test_a_narrow_hop_is_refused_before_and_reported_after(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    one.network("wide", 5002, mtu=VXLAN_MTU + 1)
    status, error = one.put("w", spec_on("wide", 1))
    assert (status, error["code"], error["step"]) == (409, "unsupported", "mtu")
    assert f"an MTU of {MTU + 1} ({VXLAN_MTU + 1} and 50 for VXLAN)" in error["detail"]
    assert f"has {MTU}" in error["detail"] and f"mtu_request={MTU + 1}" in error["fix"]
    assert one.agent.get("/v1/ports/w")[0] == 404
    assert one.ovs.vsctl("list-br").split() == [UNDERLAY]
    one.network("blue", 5001, mtu=VXLAN_MTU)
    one.plug("a", spec_on("blue", 2))
    one.ovs.vsctl("set", "Interface", "dpdk0", f"mtu_request={MTU - 1}")
    try:
        wait_for(lambda: one.ovs.get("Interface", "dpdk0", "mtu") == str(MTU - 1), 30, "it is less")
        one.agent.call("POST", "/v1/reconcile", {})
        port = one.agent.get("/v1/ports/a")[1]
        assert port["state"] == "degraded" and f"has {MTU - 1}" in port["error"]["detail"]
    finally:
        one.ovs.vsctl("set", "Interface", "dpdk0", f"mtu_request={MTU}")

"""VXLAN networks across hosts, through the agents, with the packets of VMs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from drivers.linuxbridge.segments import Segment
from tests.lab.namespaces import ANSWER_S
from tests.lab.processes import wait_for
from tests.lab.switch import switch
from tests.lab.traffic_hosts import WIRE, Host, host, make_spec, overlay

MTU = 8950  # what 9000 on the wire leaves
BLUE = Segment(network_id="blue")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        yield [stack.enter_context(host(number, mtu=MTU + 50)) for number in (1, 2, 3)]


@pytest.fixture(autouse=True)
def clean(hosts: list[Host]) -> Iterator[None]:
    before = [each.links() for each in hosts]
    yield
    for each in hosts:
        each.sh("ip", "link", "set", WIRE, "mtu", str(MTU + 50), "up")
        each.repair()
        each.unplug(*each.ports())
        for network in each.agent.get("/v1/networks")[1]:
            each.agent.call("DELETE", f"/v1/networks/{network['network_id']}")
    assert [each.links() for each in hosts] == before, "each device went with its last port"


def put_blue(hosts: list[Host], mtu: int = MTU) -> None:
    """Each host is given the addresses of all, its own among them."""
    addresses = [each.address for each in hosts]
    for each in hosts:
        each.network("blue", 5001, addresses, mtu=mtu)


def peers(each: Host) -> set[str]:
    """Read by the kernel's own tools."""
    text = each.sh("bridge", "fdb", "show", "dev", BLUE.device)
    lines = [line.split() for line in text.splitlines() if line.startswith("00:00:00:00:00:00")]
    return {words[words.index("dst") + 1] for words in lines}


def test_vms_of_one_network_reach_each_other_and_no_others(hosts: list[Host]) -> None:
    one, two, _ = hosts
    put_blue(hosts)
    for each in hosts:
        each.network("red", 5002, [h.address for h in hosts], mtu=MTU)
    with (
        one.vm("a", make_spec(1, overlay("blue")), "10.0.0.1") as a,
        two.vm("b", make_spec(2, overlay("blue")), "10.0.0.2") as b,
        two.vm("c", make_spec(3, overlay("red")), "10.0.0.3") as c,
        one.vm("d", make_spec(4, overlay("red")), "10.0.0.4") as d,
    ):
        assert a.reaches("10.0.0.2") and b.reaches("10.0.0.1")
        assert c.reaches("10.0.0.4")
        assert not a.pings("10.0.0.3") and not b.pings("10.0.0.3") and not d.pings("10.0.0.1")


def test_frames_of_the_mtu_pass_and_one_byte_more_does_not(hosts: list[Host]) -> None:
    one, two, _ = hosts
    put_blue(hosts)
    with (
        one.vm("a", make_spec(1, overlay("blue")), "10.0.0.1") as a,
        two.vm("b", make_spec(2, overlay("blue")), "10.0.0.2"),
    ):
        assert a.reaches("10.0.0.2", MTU - 28)
        assert not a.pings("10.0.0.2", MTU - 27)
        assert a.pings("10.0.0.2", MTU - 28, ANSWER_S)
        for device in (a.tap, BLUE.bridge, BLUE.device):
            assert one.link(device)["mtu"] == MTU


def test_a_wire_too_small_is_refused_before_the_vm_is_and_reported_afterwards(
    hosts: list[Host],
) -> None:
    one = hosts[0]
    put_blue(hosts)
    before = one.links()
    one.sh("ip", "link", "set", WIRE, "mtu", str(MTU + 49))
    status, problem = one.put("a", make_spec(1, overlay("blue")))
    assert (status, problem["code"], problem["step"]) == (409, "conflict", "local_ip")
    assert f"ip link set {WIRE} mtu {MTU + 50}" in problem["fix"] and one.links() == before
    one.sh("ip", "link", "set", WIRE, "mtu", str(MTU + 50))
    one.plug("a", make_spec(1, overlay("blue")))
    one.sh("ip", "link", "set", WIRE, "mtu", str(MTU + 49))
    one.repair()
    port = one.port("a")
    assert port["state"] == "degraded" and f"MTU {MTU + 49}" in port["error"]["detail"]
    assert one.changes() == []


def test_a_host_joins_and_leaves_and_the_others_lose_nothing(hosts: list[Host]) -> None:
    one, two, three = hosts
    pair = [one.address, two.address]
    for each in (one, two):
        each.network("blue", 5001, pair, mtu=MTU)
    everyone = [*pair, three.address]
    three.network("blue", 5001, everyone, mtu=MTU)
    spec = [make_spec(number, overlay("blue")) for number in (1, 2, 3)]
    with (
        one.vm("a", spec[0], "10.0.0.1") as a,
        two.vm("b", spec[1], "10.0.0.2") as b,
        three.vm("c", spec[2], "10.0.0.3") as c,
    ):
        assert a.reaches("10.0.0.2")
        with b.listening() as arrivals:
            with a.streaming("10.0.0.2", size=500) as sent:
                index = one.link(BLUE.device)["ifindex"]
                for each in (one, two):
                    each.network("blue", 5001, everyone, mtu=MTU)
                joined = c.reaches("10.0.0.1")
                learned = one.sh("bridge", "fdb", "show", "dev", BLUE.device)
                three.network("blue", 5001, [], mtu=MTU)
                for each in (one, two):
                    each.network("blue", 5001, pair, mtu=MTU)
            wait_for(lambda: sent[-1] in arrivals.numbers, 60, "the last one has come")
        assert joined and f"{spec[2]['mac']} dst {three.address}" in learned
        assert arrivals.numbers == set(sent)
        assert one.link(BLUE.device)["ifindex"] == index
        assert peers(one) == {two.address}
        text = one.sh("bridge", "fdb", "show", "dev", BLUE.device)
        assert three.address not in text and two.address in text


def test_each_host_has_the_others_as_peers_and_one_only_for_itself(hosts: list[Host]) -> None:
    one, two, three = hosts
    put_blue(hosts)
    one.plug("a", make_spec(1, overlay("blue")))
    assert peers(one) == {two.address, three.address}
    details = one.port("a")["observed"]["uplink"]
    assert details["peers"] == [two.address, three.address]
    assert details["interface"]["name"] == WIRE


def test_what_cannot_be_is_refused_and_changes_nothing(hosts: list[Host]) -> None:
    one = hosts[0]
    put_blue(hosts)
    before = one.links()
    one.agent.call("PUT", "/v1/networks/six", {"type": "vxlan", "vni": 6, "peers": ["fd00::1"]})
    status, problem = one.put("a", make_spec(1, overlay("six")))
    assert (status, problem["code"], problem["step"]) == (409, "conflict", "plan")
    one.sh(
        "ip", "link", "add", "theirs", "type", "vxlan", "id", "5001", "dstport", "4789", "local", one.address
    )
    try:
        status, problem = one.put("a", make_spec(1, overlay("blue")))
        assert (status, problem["code"]) == (409, "conflict") and "theirs" in problem["detail"]
    finally:
        one.sh("ip", "link", "delete", "theirs")
    one.sh("ip", "addr", "del", f"{one.address}/24", "dev", WIRE)
    try:
        status, problem = one.put("a", make_spec(1, overlay("blue")))
        assert (status, problem["step"]) == (503, "local_ip") and one.address in problem["detail"]
    finally:
        one.sh("ip", "addr", "add", f"{one.address}/24", "dev", WIRE)
    assert one.links() == before


def test_a_change_of_peers_that_cannot_be_is_undone(hosts: list[Host]) -> None:
    one, two, _ = hosts
    put_blue(hosts)
    one.plug("a", make_spec(1, overlay("blue")))
    wrong = {"type": "vxlan", "vni": 5001, "peers": ["fd00::1"], "mtu": MTU}
    assert one.agent.call("PUT", "/v1/networks/blue", wrong)[0] == 409
    assert two.address in peers(one) and one.port("a")["state"] == "active"


def test_a_host_without_an_address_for_tunnels_refuses_and_says_why(hosts: list[Host]) -> None:
    with host(9, tunnels=False) as alone:
        alone.agent.call("PUT", "/v1/networks/blue", {"type": "vxlan", "vni": 5001, "peers": []})
        status, problem = alone.put("a", make_spec(1, overlay("blue")))
        assert (status, problem["code"]) == (503, "backend_unavailable")
        assert "set [linuxbridge] local_ip" in problem["fix"]


@pytest.mark.parametrize("family", [4, 6])
def test_tunnels_over_either_family(hosts: list[Host], family: int) -> None:
    with (
        host(11, family=family, mtu=1500) as one,
        host(12, family=family, mtu=1500) as two,
    ):
        mtu = 1450 if family == 4 else 1430
        for each in (one, two):
            each.network("green", 7, [one.address, two.address], mtu=mtu)
        with (
            one.vm("e", make_spec(5, overlay("green")), "10.0.1.1") as a,
            two.vm("f", make_spec(6, overlay("green")), "10.0.1.2"),
        ):
            assert a.reaches("10.0.1.2", mtu - 28) and not a.pings("10.0.1.2", mtu - 27)

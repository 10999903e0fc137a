"""Segments across hypervisors: VMs on one VLAN or VNI reach each other, on different ones not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from drivers.ovs.overlays import OVERLAY, TO_OVERLAY, TUNNELS, vxlan_name
from tests.functional.conftest import make_spec
from tests.functional.hosts_ovs import UNDERLAY, Host, clean, host, let_in_by_peers_alone, mac, spec_on
from tests.lab.namespaces import namespace, pings, within
from tests.lab.processes import run, wait_for
from tests.lab.switch import switch, wire
from tests.lab.vm import Vm


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Host, Host]]:
    with switch(), host(1, uplinks=["eth2"]) as one, host(2, uplinks=["eth2"]) as other:
        yield one, other


@pytest.fixture
def hosts(pair: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    with clean(*pair):
        yield pair


def reaches(one: Vm, address: str) -> None:
    wait_for(lambda: one.pings(address), 20, f"{one.name} reaches {address}")


def test_one_vni_across_two_hosts(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    for each in hosts:
        each.network("blue", 5001, one.address, other.address)
        each.network("red", 5002, one.address, other.address)
    with (
        one.vm("a", spec_on("blue", 1), "10.0.0.1") as a,
        one.vm("b", spec_on("blue", 2), "10.0.0.2") as b,
        other.vm("c", spec_on("blue", 3), "10.0.0.3") as c,
        other.vm("d", spec_on("red", 4), "10.0.0.4") as d,
    ):
        reaches(a, b.address)
        reaches(a, c.address)
        reaches(c, b.address)
        for _ in range(3):
            assert not a.pings(d.address) and not d.pings(c.address)
        for each in hosts:
            assert each.planned() == [], "what vswitchd learned is no drift"
        assert other.agent.get("/v1/ports/c")[1]["observed"]["network_id"] == "blue"
    assert one.agent.call("POST", "/v1/ports:batch", {"delete": ["a", "b"]})[0] == 200
    assert one.ovs.vsctl("list-br").split() == [UNDERLAY], "bridges of ours go with the last"


def test_who_is_no_peer_of_a_network_gets_nothing_into_it(hosts: tuple[Host, Host]) -> None:
    let_in_by_peers_alone(*hosts)


def test_one_vlan_across_two_hosts(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    with (
        one.vm("a", make_spec(1, vlan_id=100), "10.0.0.1") as a,
        other.vm("b", make_spec(2, vlan_id=100), "10.0.0.2") as b,
        other.vm("c", make_spec(3, vlan_id=101), "10.0.0.3") as c,
    ):
        reaches(a, b.address)
        for _ in range(3):
            assert not a.pings(c.address) and not c.pings(a.address)


def test_what_the_flows_do_by_the_word_of_vswitchd(hosts: tuple[Host, Host]) -> None:
    """ofproto/trace is the judge: where a frame goes, and that none goes back into a tunnel."""
    one, _ = hosts
    peers = ("10.9.0.2", "10.9.0.3")
    one.network("blue", 5001, one.address, *peers)
    one.network("red", 5002, "10.9.0.4")
    one.plug("a", spec_on("blue", 1))
    one.plug("b", spec_on("red", 2))
    vlan = one.agent.get("/v1/networks/blue")[1]["local_vlan"]
    ofport = {name: one.ovs.get("Interface", name, "ofport") for name in (TO_OVERLAY, vxlan_name(4789))}

    def trace(flow: str) -> str:
        return one.ovs.appctl("ofproto/trace", TUNNELS, flow, "-generate")

    out = f"in_port={ofport[TO_OVERLAY]},dl_vlan={vlan},dl_src={mac(1)}"
    everybody = trace(f"{out},dl_dst=ff:ff:ff:ff:ff:ff")
    assert all(f"set_field:{peer}->tun_dst" in everybody for peer in peers)
    assert "10.9.0.1->tun_dst" not in everybody and "10.9.0.4" not in everybody
    unknown = trace(f"{out},dl_dst={mac(9)}")
    assert all(f"set_field:{peer}->tun_dst" in unknown for peer in peers)
    # A frame of VM 9 comes from the second peer: it reaches the overlay bridge and no tunnel.
    into = f"in_port={ofport[vxlan_name(4789)]},tun_id=5001,tun_src=10.9.0.3"
    received = trace(f"{into},dl_src={mac(9)},dl_dst=ff:ff:ff:ff:ff:ff")
    assert f'bridge("{OVERLAY}")' in received and "native tunnel" not in received
    known = trace(f"{out},dl_dst={mac(9)}")
    assert "load:0xa090003->NXM_NX_TUN_IPV4_DST[]" in known and "set_field" not in known.split("10.")[-1]
    # Nothing is learned from a sender that cannot be, and a VNI that is not ours goes nowhere.
    assert "drop" in trace(f"{into},dl_src=01:00:5e:00:00:01,dl_dst={mac(1)}")
    assert "drop" in trace(f"in_port={ofport[vxlan_name(4789)]},tun_id=7,dl_dst={mac(1)}")
    assert one.planned() == []


@contextmanager
def kernel_host(number: int, vni: int, *peers: str) -> Iterator[str]:
    """Another kind of peer: the kernel's own VXLAN device in a namespace; it is its own VM."""
    name = f"np-k{number}"
    with namespace(name):
        # It says nothing unasked: what it sends would be learned.
        run(within(name, ["sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1"]))
        wire(name, "eth1")
        run(within(name, ["ip", "address", "add", f"10.9.0.{number}/24", "dev", "eth1"]))
        # Without a UDP checksum: a veth leaves it to a NIC, and there is none.
        run(
            within(
                name,
                [
                    "ip",
                    "link",
                    "add",
                    "vx",
                    "mtu",
                    "1450",
                    "type",
                    "vxlan",
                    "id",
                    str(vni),
                    "local",
                    f"10.9.0.{number}",
                    "dstport",
                    "4789",
                    "noudpcsum",
                ],
            )
        )
        for peer in peers:
            flood = ["bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "vx", "dst", peer]
            run(within(name, flood))
        run(within(name, ["ip", "address", "add", f"10.0.0.{number}/24", "dev", "vx"]))
        run(within(name, ["ip", "link", "set", "vx", "up"]))
        yield name


def test_peers_come_and_go_without_loss_for_the_others(hosts: tuple[Host, Host]) -> None:
    """And the third peer is a kernel: what we send is VXLAN to others too."""
    one, other = hosts
    ours = [one.address, other.address]
    for each in hosts:
        each.network("blue", 5001, *ours)
    with (
        one.vm("a", spec_on("blue", 1), "10.0.0.1") as a,
        other.vm("b", spec_on("blue", 2), "10.0.0.2") as b,
        kernel_host(7, 5001, *ours) as third,
        b.receives() as ear,
    ):
        reaches(a, b.address)
        reaches(b, a.address)
        assert not a.pings("10.0.0.7"), "it is no peer yet: it is not asked"
        before, third_address = one.flows(TUNNELS), "10.9.0.7"
        missed = lambda: sum(each.missed() for each in hosts)  # noqa: E731
        already = missed()
        with a.streaming(b, ear) as sent:
            for each in hosts:
                each.network("blue", 5001, *ours, "10.9.0.7")
            wait_for(lambda: pings(third, a.address), 20, "the kernel reaches the VM")
            changed = set(one.flows(TUNNELS)) ^ set(before)
            about_it = ("table=20", f"tun_src={third_address}")
            assert changed and all(any(w in flow for w in about_it) for flow in changed), changed
            for each in hosts:
                each.network("blue", 5001, *ours)
            assert "0xa090007" not in one.ovs.ofctl("dump-flows", TUNNELS), "nothing leads to it"
            after = len(sent)
            wait_for(lambda: len(sent) > after + 100, 60, "frames go on")
        # Its buffer holds a tenth of a second: less than a busy machine may let a PMD thread wait.
        wait_for(
            lambda: len(sent) - ear.listen() <= missed() - already,
            30,
            "all have come but what the lab's NICs missed",
        )
        assert ear.numbers == sorted(set(ear.numbers)), "each frame once at most, in order"
        assert sorted(one.flows(TUNNELS)) == sorted(before)
        a.forget()
        assert not a.pings("10.0.0.7")


def test_a_killed_vswitchd_has_its_networks_back(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    for each in hosts:
        each.network("blue", 5001, one.address, other.address)
    one.plug("a", spec_on("blue", 1))
    flows = one.flows(TUNNELS)
    one.ovs.kill_vswitchd()
    one.ovs.start_vswitchd()
    wait_for(lambda: one.flows(TUNNELS) == flows, 20, "the network's flows are back")
    with (
        one.vm("a", spec_on("blue", 1), "10.0.0.1") as a,
        other.vm("b", spec_on("blue", 2), "10.0.0.2") as b,
    ):
        reaches(a, b.address)
    assert one.planned() == []


def test_an_address_that_is_not_there_is_refused_and_then_reported(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.network("blue", 5001, other.address)
    one.plug("a", spec_on("blue", 1))
    one.ip("address", "delete", f"{one.address}/24", "dev", UNDERLAY)
    try:
        status, error = one.put("b", spec_on("blue", 2))
        assert (status, error["code"], error["step"]) == (503, "backend_unavailable", "underlay")
        assert one.address in error["detail"] and "ip address add" in error["fix"]
        one.agent.call("POST", "/v1/reconcile", {})
        port = one.agent.get("/v1/ports/a")[1]
        assert port["state"] == "degraded" and one.address in port["error"]["detail"]
        checks = {c["id"]: c for c in one.agent.get("/v1/host/checks")[1]}
        assert checks["underlay"]["status"] == "fail"
        one.ip("address", "add", f"{one.address}/24", "dev", "eth1")
        status, error = one.put("b", spec_on("blue", 2))
        assert status == 503 and "eth1, which is no netdev bridge" in error["detail"]
        one.ip("address", "delete", f"{one.address}/24", "dev", "eth1")
    finally:
        one.ip("address", "add", f"{one.address}/24", "dev", UNDERLAY)
    one.plug("b", spec_on("blue", 2))
    one.agent.call("POST", "/v1/reconcile", {})
    assert one.agent.get("/v1/ports/a")[1]["state"] == "active"
    other.network("blue", 5001, one.address)
    status, error = other.agent.call(
        "PUT", "/v1/networks/six", {"type": "vxlan", "vni": 6, "peers": ["fd00::7"]}
    )
    assert status == 200
    status, error = other.put("c", spec_on("six", 3))
    assert (status, error["code"]) == (422, "invalid_request") and "fd00::7" in error["detail"]


def test_a_lost_store_keeps_the_numbers_of_networks(hosts: tuple[Host, Host]) -> None:
    """What VMs run on is not renumbered: the rows tell which local VLAN is whose."""
    one, other = hosts
    one.network("first", 1, other.address)
    one.network("blue", 5001, other.address)
    one.plug("a", spec_on("blue", 1))
    vlan = one.agent.get("/v1/networks/blue")[1]["local_vlan"]
    one.agent.lose_store()
    flows = one.flows(TUNNELS)
    one.network("other", 5002, other.address)
    assert one.network("blue", 5001, other.address)["local_vlan"] == vlan
    assert one.agent.get("/v1/networks/other")[1]["local_vlan"] != vlan
    one.plug("a", spec_on("blue", 1))
    assert one.flows(TUNNELS) == flows
    one.agent.call("POST", "/v1/reconcile", {"remove_orphans": True})


def test_an_operators_nic_with_too_small_an_mtu_is_refused_before(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    one.ovs.vsctl(
        "add-br",
        "br-phys1",
        "--",
        "set",
        "bridge",
        "br-phys1",
        "datapath_type=netdev",
        "fail_mode=secure",
        "--",
        "add-port",
        "br-phys1",
        "theirs",
        "--",
        "set",
        "interface",
        "theirs",
        "type=dpdk",
        "options:dpdk-devargs=net_null9",
        "mtu_request=1400",
    )
    try:
        wait_for(lambda: one.ovs.get("Interface", "theirs", "mtu") == "1400", 30, "the NIC is there")
        too_large = make_spec(1, vlan_id=100, network={"mtu": 1401})
        # The agent may hear of it later than we did: what it did not foresee, vswitchd refuses.
        wait_for(
            lambda: one.put("a", too_large)[1]["code"] != "host_error",
            60,
            "the agent knows the NIC",
        )
        status, error = one.put("a", too_large)
        assert (status, error["code"], error["step"]) == (409, "unsupported", "mtu")
        assert "theirs has 1400" in error["detail"]
        one.plug("a", make_spec(1, vlan_id=100, network={"mtu": 1400}))
        assert one.agent.call("DELETE", "/v1/ports/a")[0] == 204
    finally:
        one.ovs.vsctl("del-br", "br-phys1")


def test_what_is_reported_of_the_host(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    body = one.plug("a", make_spec(1, queues=4))
    assert body["observed"]["queues_asked"] == 4
    findings = {f["id"]: f for f in one.agent.get("/v1/host/checks")[1]}
    queues = findings["pmd-queues"]
    assert queues["status"] == "warn"
    assert "4 queues" in queues["found"] and "1 PMD" in queues["found"]
    assert findings["underlay"]["status"] == "ok" and one.address in findings["underlay"]["found"]
    assert one.agent.call("DELETE", "/v1/ports/a")[0] == 204
    assert "pmd-queues" not in {f["id"] for f in one.agent.get("/v1/host/checks")[1]}
    (backend,) = one.agent.get("/v1/backends")[1]
    assert backend["facts"]["ovs_version"] == one.ovs.get("Open_vSwitch", ".", "ovs_version")
    assert backend["facts"]["userspace_tso"] is False
    assert "DPDK" in backend["facts"]["dpdk_version"]

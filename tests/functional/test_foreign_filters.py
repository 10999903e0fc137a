"""Packet filters of other programs that cut VMs off: real rules and real pings, and what the agent says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from drivers.linuxbridge.segments import Segment
from netplugin.host.names import TAP, device_name
from tests.lab.namespaces import ANSWER_S, within
from tests.lab.processes import run, wait_for
from tests.lab.switch import switch
from tests.lab.traffic_hosts import WIRE, Host, host, make_spec, overlay
from tests.lab.traffic_taps import TapVm

FLAT = {"type": "flat", "physical_network": "physnet1"}
BRIDGE = Segment("physnet1").bridge
TAP_A = device_name(TAP, "a")
TAP_B = device_name(TAP, "b")


@pytest.fixture(scope="module")
def hypervisor() -> Iterator[Host]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        yield stack.enter_context(host(1))


@pytest.fixture(scope="module")
def vms(hypervisor: Host) -> Iterator[tuple[TapVm, TapVm]]:
    with (
        hypervisor.vm("a", make_spec(1, FLAT), "10.0.0.1") as a,
        hypervisor.vm("b", make_spec(2, FLAT), "10.0.0.2") as b,
    ):
        assert a.reaches("10.0.0.2")
        yield a, b


def states(on: Host) -> set[str]:
    return {on.port(port_id)["state"] for port_id in on.ports()}


def findings(on: Host) -> dict[str, dict[str, Any]]:
    found = on.agent.get("/v1/host/checks")[1]
    return {each["id"]: each for each in found if each["id"].startswith("foreign-filter")}


def nft(on: Host, text: str) -> None:
    run(within(on.name, ["nft", "-f", "-"]), stdin=text)


def sysctl(on: Host, name: str, value: int) -> None:
    on.sh("sysctl", "-q", f"net.bridge.bridge-nf-call-{name}={value}")


def chain(family: str, hook: str, policy: str = "accept", *rules: str, before: str = "") -> str:
    """The commands that make a table with one base chain. ``before``: those that its rules need."""
    base = f"add chain {family} f c {{ type filter hook {hook} priority -10; policy {policy}; }}"
    return "\n".join(
        [f"add table {family} f", before, base, *(f"add rule {family} f c {rule}" for rule in rules)]
    )


CUTS = {
    "policy": chain("ip", "forward", "drop", "ct state established accept"),
    "bridge": chain("bridge", "forward", "drop"),
    "device": chain("netdev", f"ingress device {TAP_A}", "accept", "ip protocol icmp drop"),
}


@pytest.mark.parametrize("rules", CUTS.values(), ids=CUTS.keys())
def test_a_port_is_degraded_while_rules_of_others_drop_its_frames(
    hypervisor: Host, vms: tuple[TapVm, TapVm], rules: str
) -> None:
    a, _ = vms
    before = hypervisor.sh("sysctl", "net.bridge")
    nft(hypervisor, rules)
    table = " ".join(rules.split()[1:4])
    try:
        assert not a.pings("10.0.0.2")
        wait_for(lambda: hypervisor.port("a")["state"] == "degraded", 60, "degraded")
        found = findings(hypervisor)["foreign-filter"]
        assert found["status"] == "fail" and table in found["found"]
        assert table in hypervisor.port("a")["error"]["detail"]
        assert hypervisor.sh("sysctl", "net.bridge") == before, "it was changed silently"
        if "nft insert" in found["fix"]:
            hypervisor.sh("sh", "-c", found["fix"].partition(";")[0])
            assert a.reaches("10.0.0.2"), found["fix"]
            wait_for(lambda: states(hypervisor) == {"active"}, 60, "active after the fix")
    finally:
        nft(hypervisor, f"delete {table}")
    wait_for(lambda: states(hypervisor) == {"active"}, 60, "active")
    assert findings(hypervisor) == {}


def test_the_switches_of_br_netfilter_are_seen(hypervisor: Host, vms: tuple[TapVm, TapVm]) -> None:
    a, _ = vms
    on = hypervisor
    sysctl(on, "iptables", 0)
    nft(on, chain("ip", "forward", "drop"))
    try:
        assert a.reaches("10.0.0.2") and findings(on) == {} and states(on) == {"active"}
        sysctl(on, "iptables", 1)
        wait_for(lambda: states(on) == {"degraded"}, 60, "degraded")
        fix = findings(on)["foreign-filter"]["fix"]
        assert "net.bridge.bridge-nf-call-iptables=0" in fix
        sysctl(on, "iptables", 0)
        wait_for(lambda: states(on) == {"active"}, 60, "active")
        on.sh("ip", "link", "set", BRIDGE, "type", "bridge", "nf_call_iptables", "1")
        assert a.reaches("10.0.0.2"), "the option of a bridge of ours is put back"
    finally:
        nft(on, "delete table ip f")
        sysctl(on, "iptables", 1)


@pytest.mark.parametrize(("program", "mark"), [("iptables-legacy", " (legacy)"), ("iptables-nft", "")])
def test_rules_of_iptables_are_judged(
    hypervisor: Host, vms: tuple[TapVm, TapVm], program: str, mark: str
) -> None:
    a, _ = vms
    on = hypervisor
    rules = [
        "-P FORWARD DROP",
        "-N OTHERS",
        "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        "-A FORWARD -i docker0 -j ACCEPT",
        "-A FORWARD -m physdev --physdev-is-bridged --physdev-out vnic+ -j DROP",
        f"-A FORWARD -o {BRIDGE[:3]}+ -j OTHERS",
        "-A OTHERS ! -p tcp -j RETURN",
        "-A OTHERS -p tcp --dport 22 -j ACCEPT",
    ]
    try:
        for rule in rules:
            on.sh(program, *rule.split())
        on.repair()
        assert states(on) == {"degraded"} and not a.pings("10.0.0.2")
        found = findings(on)["foreign-filter"]
        policy = f"the policy of chain FORWARD of table ip filter{mark}"
        assert found["found"].startswith(
            f"{policy} drops frames with UDP over IPv4, ICMP over IPv4, on {BRIDGE}"
        )
        on.sh("sh", "-c", found["fix"].partition(";")[0])
        on.repair()
        assert states(on) == {"active"} and a.reaches("10.0.0.2"), found["fix"]
    finally:
        on.sh(program, "-P", "FORWARD", "ACCEPT")
        on.sh(program, "-F")
        on.sh(program, "-X")


JUDGED: dict[str, tuple[str, bool | None]] = {
    "established connections only": (
        chain(
            "inet",
            "forward",
            "drop",
            "ct state vmap { established : accept, related : accept, invalid : drop }",
            'iifname "docker0" oifname { "docker0", "virbr0" } accept',
        ),
        True,
    ),
    "zones of firewalld": (
        chain(
            "inet",
            "forward",
            "accept",
            'iifname "np*" goto zone',
            before="add chain inet f zone\nadd rule inet f zone ct state established accept\n"
            "add rule inet f zone reject with icmpx type admin-prohibited",
        ),
        True,
    ),
    "ICMP alone": (chain("ip", "postrouting", "accept", f'oifname "{BRIDGE}" ip protocol icmp drop'), True),
    "ports of others": (chain("inet", "forward", "accept", "tcp dport 25 drop"), None),
    "an address": (chain("ip", "prerouting", "accept", "ip daddr 10.0.0.77 drop"), None),
    "a limit": (chain("ip", "forward", "drop", "limit rate 10/second accept"), None),
    "our bridge first": (chain("inet", "forward", "drop", f'iifname "np*" oifname "{BRIDGE}" accept'), False),
    "other bridges": (
        chain("inet", "forward", "accept", 'oifname "virbr0" reject', "ct state invalid drop"),
        False,
    ),
    "packets for the host": (chain("inet", "input", "drop", "iifname lo accept"), False),
    "other devices": (chain("netdev", f"ingress device {WIRE}", "drop"), False),
    "both taps": (chain("netdev", f"ingress devices = {{ {TAP_A}, {TAP_B} }}", "drop"), True),
    "a meter": (
        chain(
            "ip",
            "forward",
            "accept",
            "update @m { ip saddr limit rate over 10/second } drop",
            before="add set ip f m { type ipv4_addr; flags dynamic; size 9; }",
        ),
        None,
    ),
    "one pair of ports": (
        chain("bridge", "forward", "accept", f'iifname "{TAP_A}" oifname "npt*" ether type arp drop'),
        None,
    ),
    "mappings": (chain("inet", "forward", "drop", f"iifname vmap {{ {BRIDGE} : accept, lo : drop }}"), False),
}


@pytest.mark.parametrize(("rules", "drops"), JUDGED.values(), ids=JUDGED.keys())
def test_rules_are_judged_as_the_kernel_does(
    hypervisor: Host, vms: tuple[TapVm, TapVm], rules: str, drops: bool | None
) -> None:
    """``drops`` is None if the rules drop some frames: a warning."""
    a, _ = vms
    nft(hypervisor, rules)
    table = " ".join(rules.split()[1:4])
    try:
        if drops is not None:
            assert a.pings("10.0.0.2", wait_s=1 if drops else ANSWER_S) != drops
        assert [each["status"] for each in findings(hypervisor).values()] == {
            True: ["fail"],
            None: ["warn"],
            False: [],
        }[drops]
        hypervisor.repair()
        assert states(hypervisor) == {"degraded" if drops else "active"}
    finally:
        nft(hypervisor, f"delete {table}")


def test_a_port_without_ipv6_does_not_mind_that_ipv6_is_dropped(hypervisor: Host) -> None:
    allowed = {"allowed_addresses": [{"ip": "10.0.0.3"}]}
    nft(hypervisor, chain("ip6", "forward", "drop"))
    try:
        hypervisor.plug("four", make_spec(3, FLAT, port_security=allowed))
        assert hypervisor.put("both", make_spec(4, FLAT))[0] == 200
        wait_for(lambda: hypervisor.port("both")["state"] == "degraded", 60, "degraded")
        assert "drops frames with IPv6" in hypervisor.port("both")["error"]["detail"]
        assert hypervisor.port("four")["state"] == "active"
    finally:
        nft(hypervisor, "delete table ip6 f")
        hypervisor.unplug("four", "both")


def test_tunnels_that_the_input_chain_drops_degrade_their_ports(hypervisor: Host) -> None:
    on = hypervisor
    on.network("blue", 5001, [on.address, "10.9.0.2", "10.9.0.3"])
    on.plug("v", make_spec(5, overlay("blue")))
    try:
        nft(on, chain("inet", "input", "accept", "udp dport 4789 drop"))
        wait_for(lambda: on.port("v")["state"] == "degraded", 60, "degraded")
        assert "VXLAN packets (UDP port 4789)" in findings(on)["foreign-filter"]["found"]
        only_one = "add rule inet f c ip saddr 10.9.0.2 accept"
        nft(on, f"flush chain inet f c\n{only_one}\nadd rule inet f c iifname {WIRE} drop")
        wait_for(lambda: "of 10.9.0.3" in on.port("v")["error"]["detail"], 60, "one peer")
        nft(on, f"insert rule inet f c iifname {WIRE} udp dport 4789 accept")
        wait_for(lambda: on.port("v")["state"] == "active", 60, "active")
    finally:
        nft(on, "delete table inet f")
        on.unplug("v")
        on.agent.call("DELETE", "/v1/networks/blue")


def test_a_program_at_an_uplink_is_a_warning(hypervisor: Host) -> None:
    def programs() -> list[str]:
        found = hypervisor.agent.get("/v1/host/checks")[1]
        return [each["found"] for each in found if each["id"] == f"foreign-program-{WIRE}"]

    assert programs() == []
    hypervisor.sh("tc", "qdisc", "add", "dev", WIRE, "clsact")
    hypervisor.sh(*f"tc filter add dev {WIRE} egress protocol all u32 match u32 0 0 flowid 1:1".split())
    assert "tc filters" in programs()[0]
    hypervisor.sh("tc", "qdisc", "del", "dev", WIRE, "clsact")
    assert programs() == []

"""The counters of ports on Linux bridges: each place of drops is provoked, and it alone rises by that."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import ICMPv6ND_NA, IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from tests.functional.wired_hosts import WIRE, wired_linuxbridge
from tests.lab.frames_nics import TapNic, tap_nic
from tests.lab.processes import wait_for
from tests.lab.traffic_hosts import Host, make_spec

FLAT = {"type": "flat", "physical_network": "physnet1"}
DEADLINE_S = 30.0
OTHER = "52:54:00:00:00:99"


@dataclass(frozen=True)
class Site:
    host: Host
    sender: TapNic
    receiver: TapNic
    specs: Mapping[str, dict[str, Any]]

    def counters(self, port_id: str) -> dict[str, Any]:
        status, body = self.host.agent.get(f"/v1/ports/{port_id}/counters")
        assert status == 200, body
        assert isinstance(body, dict)
        return body

    def drops(self, port_id: str) -> dict[str, int]:
        return {drop["place"]: drop["packets"] for drop in self.counters(port_id)["counters"]["drops"]}

    def plug(self, port_id: str, **fields: Any) -> None:
        self.host.plug(port_id, {**self.specs[port_id], **fields})

    def mac(self, port_id: str) -> str:
        return str(self.specs[port_id]["mac"])

    def plain(self, size: int = 60) -> bytes:
        head = Ether(src=self.mac("sender"), dst=self.mac("receiver"), type=0x88B5)
        return bytes(head).ljust(size, b"\0")


def rise(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {place: more for place, n in after.items() if (more := n - before.get(place, 0))}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Both with ports of the same network, whose VMs are held by this process."""
    with wired_linuxbridge() as host, ExitStack() as stack:
        specs = {name: make_spec(n, FLAT) for n, name in enumerate(("sender", "receiver"), start=1)}
        nics = []
        for name, spec in specs.items():
            body = host.plug(name, spec)
            stack.callback(host.unplug, name)
            nics.append(stack.enter_context(tap_nic(host.name, body["binding"]["device"])))
        made = Site(host, nics[0], nics[1], specs)

        def passes() -> bool:
            made.sender.send(made.plain())
            return bool(made.receiver.received())

        wait_for(passes, DEADLINE_S, "the bridge forwards")
        yield made


def test_what_passes_is_counted_in_packets_and_bytes(site: Site) -> None:
    before = {name: site.counters(name)["counters"] for name in site.specs}
    for _ in range(7):
        site.sender.send(site.plain(100))

    def more(name: str) -> dict[str, int]:
        now = site.counters(name)["counters"]
        return {key: now[key] - before[name][key] for key in now if key not in ("since", "drops")}

    assert more("receiver")["packets_to_vm"] == 0, "a tap counts what is taken from it"
    assert len(site.receiver.received()) == 7
    none = dict.fromkeys(more("sender"), 0)
    assert more("sender") == none | {"packets_from_vm": 7, "bytes_from_vm": 700}
    assert more("receiver") == none | {"packets_to_vm": 7, "bytes_to_vm": 700}
    assert [uplink["device"] for uplink in site.counters("sender")["uplinks"]] == [WIRE]


def test_the_guard_counts_what_it_drops_by_any_of_its_rules(site: Site) -> None:
    head, tail = Ether(src=site.mac("sender"), dst="ff:ff:ff:ff:ff:ff"), Raw(b"x" * 40)
    before = site.drops("sender")
    for frame in (head / Dot1Q(vlan=7) / tail, Ether(src=OTHER) / IP(src="10.0.0.5") / tail) * 3:
        site.sender.send(bytes(frame))
    answer = head / IP(src="10.0.0.5", dst="255.255.255.255") / UDP(sport=67, dport=68) / tail
    site.sender.send(bytes(answer))
    assert rise(before, site.drops("sender")) == {"filter_guard": 7}


@pytest.mark.parametrize(("place", "count"), [("filter_source_ip", 4), ("filter_neighbour", 3)])
def test_an_address_with_the_mac_of_another_is_counted_by_its_rule(
    site: Site, place: str, count: int
) -> None:
    pairs = [{"ip": "10.0.0.5"}, {"ip": "10.0.0.6", "mac": OTHER}]
    pairs += [{"ip": "2001:db8::5"}, {"ip": "2001:db8::6", "mac": OTHER}]
    site.plug("sender", port_security={"allowed_addresses": pairs})
    try:
        head = Ether(src=site.mac("sender"), dst=site.mac("receiver"))
        frames: dict[str, Packet] = {
            "filter_source_ip": head / IP(src="10.0.0.6", dst="10.0.0.7") / Raw(b"x" * 40),
            "filter_neighbour": head
            / IPv6(src="2001:db8::5", dst="ff02::1", hlim=255)
            / ICMPv6ND_NA(tgt="2001:db8::6"),
        }
        before = site.drops("sender")
        for _ in range(count):
            site.sender.send(bytes(frames[place]))
        assert rise(before, site.drops("sender")) == {place: count}
    finally:
        site.plug("sender")


def test_the_counters_of_a_filter_begin_again_with_it(site: Site) -> None:
    pairs = [{"ip": "10.0.0.5"}, {"ip": "10.0.0.6", "mac": OTHER}]
    forged = Ether(src=site.mac("sender")) / IP(src="10.0.0.6", dst="10.0.0.7") / Raw(b"x" * 40)
    site.plug("sender", port_security={"allowed_addresses": pairs})
    try:
        for count in (5, 2):
            for _ in range(count):
                site.sender.send(bytes(forged))
            found = {d["place"]: d for d in site.counters("sender")["counters"]["drops"]}
            assert found["filter_source_ip"]["packets"] == count
            time.sleep(1.1)
            pairs.append({"ip": f"10.0.1.{count}"})
            site.plug("sender", port_security={"allowed_addresses": pairs})
            assert "filter_source_ip" not in site.drops("sender")
    finally:
        site.plug("sender")


@pytest.mark.parametrize(
    ("name", "qos", "place"),
    [
        ("sender", {"egress_kbps": 1000}, "policer_from_vm"),
        ("receiver", {"ingress_kbps": 1000}, "policer_to_vm"),
    ],
)
def test_a_bucket_counts_what_is_above_the_rate(
    site: Site, name: str, qos: dict[str, int], place: str
) -> None:
    site.plug(name, qos=qos)
    try:
        before = {each: site.drops(each) for each in site.specs}
        came = 0
        for _ in range(100):
            site.sender.send(site.plain(1400))
        end = time.monotonic() + 3.0  # more than the queue of the bucket holds
        while time.monotonic() < end:
            came += len([frame for frame in site.receiver.received() if frame[12:14] == b"\x88\xb5"])
            time.sleep(0.01)
        found = {each: rise(before[each], site.drops(each)) for each in site.specs}
        assert found == {**{each: {} for each in site.specs}, name: {place: 100 - came}} and came
    finally:
        site.plug(name)


def test_a_full_ring_of_the_guest_is_counted(site: Site) -> None:
    site.receiver.received()
    before, sent = site.drops("receiver"), 3000
    for _ in range(sent):
        site.sender.send(site.plain())
    wait_for(lambda: rise(before, site.drops("receiver")), DEADLINE_S, "it is counted")
    came = len([frame for frame in site.receiver.received() if frame[12:14] == b"\x88\xb5"])
    assert rise(before, site.drops("receiver")) == {"guest_ring_full": sent - came} and came


def test_counters_outlive_the_agent_and_not_the_port(site: Site) -> None:
    before = site.counters("sender")["counters"]
    site.host.agent.stop()
    site.host.agent.start()
    after = site.counters("sender")["counters"]
    assert {**after, "since": 0, "drops": 0} == {**before, "since": 0, "drops": 0}
    assert before["packets_from_vm"] > 0

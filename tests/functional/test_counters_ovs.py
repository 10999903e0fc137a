"""The counters of ports on OVS-DPDK: each place of drops is provoked, and it alone rises by that number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.dhcp import BOOTP, DHCP
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import ICMPv6ND_NA, ICMPv6ND_RA, IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.packet import Packet, Raw

from tests.functional.conftest import make_spec
from tests.functional.hosts_ovs import Host
from tests.functional.migrate_parts import Side
from tests.functional.wired_hosts import FAR, FAR_WIRE, wired_ovs
from tests.lab.frames_nics import PacketNic, packet_nic, vhost_nics
from tests.lab.processes import run, wait_for

DEADLINE_S = 30.0
#: Seconds after which flows have been collected from the datapath twice, and their counters do not change.
SETTLED_S = 1.5
FLAT = {"type": "flat", "physical_network": "physnet1", "vlan_id": None}
SENDER, RECEIVER = "52:54:00:00:00:01", "52:54:00:00:00:02"
OTHER, EVERYBODY = "52:54:00:00:00:99", "ff:ff:ff:ff:ff:ff"
OWN6 = "fe80::5054:ff:fe00:1"
ADDRESSES = {"allowed_addresses": [{"ip": "10.0.0.5"}, {"ip": "2001:db8::5"}]}


@dataclass(frozen=True)
class Site:
    host: Host
    specs: Mapping[str, dict[str, Any]]
    sender: PacketNic
    receiver: PacketNic
    wire: PacketNic

    def counters(self, port_id: str) -> dict[str, Any]:
        status, body = self.host.agent.get(f"/v1/ports/{port_id}/counters")
        assert status == 200, body
        assert isinstance(body, dict)
        return body

    def drops(self, port_id: str) -> dict[str, int]:
        return drops_of(self.counters(port_id)["counters"])

    def settled(self, port_id: str) -> dict[str, int]:
        """The drops when they have not changed for as long as OVS takes to collect them."""
        found, at = self.drops(port_id), time.monotonic()
        while time.monotonic() < at + SETTLED_S:
            time.sleep(0.2)
            if (again := self.drops(port_id)) != found:
                found, at = again, time.monotonic()
        return found


def drops_of(counted: Mapping[str, Any]) -> dict[str, int]:
    return {drop["place"]: drop["packets"] for drop in counted["drops"]}


def rise(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {place: more for place, n in after.items() if (more := n - before.get(place, 0))}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A sender and a receiver on a flat network, each with a guest of its own, and a wire."""
    with ExitStack() as stack:
        host = stack.enter_context(wired_ovs())
        specs, nics = {}, []
        for number, name in enumerate(("sender", "receiver"), start=1):
            specs[name] = make_spec(number, network=FLAT)
            body = host.plug(name, specs[name])
            path = Path(body["binding"]["socket_path"])
            nics += stack.enter_context(vhost_nics(f"np-{name}", [path], [specs[name]["mac"]]))
            host.ovs.wait_connected(body["binding"]["device"], 90.0)
        wire = stack.enter_context(packet_nic(FAR, FAR_WIRE))
        yield Site(host, specs, nics[0], nics[1], wire)


def frames(mac: str = SENDER, to: str = EVERYBODY) -> dict[str, Packet]:
    """A frame for each place of the filter, of a port that may use its own MAC alone."""
    head, tail = Ether(src=mac, dst=to), Raw(b"x" * 40)
    dhcp = IP(src="10.0.0.5", dst="255.255.255.255") / UDP(sport=67, dport=68) / BOOTP(op=2) / DHCP()
    cut = IPv6(src=OWN6, dst="ff02::1") / IPv6ExtHdrFragment(nh=60, offset=0, m=1) / Raw(b"\x11")
    return {
        "filter_vlan_tag": head / Dot1Q(vlan=7) / tail,
        "filter_switch_protocol": Ether(src=mac, dst="01:80:c2:00:00:00", type=0x88B5) / tail,
        "filter_ipv6_header": head / cut,
        "filter_router": head / IPv6(src=OWN6, dst="ff02::1", hlim=255) / ICMPv6ND_RA(),
        "filter_dhcp_server": head / dhcp,
        "filter_arp": head / ARP(op=2, hwsrc=OTHER, psrc="10.0.0.9", pdst="10.0.0.9"),
        "filter_source_mac": Ether(src=OTHER, dst=to) / IP(src="10.0.0.5", dst="10.0.0.7") / tail,
    }


PLACES = tuple(frames())


def padded(packet: Packet) -> bytes:
    return bytes(packet).ljust(60, b"\0")


@pytest.mark.parametrize(("place", "count"), [(place, 3 + n) for n, place in enumerate(PLACES)])
def test_each_rule_of_the_filter_counts_what_it_drops(site: Site, place: str, count: int) -> None:
    before = site.settled("sender")
    for _ in range(count):
        site.sender.send(padded(frames()[place]))
    wait_for(lambda: place in rise(before, site.drops("sender")), DEADLINE_S, "it is counted")
    assert rise(before, site.settled("sender")) == {place: count}


def test_addresses_are_a_rule_of_their_own_and_their_counters_begin_with_them(site: Site) -> None:
    spec = {**site.specs["sender"], "port_security": ADDRESSES}
    began = time.time()
    site.host.plug("sender", spec)
    try:
        assert site.settled("sender").keys().isdisjoint(PLACES), "these are counted since they were made"
        other = Ether(src=SENDER, dst=EVERYBODY) / IP(src="10.0.0.6", dst="10.0.0.7") / Raw(b"x" * 40)
        advert = Ether(src=SENDER, dst="33:33:00:00:00:01") / IPv6(src=OWN6, dst="ff02::1")
        for packet, place, count in (
            (other, "filter_source_ip", 4),
            (frames()["filter_source_mac"], "filter_source_mac", 2),
            (advert / ICMPv6ND_NA(tgt="2001:db8::6"), "filter_neighbour", 3),
        ):
            before = site.settled("sender")
            for _ in range(count):
                site.sender.send(padded(packet))
            wait_for(lambda b=before, p=place: p in rise(b, site.drops("sender")), DEADLINE_S, "counted")  # type: ignore[misc]
            assert rise(before, site.settled("sender")) == {place: count}
        counted = site.counters("sender")["counters"]
        assert all(
            _seconds(drop["since"]) >= began - 2 for drop in counted["drops"] if "filter" in drop["place"]
        )
        assert _seconds(counted["since"]) < began, "those of the port go on"
    finally:
        site.host.plug("sender", site.specs["sender"])


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def plain(site: Site, number: int = 0, size: int = 60, to: str = RECEIVER) -> bytes:
    return bytes(Ether(src=SENDER, dst=to, type=0x88B5) / Raw(b"%08d" % number)).ljust(size, b"\0")


def test_what_passes_is_counted_in_packets_and_bytes(site: Site) -> None:
    before = {name: site.counters(name)["counters"] for name in ("sender", "receiver")}
    for number in range(7):
        site.sender.send(plain(site, number, 100))

    def more(name: str) -> dict[str, int]:
        now = site.counters(name)["counters"]
        return {key: now[key] - before[name][key] for key in now if key not in ("since", "drops")}

    wait_for(lambda: more("receiver")["packets_to_vm"] == 7, DEADLINE_S, "all have come")
    none = dict.fromkeys(more("sender"), 0)
    assert more("sender") == none | {"packets_from_vm": 7, "bytes_from_vm": 700}
    assert more("receiver") == none | {"packets_to_vm": 7, "bytes_to_vm": 700}


def test_a_policer_counts_what_a_vm_sends_above_its_rate(site: Site) -> None:
    _police(site, "sender", {"egress_kbps": 500}, "policer_from_vm")


def test_a_policer_counts_what_a_vm_is_sent_above_its_rate(site: Site) -> None:
    _police(site, "receiver", {"ingress_kbps": 500}, "policer_to_vm")


def _police(site: Site, name: str, qos: dict[str, int], place: str) -> None:
    site.host.plug(name, {**site.specs[name], "qos": qos})
    try:
        before = {each: site.settled(each) for each in ("sender", "receiver")}
        entered, left = _packets(site, "sender", "from_vm"), _packets(site, "receiver", "to_vm")
        for number in range(100):
            site.sender.send(plain(site, number, 1400))
        wait_for(lambda: place in rise(before[name], site.drops(name)), DEADLINE_S, "it is counted")
        found = {each: rise(before[each], site.settled(each)) for each in before}
        entered = _packets(site, "sender", "from_vm") - entered
        left = _packets(site, "receiver", "to_vm") - left
        assert found == {**{each: {} for each in before}, name: {place: entered - left}} and left
    finally:
        site.host.plug(name, site.specs[name])


def _packets(site: Site, name: str, direction: str) -> int:
    return int(site.counters(name)["counters"][f"packets_{direction}"])


def test_a_frame_above_the_mtu_of_a_port_is_counted_there(site: Site) -> None:
    """OVS looks at the size where a frame goes out, not where it comes in."""
    before = {each: site.settled(each) for each in ("sender", "receiver")}
    for number in range(5):
        site.sender.send(plain(site, number, 1800))
    wait_for(lambda: rise(before["receiver"], site.drops("receiver")), DEADLINE_S, "it is counted")
    assert rise(before["receiver"], site.settled("receiver")) == {"too_large": 5}
    assert rise(before["sender"], site.settled("sender")) == {}


def test_a_full_ring_of_the_guest_is_counted_and_a_port_without_a_guest_has_counters(site: Site) -> None:
    spec = make_spec(3, network=FLAT)
    body = site.host.plug("third", spec)
    path = Path(body["binding"]["socket_path"])
    try:
        counted = site.counters("third")["counters"]
        assert counted["packets_to_vm"] == 0 and counted["drops"] == []
        with vhost_nics("np-third", [path], [spec["mac"]]) as (nic,):
            site.host.ovs.wait_connected(body["binding"]["device"], 90.0)
            frame = bytes(Ether(src=spec["mac"], dst=SENDER, type=0x88B5)).ljust(60, b"\0")

            def is_learned() -> bool:
                nic.send(frame)
                return bool(site.counters("third")["counters"]["packets_from_vm"])

            wait_for(is_learned, DEADLINE_S, "the bridge knows where it is")
            _stop_polling(site, path, nic, spec["mac"])
    finally:
        site.host.agent.call("DELETE", "/v1/ports/third")


def _stop_polling(site: Site, path: Path, nic: PacketNic, mac: str) -> None:
    """The guest takes nothing for a while: its ring has room for 256, and the rest is lost there."""
    [pid] = map(
        int,
        subprocess.run(
            ["pgrep", "-f", "file-prefix=np-third"], capture_output=True, check=True
        ).stdout.split(),
    )
    before, sent = site.settled("third"), 400
    entered, left = _packets(site, "sender", "from_vm"), _packets(site, "third", "to_vm")
    nic.received()
    os.kill(pid, signal.SIGSTOP)
    try:
        for number in range(sent):
            site.sender.send(plain(site, number, to=mac))
            if number % 50 == 49:
                time.sleep(0.1)  # what is lost on the way is not what is looked for
        wait_for(lambda: rise(before, site.drops("third")), DEADLINE_S, "it is counted")
        lost = rise(before, site.settled("third"))
        entered = _packets(site, "sender", "from_vm") - entered
        left = _packets(site, "third", "to_vm") - left
        retries = site.counters("third")["counters"]["ring_retries"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert lost == {"guest_ring_full": entered - left} and left <= 256 and retries > 0
    wait_for(lambda: len(nic.received()) > 0, DEADLINE_S, "the guest goes on")


def test_a_port_that_is_closed_for_migration_counts_what_it_does_not_forward(site: Site) -> None:
    mover = Side(site.host.agent, "sender", site.specs["sender"])
    mover.step("leave")
    try:
        before = site.settled("sender")
        for number in range(5):
            site.sender.send(plain(site, number))
        wait_for(lambda: rise(before, site.drops("sender")), DEADLINE_S, "it is counted")
        assert rise(before, site.settled("sender")) == {"not_forwarded": 5}
    finally:
        mover.step("abort")


def test_a_busy_ovs_leaves_what_is_known_in_a_scrape_each_second(site: Site) -> None:
    site.settled("sender")
    site.host.ovs.pause_vswitchd()
    try:
        known: set[str] = set()
        end, longest = time.monotonic() + 10.0, 0.0
        while time.monotonic() < end:
            begun = time.monotonic()
            status, text = site.host.agent.get("/metrics")
            longest = max(longest, time.monotonic() - begun)
            assert status == 200
            lines = [line for line in text.splitlines() if line.startswith("netplugin_port_packets_total")]
            lines += [
                line for line in text.splitlines() if line.startswith("netplugin_counters_read_seconds{")
            ]
            known.add("\n".join(lines))
            time.sleep(max(0.0, begun + 1.0 - time.monotonic()))
        assert len(known) == 1 and 'port="sender"' in next(iter(known)) and longest < 8.0, known
        status, body = site.host.agent.get("/v1/ports/sender/counters")
        assert status == 200 and time.time() - _seconds(body["read_at"]) > 5.0
    finally:
        site.host.ovs.resume_vswitchd()
    wait_for(
        lambda: time.time() - _seconds(site.counters("sender")["read_at"]) < 3.0,
        DEADLINE_S,
        "it is read again",
    )
    wait_for(lambda: site.host.agent.get("/readyz")[0] == 200, DEADLINE_S, "nothing is wrong")


def test_counters_outlive_the_agent_and_not_a_restart_of_vswitchd_or_the_port(site: Site) -> None:
    for number in range(3):
        site.sender.send(plain(site, number))
    time.sleep(SETTLED_S)
    before = site.counters("sender")["counters"]
    site.host.agent.stop()
    site.host.agent.start()
    after = site.counters("sender")["counters"]
    assert abs(_seconds(after["since"]) - _seconds(before["since"])) <= 1
    assert after["packets_from_vm"] == before["packets_from_vm"] > 0
    assert drops_of(after) == drops_of(before)
    restarted = time.time()
    site.host.ovs.kill_vswitchd()
    site.host.ovs.start_vswitchd()
    wait_for(lambda: site.host.agent.get("/readyz")[0] == 200, DEADLINE_S, "the agent has OVS again")
    wait_for(lambda: _began(site, "sender") >= restarted - 2, DEADLINE_S, "the counters have begun again")
    site.host.agent.call("DELETE", "/v1/ports/sender")
    made = time.time()
    site.host.plug("sender", site.specs["sender"])
    assert _began(site, "sender") >= made - 2


def _began(site: Site, port_id: str) -> float:
    counted = site.counters(port_id)["counters"]
    return _seconds(counted["since"]) if counted else 0.0


def test_the_uplink_counts_what_it_has_missed_and_what_it_has_carried(site: Site) -> None:
    """libpcap counts what the lab's NIC drops while vswitchd does not take frames, and tells every 5 s."""
    [before] = site.counters("sender")["uplinks"]
    sent = _sent_by_wire()
    site.host.ovs.pause_vswitchd()
    try:
        for number in range(60_000):
            site.wire.send(plain(site, number, 1400, to=OTHER))
    finally:
        site.host.ovs.resume_vswitchd()

    def lost() -> dict[str, int]:
        [now] = site.counters("sender")["uplinks"]
        return rise(drops_of(before["counters"]), drops_of(now["counters"]))

    wait_for(lost, DEADLINE_S, "it is counted")
    time.sleep(6.0)
    [after] = site.counters("sender")["uplinks"]
    came = after["counters"]["packets_from_vm"] - before["counters"]["packets_from_vm"]
    sent = _sent_by_wire() - sent  # the kernel sends some too, such as reports of multicast listeners
    assert lost() == {"missed": sent - came} and came > 0 and sent >= 60_000


def _sent_by_wire() -> int:
    [link] = json.loads(run(["ip", "-n", FAR, "-s", "-j", "link", "show", FAR_WIRE]))
    return int(link["stats64"]["tx"]["packets"])

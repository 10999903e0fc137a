"""What a port in mode vduse carries: TCP, rates, its counters, and what a restart of vswitchd loses."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.lab.driven import Driven
from tests.lab.namespaces import entered, namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.sequenced import PORT, RATE, Peer
from tests.lab.vm import Vm
from tests.nested.vduse_host import (
    WAIT_S,
    address,
    agent_on,
    into,
    mac,
    make_spec,
    netdev,
    pings,
    served_by,
    settled,
    streamed,
)

pytestmark = [
    pytest.mark.long,
    # A guest of their own: the other tests in it have the machine's own OVS.
    pytest.mark.nested(cpus=2, memory_mb=2400, hugepages=400),
    pytest.mark.timeout(600),
]

STREAM = 4 << 20
PART = 10  # of what the emulated machine carries in this moment: what a limit leaves
BURST_S = 0.8
FRAME = 1442
MEASURED_S = 4.0
EVERY_S = 0.02
RECEIVED = 100


@pytest.fixture(scope="module", params=("forky", "trixie"))
def ovs(request: pytest.FixtureRequest) -> Iterator[PrivateOvs]:
    with served_by(request.param) as private:
        yield private


@pytest.fixture
def process(ovs: PrivateOvs, tmp_path: Path) -> Iterator[Driven]:
    with agent_on(ovs, Path("/run/np-agent") / tmp_path.name) as made:
        yield made


@contextmanager
def two_containers(process: Driven, ovs: PrivateOvs) -> Iterator[dict[str, str]]:
    """Namespaces ``na`` and ``nb`` that meet. Gives the names of their ports in OVS."""
    names = {}
    with namespace("na"), namespace("nb"):
        for number, port in ((1, "a"), (2, "b")):
            binding = process.put(port, netdev(number))
            names[port] = str(binding.device)
            into(f"n{port}", binding, number)
        wait_for(lambda: pings("na", 2), WAIT_S, "they meet", ovs.vswitchd.tail)
        yield names
        process.delete("a")
        process.delete("b")


# -- TCP -----------------------------------------------------------------------------------------


def mbits_since(start: float) -> float:
    return STREAM * 8 / 1e6 / (time.monotonic() - start)


def test_a_stream_of_tcp_arrives_whole(process: Driven, ovs: PrivateOvs) -> None:
    """With the offloads that the driver has negotiated: frames come without checksums."""
    data = os.urandom(STREAM)
    with two_containers(process, ovs):
        start = time.monotonic()
        assert streamed(data, "na", "nb", 2) == hashlib.sha256(data).hexdigest()
        print(f"TCP by virtio_vdpa, OVS {ovs.version}: {STREAM >> 20} MiB at {mbits_since(start):.1f} Mbit/s")


def test_a_stream_of_tcp_passes_a_vm_whole(process: Driven, ovs: PrivateOvs, tmp_path: Path) -> None:
    """Both ways between a container and a VM: testpmd has the device by vhost-vdpa, and joins it to an
    interface of the kernel, whose stack is the VM's."""
    data = os.urandom(STREAM)
    binding: Any = process.put("a", make_spec(1))
    with namespace("nb"):
        into("nb", process.put("b", netdev(2)), 2)
        path = binding.vhost_vdpa_device
        with Vm("na", path, mac(1), address(1), log=tmp_path / "testpmd.log"):
            wait_for(lambda: pings("na", 2), WAIT_S, "they meet", ovs.vswitchd.tail)
            for source, target, number in (("na", "nb", 2), ("nb", "na", 1)):
                start = time.monotonic()
                assert streamed(data, source, target, number) == hashlib.sha256(data).hexdigest()
                print(
                    f"TCP by vhost-vdpa, OVS {ovs.version}, {source} to {target}: "
                    f"{STREAM >> 20} MiB at {mbits_since(start):.1f} Mbit/s"
                )
        process.delete("a")
        process.delete("b")


# -- rates and counters --------------------------------------------------------------------------


def received(container: str, counter: str) -> int:
    """A counter of the container's interface."""
    return int(run(within(container, ["cat", f"/sys/class/net/eth0/statistics/{counter}"])))


def flood(source: str, number: int, seconds: float) -> tuple[int, float]:
    """Datagrams as fast as they go: those handed to the kernel, and the seconds that it took."""
    with entered(source):
        sending = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sent, payload, start = 0, bytes(1400), time.monotonic()
    with sending:
        while (spent := time.monotonic() - start) < seconds:
            sending.sendto(payload, (f"10.7.0.{number}", PORT))
            sent += 1
    return sent, spent


def carried(source: str, target: str) -> tuple[float, float]:
    """kbit that arrived of a flood, and the seconds of it."""
    before = received(f"n{target}", "rx_bytes")
    _, seconds = flood(f"n{source}", 2 if target == "b" else 1, MEASURED_S)
    _at_rest(f"n{target}")
    return (received(f"n{target}", "rx_bytes") - before) * 8 / 1e3, seconds


def _at_rest(container: str) -> None:
    """Wait until nothing more comes in: two reads, half a second apart, are the same."""
    last = -1

    def rests() -> bool:
        nonlocal last
        before, last = last, received(container, "rx_bytes")
        time.sleep(0.5)
        return before == last

    wait_for(rests, WAIT_S, "nothing is on its way")


def test_rates_are_enforced_each_way(process: Driven, ovs: PrivateOvs) -> None:
    with two_containers(process, ovs):
        kbit, seconds = carried("a", "b")
        print(f"OVS {ovs.version}, no rate: {kbit / seconds:.0f} kbit/s")
        limit = int(kbit / seconds / PART)
        for limited in ({"a": {"egress_kbps": limit}}, {"b": {"ingress_kbps": limit}}):
            for number, port in ((1, "a"), (2, "b")):
                process.put(port, netdev(number) | ({"qos": limited[port]} if port in limited else {}))
            assert settled(process)
            kbit, seconds = carried("a", "b")
            allowed = limit * (seconds + BURST_S)
            print(
                f"OVS {ovs.version}, {limited}: {kbit / seconds:.0f} kbit/s, {allowed / seconds:.0f} allowed"
            )
            assert 0.5 * allowed < kbit < 1.5 * allowed, (limited, kbit, allowed)
            kbit, seconds = carried("b", "a")
            assert kbit > 2 * limit * (seconds + BURST_S), "the other direction has no rate"


def counted(ovs: PrivateOvs, port: str) -> dict[str, int]:
    """The counters of a port that OVS keeps in its database."""
    shown = ovs.vsctl("get", "Interface", port, "statistics")
    found = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", shown)}
    return found if {"rx_packets", "rx_bytes", "tx_packets", "tx_bytes"} <= found.keys() else {}


def shown(ovs: PrivateOvs, names: dict[str, str]) -> str:
    return "\n".join(ovs.vsctl("get", "Interface", name, "statistics") for name in names.values())


def test_ovs_counts_what_the_containers_count(process: Driven, ovs: PrivateOvs) -> None:
    with two_containers(process, ovs) as names:
        wait_for(
            lambda: all(counted(ovs, name) for name in names.values()),
            WAIT_S,
            "OVS counts",
            lambda: shown(ovs, names),
        )
        before = {side: counted(ovs, names[side]) for side in names}
        received_before = received("nb", "rx_packets")
        frames = 500
        with entered("na"):
            sending = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with sending:
            for _ in range(frames):
                sending.sendto(bytes(1400), ("10.7.0.2", PORT))
                time.sleep(0.002)  # no more than the ring holds
        _at_rest("nb")
        arrived = received("nb", "rx_packets") - received_before
        assert arrived >= frames

        def seen() -> bool:
            a, b = counted(ovs, names["a"]), counted(ovs, names["b"])
            return (
                a["rx_packets"] - before["a"]["rx_packets"] >= frames
                and a["rx_bytes"] - before["a"]["rx_bytes"] >= frames * FRAME
                and b["tx_packets"] - before["b"]["tx_packets"] >= frames
                and b["tx_bytes"] - before["b"]["tx_bytes"] >= frames * FRAME
            )

        # They are written every five seconds (other_config:stats-update-interval).
        wait_for(seen, WAIT_S, "the counters are in the database", lambda: shown(ovs, names))
        assert ovs.get("Interface", names["a"], "status:status") == "connected"


# -- vswitchd is killed --------------------------------------------------------------------------


def echoes(log: Path) -> dict[int, float]:
    """When each numbered echo came, from what ``ping -D`` has printed."""
    found = re.findall(r"^\[([\d.]+)\] .*icmp_seq=(\d+) .*time=", log.read_text(), re.MULTILINE)
    return {int(number): float(at) for at, number in found}


def test_vswitchd_is_killed_under_traffic(process: Driven, ovs: PrivateOvs, tmp_path: Path) -> None:
    """Numbered echoes at a rate go on by themselves; what is lost is printed."""
    log = tmp_path / "ping.log"
    with two_containers(process, ovs), log.open("wb") as out:
        words = within("na", ["ping", "-D", "-n", "-i", str(EVERY_S), "10.7.0.2"])
        pinging = subprocess.Popen([str(word) for word in words], stdout=out)
        try:
            wait_for(lambda: len(echoes(log)) >= RECEIVED, WAIT_S, "echoes come")
            ovs.kill_vswitchd()
            killed = time.time()
            ovs.start_vswitchd()
            process.wait_for_ovs()
            wait_for(lambda: settled(process), WAIT_S, "the agent has set the flows again")
            fresh = max(echoes(log))
            wait_for(
                lambda: len([n for n in echoes(log) if n > fresh]) >= RECEIVED,
                WAIT_S,
                "echoes come again",
                ovs.vswitchd.tail,
            )
        finally:
            pinging.send_signal(signal.SIGINT)
            pinging.wait(WAIT_S)
        came = echoes(log)
        after = {number: at for number, at in came.items() if at > killed}
        lost = [number for number in range(1, max(came) + 1) if number not in came]
        times = sorted(came.values())
        gap = max(later - sooner for sooner, later in pairwise(times))
        print(
            f"OVS {ovs.version}: {len(lost)} of {max(came)} echoes lost at {1 / EVERY_S:.0f} a second, "
            f"longest gap {gap:.2f} s, the first after the kill after {min(after.values()) - killed:.2f} s"
        )
        before = [number for number in lost if number < min(after)]
        assert lost == before, "when they come again, none is lost any more"
        assert settled(process)


@contextmanager
def connected(program: Path) -> Iterator[None]:
    """The exchange's other end, in ``na``."""
    words = within("na", ["setpriv", "--pdeathsig", "KILL", "--", program])
    words += ["connect", "10.7.0.1", "10.7.0.2", PORT, RATE]
    running = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.kill()
        running.wait()


def test_a_stream_outlives_vswitchd(process: Driven, ovs: PrivateOvs, tmp_path: Path) -> None:
    """Datagrams each way and a TCP stream, more than the rings hold while nobody serves them."""
    with (
        two_containers(process, ovs),
        Peer(tmp_path, within("nb", []), "10.7.0.2", "10.7.0.1") as peer,
        connected(tmp_path / "sequenced"),
    ):
        peer.wait_connected()
        peer.wait_received(deadline_s=WAIT_S)
        before = peer.counts()
        ovs.kill_vswitchd()
        ovs.start_vswitchd()
        process.wait_for_ovs()
        wait_for(lambda: settled(process), WAIT_S, "the agent has set the flows again")
        peer.wait_received(deadline_s=WAIT_S)
        # The stream waits for its next repetition, which is later with each one that was lost.
        wait_for(lambda: peer.counts().stream_back > before.stream_back + 1000, WAIT_S, "TCP goes on")
        found = peer.counts()
        print(
            f"OVS {ovs.version}, {RATE} datagrams a second each way: lost {found.missing}, "
            f"longest gap {found.silence_ms:.0f} ms, {found.stream_back} bytes of TCP"
        )
        assert not found.stream_broken and found.stream_wrong == found.twice == 0

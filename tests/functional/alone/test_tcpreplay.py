"""The generator tcpreplay with real frames: over a wire, a bridge, and devices that lose some of them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.generators.choose import Tcpreplay, make
from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.generators.frames import Frames, Vary
from netplugin_zeroloss.generators.tcpreplay import InterfacePath
from netplugin_zeroloss.judge import Cause, Judgement, Verdict, judge
from netplugin_zeroloss.values import GeneratorError, Measurement, TrialRequest, UnusableInput

from tests.lab.namespaces import connect, entered, namespace, within
from tests.lab.processes import run, wait_for

#: The device under test is a bridge in a namespace of its own; the generator has both its sides.
GENERATOR, DEVICE = "zl-generator", "zl-device"
THERE = InterfacePath(send="west", receive="east")
BACK = InterfacePath(send="east", receive="west")
PRECISION = 0.05


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    with namespace(GENERATOR), namespace(DEVICE):
        for name in ("west", "east"):
            connect(GENERATOR, name, DEVICE, f"to-{name}")
        run(within(DEVICE, ["ip", "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0"]))
        for name in ("to-west", "to-east"):
            run(within(DEVICE, ["ip", "link", "set", name, "master", "bridge"]))
        run(within(DEVICE, ["ip", "link", "set", "bridge", "up"]))
        yield DEVICE


@contextmanager
def losing(device: str, rule: str, port: str = "to-east") -> Iterator[None]:
    """The device drops what the rule (of nftables) matches, of the frames of ours that leave there."""
    table = f"""table netdev loss {{
      counter dropped {{ }}
      chain out {{
        type filter hook egress device "{port}" priority 0; policy accept;
        udp dport 9 {rule} counter name dropped drop
      }}
    }}"""
    run(within(device, ["nft", "-f", "-"]), stdin=table)
    try:
        yield
    finally:
        run(within(device, ["nft", "delete", "table", "netdev", "loss"]))


def dropped(device: str) -> int:
    found = json.loads(run(within(device, ["nft", "-j", "list", "counter", "netdev", "loss", "dropped"])))
    packets: int = next(e["counter"]["packets"] for e in found["nftables"] if "counter" in e)
    return packets


def generator(*paths: InterfacePath, **options: object) -> Generator:
    return make(Tcpreplay(paths=paths or (THERE,), netns=GENERATOR, **options))  # type: ignore[arg-type]


def judged(asked: TrialRequest, measured: Measurement) -> Judgement:
    return judge(asked, measured, PRECISION)


def test_a_clean_device_in_both_directions(device: str) -> None:
    """Every frame of ours is counted once, on its own side."""
    asked = TrialRequest(20_000, 1.0, flows=100, readings=4)
    with generator(THERE, BACK) as tool:
        found = tool.run(asked)
    sent = [reading.tx_packets for reading in found.progress]
    assert len(sent) >= 3 and sent == sorted(set(sent)) and sent[-1] <= 20_000
    assert [(d.tx_packets, d.rx_packets) for d in found.directions] == [(10_000, 10_000)] * 2
    assert not found.aborted and found.settled
    assert (found.rx_errors, found.queue_drops) == (0, 0)
    assert found.elapsed_s >= 0.999


@pytest.mark.parametrize("vary", list(Vary))
def test_a_mix_of_sizes(device: str, vary: Vary) -> None:
    path = THERE.model_copy(update={"frames": Frames(vary=vary)})
    with generator(path) as tool:
        found = tool.run(TrialRequest(4_800, 0.2, frame_size=354, mix="imix", flows=7))
    assert found.tx_packets == found.rx_packets == 960


def test_a_lossy_device_is_found_so_to_the_frame(device: str) -> None:
    asked = TrialRequest(20_000, 1.0, abort_on_loss=False)
    with losing(device, "limit rate over 10000/second burst 500 packets"), generator() as tool:
        found = tool.run(asked)
        lost = dropped(device)
    assert found.tx_packets == 20_000 and lost > 5_000
    assert found.tx_packets - found.rx_packets == lost
    assert judged(asked, found).verdict in (Verdict.LOSSY, Verdict.INVALID)
    assert judged(asked, found).cause in (None, Cause.QUEUE, Cause.LATE), "held up by others at most"


def test_one_lost_frame_is_seen(device: str) -> None:
    with losing(device, "numgen inc mod 5000 == 4999"), generator() as tool:
        found = tool.run(TrialRequest(10_000, 0.5))
        assert dropped(device) == 1
    assert (found.tx_packets, found.rx_packets, found.aborted) == (5_000, 4_999, False)


def test_loss_in_one_direction(device: str) -> None:
    with losing(device, "numgen inc mod 10 == 0"), generator(THERE, BACK) as tool:
        found = tool.run(TrialRequest(4_000, 0.5, abort_on_loss=False))
    assert [(d.tx_packets, d.rx_packets) for d in found.directions] == [
        (1_000, 900),
        (1_000, 1_000),
    ]


def test_a_trial_is_stopped_when_loss_is_certain(device: str) -> None:
    """Long before its minute, and no sooner than more is missing than can be in flight."""
    asked = TrialRequest(20_000, 60.0)
    with losing(device, "numgen inc mod 2 == 0"), generator(in_flight=1000) as tool:
        found = tool.run(asked)
        assert found.tx_packets - found.rx_packets == dropped(device)
    assert found.aborted and found.elapsed_s < 30
    assert found.tx_packets - found.rx_packets > 1000
    assert judged(asked, found).cause in (None, Cause.QUEUE)


def test_a_direction_that_starts_late_is_not_stopped_before_it_sends(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has lost frames by then."""
    program = tmp_path / "tcpreplay"
    real = shutil.which("tcpreplay")
    program.write_text(f'#!/bin/sh\ncase "$*" in *intf1=east*) sleep 2; esac\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with losing(device, "numgen inc mod 2 == 0"), generator(THERE, BACK, in_flight=100) as tool:
        found = tool.run(TrialRequest(20_000, 60.0))
        assert found.tx_packets - found.rx_packets == dropped(device)
    assert found.aborted and all(way.tx_packets > 0 for way in found.directions)


def test_a_device_that_keeps_frames_for_long_has_not_lost_them(device: str) -> None:
    """More in flight than thought: a false alarm is no loss, and not made again."""
    run(
        within(
            device,
            [
                "tc",
                "qdisc",
                "add",
                "dev",
                "to-east",
                "root",
                "tbf",
                "rate",
                "15mbit",
                "burst",
                "10k",
                "limit",
                "10mb",
            ],
        )
    )
    try:
        asked = TrialRequest(10_000, 1.0, frame_size=256)
        with generator(in_flight=1000) as tool:
            first, second = tool.run(asked), tool.run(asked)
    finally:
        run(within(device, ["tc", "qdisc", "delete", "dev", "to-east", "root"]))
    assert first.aborted and first.tx_packets == first.rx_packets
    assert judged(asked, first).verdict is Verdict.INVALID
    assert not second.aborted and second.tx_packets == second.rx_packets == 10_000


def test_other_frames_on_the_wire_are_not_counted(device: str) -> None:
    """Broadcasts, and even what is as ours but for the marker."""
    stop = threading.Event()

    def disturb() -> None:
        with entered(DEVICE), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as other:
            other.bind(("to-east", 0))
            while not stop.wait(0.001):
                other.send(bytes(42) + b"NOT-OURS" + bytes(10))
                other.send(b"\xff" * 6 + b"\x02\0\0\0\0\x09" + b"\x08\x06" + bytes(46))

    noise = threading.Thread(target=disturb)
    noise.start()
    try:
        with generator() as tool:
            found = tool.run(TrialRequest(10_000, 0.5))
    finally:
        stop.set()
        noise.join()
    assert found.tx_packets == found.rx_packets == 5_000


def test_beyond_its_pace_the_generator_is_to_blame(device: str) -> None:
    asked = TrialRequest(20e6, 0.2)
    with generator() as tool:
        found = tool.run(asked)
    assert found.tx_packets < asked.packets and not found.aborted
    assert judged(asked, found).verdict is Verdict.INVALID


@pytest.mark.parametrize(("says", "cause"), [(20_000, Cause.QUEUE), (2_000, Cause.COUNTERS)])
def test_a_false_number_of_sent_frames_is_noticed(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: int, cause: Cause
) -> None:
    """More than left its interface, or less: the trial says nothing of the device."""
    program = tmp_path / "tcpreplay"
    lie = f"s/Successful packets: .*/Successful packets: {says}/"
    program.write_text(f"#!/bin/sh\n{shutil.which('tcpreplay')} \"$@\" | sed '{lie}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = TrialRequest(10_000, 1.0)
    with generator() as tool:
        found = tool.run(asked)
    assert found.rx_packets == 10_000
    assert judged(asked, found).cause is cause, judged(asked, found).reason


def test_interfaces_of_another_run_are_refused(device: str) -> None:
    """Its frames would add to ours, and the device would seem to do half."""
    with generator(THERE), pytest.raises(UnusableInput, match="east is that of another run"):
        generator(InterfacePath(send="east", receive="east"))
    with generator(BACK) as tool:
        assert tool.run(TrialRequest(1_000, 0.2)).rx_packets == 200


def test_what_its_own_queue_drops_is_not_the_device_s_loss(device: str) -> None:
    """A queue before the interface: tcpreplay takes it for sent."""
    queue = [
        "tc",
        "qdisc",
        "add",
        "dev",
        "west",
        "root",
        "tbf",
        "rate",
        "1mbit",
        "burst",
        "2k",
        "limit",
        "3k",
    ]
    run(within(GENERATOR, queue))
    try:
        asked = TrialRequest(20_000, 0.2)
        with generator() as tool:
            found = tool.run(asked)
    finally:
        run(within(GENERATOR, ["tc", "qdisc", "delete", "dev", "west", "root"]))
    assert judged(asked, found).verdict is Verdict.INVALID
    assert found.tx_packets == found.rx_packets


def test_it_ends_with_the_tool_however_that_ends(device: str, tmp_path: Path) -> None:
    """Killed in the middle of a minute; nobody sends on."""
    code = (
        "from netplugin_zeroloss.generators.choose import *\n"
        "from netplugin_zeroloss.values import TrialRequest\n"
        f"make(Tcpreplay(netns={GENERATOR!r}, paths=[{{'send': 'west', 'receive': 'east'}}]))"
        ".run(TrialRequest(1000, 60))"
    )
    # Who is killed leaves its files behind.
    tool = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        wait_for(lambda: playing(), 30, "tcpreplay begins")
    finally:
        tool.kill()
        tool.wait()
    wait_for(lambda: not playing(), 10, "tcpreplay ends")


def playing() -> bool:
    return bool(run(["ip", "netns", "pids", GENERATOR]).split())


def test_what_cannot_be_is_reported_before_anything_is_sent(device: str) -> None:
    with pytest.raises(UnusableInput, match="nosuch: No such device"):
        generator(InterfacePath(send="nosuch", receive="east"))
    run(within(GENERATOR, ["ip", "link", "set", "east", "down"]))
    try:
        with pytest.raises(UnusableInput, match="east is down: try `ip link set east up`"):
            generator()
    finally:
        run(within(GENERATOR, ["ip", "link", "set", "east", "up"]))
    with generator() as tool:
        with pytest.raises(GeneratorError, match="MTU of 8982"):
            tool.run(TrialRequest(1000, 0.1, frame_size=9000))
        with pytest.raises(GeneratorError, match="flows"):
            tool.run(TrialRequest(1000, 0.1, flows=2_000_000))


def searched(tmp_path: Path, *paths: InterfacePath) -> tuple[int, dict[str, Any]]:
    """From options to the exit status and the result."""
    file = tmp_path / "result.json"
    options = ["search", "--generator", "tcpreplay", "--netns", GENERATOR, "--json", str(file)]
    for path in paths:
        options += ["--tx-interface", path.send, "--rx-interface", path.receive]
    options += ["--line-rate-pps", "40000", "--final-duration", "2", "--precision", "0.1"]
    status = main([*options, "--buffer-packets", "1000"])
    return status, json.loads(file.read_text())


def test_a_search(device: str, tmp_path: Path) -> None:
    """From options to a verdict; what the device lost is where the result says that it ends."""
    with losing(device, "limit rate over 12000/second burst 500 packets"):
        status, result = searched(tmp_path, THERE)
    assert (status, result["verdict"]) == (0, "ndr"), result["reason"]
    lower, upper = result["bounds_pps"]
    assert lower * 0.9 <= 12_000 <= upper * 1.1
    assert result["environment"]["generator"] == "tcpreplay"


def test_a_search_of_a_device_that_forwards_one_way(device: str, tmp_path: Path) -> None:
    """Frames of ours leave it to the east, and none to the west."""
    with losing(device, "", "to-west"):
        status, result = searched(tmp_path, THERE, BACK)
        lost = dropped(device)
    assert (status, result["verdict"]) == (1, "dead_direction"), result["reason"]
    assert result["evidence"]["dead_directions"] == [1] and "direction 1 is dead" in result["reason"]
    assert result["traffic_s"] <= 10
    assert lost == sum(t["measured"]["directions"][1]["tx_packets"] for t in result["trial_log"])
    assert result["trial_log"][-1]["measured"]["directions"][0]["rx_packets"] > 0

"""Wires, an exactly counted stream of frames, and a trial with loss attribution: for the tests of VNFs."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.generators.frames import Frames, frames_of
from netplugin_zeroloss.generators.wire import MARKER_BYTES, Wire
from netplugin_zeroloss.loss.contract import AttributedGenerator, DropCounters
from netplugin_zeroloss.values import Measurement, TrialRequest
from netplugin_zeroloss.vnf.contract import TestpmdDescription, Vnf, VnfCores

from tests.lab.processes import run, stop, wait_for

PORTS = 2
MACS = ("52:54:00:00:0a:01", "52:54:00:00:0a:02")
PEERS = ("52:54:00:00:0b:01", "52:54:00:00:0b:02")
TESTPMD = TestpmdDescription(type="testpmd", hugepages=False, memory_mb=96)
CORES = VnfCores(main=0, workers=(0,))
#: What every ring and queue on the way holds, so that a busy machine loses none of them.
FEW = 400
#: More than any of them holds.
MANY = 2000
PACE_S = 0.002
BURST = 32
#: Longer than a thread that forwards waits for a CPU.
QUIET_S = 3.0
#: On a machine that has more to do than this.
SETTLE_S = 15.0


class Stream(Generator):
    """Frames into one wire and out of the other, a burst every other millisecond; exactly counted."""

    def __init__(
        self, frames: int = FEW, frame_bytes: int = 200, then: Callable[[], None] | None = None
    ) -> None:
        """``then`` is called when all have been sent."""
        self.frames, self._frame_bytes, self._then = frames, frame_bytes, then
        self._wire = Wire()

    @property
    def info(self) -> GeneratorInfo:
        return GeneratorInfo("stream")

    def run(self, request: TrialRequest) -> Measurement:
        marker = os.urandom(MARKER_BYTES)
        frame = _frame(self._frame_bytes, marker)
        ends = [self._wire.interface(f"gen{n}") for n in range(PORTS)]
        with ExitStack() as stack:
            sent = stack.enter_context(closing(self._wire.count(ends[0], marker, outgoing=True)))
            came = stack.enter_context(closing(self._wire.count(ends[1], marker, outgoing=False)))
            outbox = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            stack.enter_context(outbox)
            outbox.bind((ends[0].name, 0))
            began = time.monotonic()
            for number in range(self.frames):
                outbox.send(frame)
                if number % BURST == BURST - 1:
                    time.sleep(PACE_S)  # the pace is the load that is offered
            elapsed = time.monotonic() - began
            if self._then is not None:
                self._then()
            return Measurement(sent.read(), _at_rest(came.read, self.frames), elapsed)

    def close(self) -> None:
        self._wire.close()


def _frame(size: int, marker: bytes) -> bytes:
    frames = Frames(source_mac=PEERS[0], destination_mac=MACS[0]).in_direction(0)
    (frame,) = frames_of(frames, TrialRequest(1, 1, size, flows=1), marker, 1)
    return frame


def _at_rest(read: Callable[[], int], most: int) -> int:
    """The count once it is the most that it can be, or has not moved for a while."""
    last, since = read(), time.monotonic()
    while last < most and time.monotonic() - since < QUIET_S:
        time.sleep(0.02)
        now = read()
        if now != last:
            last, since = now, time.monotonic()
    return last


@contextmanager
def wires() -> Iterator[None]:
    """What the generator sends into ``gen0`` arrives at ``dut0``, and so for 1."""
    with ExitStack() as stack:
        for number in range(PORTS):
            gen, dut = f"gen{number}", f"dut{number}"
            run(["ip", "link", "add", gen, "type", "veth", "peer", "name", dut])
            stack.callback(run, ["ip", "link", "delete", gen])
            for device in (gen, dut):
                Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6").write_text("1")
                run(["ip", "link", "set", device, "up"])
        yield


def trial(vnf: Vnf, stream: Stream, *places: DropCounters) -> Measurement:
    """One trial, with these places and the VNF's own."""
    with AttributedGenerator(stream, [*places, vnf.place], SETTLE_S) as attributed:
        measured = attributed.run(TrialRequest(stream.frames, 1.0))
    assert measured.tx_packets == stream.frames
    return measured


def lost(measured: Measurement) -> dict[str, float]:
    """Where; the sum closes, whatever was found."""
    found = sum(measured.evidence.values())
    assert measured.tx_packets == measured.rx_packets + found, measured
    return dict(measured.evidence)


class Asleep(Stream):
    """Many while a process sleeps: from when its counters were read until all came before it."""

    def __init__(self, pid: int, came: Callable[[], int]) -> None:
        """``came``: how many frames have come before the process, and found room or not."""
        super().__init__(MANY, then=self._wake)
        self._pid, self._came = pid, came
        self._before = 0

    def _wake(self) -> None:
        wait_for(lambda: self._came() >= self._before + MANY, 30, "all frames have come")
        os.kill(self._pid, signal.SIGCONT)

    def run(self, request: TrialRequest) -> Measurement:
        self._before = self._came()
        stop(self._pid)
        try:
            return super().run(request)
        finally:
            os.kill(self._pid, signal.SIGCONT)


def process(word: str) -> int:
    """The one whose command has this in it."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended since
            if word.encode() in (entry / "cmdline").read_bytes():
                return int(entry.name)
    raise AssertionError(f"{word} does not run")

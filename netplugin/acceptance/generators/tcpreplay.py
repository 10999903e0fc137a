"""The generator ``tcpreplay``: Debian's program sends at a pace, packet sockets count what comes back.

It is for machines without TRex, and for rates up to some 100,000 frames a second.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

from netplugin.acceptance.errors import GeneratorError, UnusableInput
from netplugin.acceptance.generators.contract import Generator, GeneratorInfo
from netplugin.acceptance.generators.frames import FCS_BYTES, Frames, frames_of, sizes, write_pcap
from netplugin.acceptance.generators.tcpreplay_player import PROGRAM, Player, wait_for_an_end
from netplugin.acceptance.generators.watch import IN_FLIGHT, InFlight, LossWatch, PaceWatch, at_rest
from netplugin.acceptance.generators.wire import MARKER_BYTES, Interface, Wire
from netplugin.acceptance.values import Direction, Measurement, TrialRequest

#: Half a ring of 1,024: what a device loses of a larger burst is not its fault.
MOST_BURST: Final = 512
#: Its last frame may be 0.3 ms late, as others run on its core too: too much of a shorter trial.
MIN_TRIAL_S: Final = 1.0
#: Frames of a pcap, all of which are kept in memory.
_MOST_FRAMES: Final = 1_000_000
#: How often the counters are looked at while it sends.
_LOOK_S: Final = 0.002
#: Later than by this part of a trial, and this long, it will not catch up any more.
_LATE_PART: Final = 0.02
_LATE_S: Final = 0.3
#: How long it may take to load its frames.
_START_S: Final = 30.0
_ETHERNET_BYTES: Final = 14


@dataclass(frozen=True, slots=True)
class _Way:
    """One direction: out of one interface, and back at the other."""

    send: Interface
    receive: Interface
    frames: Frames


class TcpreplayGenerator(Generator):
    """One tcpreplay for each direction."""

    def __init__(
        self, paths: Sequence[tuple[str, str, Frames]], netns: str | None = None,
        max_pps: float = math.inf, *, realtime: bool = True, most_burst: int = MOST_BURST,
        in_flight: int = IN_FLIGHT,
    ) -> None:  # fmt: skip
        """``paths``: for each direction the interface that sends, the one that receives, the frames.

        ``most_burst``: frames; ``in_flight``: frames that the device may hold.
        Raises: UnusableInput, before anything is sent.
        """
        if shutil.which(PROGRAM) is None:
            raise UnusableInput(PROGRAM, f"it is not installed: try `apt-get install {PROGRAM}`")
        self._realtime = realtime
        self._most_burst = most_burst
        self._in_flight = InFlight(in_flight)
        self._info = GeneratorInfo(PROGRAM, max_pps, min_trial_s=MIN_TRIAL_S)
        self._files = tempfile.TemporaryDirectory(prefix="zeroloss-")
        try:
            self._wire = Wire(netns)
        except BaseException:
            self._files.cleanup()
            raise
        try:
            self._ways = [self._way(number, *path) for number, path in enumerate(paths)]
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> GeneratorInfo:
        return self._info

    def run(self, request: TrialRequest) -> Measurement:
        with ExitStack() as stack:
            legs = [
                stack.enter_context(closing(self._leg(number, way, request)))
                for number, way in enumerate(self._ways)
            ]
            ears = list(dict.fromkeys(way.receive for way in self._ways))
            dropped = sum(map(self._wire.dropped, ears))
            for leg in legs:
                leg.start()
            aborted = self._send(legs, request)
            played = [leg.player.finish() for leg in legs]
            directions, settled = at_rest(
                lambda: tuple(leg.counted(run.sent) for leg, run in zip(legs, played, strict=True)),
                lambda found: all(d.rx_packets >= d.tx_packets for d in found),
            )
            rx_errors = sum(map(self._wire.dropped, ears)) - dropped
            # What was handed over and did not reach the driver, or was refused.
            queue_drops = sum(
                max(0, run.sent - one.tx_packets - leg.doubt) + run.failed
                for run, one, leg in zip(played, directions, legs, strict=True)
            )
            bursts = [leg.pace.burst_packets for leg in legs]
        sent, received = (
            sum(d.tx_packets for d in directions), sum(d.rx_packets for d in directions)
        )  # fmt: skip
        if aborted and sent == received:
            self._in_flight.was_more()
        return Measurement(
            tx_packets=sent,
            rx_packets=received,
            # The last frame has its time too.
            elapsed_s=max(run.elapsed_s for run in played) + len(legs) / request.rate_pps,
            aborted=aborted,
            rx_errors=rx_errors,
            queue_drops=queue_drops,
            queue_full=sum(run.retried for run in played)
            + sum(1 for burst in bursts if burst > self._most_burst),
            elapsed_uncertainty_s=max(run.uncertainty_s for run in played),
            settled=settled,
            directions=directions,
            evidence={"generator.rx": rx_errors, "generator.queue": queue_drops},
            readings={"generator.burst_packets": max(bursts)},
        )

    def close(self) -> None:
        self._wire.close()
        self._files.cleanup()

    def _send(self, legs: Sequence[_Leg], request: TrialRequest) -> bool:
        """Until all is sent, or it is too late, or a loss is certain (True)."""
        started = time.monotonic()
        late = started + request.duration_s * (1 + _LATE_PART) + _LATE_S
        while wait_for_an_end([leg.player for leg in legs], _LOOK_S):
            now = time.monotonic()
            lost = sum(leg.look() for leg in legs) > 0
            if not all(leg.has_sent for leg in legs):
                late = now + request.duration_s * (1 + _LATE_PART) + _LATE_S
                if now > started + _START_S:
                    raise GeneratorError(f"{PROGRAM} sent nothing within {_START_S:g} s")
            if now > late or (lost and request.abort_on_loss):
                for leg in legs:
                    leg.stop()
                return now <= late
        return False

    def _way(self, number: int, send: str, receive: str, frames: Frames) -> _Way:
        sender, receiver = self._wire.interface(send), self._wire.interface(receive)
        addressed = frames.in_direction(number).model_copy(
            update={
                "source_mac": frames.source_mac or sender.mac,
                "destination_mac": frames.destination_mac or receiver.mac,
            }
        )
        return _Way(sender, receiver, addressed)

    def _leg(self, number: int, way: _Way, request: TrialRequest) -> _Leg:
        longest = max(sizes(request)) - FCS_BYTES - _ETHERNET_BYTES
        for interface in (way.send, way.receive):
            if longest > interface.mtu:
                raise GeneratorError(
                    f"{interface.name}: the frames need an MTU of {longest}, and it has"
                    f" {interface.mtu}: try `ip link set {interface.name} mtu {longest}`"
                )
        pcap = os.path.join(self._files.name, f"{number}.pcap")
        share = request.rate_pps / len(self._ways)
        return _Leg(self._wire, way, request, share, pcap, self._in_flight.packets, self._realtime)


class _Leg:
    """One direction in one trial. Close it."""

    def __init__(
        self, wire: Wire, way: _Way, request: TrialRequest, rate_pps: float, pcap: str,
        in_flight: int, realtime: bool,
    ) -> None:  # fmt: skip
        self._wire = wire
        self._way = way
        self._rate_pps = rate_pps
        self._packets = max(1, round(rate_pps * request.duration_s))
        self._pcap = pcap
        self._realtime = realtime
        # Of this trial and direction only, so that nothing of another is counted.
        marker = os.urandom(MARKER_BYTES)
        self._frames = write_pcap(pcap, frames_of(way.frames, request, marker, _MOST_FRAMES))
        self._loss = LossWatch(in_flight)
        self.pace = PaceWatch(rate_pps)
        self.has_sent = False
        #: Frames by which tcpreplay may be wrong: the one during which it was stopped.
        self.doubt = 0
        with ExitStack() as stack:
            self.sent = wire.count(way.send, marker, outgoing=True)
            stack.callback(self.sent.close)
            self.received = wire.count(way.receive, marker, outgoing=False)
            stack.callback(self.received.close)
            self._opened = stack.pop_all()

    def start(self) -> None:
        self.player = Player(
            self._way.send.name, self._pcap, self._rate_pps, self._packets,
            math.ceil(self._packets / self._frames),
            netns_path=self._wire.netns_path, realtime=self._realtime,
        )  # fmt: skip
        self._opened.callback(self.player.close)

    def look(self) -> bool:
        """Whether a frame is lost for certain."""
        sent = self.sent.read()
        now = time.monotonic()
        self.has_sent = sent > 0
        if self.player.running:
            self.pace.look(now, sent)
        return self._loss.sees_loss(now, sent, self.received.read())

    def stop(self) -> None:
        """Before all is sent."""
        if self.player.running:
            self.doubt = 1
            self.player.stop()

    def counted(self, played: int) -> Direction:
        """After it ended; ``played`` is what tcpreplay says that it sent.

        Counted is what leaves the interface. That is less if a queue before it drops, and seems to be
        more if a driver that is busy is given a frame twice.
        """
        return Direction(min(self.sent.read(), played + self.doubt), self.received.read())

    def close(self) -> None:
        self._opened.close()

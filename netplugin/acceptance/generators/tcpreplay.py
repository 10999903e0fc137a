"""The generator ``tcpreplay``: tcpreplay sends at a fixed rate, packet sockets count received frames.

For machines without TRex, at rates up to some 100,000 frames per second.
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

#: Half of a ring of 1,024 descriptors: loss in a larger burst is not the device's fault.
MOST_BURST: Final = 512
#: The last frame may be 0.3 ms late because other tasks share the CPU; that is too much for a
#: shorter trial.
MIN_TRIAL_S: Final = 1.0
#: Maximum frames of a pcap; all of them are held in memory.
_MOST_FRAMES: Final = 1_000_000
#: Polling interval of the counters while sending, in seconds.
_LOOK_S: Final = 0.002
#: A trial this fraction of its duration plus ``_LATE_S`` late is stopped: it cannot catch up.
_LATE_PART: Final = 0.02
_LATE_S: Final = 0.3
#: Seconds tcpreplay may take to load its frames.
_START_S: Final = 30.0
_ETHERNET_BYTES: Final = 14


@dataclass(frozen=True, slots=True)
class _Way:
    """One direction: the transmitting and the receiving interface, and the frames."""

    send: Interface
    receive: Interface
    frames: Frames


class TcpreplayGenerator(Generator):
    """Runs one tcpreplay process per direction."""

    def __init__(
        self, paths: Sequence[tuple[str, str, Frames]], netns: str | None = None,
        max_pps: float = math.inf, *, realtime: bool = True, most_burst: int = MOST_BURST,
        in_flight: int = IN_FLIGHT,
    ) -> None:  # fmt: skip
        """``paths``: per direction the transmitting interface, the receiving interface, and the frames.

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
            # Frames that tcpreplay sent but the driver did not get, or refused.
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
            # Includes the interval after the last frame.
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
        """Wait until all frames are sent or the trial is late; True: stopped because of certain loss."""
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
    """One direction of one trial. The caller closes it."""

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
        # Unique per trial and direction, so that frames of another trial are not counted.
        marker = os.urandom(MARKER_BYTES)
        self._frames = write_pcap(pcap, frames_of(way.frames, request, marker, _MOST_FRAMES))
        self._loss = LossWatch(in_flight)
        self.pace = PaceWatch(rate_pps)
        self.has_sent = False
        #: Uncertainty of tcpreplay's count: the frame during which it was stopped.
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
        """Poll the counters; returns whether a frame is certainly lost."""
        sent = self.sent.read()
        now = time.monotonic()
        self.has_sent = sent > 0
        if self.player.running:
            self.pace.look(now, sent)
        return self._loss.sees_loss(now, sent, self.received.read())

    def stop(self) -> None:
        """Stop tcpreplay early."""
        if self.player.running:
            self.doubt = 1
            self.player.stop()

    def counted(self, played: int) -> Direction:
        """Return the counts after tcpreplay has ended; ``played`` is the number of frames it reports.

        Frames count when they leave the interface. That is less than ``played`` if a queue drops, and
        appears to be more if a busy driver gets a frame twice.
        """
        return Direction(min(self.sent.read(), played + self.doubt), self.received.read())

    def close(self) -> None:
        self._opened.close()

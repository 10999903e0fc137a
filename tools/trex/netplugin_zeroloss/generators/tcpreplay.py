"""The generator ``tcpreplay``: a process per direction, and packet sockets that count frames.

Observed with tcpreplay 4.4.3 of Debian 12:

- The default timer busy-waits. When other tasks need its CPU, the scheduler preempts it for
  milliseconds, and it catches up with one burst of hundreds of frames. ``--timer=nano`` sleeps between
  frames; with real-time priority it wakes up in time, with bursts of 10 to 50 frames.
- From 1 s on, seconds are printed with a resolution of 0.01 s; the printed rate is more exact.
- After SIGINT, ``Actual`` includes a frame that was not sent. ``Successful`` is correct.
- After SIGTERM it prints no summary.
- ``--pps-multi`` changes nothing: frames leave one by one. With time stamps in the file they leave in bursts,
  and each gap is tens of microseconds too long, so that the rate is some percent too low.
"""

from __future__ import annotations

import math
import os
import re
import select
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from netplugin_zeroloss.generators.contract import (
    IN_FLIGHT,
    Count,
    Generator,
    GeneratorDescription,
    GeneratorInfo,
    PaceWatch,
    Positive,
    TrialWatch,
    all_came,
    at_rest,
    counted,
    each_once,
)
from netplugin_zeroloss.generators.frames import FCS_BYTES, Frames, frames_of, sizes, write_pcap
from netplugin_zeroloss.generators.guarded import GuardedProgram
from netplugin_zeroloss.generators.wire import MARKER_BYTES, Interface, Wire
from netplugin_zeroloss.values import Direction, GeneratorError, Measurement, TrialRequest, UnusableInput

_PROGRAM: Final = "tcpreplay"
#: The lowest real-time priority preempts every normal task.
_HURRIED: Final = ("chrt", "--fifo", "1")
#: The last frame may be 0.3 ms late because other tasks share the CPU; that is too much for a
#: shorter trial.
_MIN_TRIAL_S: Final = 1.0
#: Maximum frames of a pcap; all of them are held in memory.
_MOST_FRAMES: Final = 1_000_000
#: Polling interval of the counters while sending, in seconds.
_LOOK_S: Final = 0.002
#: See ``TrialWatch``.
_LATE_S: Final = 0.3
#: Seconds tcpreplay may take to load its frames, and to print its summary.
_START_S: Final = 30.0
_STOP_S: Final = 5.0
_ETHERNET_BYTES: Final = 14
_Name = Annotated[str, Field(min_length=1, max_length=15)]


class InterfacePath(GeneratorDescription):
    """Interface names: frames leave one interface and return at the other."""

    send: _Name
    receive: _Name
    frames: Frames = Frames()


class Tcpreplay(GeneratorDescription):
    """One tcpreplay process per direction, and exact counters at the receivers."""

    type: Literal["tcpreplay"] = "tcpreplay"
    paths: Annotated[tuple[InterfacePath, ...], Field(min_length=1), AfterValidator(each_once)]
    #: Name or path of the network namespace of the interfaces; None: that of this process.
    netns: str | None = None
    #: Upper limit of the load in pps, all paths together.
    max_pps: Positive | None = None
    #: Run with real-time priority; without it tcpreplay sends in bursts.
    realtime: bool = True
    #: Trials with larger bursts are invalid; in frames. Half of a ring of 1,024 descriptors: loss in a larger
    #: burst is not the device's fault.
    most_burst: Annotated[int, Field(ge=1)] = 512
    in_flight: Count = IN_FLIGHT


@dataclass(frozen=True, slots=True)
class Played:
    """Summary of a run. ``elapsed_s`` is from the first frame to the last."""

    sent: int
    failed: int
    retried: int
    elapsed_s: float
    uncertainty_s: float

    @staticmethod
    def parse(text: str) -> Played:
        """Parse the summary of tcpreplay. Raises: GeneratorError."""
        seconds = _number(r"sent in ([\d.]+) seconds", text)
        rate = _number(r"Rated:.*, ([\d.]+) pps", text)
        actual = _number(r"Actual: (\d+) packets", text)
        clocks = [(seconds, 1e-6 if seconds < 1 else 0.01)]
        if rate > 0:
            clocks.append((actual / rate, 0.01 / rate * actual / rate))
        elapsed_s, uncertainty_s = min(clocks, key=lambda clock: clock[1])
        return Played(
            sent=round(_number(r"Successful packets:\s+(\d+)", text)),
            failed=round(_number(r"Failed packets:\s+(\d+)", text)),
            retried=sum(map(int, re.findall(r"Retried packets \(\w+\):\s+(\d{1,18})", text))),
            elapsed_s=elapsed_s,
            uncertainty_s=uncertainty_s,
        )


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    if match is None:
        raise GeneratorError(f"{_PROGRAM} did not say what it sent: {text.strip()[-500:]}")
    try:
        return float(match[1])
    except ValueError as error:
        raise GeneratorError(f"{_PROGRAM} printed {match[1]!r:.40} in place of a number") from error


def _summary(player: GuardedProgram) -> Played:
    """Wait for the end of tcpreplay, and return its summary. Raises: GeneratorError."""
    if not player.wait(2 * _STOP_S):
        raise GeneratorError(f"{_PROGRAM} does not end when it is interrupted")
    text = player.output.strip()[-500:]
    if player.status and text.startswith(_HURRIED[0]):
        raise GeneratorError(
            f"{_PROGRAM} may have no real-time priority, and sends in bursts without: run as root"
            f" (CAP_SYS_NICE), or say --no-realtime ({text})"
        )
    if player.status:
        raise GeneratorError(f"{_PROGRAM} ended with status {player.status}: {text}")
    return Played.parse(player.output)


class TcpreplayGenerator(Generator):
    """Runs one tcpreplay process per direction, on interfaces that it takes until ``close``."""

    def __init__(self, description: Tcpreplay) -> None:
        """Raises: UnusableInput, before anything is sent."""
        if shutil.which(_PROGRAM) is None:
            raise UnusableInput(_PROGRAM, f"it is not installed: try `apt-get install {_PROGRAM}`")
        self._description = description
        self._in_flight = description.in_flight
        self._info = GeneratorInfo(_PROGRAM, description.max_pps or math.inf, min_trial_s=_MIN_TRIAL_S)
        with ExitStack() as opened:
            self._files = opened.enter_context(tempfile.TemporaryDirectory(prefix="zeroloss-"))
            self._wire = opened.enter_context(closing(Wire(description.netns)))
            self._ways = [self._way(number, path) for number, path in enumerate(description.paths)]
            for interface in dict.fromkeys(end for way in self._ways for end in (way.send, way.receive)):
                self._wire.take(interface)
            self._opened = opened.pop_all()

    def run(self, request: TrialRequest) -> Measurement:
        watch = TrialWatch(request, len(self._ways), self._in_flight, _LATE_S)
        with ExitStack() as stack:
            legs = [
                stack.enter_context(closing(self._leg(number, way, request)))
                for number, way in enumerate(self._ways)
            ]
            ears = list(dict.fromkeys(way.receive for way in self._ways))
            dropped = sum(map(self._wire.dropped, ears))
            for leg in legs:
                leg.start()
            _send(legs, watch)
            played = [_summary(leg.player) for leg in legs]
            directions, settled = at_rest(
                lambda: [leg.counted(run.sent) for leg, run in zip(legs, played, strict=True)], all_came
            )
            rx_errors = sum(map(self._wire.dropped, ears)) - dropped
        # Frames that tcpreplay sent but the driver did not get, or refused.
        queue_drops = sum(
            max(0, run.sent - one.tx_packets - leg.doubt) + run.failed
            for run, one, leg in zip(played, directions, legs, strict=True)
        )
        bursts = [leg.pace.burst_packets for leg in legs]
        held_up = sum(burst > self._description.most_burst for burst in bursts)
        measured = counted(
            directions,
            # Includes the interval after the last frame.
            max(run.elapsed_s for run in played) + len(legs) / request.rate_pps,
            rx_errors=rx_errors,
            queue_drops=queue_drops,
            queue_full=sum(run.retried for run in played) + held_up,
            elapsed_uncertainty_s=max(run.uncertainty_s for run in played),
            settled=settled,
            evidence={"generator.rx": rx_errors, "generator.queue": queue_drops},
            readings={"generator.burst_packets": max(bursts)},
        )
        measured = watch.finish(measured)
        self._in_flight = watch.in_flight
        return measured

    def _way(self, number: int, path: InterfacePath) -> _Way:
        sender, receiver = self._wire.interface(path.send), self._wire.interface(path.receive)
        source, destination = (path.frames.source_mac, path.frames.destination_mac)
        macs = {"source_mac": source or sender.mac, "destination_mac": destination or receiver.mac}
        return _Way(sender, receiver, path.frames.in_direction(number).model_copy(update=macs))

    def _leg(self, number: int, way: _Way, request: TrialRequest) -> _Leg:
        longest = max(sizes(request)) - FCS_BYTES - _ETHERNET_BYTES
        for interface in (way.send, way.receive):
            if longest > interface.mtu:
                raise GeneratorError(
                    f"{interface.name}: the frames need an MTU of {longest}, and it has"
                    f" {interface.mtu}: try `ip link set {interface.name} mtu {longest}`"
                )
        pcap = os.path.join(self._files, f"{number}.pcap")
        share = replace(request, rate_pps=request.rate_pps / len(self._ways))
        return _Leg(self._wire, way, share, pcap, _HURRIED if self._description.realtime else ())


@dataclass(frozen=True, slots=True)
class _Way:
    """One direction: the transmitting and the receiving interface, and the frames."""

    send: Interface
    receive: Interface
    frames: Frames


class _Leg:
    """One direction of one trial; ``request`` has its share of the rate. The caller closes it."""

    player: GuardedProgram

    def __init__(
        self, wire: Wire, way: _Way, request: TrialRequest, pcap: str, hurried: Sequence[str]
    ) -> None:
        # Unique per trial and direction, so that frames of another trial are not counted.
        marker = os.urandom(MARKER_BYTES)
        frames = write_pcap(pcap, frames_of(way.frames, request, marker, _MOST_FRAMES))
        packets = max(1, round(request.packets))
        self._command = [
            *(["nsenter", f"--net={wire.netns_path}"] if wire.netns_path else []),
            *(*hurried, _PROGRAM, "--quiet", "--preload-pcap", "--timer=nano", "--no-flow-stats"),
            *(f"--pps={request.rate_pps:.2f}", f"--limit={packets}", f"--loop={math.ceil(packets / frames)}"),
            *(f"--intf1={way.send.name}", pcap),
        ]
        self.pace = PaceWatch(request.rate_pps)
        #: Uncertainty of tcpreplay's count: the frame during which it was stopped.
        self.doubt = 0
        with ExitStack() as stack:
            self._sent = stack.enter_context(closing(wire.count(way.send, marker, outgoing=True)))
            self._received = stack.enter_context(closing(wire.count(way.receive, marker, outgoing=False)))
            self._opened = stack.pop_all()

    def start(self) -> None:
        self.player = self._opened.enter_context(closing(GuardedProgram(self._command, _STOP_S)))

    def look(self) -> Direction:
        """Read the counters while tcpreplay sends."""
        sent = self._sent.read()
        if self.player.status is None:
            self.pace.look(time.monotonic(), sent)
        return Direction(sent, self._received.read())

    def stop(self) -> None:
        """Stop tcpreplay early: it finishes the current frame and prints its summary."""
        if self.player.status is None:
            self.doubt = 1
            self.player.interrupt()

    def counted(self, played: int) -> Direction:
        """Return the counts after tcpreplay has ended; ``played`` is the number of frames it reports.

        Frames count when they leave the interface. That is less than ``played`` if a queue drops, and
        appears to be more if a busy driver gets a frame twice.
        """
        return Direction(min(self._sent.read(), played + self.doubt), self._received.read())

    def close(self) -> None:
        self._opened.close()


def _send(legs: Sequence[_Leg], watch: TrialWatch) -> None:
    """Wait until all frames are sent, or stop because the trial is late or loss is certain."""
    deadline = time.monotonic() + _START_S
    watch.begin()
    while running := _running(legs):
        select.select(running, [], [], _LOOK_S)
        if not _running(legs):
            return
        seen = [leg.look() for leg in legs]
        now = time.monotonic()
        stops = watch.stops(now, seen)
        if not all(d.tx_packets for d in seen):
            # Not stopped before it sends: it prints no summary if it is interrupted while it starts.
            watch.begin()
            if now > deadline:
                raise GeneratorError(f"{_PROGRAM} sent nothing within {_START_S:g} s")
        elif stops:
            for leg in legs:
                leg.stop()
            return


def _running(legs: Sequence[_Leg]) -> list[int]:
    return [leg.player.ended for leg in legs if leg.player.status is None]

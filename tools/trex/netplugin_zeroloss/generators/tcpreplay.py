"""The generator ``tcpreplay``: a process per direction, and packet sockets that count frames.

Observed with tcpreplay 4.4.3 of Debian 12, next to what docs/zeroloss/generators.md says of its timers:

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

from netplugin_zeroloss.generators import contract
from netplugin_zeroloss.generators.frames import FCS_BYTES, Frames, frames_of, sizes, write_pcap
from netplugin_zeroloss.generators.owned_program import OwnedProgram
from netplugin_zeroloss.generators.wire import MARKER_BYTES, Wire
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


class InterfacePath(contract.GeneratorDescription):
    """Interface names: frames leave one interface and return at the other."""

    send: _Name
    receive: _Name
    frames: Frames = Frames()


class Tcpreplay(contract.GeneratorDescription):
    """One tcpreplay process per direction, and exact counters at the receivers."""

    type: Literal["tcpreplay"] = "tcpreplay"
    paths: Annotated[tuple[InterfacePath, ...], Field(min_length=1), AfterValidator(contract.each_once)]
    #: Name or path of the network namespace of the interfaces; None: that of this process.
    netns: str | None = None
    #: Upper limit of the load in pps, all paths together.
    max_pps: contract.Positive | None = None
    #: Run with real-time priority; without it tcpreplay sends in bursts.
    realtime: bool = True
    #: Trials with larger bursts are invalid; in frames. Half of a ring of 1,024 descriptors: loss in a larger
    #: burst is not the device's fault.
    most_burst: Annotated[int, Field(ge=1)] = 512
    in_flight: contract.Count = contract.IN_FLIGHT


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
        seconds = _number(r"sent in N seconds", text)
        rate = _number(r"Rated:.*, N pps", text)
        actual = _number(r"Actual: N packets", text)
        clocks = [(seconds, 1e-6 if seconds < 1 else 0.01)]
        if rate > 0:
            clocks.append((actual / rate, 0.01 / rate * actual / rate))
        sent, failed = (round(_number(rf"{what} packets:\s+N", text)) for what in ("Successful", "Failed"))
        retried = sum(map(int, re.findall(r"Retried packets \(\w+\):\s+(\d{1,18})", text)))
        return Played(sent, failed, retried, *min(clocks, key=lambda clock: clock[1]))


def _number(pattern: str, text: str) -> float:
    """Return what the pattern has at its N. Raises: GeneratorError."""
    match = re.search(pattern.replace("N", r"(\d{1,18}(?:\.\d{1,18})?)"), text)
    if match is None:
        raise GeneratorError(f"{_PROGRAM} did not say what it sent: {text.strip()[-500:]}")
    return float(match[1])


def _summary(player: OwnedProgram) -> Played:
    """Wait for the end of tcpreplay, and return its summary. Raises: GeneratorError."""
    if not player.wait(2 * _STOP_S):
        raise GeneratorError(f"{_PROGRAM} does not end when it is interrupted")
    text = player.output.strip()[-500:]
    if player.status and text.startswith(_HURRIED[0]):
        what = f"{_PROGRAM} may have no real-time priority, and sends in bursts without"
        raise GeneratorError(f"{what}: run as root (CAP_SYS_NICE), or say --no-realtime ({text})")
    if player.status:
        raise GeneratorError(f"{_PROGRAM} ended with status {player.status}: {text}")
    return Played.parse(player.output)


class TcpreplayGenerator(contract.Generator):
    """Runs one tcpreplay process per direction, on interfaces that it takes until ``close``."""

    def __init__(self, description: Tcpreplay) -> None:
        """Raises: UnusableInput, before anything is sent."""
        if shutil.which(_PROGRAM) is None:
            raise UnusableInput(_PROGRAM, f"it is not installed: try `apt-get install {_PROGRAM}`")
        self._in_flight, self._most_burst = description.in_flight, description.most_burst
        most = description.max_pps or math.inf
        self._info = contract.GeneratorInfo(_PROGRAM, most, min_trial_s=_MIN_TRIAL_S)
        hurried = _HURRIED if description.realtime else ()
        with ExitStack() as opened:
            files = opened.enter_context(tempfile.TemporaryDirectory(prefix="zeroloss-"))
            self._wire = wire = opened.enter_context(closing(Wire(description.netns)))
            self._legs = [
                _Leg(wire, path, number, os.path.join(files, f"{number}.pcap"), hurried)
                for number, path in enumerate(description.paths)
            ]
            for end in dict.fromkeys(end for leg in self._legs for end in (leg.send, leg.receive)):
                wire.take(end)
            self._opened = opened.pop_all()

    def run(self, request: TrialRequest) -> Measurement:
        legs = self._legs
        share = replace(request, rate_pps=request.rate_pps / len(legs))
        watch = contract.TrialWatch(request, len(legs), self._in_flight, _LATE_S)
        with ExitStack() as trial:
            for leg in legs:
                leg.prepare(share, trial)
            ears = list(dict.fromkeys(leg.receive for leg in legs))
            dropped = sum(map(self._wire.dropped, ears))
            for leg in legs:
                leg.start(trial)
            _send(legs, watch)
            played = [_summary(leg.player) for leg in legs]
            directions, settled = contract.at_rest(
                lambda: [leg.counted(run.sent) for leg, run in zip(legs, played, strict=True)],
                contract.all_came,
            )
            rx_errors = sum(map(self._wire.dropped, ears)) - dropped
        # Frames that tcpreplay sent but the driver did not get, or refused.
        queue_drops = sum(
            max(0, run.sent - one.tx_packets - leg.doubt) + run.failed
            for run, one, leg in zip(played, directions, legs, strict=True)
        )
        bursts = [leg.pace.burst_packets for leg in legs]
        measured = contract.counted(
            directions,
            # Includes the interval after the last frame.
            max(run.elapsed_s for run in played) + len(legs) / request.rate_pps,
            rx_errors,
            queue_drops,
            queue_full=sum(run.retried for run in played) + sum(one > self._most_burst for one in bursts),
            elapsed_uncertainty_s=max(run.uncertainty_s for run in played),
            settled=settled,
            readings={"generator.burst_packets": max(bursts)},
        )
        measured = watch.finish(measured)
        self._in_flight = watch.in_flight
        return measured


class _Leg:
    """One direction: the transmitting and the receiving interface, and one trial after the other."""

    #: Of the trial that runs.
    player: OwnedProgram
    pace: contract.PaceWatch
    #: Uncertainty of tcpreplay's count: the frame during which it was stopped.
    doubt: int

    def __init__(
        self, wire: Wire, path: InterfacePath, number: int, pcap: str, hurried: Sequence[str]
    ) -> None:
        self._wire, self._pcap, self._hurried = wire, pcap, hurried
        self.send, self.receive = wire.interface(path.send), wire.interface(path.receive)
        macs = {"source_mac": self.send.address, "destination_mac": self.receive.address}
        update = {name: getattr(path.frames, name) or mac for name, mac in macs.items()}
        self._frames = path.frames.in_direction(number).model_copy(update=update)

    def prepare(self, request: TrialRequest, trial: ExitStack) -> None:
        """Write the frames and begin to count; ``request`` has this direction's share of the rate."""
        longest = max(sizes(request)) - FCS_BYTES - _ETHERNET_BYTES
        for end in (self.send, self.receive):
            if longest > end.mtu:
                why = f"the frames need an MTU of {longest}, and it has {end.mtu}"
                raise GeneratorError(f"{end.name}: {why}: try `ip link set {end.name} mtu {longest}`")
        # Unique per trial and direction, so that frames of another trial are not counted.
        marker = os.urandom(MARKER_BYTES)
        frames = write_pcap(self._pcap, frames_of(self._frames, request, marker, _MOST_FRAMES))
        packets, netns = max(1, round(request.packets)), self._wire.netns_path
        self._command = [
            *(["nsenter", f"--net={netns}"] if netns else []),
            *(*self._hurried, _PROGRAM, "--quiet", "--preload-pcap", "--timer=nano", "--no-flow-stats"),
            *(f"--pps={request.rate_pps:.2f}", f"--limit={packets}", f"--loop={math.ceil(packets / frames)}"),
            *(f"--intf1={self.send.name}", self._pcap),
        ]
        self.pace, self.doubt = contract.PaceWatch(request.rate_pps), 0
        self._sent = trial.enter_context(closing(self._wire.count(self.send, marker, outgoing=True)))
        self._came = trial.enter_context(closing(self._wire.count(self.receive, marker, outgoing=False)))

    def start(self, trial: ExitStack) -> None:
        self.player = trial.enter_context(closing(OwnedProgram(self._command, _STOP_S)))

    def look(self) -> Direction:
        """Read the counters while tcpreplay sends."""
        sent = self._sent.read()
        if self.player.status is None:
            self.pace.look(time.monotonic(), sent)
        return Direction(sent, self._came.read())

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
        return Direction(min(self._sent.read(), played + self.doubt), self._came.read())


def _send(legs: Sequence[_Leg], watch: contract.TrialWatch) -> None:
    """Wait until all frames are sent, or stop because the trial is late or loss is certain."""
    deadline = time.monotonic() + _START_S
    watch.begin()
    while running := [leg.player.ended for leg in legs if leg.player.status is None]:
        select.select(running, [], [], _LOOK_S)
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

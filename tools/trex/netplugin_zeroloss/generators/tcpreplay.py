"""One run of tcpreplay: start, stop, and the parsed summary.

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
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import IO, Final

from netplugin_zeroloss.generators.contract import (
    IN_FLIGHT,
    Generator,
    GeneratorInfo,
    InFlight,
    LossWatch,
    PaceWatch,
    ProgressWatch,
    at_rest,
)
from netplugin_zeroloss.generators.frames import FCS_BYTES, Frames, frames_of, sizes, write_pcap
from netplugin_zeroloss.generators.wire import MARKER_BYTES, Interface, Wire
from netplugin_zeroloss.values import (
    Direction,
    GeneratorError,
    Measurement,
    TrialRequest,
    UnusableInput,
)

PROGRAM = "tcpreplay"
#: Seconds tcpreplay may take to print its summary.
_STOP_S = 5.0
#: The lowest real-time priority preempts every normal task.
_PRIORITY = 1


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
        counted = _number(r"Actual: (\d+) packets", text)
        clocks = [(seconds, 1e-6 if seconds < 1 else 0.01)]
        if rate > 0:
            clocks.append((counted / rate, 0.01 / rate * counted / rate))
        elapsed_s, uncertainty_s = min(clocks, key=lambda clock: clock[1])
        return Played(
            sent=round(_number(r"Successful packets:\s+(\d+)", text)),
            failed=round(_number(r"Failed packets:\s+(\d+)", text)),
            retried=sum(map(int, re.findall(r"Retried packets \(\w+\):\s+(\d{1,18})", text))),
            elapsed_s=elapsed_s,
            uncertainty_s=uncertainty_s,
        )


class Player:
    """A running tcpreplay on one interface. The caller closes it."""

    def __init__(
        self,
        interface: str,
        pcap: str,
        rate_pps: float,
        packets: int,
        repeats: int,
        *,
        netns_path: str | None,
        realtime: bool,
    ) -> None:
        """Play ``pcap`` at most ``repeats`` times, until ``packets`` frames are sent.

        Raises: UnusableInput, GeneratorError.
        """
        arguments = [
            # SIGKILL when the parent dies, even if the parent was killed.
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            *(["nsenter", f"--net={netns_path}"] if netns_path else []),
            PROGRAM,
            "--quiet",
            "--preload-pcap",
            "--timer=nano",
            "--no-flow-stats",
            f"--pps={rate_pps:.2f}",
            f"--limit={packets}",
            f"--loop={repeats}",
            f"--intf1={interface}",
            pcap,
        ]
        self._output: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise UnusableInput(arguments[0], f"{error.strerror}: is it installed?") from error
        #: A pidfd, readable when the process has ended.
        self.ended = os.pidfd_open(self._process.pid)
        if realtime:
            self._hurry()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Send SIGINT: tcpreplay finishes the current frame and prints its summary."""
        if self.running:
            self._process.send_signal(signal.SIGINT)

    def finish(self) -> Played:
        """Return the summary; stop tcpreplay or wait for its end first. Raises: GeneratorError."""
        try:
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            raise GeneratorError(f"{PROGRAM} does not end when it is interrupted") from None
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        if status != 0:
            raise GeneratorError(f"{PROGRAM} ended with status {status}: {text.strip()[-500:]}")
        return Played.parse(text)

    def close(self) -> None:
        """Kill tcpreplay if it runs, and release its files. Idempotent."""
        if self._output.closed:
            return
        if self.running:
            self._process.kill()
        self._process.wait()
        os.close(self.ended)
        self._output.close()

    def _hurry(self) -> None:
        try:
            os.sched_setscheduler(self._process.pid, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        except ProcessLookupError:
            # Already ended: finish() reports why.
            pass
        except PermissionError as error:
            self.close()
            raise GeneratorError(
                f"{PROGRAM} may have no real-time priority, and sends in bursts without: run as root"
                " (CAP_SYS_NICE), or say --no-realtime"
            ) from error


def wait_for_an_end(players: Sequence[Player], seconds: float) -> bool:
    """Wait until a player ends or the time is over. Returns whether any player still runs."""
    running = [player for player in players if player.running]
    if running:
        select.select([player.ended for player in running], [], [], seconds)
    return any(player.running for player in running)


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    if match is None:
        raise GeneratorError(f"{PROGRAM} did not say what it sent: {text.strip()[-500:]}")
    try:
        return float(match[1])
    except ValueError as error:
        raise GeneratorError(f"{PROGRAM} printed {match[1]!r:.40} in place of a number") from error


# -- The generator ``tcpreplay``: tcpreplay sends at a fixed rate, packet sockets count received frames.
# For machines without TRex, at rates up to some 100,000 frames per second.


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
        self,
        paths: Sequence[tuple[str, str, Frames]],
        netns: str | None = None,
        max_pps: float = math.inf,
        *,
        realtime: bool = True,
        most_burst: int = MOST_BURST,
        in_flight: int = IN_FLIGHT,
    ) -> None:
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
            progress = ProgressWatch(request)
            aborted = self._send(legs, request, progress)
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
        sent, received = (sum(d.tx_packets for d in directions), sum(d.rx_packets for d in directions))
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
            progress=progress.readings,
            evidence={"generator.rx": rx_errors, "generator.queue": queue_drops},
            readings={"generator.burst_packets": max(bursts)},
        )

    def close(self) -> None:
        self._wire.close()
        self._files.cleanup()

    def _send(self, legs: Sequence[_Leg], request: TrialRequest, progress: ProgressWatch) -> bool:
        """Wait until all frames are sent or the trial is late; True: stopped because of certain loss."""
        started = time.monotonic()
        late = started + request.duration_s * (1 + _LATE_PART) + _LATE_S
        while wait_for_an_end([leg.player for leg in legs], _LOOK_S):
            now = time.monotonic()
            lost = sum(leg.look() for leg in legs) > 0
            progress.look(now, sum(leg.seen[0] for leg in legs), sum(leg.seen[1] for leg in legs))
            if not all(leg.has_sent for leg in legs):
                # Not stopped before it sends: it prints no summary if it is interrupted while it starts.
                late = now + request.duration_s * (1 + _LATE_PART) + _LATE_S
                if now > started + _START_S:
                    raise GeneratorError(f"{PROGRAM} sent nothing within {_START_S:g} s")
            elif now > late or (lost and request.abort_on_loss):
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
        self,
        wire: Wire,
        way: _Way,
        request: TrialRequest,
        rate_pps: float,
        pcap: str,
        in_flight: int,
        realtime: bool,
    ) -> None:
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
        #: Frames sent and received at the last look.
        self.seen = (0, 0)
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
            self._way.send.name,
            self._pcap,
            self._rate_pps,
            self._packets,
            math.ceil(self._packets / self._frames),
            netns_path=self._wire.netns_path,
            realtime=self._realtime,
        )
        self._opened.callback(self.player.close)

    def look(self) -> bool:
        """Poll the counters; returns whether a frame is certainly lost."""
        sent = self.sent.read()
        now = time.monotonic()
        self.has_sent = sent > 0
        if self.player.running:
            self.pace.look(now, sent)
        self.seen = sent, self.received.read()
        return self._loss.sees_loss(now, *self.seen)

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

"""One run of tcpreplay: start, stop, and the parsed summary.

Observed with tcpreplay 4.4.3 of Debian 12:

- The default timer busy-waits. When other tasks need its CPU, the scheduler preempts it for
  milliseconds, and it catches up with one burst of hundreds of frames. ``--timer=nano`` sleeps between
  frames; with real-time priority it wakes up in time, with bursts of 10 to 50 frames.
- From 1 s on, seconds are printed with a resolution of 0.01 s; the printed rate is more exact.
- After SIGINT, ``Actual`` includes a frame that was not sent. ``Successful`` is correct.
- After SIGTERM it prints no summary.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from netplugin.acceptance.errors import GeneratorError, UnusableInput

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
            retried=sum(map(int, re.findall(r"Retried packets \(\w+\):\s+(\d+)", text))),
            elapsed_s=elapsed_s,
            uncertainty_s=uncertainty_s,
        )


class Player:
    """A running tcpreplay on one interface. The caller closes it."""

    def __init__(
        self, interface: str, pcap: str, rate_pps: float, packets: int, repeats: int, *,
        netns_path: str | None, realtime: bool,
    ) -> None:  # fmt: skip
        """Play ``pcap`` at most ``repeats`` times, until ``packets`` frames are sent.

        Raises: UnusableInput, GeneratorError.
        """
        arguments = [
            # SIGKILL when the parent dies, even if the parent was killed.
            "setpriv", "--pdeathsig", "KILL", "--",
            *(["nsenter", f"--net={netns_path}"] if netns_path else []),
            PROGRAM, "--quiet", "--preload-pcap", "--timer=nano", "--no-flow-stats",
            f"--pps={rate_pps:.2f}", f"--limit={packets}", f"--loop={repeats}",
            f"--intf1={interface}", pcap,
        ]  # fmt: skip
        self._said: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._said.close()
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
        self._said.seek(0)
        text = self._said.read().decode(errors="replace")
        if status != 0:
            raise GeneratorError(f"{PROGRAM} ended with status {status}: {text.strip()[-500:]}")
        return Played.parse(text)

    def close(self) -> None:
        """Kill tcpreplay if it runs, and release its files. Idempotent."""
        if self._said.closed:
            return
        if self.running:
            self._process.kill()
        self._process.wait()
        os.close(self.ended)
        self._said.close()

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
    return float(match[1])

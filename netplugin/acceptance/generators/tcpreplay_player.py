"""One run of tcpreplay: how it is started, how it is stopped, and what it says at the end.

Traps, each seen with tcpreplay 4.4.3 of Debian 12:

- Its default timer turns in a loop. As soon as others want its core the scheduler takes it away for
  milliseconds, and it makes up for them in one burst of hundreds of frames. With ``--timer=nano`` it
  sleeps between frames, and with a real-time priority it is back in time: bursts of 10 to 50 frames.
- Seconds are printed to 0.01 from 1 s on; the rate beside them says them more exactly.
- Interrupted, it counts in ``Actual`` the frame that it did not send any more. ``Successful`` is right.
- After SIGTERM it says nothing.
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
#: How long it may take to print its last lines.
_STOP_S = 5.0
#: The lowest real-time priority is above everything that has none.
_PRIORITY = 1


@dataclass(frozen=True, slots=True)
class Played:
    """What tcpreplay says of a run. ``elapsed_s`` is from the first frame to the last."""

    sent: int
    failed: int
    retried: int
    elapsed_s: float
    uncertainty_s: float

    @staticmethod
    def parse(text: str) -> Played:
        """Raises: GeneratorError."""
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
    """tcpreplay at work on one interface. Close it."""

    def __init__(
        self, interface: str, pcap: str, rate_pps: float, packets: int, repeats: int, *,
        netns_path: str | None, realtime: bool,
    ) -> None:  # fmt: skip
        """Play ``pcap`` up to ``repeats`` times, until ``packets`` were sent.

        Raises: UnusableInput, GeneratorError.
        """
        arguments = [
            # It dies with us, even of a SIGKILL.
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
        #: Readable when it has ended.
        self.ended = os.pidfd_open(self._process.pid)
        if realtime:
            self._hurry()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """As Ctrl-C does: it ends with the frame it has, and still says what it did."""
        if self.running:
            self._process.send_signal(signal.SIGINT)

    def finish(self) -> Played:
        """What it did. Stop it first, or wait until it has ended. Raises: GeneratorError."""
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
        """End it; may be called twice."""
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
            # It has ended already: finish() tells why.
            pass
        except PermissionError as error:
            self.close()
            raise GeneratorError(
                f"{PROGRAM} may have no real-time priority, and sends in bursts without: run as root"
                " (CAP_SYS_NICE), or say --no-realtime"
            ) from error


def wait_for_an_end(players: Sequence[Player], seconds: float) -> bool:
    """Until one of those that run ends, or so long. Whether any runs still."""
    running = [player for player in players if player.running]
    if running:
        select.select([player.ended for player in running], [], [], seconds)
    return any(player.running for player in running)


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    if match is None:
        raise GeneratorError(f"{PROGRAM} did not say what it sent: {text.strip()[-500:]}")
    return float(match[1])

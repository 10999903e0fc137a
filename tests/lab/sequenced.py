"""Numbered datagrams both ways between a guest and its peer, and a TCP stream: what was lost, and when."""

from __future__ import annotations

import functools
import json
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.guest import Guest
from tests.lab.processes import PATIENCE, Argument, LabError, LabTimeout, Running, run, wait_for

RATE = 1000
"""Datagrams a second, each way."""
PORT = 7000
PROGRAM = "sequenced"
SOURCE = Path(__file__).with_name(f"{PROGRAM}.c")
DEADLINE_S = 20.0
# Reads of the counts, 50 ms apart, that find nothing new.
_AT_REST = 20


@functools.cache
def program() -> bytes:
    """The program of both, which needs no libraries where it runs."""
    with tempfile.TemporaryDirectory(dir="/run") as directory:
        made = Path(directory) / PROGRAM
        run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-o", made, SOURCE])
        return made.read_bytes()


@dataclass(frozen=True)
class Counts:
    """What one of the two has sent and received by now."""

    sent: int
    received: int
    """Each of the other's datagrams once."""
    twice: int
    highest: int
    """The number of the last one that was received; numbers begin with 0."""
    other_received: int
    """What the other had received when it sent that."""
    silence_ms: float
    """The longest time between two arrivals, by the clock of this side."""
    unheard_ms: float
    """The longest time in which the other sent nothing that arrived, by its clock."""
    stream_sent: int
    stream_back: int
    stream_wrong: int
    stream_broken: bool
    missing: list[list[int]]
    """The numbers that did not arrive of those up to the highest: the first and the last of each run."""


@dataclass(frozen=True)
class Exchange:
    """What both have counted in the end."""

    guest: Counts
    peer: Counts

    @property
    def lost_to_guest(self) -> int:
        return self.peer.sent - self.guest.received

    @property
    def lost_from_guest(self) -> int:
        return self.guest.sent - self.peer.received

    def stream_survived(self) -> bool:
        """Whether all that the guest wrote to its TCP stream came back, in order."""
        guest = self.guest
        broken = guest.stream_broken or self.peer.stream_broken or guest.stream_wrong > 0
        return not broken and guest.stream_back == guest.stream_sent > 0


class Peer(Running):
    """The program outside of the guest; its counts may be read as it runs."""

    def __init__(self, directory: Path, where: Sequence[Argument], own: str, other: str) -> None:
        """``where`` is a command that starts one in the namespace of the address ``own``."""
        self._program = directory / PROGRAM
        words = [*where, "setpriv", "--pdeathsig", "KILL", "--", self._program]
        self._words = [str(word) for word in [*words, "listen", own, other, PORT, RATE]]
        self._started: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._program.write_bytes(program())
        self._program.chmod(0o755)
        self._started = subprocess.Popen(
            self._words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
        )
        self._expect("listening")

    def stop(self) -> None:
        if self._started is not None:
            self._started.kill()
            self._started.communicate()
            self._started = None

    def wait_connected(self) -> None:
        """Wait until the guest's stream is there; from then on it sends."""
        self._expect("connected")

    def counts(self) -> Counts:
        self._process.send_signal(signal.SIGUSR2)
        return Counts(**json.loads(self._line()))

    def be_quiet(self) -> None:
        """Send nothing more; what arrives is counted."""
        self._process.send_signal(signal.SIGUSR1)

    def wait_received(self, more: int = RATE // 2, deadline_s: float = DEADLINE_S) -> None:
        """Wait until so many more datagrams have passed each way."""
        before = self.counts()

        def passed() -> bool:
            now = self.counts()
            return min(now.received - before.received, now.other_received - before.other_received) >= more

        wait_for(passed, deadline_s, "guest and peer hear each other", lambda: f"{before}\n{self.counts()}")

    def settle(self, guest: Guest) -> Exchange:
        """End sending at both, wait until nothing is on its way, and end the guest's program."""
        guest.check("kill -USR1 $(cat /tmp/pid)")
        self.be_quiet()
        read: list[Counts] = []

        def at_rest() -> bool:
            read.append(self.counts())
            return len(read) > _AT_REST and read[-1] == read[-_AT_REST]

        wait_for(at_rest, DEADLINE_S, "nothing is on its way any more")
        guest.check("kill -TERM $(cat /tmp/pid)")
        guest.check("while kill -0 $(cat /tmp/pid) 2>/dev/null; do sleep 0.1; done")
        return Exchange(Counts(**json.loads(guest.check("tail -n 1 /tmp/counts"))), read[-1])

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        if self._started is None:
            raise LabError("the peer was not started")
        return self._started

    def _expect(self, word: str) -> None:
        printed = self._line()
        if printed != word:
            raise LabError(f"the peer says {printed!r}, not {word!r}")

    def _line(self) -> str:
        out = self._process.stdout
        if out is None or not select.select([out], [], [], DEADLINE_S * PATIENCE)[0]:
            raise LabTimeout("the peer says nothing")
        return out.readline().decode().strip()


def start_in(guest: Guest, own: str, other: str) -> None:
    """Start the guest's program (its ``programs`` must have it), which connects to a peer that listens."""
    guest.check(f"{PROGRAM} connect {own} {other} {PORT} {RATE} >/tmp/counts 2>&1 & echo $! >/tmp/pid")

"""Start, stop, pause and kill processes, and wait for a condition with a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self, TypeVar

T = TypeVar("T")
Argument = str | Path

POLL_INTERVAL_S = 0.05
PATIENCE = 3.0
"""Deadlines in the tests are meant for two idle cores: every wait lasts so much longer, for a machine
that is slower or has other work."""


class LabError(RuntimeError):
    """Something in the lab did not do what a test needs."""


class LabTimeout(LabError):
    """A wait ran into its deadline."""


class CommandError(LabError):
    """A command failed; holds its output."""

    def __init__(self, args: Sequence[str], status: int, stdout: str, stderr: str) -> None:
        self.command = tuple(args)
        self.status = status
        self.stdout = stdout
        self.stderr = stderr
        printed = stderr.strip() or stdout.strip() or "nothing on stderr"
        super().__init__(f"{' '.join(args)}: exit status {status}: {printed}")


def wait_for(
    condition: Callable[[], T],
    deadline_s: float,
    what: str,
    tail: Callable[[], str] | None = None,
) -> T:
    """Poll `condition` until it is true and return its value; the one place that polls."""
    deadline_s *= PATIENCE
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            printed = f"\n{tail()}" if tail is not None else ""
            raise LabTimeout(f"{what}: not within {deadline_s:g} s{printed}")
        time.sleep(POLL_INTERVAL_S)


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has stopped. It goes on until one of its threads, which may have to wait for
    a CPU, takes the signal (signal(7)), and then stops the others."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(state in "Tt" for state in _states(pid)), 30, f"process {pid} stops")


def _states(pid: int) -> list[str]:
    """Of each thread that has not ended, as proc(5) has it: ``T`` is stopped, ``t`` is so by a debugger."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            found += [state] if state not in "ZX" else []
    return found


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has had: of one that polls, how long it has polled, whatever else runs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def opened_files(pid: int) -> list[str]:
    """What a process has open now, by path; what it closes meanwhile is left out."""
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(os.readlink(link))
    return names


def run(
    args: Sequence[Argument],
    timeout: float = 30.0,
    *,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command to its end and return its stdout; a failure carries its stderr."""
    words = [str(arg) for arg in args]
    timeout *= PATIENCE
    try:
        done = subprocess.run(
            words,
            env=None if env is None else {**os.environ, **env},
            cwd=cwd,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else ""
        raise LabTimeout(f"{' '.join(words)}: not done within {timeout:g} s\n{printed}") from late
    if done.returncode != 0:
        raise CommandError(words, done.returncode, done.stdout, done.stderr)
    return done.stdout


def tail_of(path: Path, lines: int = 30) -> str:
    """The last lines of a log, under a title."""
    if not path.exists():
        return f"--- {path}: no such log"
    with path.open(errors="replace") as log:
        last = deque(log, maxlen=lines)
    return f"--- last lines of {path}\n{''.join(last)}"


class Process(Protocol):
    """What a daemon uses of ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Running(ABC):
    """What runs as long as its context: stopped at the end, and after a start that fails half-way."""

    def begin(self) -> None:
        """Start all of it, as the context is entered."""
        self.start()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Daemon(Running):
    """One process in the foreground of a session of its own, with a log file.

    It is started through `setpriv --pdeathsig`, so it dies with the thread that started it:
    start daemons from a thread that lives as long as they should (pytest's main thread).
    """

    def __init__(
        self,
        name: str,
        args: Sequence[Argument],
        log: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.args = tuple(str(arg) for arg in args)
        self.log = log
        self._env = dict(env or {})
        self._pass_fds = tuple(pass_fds)
        self._process: Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LabError(f"{self.name} was not started")
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, None while it runs, negative for a signal (as in subprocess)."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        if self.running:
            raise LabError(f"{self.name} runs already (pid {self.pid})")
        with self.log.open("ab") as log:
            self._process = self._spawned(log.fileno(), {**os.environ, **self._env})

    def _spawned(self, log: int, env: Mapping[str, str]) -> Process:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *self.args],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=self._pass_fds,
            start_new_session=True,
        )

    def stop(self, deadline_s: float = 10.0) -> None:
        """Ask it to end, then insist; also ends what it left in its process group."""
        if self._process is None:
            return
        if self.running:
            # A paused process would never see the TERM.
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(deadline_s * PATIENCE)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """End it and its process group with SIGKILL, as a crash would."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._process = None

    def pause(self) -> None:
        """Returns when it has stopped."""
        self._require_running()
        stop(self.pid)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def tail(self, lines: int = 30) -> str:
        return tail_of(self.log, lines)

    def wait_for(self, condition: Callable[[], T], deadline_s: float, what: str) -> T:
        """`wait_for` that gives up at once when the daemon ends, and shows its log."""

        def alive_and_true() -> T:
            if not self.running:
                raise LabError(f"{what}: {self.name} ended ({self.status})\n{self.tail()}")
            return condition()

        return wait_for(alive_and_true, deadline_s, what, self.tail)

    def _signal(self, number: signal.Signals) -> None:
        self._require_running()
        os.kill(self.pid, number)

    def _require_running(self) -> None:
        if not self.running:
            raise LabError(f"{self.name} does not run\n{self.tail()}")

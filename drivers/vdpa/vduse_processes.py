"""Processes that change vDPA devices and that may never end: none is waited for beyond a bounded time.

Such a process waits in the kernel, holds a lock of the whole vDPA bus, and SIGKILL does not end it. It is
left alone when it is late. Until it has ended no other is started, also not after a restart of the agent,
which finds it by its arguments.
"""

from __future__ import annotations

import logging
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from drivers.vdpa import vduse_step
from netplugin.api.errors import Conflict, HostError, TryAgain
from netplugin.host.names import VDUSE

LOG = logging.getLogger(__name__)
STEP = "vdpa-device"
#: How long a step is waited for, in seconds. It takes less than a tenth of one, unless vswitchd is dead: then
#: the kernel waits for the ``msg_timeout`` of the device (30 s), or somebody else has the lock of the bus.
WAIT_S = 3.0
#: The arguments of a step: of the program of this package, or of ``vdpa`` of iproute2 which it starts.
_ARGUMENTS = re.compile(
    rf"(?:(?:\S*/)?vdpa dev (del|add name)|.*/vduse_step\.py (\S+)) ({VDUSE}\S*)(?: (\S+))?.*", re.DOTALL
)
_VERBS = {"del": "delete", "add name": "create"}


@dataclass(frozen=True)
class DeviceStep:
    """A step on the device of this name: ``verb`` as ``vduse_step`` has it."""

    verb: str
    name: str
    driver: str = ""

    @property
    def command(self) -> list[str]:
        words = [self.verb, self.name, *([self.driver] if self.driver else [])]
        return [sys.executable, "-I", "-S", str(vduse_step.__file__), *words]

    def __str__(self) -> str:
        kind = "VDUSE" if self.verb == "destroy" else "vDPA"
        return f"{self.verb} {f'{self.driver} to ' if self.driver else ''}{kind} device {self.name}"


@dataclass
class _Running:
    """A process that was left alone. ``ended`` becomes readable when it has ended."""

    step: DeviceStep
    pid: int
    ended: int
    process: subprocess.Popen[bytes] | None = None


@dataclass
class DeviceProcesses:
    """Not thread-safe. ``command`` makes the argument list of a step: a test has its own."""

    wait_s: float = WAIT_S
    proc: Path = Path("/proc")
    command: Callable[[DeviceStep], Sequence[str]] = lambda step: step.command
    _left: list[_Running] = field(default_factory=list)
    _has_searched: bool = False

    def run(self, step: DeviceStep, deadline: float) -> str:
        """Start a process for the step, wait for its end, at most ``wait_s``, and return what it has printed.

        Raises: Conflict if another process has the device open; HostError with the words of the kernel;
        TryAgain if it did not end in time, or one before it has not ended.
        """
        if (before := self.pending()) is not None:
            raise waits(before)
        with tempfile.TemporaryFile() as words:
            running = self._start(step, words)
            until = min(deadline, time.monotonic() + self.wait_s)
            if not _has_ended(running, max(0.0, until - time.monotonic())):
                LOG.warning("process %d is left alone: %s does not end", running.pid, step)
                self._left.append(running)
                raise waits(step)
            assert running.process is not None
            status = running.process.wait()
            os.close(running.ended)
            words.seek(0)
            text = words.read().decode(errors="replace").strip()
        if status == vduse_step.HELD:
            raise Conflict(
                f"{step}: {text}",
                step=STEP,
                fix="stop the VM or the program that uses it; then the agent tries again by itself",
            )
        if status:
            raise HostError(f"{step}: {text or f'exit status {status}'}", step=STEP)
        return text

    def pending(self) -> DeviceStep | None:
        """The step whose process has not ended; None if there is none."""
        if not self._has_searched:
            self._left += self._of_before()
            self._has_searched = True
        going: list[_Running] = []
        for running in self._left:
            if not _has_ended(running, 0):
                going.append(running)
                continue
            os.close(running.ended)
            if running.process is not None:
                running.process.wait()
            LOG.info("process %d has ended: %s", running.pid, running.step)
        self._left = going
        return going[0].step if going else None

    def close(self) -> None:
        """Forget the processes; those that have not ended go on."""
        for running in self._left:
            os.close(running.ended)
            if running.process is not None:
                running.process.returncode = 0  # nobody waits for it: it is init's when this process ends
        self._left = []

    def _start(self, step: DeviceStep, words: IO[bytes]) -> _Running:
        try:
            process = subprocess.Popen(
                list(self.command(step)),
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,  # a signal to the group of the agent is not for it
            )
        except OSError as failed:
            raise HostError(f"{step}: no process could be started: {failed.strerror}", step=STEP) from failed
        return _Running(step, process.pid, os.pidfd_open(process.pid), process)

    def _of_before(self) -> list[_Running]:
        """The processes that an agent before this one has left."""
        found = []
        for entry in self.proc.iterdir() if self.proc.exists() else ():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            if (step := _step_of(entry / "cmdline")) is None:
                continue
            try:
                ended = os.pidfd_open(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
            LOG.warning("process %s of before is not at its end: %s", entry.name, step)
            found.append(_Running(step, int(entry.name), ended))
        return found


def waits(step: DeviceStep) -> TryAgain:
    """The error of who must wait until a step has ended."""
    return TryAgain(
        f"the kernel has not finished: {step}",
        step=STEP,
        fix="if it lasts: start ovs-vswitchd, or end the process that has a vDPA device open",
    )


def _has_ended(running: _Running, seconds: float) -> bool:
    ends = select.poll()  # ``select`` takes no descriptor above 1023
    ends.register(running.ended, select.POLLIN)
    return bool(ends.poll(seconds * 1e3))


def _step_of(cmdline: Path) -> DeviceStep | None:
    """The step that a process was started for; None if it is another program, or has ended."""
    try:
        arguments = cmdline.read_bytes().decode(errors="replace").rstrip("\0").replace("\0", " ")
    except OSError:
        return None
    if (found := _ARGUMENTS.fullmatch(arguments)) is None:
        return None
    command, verb, name, driver = found.groups()
    return DeviceStep(verb, name, driver or "") if verb else DeviceStep(_VERBS[command], name)

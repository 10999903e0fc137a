"""Follows a process from step to step, notes them, and makes one of them go wrong."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.lab.namespaces import entered
from tests.lab.processes import wait_for
from tests.lab.steps.faults import Fault, netlink_refusal, number_of, refused
from tests.lab.steps.filter import LISTENER
from tests.lab.steps.naming import Kind, Step, step_of
from tests.lab.steps.stopped import Gone, Stopped, take

_ATTACH_S = 30.0
#: How long a thread may need from the end of one call to its next, in seconds.
_AFTER_S = 0.1
_SENDS = ("sendto", "sendmsg", "write", "writev")
_NETLINKS = (Kind.NETLINK, Kind.NETFILTER)


@dataclass
class _Held:
    """A connection whose peer hears nothing until ``until`` (monotonic; None: never again)."""

    until: float | None
    end: socket.socket | None
    data: list[bytes] = field(default_factory=list)


class StepWatch:
    """Attach it to each process in turn; between ``arm`` and ``arm`` it counts the steps by their names."""

    def __init__(self, own_port: int, netns: str | None = None, late_s: float = 6.0) -> None:
        """``late_s``: how late a step lands, or how long a call takes that hangs, in seconds."""
        self._own_port, self._netns, self.late_s = own_port, netns, late_s
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._seen: Counter[str] = Counter()
        self._trace: list[tuple[Step, int]] = []
        self._fired = threading.Event()
        self._held: dict[str, _Held] = {}
        self._delayed: list[tuple[float, Stopped]] = []
        self._doomed: tuple[int, int, float] | None = None
        self._thread: threading.Thread | None = None
        self.pid = 0
        self._last = time.monotonic()

    def attach(self, pid: int) -> None:
        """Follow a process that has installed the filter, or is about to."""
        if self._thread is not None:
            self._thread.join(_ATTACH_S)
        self.pid = pid
        self._held.clear()
        self._delayed.clear()
        self._doomed = None
        process = os.pidfd_open(pid)
        try:
            listener = wait_for(lambda: _listener(process), _ATTACH_S, "the process has its filter")
        finally:
            os.close(process)
        self._thread = threading.Thread(target=self._follow, args=(listener,), daemon=True)
        self._thread.start()

    def arm(self, fault: Fault | None = None) -> None:
        """Count from here on; ``fault`` happens once."""
        with self._lock:
            self._fault = fault
            self._seen.clear()
            self._trace = []
            self._fired.clear()

    def steps(self) -> list[tuple[Step, int]]:
        """The steps since ``arm``, each with its number among those of its name."""
        with self._lock:
            return list(self._trace)

    @property
    def fired(self) -> bool:
        return self._fired.is_set()

    @property
    def idle_s(self) -> float:
        """Seconds since the last step."""
        return time.monotonic() - self._last

    @property
    def delayed(self) -> bool:
        """Whether a step has still to land late."""
        return bool(self._delayed) or any(held.until is not None for held in list(self._held.values()))

    # -- the thread ------------------------------------------------------------------------------

    def _follow(self, listener: int) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        ended = False
        try:
            while True:
                ready = poll.poll(self._pause_ms())
                self._due()
                if ready and ready[0][1] & select.POLLIN:
                    with contextlib.suppress(Gone):
                        self._stopped(Stopped.next_of(listener))
                elif ready:  # the last process with this filter has ended; what it sent is still under way
                    self._delayed.clear()
                    poll.unregister(listener)
                    ended = True
                if ended and not self.delayed:
                    return
        finally:
            os.close(listener)
            for held in self._held.values():
                if held.end is not None:
                    held.end.close()

    def _pause_ms(self) -> float | None:
        due = [at for at, _ in self._delayed]
        due += [held.until for held in self._held.values() if held.until is not None]
        if self._doomed is not None:
            due.append(self._doomed[2])
        return max(0.0, min(due) - time.monotonic()) * 1000 + 1 if due else None

    def _due(self) -> None:
        now = time.monotonic()
        if self._doomed is not None and now >= self._doomed[2]:
            _kill(self._doomed[1])
            self._doomed = None
        for entry in [entry for entry in self._delayed if entry[0] <= now]:
            self._delayed.remove(entry)
            entry[1].go_on()
        for link in [link for link, held in self._held.items() if held.until and held.until <= now]:
            held = self._held.pop(link)
            assert held.end is not None
            with held.end, contextlib.suppress(OSError):
                held.end.setblocking(True)
                held.end.settimeout(5)
                for data in held.data:
                    held.end.sendall(data)

    def _stopped(self, stopped: Stopped) -> None:
        if self._doomed is not None and stopped.tid == self._doomed[0]:
            _kill(self._doomed[1])
            return
        link = stopped.link(stopped.args[0]) if stopped.call in _SENDS else ""
        if held := self._held.get(link):
            data = stopped.data()
            held.data.append(data)
            stopped.returns(len(data))
            return
        step = step_of(stopped, self._own_port)
        if step is None:
            stopped.go_on()
            return
        self._last = time.monotonic()
        with self._lock:
            self._seen[step.name] += 1
            nth = self._seen[step.name]
            self._trace.append((step, nth))
            fault = self._fault
            if fault is not None and (fault.step, fault.nth) == (step.name, nth):
                self._fault = None
                self._fired.set()
            else:
                fault = None
        if fault is None:
            stopped.go_on()
        else:
            self._happens(stopped, step, fault.what)

    def _happens(self, stopped: Stopped, step: Step, what: str) -> None:
        if what == "kill before":
            _kill(stopped.pid)
        elif what == "kill in half":
            data = step.data or b""
            _carry_out(stopped, data[: len(data) // 2])
            _kill(stopped.pid)
        elif what == "kill after":
            if step.data is not None:
                _carry_out(stopped, step.data)
                _kill(stopped.pid)
            else:
                self._doomed = (stopped.tid, stopped.pid, time.monotonic() + _AFTER_S)
                stopped.go_on()
        elif what.startswith("error"):
            stopped.fails(number_of(what))
        elif what == "connection lost":
            with stopped.taken() as end:
                end.shutdown(socket.SHUT_RDWR)
            stopped.go_on()
        elif what == "hang":
            self._swallow(stopped, step, None)
        elif what == "late":
            self._late(stopped, step)
        elif step.kind in _NETLINKS:
            self._refuse(stopped, step, number_of(what))
        else:
            # The caller is told that all was sent: the rest of the exchange is the peer's.
            _carry_out(stopped, refused(step, what.removeprefix("refused ")))
            stopped.returns(len(step.data or b""))

    def _late(self, stopped: Stopped, step: Step) -> None:
        until = time.monotonic() + self.late_s
        if step.data is None or step.kind in (*_NETLINKS, Kind.DATA, Kind.KERNEL_FILE):
            self._delayed.append((until, stopped))  # the kernel itself takes so long
        else:
            self._swallow(stopped, step, until)

    def _swallow(self, stopped: Stopped, step: Step, until: float | None) -> None:
        data = step.data or b""
        if step.kind not in _NETLINKS:
            end = stopped.socket() if until is not None else None
            self._held[stopped.link(stopped.args[0])] = _Held(until, end, [data])
        stopped.returns(len(data))

    def _refuse(self, stopped: Stopped, step: Step, number: int) -> None:
        """Tell the caller what the kernel would, which has not had the request."""
        with stopped.taken() as end:
            protocol = end.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
            address = end.getsockname()[0]
        with entered(self._netns):
            speaker = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        with speaker:
            speaker.sendto(netlink_refusal(step, number), (address, 0))
        stopped.returns(len(step.data or b""))


def _carry_out(stopped: Stopped, data: bytes) -> None:
    """Do what the call is for, here, while it is stopped."""
    if stopped.call in ("write", "writev", "pwrite64"):
        with stopped.descriptor() as file, contextlib.suppress(OSError):
            if stopped.call == "pwrite64":
                os.pwrite(file, data, stopped.args[3])
            else:
                os.write(file, data)
        return
    with stopped.taken() as end, contextlib.suppress(OSError):
        end.send(data)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _listener(process: int) -> int | None:
    """The listener of the process; None while it has none."""
    try:
        return take(process, LISTENER)
    except OSError:
        return None

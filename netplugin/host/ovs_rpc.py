"""Connections of python-ovs to the daemons of Open vSwitch, with deadlines and any number of descriptors."""

from __future__ import annotations

import errno
import math
import select
import time
from typing import Any

from ovs import jsonrpc
from ovs import poller as ovs_poller
from ovs.stream import Stream

from netplugin.host.processes import remaining

_RETRY_S = 0.05  # there is no event for a place in the queue of a UNIX socket (connect(2), EAGAIN)


class _Poll:
    """A poll(2) poller for python-ovs, as documented in ``ovs/poller.py``.

    The default poller uses select(2), because of eventlet, which accepts no file descriptor above
    1,023. A descriptor may be registered for reading and again for writing.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._events: dict[int, int] = {}

    def register(self, fd: Any, events: int) -> None:
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        self._events[descriptor] = self._events.get(descriptor, 0) | events
        self._poll.register(descriptor, self._events[descriptor])

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        return self._poll.poll(timeout_ms)


ovs_poller.SelectPoll = _Poll


def connect(address: str, deadline: float) -> tuple[int, Any]:
    """An errno (0: none) and the stream. While its queue is full, a daemon refuses with EAGAIN."""
    while True:
        failed, stream = Stream.open_block(Stream.open(address), milliseconds(deadline))
        if failed != errno.EAGAIN or not remaining(deadline):
            return failed, stream
        time.sleep(min(_RETRY_S, remaining(deadline)))


class TimedConnection(jsonrpc.Connection):  # type: ignore[misc]
    """A connection whose blocking calls, which have no timeout, raise TimeoutError at a deadline."""

    def __init__(self, stream: Any, deadline: float) -> None:
        super().__init__(stream)
        self.deadline = deadline

    def run(self) -> None:
        """Called before each wait."""
        if not remaining(self.deadline):
            raise TimeoutError
        super().run()

    def recv_wait(self, poller: Any) -> None:
        poller.timer_wait(milliseconds(self.deadline))
        super().recv_wait(poller)


def milliseconds(deadline: float) -> int:
    """What is left until the deadline (``time.monotonic``), as a poller takes it."""
    return math.ceil(remaining(deadline) * 1000)

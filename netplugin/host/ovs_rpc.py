"""Connections of python-ovs to the daemons of Open vSwitch: deadlines, descriptors above 1,023, JSON."""

from __future__ import annotations

import errno
import json
import math
import re
import select
import time
from typing import Any

from ovs import json as ovs_json
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


class _Parser:
    """``ovs.json.Parser`` by the standard library, which parses in C.

    python-ovs has a parser in C too, but only where it was built with the library of Open vSwitch. Its other
    one takes more than a second for a thousand ports. A message of JSON-RPC is an object.
    """

    _MARKS = re.compile(r'["{}]|\\(?:.|$)', re.DOTALL)

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._depth, self._in_string, self._done = 0, False, False
        self._escape = ""  # a backslash whose character has not come

    def feed(self, text: str) -> int:
        """Returns how many characters of the text belong to the message."""
        before, text = len(self._escape), self._escape + text
        self._escape = ""
        for mark in self._MARKS.finditer(text):
            found = mark[0]
            if found == '"':
                self._in_string = not self._in_string
            elif found == "\\":
                self._escape = found
            elif not self._in_string and found in "{}":
                self._depth += 1 if found == "{" else -1
                if self._depth <= 0:
                    return self._end(text[: mark.end()]) - before
        if not self._depth and text.strip():  # no object begins here: ``finish`` reports that
            return self._end(text) - before
        self._parts.append(text.removesuffix(self._escape))
        return len(text) - before

    def _end(self, text: str) -> int:
        self._parts.append(text)
        self._done = True
        return len(text)

    def is_done(self) -> bool:
        return self._done

    def finish(self) -> Any:
        """The message, or a text that says what is wrong with it."""
        try:
            return json.loads("".join(self._parts))
        except (ValueError, RecursionError) as wrong:
            return str(wrong)


if ovs_json.PARSER == ovs_json.PARSER_PY:
    ovs_json.Parser = _Parser
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

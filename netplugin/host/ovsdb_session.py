"""A JSON-RPC session with ovsdb-server: kept, reconnected, and usable by many threads.

One thread receives, and reconnects after a loss. Requests are sent by the thread that makes them, so
that none waits until another thread has its turn.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ovs import json as ovs_json
from ovs import jsonrpc
from ovs import poller as ovs_poller

from netplugin.host.json_stream import StreamParser

LOG = logging.getLogger(__name__)
# The default back-off (1 s growing to 8 s) is longer than a VM should wait for its NIC.
_BACKOFF_MS = (100, 1000)
# How often late requests are looked for. A thread that sends a request does not wake that of the session,
# which would take longer than to send it.
_LATE_MS = 2000


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


class ConnectionLost(Exception):
    """The connection ended before the answer; whether the request was carried out is not known."""


class Refused(Exception):
    """The server refused a request; the text is its error."""


#: Called with the result, or None and the error (ConnectionLost, Refused).
Answer = Callable[[Any, Exception | None], None]


class Listener(Protocol):
    """What a session tells, in its thread."""

    def connected(self) -> None: ...
    def disconnected(self) -> None:
        """The connection is lost, or another attempt to connect was made."""

    def notified(self, method: str, params: Any) -> None: ...


class OvsdbSession:
    """The connection to an OVSDB server. ``start`` connects in the background."""

    def __init__(self, remote: str, listener: Listener) -> None:
        """``remote`` is an OVSDB address, or several with commas between them."""
        self._listener = listener
        self._lock = threading.RLock()
        self._session = jsonrpc.Session.open_multiple(re.split(r",(?=\w+:)", remote))
        self._session.reconnect.set_backoff(*_BACKOFF_MS)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Answer] = {}
        #: When requests with a time limit are late (``time.monotonic``), by number.
        self._late_at: dict[int, float] = {}
        self._state = (0, False)
        self._stop = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="ovsdb", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self, method: str, params: Any, answer: Answer, within_s: float | None = None) -> None:
        """Send a request; its answer comes in the session's thread, also if the connection is lost.

        ``within_s``: connect again if there is no answer by then. The server may still carry the request out.

        Callable from any thread.
        """
        with self._lock:
            if self._state != (self._session.get_seqno(), True):
                lost = True
            else:
                lost = False
                number = next(self._numbers)
                self._waiting[number] = answer
                if within_s is not None:
                    self._late_at[number] = time.monotonic() + within_s
                message = jsonrpc.Message(jsonrpc.Message.T_REQUEST, method, params, None, None, number)
                sent = not self._session.send(message) and not self._session.get_backlog()
        if lost:
            answer(None, ConnectionLost())
        elif not sent:
            self._wake()  # the thread sends the rest, or sees that the connection is lost

    def reconnect(self) -> None:
        """Connect again, and so read everything again."""
        with self._lock:
            self._session.force_reconnect()
            # Disconnects at once: a message that was received first would make the connection active again.
            self._session.run()
        self._wake()

    def close(self) -> None:
        """End the session and its thread."""
        self._stop.set()
        self._wake()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join(timeout=5)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake_writer.send(b"x")

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._turn()
                except Exception:
                    # A notice may be lost. Only reading all rows again recovers from that.
                    LOG.exception("the session with the OVS database starts again")
                    self.reconnect()
                self._wait()
        finally:
            self._end()

    def _turn(self) -> None:
        """Read what there is to read."""
        with self._lock:
            self._session.run()
            if any(at <= time.monotonic() for at in self._late_at.values()):
                LOG.warning("the server of the OVS database leaves a request without an answer")
                self._late_at.clear()
                self.reconnect()
        self._follow()
        while message := self._receive():
            self._handle(message)
        with self._lock:
            self._session.run()
        self._follow()

    def _follow(self) -> None:
        """Tell of a connection that was gained or lost."""
        with self._lock:
            state = (self._session.get_seqno(), self._session.is_connected())
            if state == self._state:
                return
            self._state = state
            lost, self._waiting = self._waiting, {}
            self._late_at.clear()
        if not state[1]:
            self._listener.disconnected()
        for answer in lost.values():
            answer(None, ConnectionLost())
        if state[1]:
            self._listener.connected()

    def _receive(self) -> Any:
        with self._lock:
            rpc = self._session.rpc
            # The session creates a parser before each message, unless one is set already.
            if rpc is not None and rpc.parser is None and ovs_json.PARSER != ovs_json.PARSER_C:
                rpc.parser = StreamParser()
            return self._session.recv()

    def _handle(self, message: Any) -> None:
        if message.type == jsonrpc.Message.T_NOTIFY:
            self._listener.notified(message.method, message.params)
        elif message.type in (jsonrpc.Message.T_REPLY, jsonrpc.Message.T_ERROR):
            with self._lock:
                answer = self._waiting.pop(message.id, None)
                self._late_at.pop(message.id, None)
            if answer is not None:
                answer(message.result, None if message.error is None else Refused(str(message.error)))

    def _wait(self) -> None:
        poller = ovs_poller.Poller()
        with self._lock:
            self._session.wait(poller)
            self._session.recv_wait(poller)
            poller.timer_wait(_LATE_MS)
        poller.fd_wait(self._wake_reader, ovs_poller.POLLIN)
        poller.block()
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)

    def _end(self) -> None:
        with self._lock:
            self._session.close()
            self._state = (-1, False)
            lost, self._waiting = self._waiting, {}
        self._listener.disconnected()
        for answer in lost.values():
            answer(None, ConnectionLost())
        self._wake_reader.close()
        self._wake_writer.close()

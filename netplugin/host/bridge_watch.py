"""Notices what others change on OVS bridges by OpenFlow, which the database does not show."""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from netplugin.api.errors import NetpluginError
from netplugin.host.openflow import OpenFlow
from netplugin.host.openflow_messages import Changed
from netplugin.host.supervisor import Supervisor

LOG = logging.getLogger(__name__)
#: Seconds between two looks at the settings that OVS sends no notice of.
_POLL_S = 1.0
#: Seconds that vswitchd may take for an answer.
_ANSWER_S = 5.0
#: The least time from one report of a kind of change to the next, in seconds. It doubles up to
#: ``_MOST_GAP_S`` while changes of flows without our mark go on, as a controller makes them on a bridge of
#: the operator's.
_GAP_S, _MOST_GAP_S = 1.0, 60.0


class OvsBridgeWatch:
    """Watches the flows of some bridges by notices of OVS, and their settings by reading them each second.

    A change is reported at once, if the report before was long enough ago.
    """

    def __init__(
        self,
        flows: OpenFlow,
        bridges: Callable[[], Collection[str]],
        report: Callable[[str], None],
        supervisor: Supervisor,
    ) -> None:
        """``report`` is called with a reason; ``bridges`` returns the names of those to watch now."""
        self._flows = flows
        self._bridges = bridges
        self._report = report
        self._lock = threading.Lock()
        #: The changes to report, each with its time and reason.
        self._due: dict[Changed, tuple[float, str]] = {}
        self._reported = dict.fromkeys(Changed, -math.inf)
        self._gap_s = dict.fromkeys(Changed, _GAP_S)
        self._next_poll = 0.0
        self._stop = threading.Event()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        flows.changed = self._note
        self._thread = supervisor.thread("bridge-watch", self._run, self._stop)

    def close(self) -> None:
        """Stop watching, after an exchange that is under way."""
        self._stop.set()
        self._wake()
        self._thread.join(timeout=_ANSWER_S + 1)
        self._woken.close()
        self._waker.close()

    def _note(self, bridge: str, changed: Changed) -> None:
        """Note a change, or (``NOTHING``) that there is a new connection; called in any thread."""
        if changed is not Changed.NOTHING:
            with self._lock:
                due = max(time.monotonic(), self._reported[changed] + self._gap_s[changed])
                reason = f"others have changed flows or settings of bridge {bridge}"
                self._due.setdefault(changed, (due, reason))
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # it has been woken already, or has ended
            self._waker.send(b"x")

    def _run(self) -> None:
        while not self._stop.is_set():
            if time.monotonic() >= self._next_poll:
                self._poll()
                self._next_poll = time.monotonic() + _POLL_S
            for reason in self._take_due():
                self._report(reason)
            self._wait()

    def _poll(self) -> None:
        for bridge in self._bridges():
            if self._stop.is_set():
                return
            try:
                self._flows.compare_settings(bridge, time.monotonic() + _ANSWER_S)
            except NetpluginError as error:
                LOG.debug("%s is not watched: %s", bridge, error)

    def _take_due(self) -> list[str]:
        """The reason, if a report is due: of all kinds, since all are looked at."""
        with self._lock:
            now, reasons = time.monotonic(), [reason for _, reason in self._due.values()]
            if all(due > now for due, _ in self._due.values()):
                return []
            for changed in self._due:
                gap_s, ago_s = self._gap_s[changed], now - self._reported[changed]
                goes_on = changed is Changed.OTHERS and ago_s <= 2 * gap_s
                self._gap_s[changed] = min(2 * gap_s, _MOST_GAP_S) if goes_on else _GAP_S
                self._reported[changed] = now
            self._due.clear()
            return reasons[:1]

    def _wait(self) -> None:
        """Wait until something has come in, is due, or must be read; take what has come in."""
        bridges = self._flows.descriptors()
        poll = select.poll()
        for descriptor in (*bridges, self._woken.fileno()):
            poll.register(descriptor, select.POLLIN)
        with self._lock:
            until = min([self._next_poll, *(due for due, _ in self._due.values())])
        for descriptor, _ in poll.poll(max(0, math.ceil((until - time.monotonic()) * 1000))):
            if descriptor in bridges:
                self._flows.take(bridges[descriptor])
            else:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)

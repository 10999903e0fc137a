"""How long ovs-vswitchd's main loop was away: asked on its control socket, and read from its log.

The log has no wait below 1,000 ms (lib/timeval.c, log_poll_interval), so that the loop is asked too: it
answers commands between two turns, and an answer that comes late was kept waiting by the turn before.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Self

from ovs.unixctl.client import UnixctlClient

from tests.lab.ovs import PrivateOvs

#: Time between two questions; a stall is longer than what is found by this at most.
EVERY_S = 0.05
#: Of the main thread: others have their names behind the module's.
_LATE = re.compile(r"\|timeval\|WARN\|Unreasonably long (\d+)ms poll interval")


def logged_ms(text: str) -> list[float]:
    """Return the waits that vswitchd has written in its log."""
    return [float(found) for found in _LATE.findall(text)]


class Stalls:
    """The longest wait of the main loop while the context is open."""

    def __init__(self, ovs: PrivateOvs) -> None:
        self._log = ovs.directory / "ovs-vswitchd.log"
        self._socket = ovs.sockets.control()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._answers_ms: list[float] = []
        self._offset = 0

    def __enter__(self) -> Self:
        self._offset = self._log.stat().st_size
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def longest_ms(self) -> float:
        """0 if no question was answered, as after a kill."""
        with self._log.open(errors="replace") as log:
            log.seek(self._offset)
            return max([*self._answers_ms, *logged_ms(log.read())], default=0.0)

    def _ask(self) -> None:
        error, client = UnixctlClient.create(str(self._socket))
        if error:
            return
        intended = time.monotonic()
        while not self._ended.wait(max(0.0, intended - time.monotonic())):
            error, _, _ = client.transact("version", [])
            if error:
                break
            answered = time.monotonic()
            # From when it was to be asked: while one question waits, others would have waited too.
            self._answers_ms.append((answered - intended) * 1e3)
            intended = max(intended + EVERY_S, answered)
        client.close()

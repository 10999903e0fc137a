"""Announces ports that were opened: several times with growing gaps, and other work in between."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from netplugin.api.errors import NetpluginError
from netplugin.api.models import PortState

if TYPE_CHECKING:
    from agents.ports.backend_ports import BackendPorts

LOG = logging.getLogger(__name__)
#: Seconds after each of the first announcements; QEMU's defaults (``announce-rounds`` 5,
#: ``announce-initial`` 50 ms, ``announce-step`` 100 ms in migration/options.c).
_GAPS_S = (0.05, 0.15, 0.25, 0.35)
_SEND_S = 2.0
#: Seconds that a repetition may wait for its turn: it is not worth more.
_TURN_S = 2.0
#: Seconds after which one that failed is sent again, and seconds for as long as that is tried. A vswitchd
#: that is restarted or overloaded is there again within that time; later the guest has sent something itself.
_AGAIN_S, _TRIED_S = 1.0, 60.0


class Announcer:
    """Of one backend. Its worker's thread calls it; ``later`` hands the later rounds back to that thread."""

    def __init__(self, ports: BackendPorts) -> None:
        self._ports = ports
        #: Runs work in the worker's thread, if its turn comes within so many seconds. None: there are no
        #: later rounds.
        self.later: Callable[[Callable[[], None], float], None] | None = None
        #: Ports to announce when they are known to be open on the host.
        self._expected: set[str] = set()
        #: The number of the last announcement of each port that is going on.
        self._going: dict[str, int] = {}
        self._count = 0

    def expect(self, port_ids: Iterable[str]) -> None:
        """Announce these ports as soon as they are open on the host."""
        self._expected.update(port_ids)

    def begin(self, converged: Iterable[str]) -> None:
        """Announce those of these ports that are expected: the host has them as they are stored."""
        if not self._expected:
            return
        for port_id in self._expected & set(converged):
            self._expected.discard(port_id)
            self._count += 1
            self._going[port_id] = self._count
            self._round(port_id, self._count, 0, time.monotonic() + _TRIED_S)

    def _round(self, port_id: str, number: int, turn: int, until: float) -> None:
        record = self._ports.store.get(port_id)
        is_open = (
            record is not None
            and record.state is not PortState.REMOVING
            and record.migration is not None
            and not self._ports.is_closed(record)
        )
        migrates = self._ports.extras.migrates
        if self._going.get(port_id) != number or record is None or not is_open or migrates is None:
            self._end(port_id, number)
            return
        gap_s, turn_s = (_GAPS_S[turn] if turn < len(_GAPS_S) else None), _TURN_S
        try:
            migrates.announce([self._ports.intent(record)], time.monotonic() + _SEND_S)
            turn += 1
        except NetpluginError as error:
            # What fails may keep the thread for seconds, so its repetition waits for as long as it is tried.
            gap_s, turn_s = (_AGAIN_S if time.monotonic() < until else None), _TRIED_S
            LOG.warning("not announced: %s", error, extra={"port_id": port_id})
        if gap_s is None or self.later is None:
            self._end(port_id, number)
            return
        again = partial(self.later, partial(self._round, port_id, number, turn, until), turn_s)
        timer = threading.Timer(gap_s, again)
        timer.daemon = True
        timer.start()

    def _end(self, port_id: str, number: int) -> None:
        if self._going.get(port_id) == number:
            del self._going[port_id]

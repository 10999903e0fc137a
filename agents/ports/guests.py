"""Guests of ports that migrate: followed while they start and stop here, and announced to the network."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from agents.ports.backend_ports import BackendPorts, logged
from agents.ports.migration import followed, hands_over, is_news, opens
from agents.store.port_table import Record
from netplugin.api.errors import NetpluginError
from netplugin.api.models import PortState
from netplugin.backend import Observation, ObservedPort

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


class Guests:
    """Of one backend. Its worker's thread calls it; ``later`` hands later announcements to that thread."""

    def __init__(self, ports: BackendPorts) -> None:
        self._ports = ports
        #: Runs work in the worker's thread, if its turn comes within so many seconds. None: there are no
        #: later announcements.
        self.later: Callable[[Callable[[], None], float], None] | None = None
        #: Whether a guest may have stopped or started while its port began to follow it.
        self.follow_again = False
        self._has_started = False
        #: Ports to announce when they are known to be open on the host.
        self._expected: set[str] = set()
        #: The number of the last announcement of each port that is going on.
        self._going: dict[str, int] = {}
        self._count = 0

    # -- following -------------------------------------------------------------------------------

    def follow(self, records: Iterable[Record], observed: Mapping[str, ObservedPort] | None = None) -> None:
        """Have the backend report the guests of those ports that wait for them.

        ``observed`` is from before that: another look is due if a guest has started or stopped meanwhile.
        """
        migrates = self._ports.extras.migrates
        for record in records:
            if migrates is None or record.migration is None:
                continue
            try:
                migrates.follow_guest(self._ports.intent(record))
            except Exception as error:  # the next look at the whole host tries it again
                logged(error, "follow")
            self.follow_again |= observed is not None and _moved(record, observed) is not record

    def migrated(
        self, records: Mapping[str, Record], observation: Observation, *, whole: bool
    ) -> dict[str, Record]:
        """The ports whose migration goes on because their guest runs or has stopped; stored."""
        if whole:
            self.follow_again = False
            if not self._has_started:
                self._has_started = True
                now = datetime.now(UTC)
                self.expect(i for i, record in records.items() if is_news(record.migration, now))
        auto = [r for r in records.values() if r.migration and r.migration.activation == "auto"]
        if not auto:
            return {}
        observed = self._ports.observed_ports(self._ports.intents(auto), observation)
        moved = {r.port_id: after for r in auto if (after := _moved(r, observed)) is not r}
        unsaved = self._ports.store.save_each(moved.values())
        moved = {i: record for i, record in moved.items() if i not in unsaved}
        before = {i: records[i].migration for i in moved}
        self._hand_over([r for i, r in moved.items() if hands_over(before[i], r.migration)])
        self.expect(i for i, r in moved.items() if opens(before[i], r.migration))
        return moved

    def _hand_over(self, records: Sequence[Record]) -> None:
        """Ask the destinations of ports whose guests have stopped here to announce them."""
        if not records or self._ports.extras.migrates is None:
            return
        try:
            self._ports.extras.migrates.hand_over(self._ports.intents(records), time.monotonic() + _SEND_S)
        except Exception as error:  # they announce themselves when the guests run there
            logged(error, "hand-over")

    # -- announcing: several times with growing gaps, and other work in between ------------------

    def expect(self, port_ids: Iterable[str]) -> None:
        """Announce these ports as soon as they are open on the host."""
        self._expected.update(port_ids)

    def announce(self, converged: Iterable[str]) -> None:
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
        migrates = self._ports.extras.migrates
        if self._going.get(port_id) != number or record is None or migrates is None:
            self._end(port_id, number)
            return
        intent = self._ports.intent(record)
        if record.state is PortState.REMOVING or record.migration is None or intent.closed:
            self._end(port_id, number)
            return
        gap_s, turn_s = (_GAPS_S[turn] if turn < len(_GAPS_S) else None), _TURN_S
        try:
            migrates.announce([intent], time.monotonic() + _SEND_S)
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


def _moved(record: Record, observed: Mapping[str, ObservedPort]) -> Record:
    """The port with its migration as far as its guest has taken it."""
    found = observed.get(record.port_id)
    migration = followed(record.migration, found.guest if found else None, datetime.now(UTC))
    return record if migration is record.migration else replace(record, migration=migration)

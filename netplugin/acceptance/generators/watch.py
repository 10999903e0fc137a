"""What a generator sees while it sends: loss that is certain, a pace that is kept, counters at rest.

Times are seconds of any steady clock, counts are frames since the trial began.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

#: Frames that rings and queues on the way may hold, unless it is known better.
IN_FLIGHT: Final = 2048
#: What a false alarm multiplies that with: a search gives a rate three trials.
_FALSE_ALARM: Final = 8
#: A moment without a look at the counters must not look like a loss.
_CERTAIN_S: Final = 0.05
#: Nothing more comes after so long without a frame.
QUIET_S: Final = 0.25
#: Counters are given up that still move after this.
_DRAIN_S: Final = 10.0
#: Between two reads of counters that have all that there can be.
_MOMENT_S: Final = 0.02


class InFlight:
    """How many frames may be under way. That nothing is missing in the end shows that it was too few."""

    def __init__(self, packets: int) -> None:
        self.packets = packets

    def was_more(self) -> None:
        self.packets *= _FALSE_ALARM


class LossWatch:
    """Whether a direction has lost a frame for certain: more are missing than can be in flight.

    A difference between two counters is no loss: frames are under way, and a device that gets a little
    too much fills its rings for seconds before it loses the first one.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self._since: float | None = None

    def sees_loss(self, now: float, sent: int, received: int, between: float = 0.0) -> bool:
        """``between``: frames that may have been sent after ``received`` was read."""
        if sent - received <= self._in_flight + between:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= _CERTAIN_S


class PaceWatch:
    """How many frames were sent at once, to make up for a pause: those between two looks at least."""

    def __init__(self, rate_pps: float) -> None:
        self._rate = rate_pps
        self._start: float | None = None
        self._most_behind = 0.0
        self.burst_packets = 0

    def look(self, now: float, sent: int) -> None:
        """``sent`` was read at ``now``."""
        if not sent:
            return
        if self._start is None:
            self._start = now - sent / self._rate
        behind = (now - self._start) * self._rate - sent
        self._most_behind = max(self._most_behind, behind)
        # What was made up for since it was most behind; being late all the time is no burst.
        self.burst_packets = max(self.burst_packets, round(self._most_behind - max(0.0, behind)))


def at_rest(
    read: Callable[[], T], complete: Callable[[T], bool], quiet_s: float = QUIET_S
) -> tuple[T, bool]:
    """Read until nothing more can come, or nothing came for ``quiet_s``; and whether it came to that."""
    deadline = time.monotonic() + _DRAIN_S
    last = read()
    while True:
        # Even what is complete is looked at twice: more may come than was sent.
        time.sleep(_MOMENT_S if complete(last) else quiet_s)
        before, last = last, read()
        if before == last or time.monotonic() > deadline:
            return last, before == last

"""What a worker does next: calls in batches, their retries, background jobs and looks take turns (pure).

All times are of one clock, in seconds, and given by the caller, who also does the locking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Any, TypeAlias

from agents.ports.call import NEXT_TRY_S, Call

# -- when ----------------------------------------------------------------------------------------

#: Retries that are due at once: a driver may block before it fails (ice_wait_on_vf_reset: 0.8 s per VF).
_RETRIES = 4
# First delay in seconds of a retry that the host requested; it doubles with each retry.
_NEXT_TRY_FIRST_S = 0.05
# Delays in seconds of another look after one that left something; it doubles each time.
_AGAIN_FIRST_S, _AGAIN_MOST_S = 0.5, 30.0
_FIRST_LOOK_S = 2.0
# After a reconcile that a change of the host triggered, the next one waits for a multiple of its
# duration, up to a limit. Frequent changes, and changes caused by reading, then use a fifth of the
# thread.
_LOOK_GAP, _LOOK_GAP_MOST_S = 4.0, 5.0


@dataclass(frozen=True)
class CallBatch:
    """Calls to carry out together: new ones, or ones to retry, whose deadlines are nearer."""

    calls: list[Call]
    is_retry: bool = False


@dataclass(frozen=True)
class Job:
    """A background job, to be begun before ``deadline``."""

    future: Future[Any]
    work: Callable[[], Any]
    deadline: float


@dataclass(frozen=True)
class Look:
    """A reconcile of these ports, or (None) of the whole host."""

    ports: frozenset[str] | None


Work: TypeAlias = CallBatch | Job | Look


class Turn(Enum):
    """The kinds of work, which take turns when due."""

    CALLS = 0
    JOB = 1
    LOOK = 2


@dataclass
class _Retry:
    """A call to be retried at ``due``; ``pause_s`` is the next delay."""

    call: Call
    due: float
    pause_s: float = _NEXT_TRY_FIRST_S


class Looks:
    """When the host is looked at: each interval, when it has changed, and until nothing is left to do."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._ports: set[str] = set()
        self._is_whole = False
        self._not_before = 0.0
        self._next = now + interval_s
        self._again_s = _AGAIN_FIRST_S
        # The backend reports when the host can be observed; this is the fallback.
        self._again_at: float | None = now + _FIRST_LOOK_S

    def wake(self, ports: frozenset[str] | None) -> None:
        """These ports have changed on the host, or (None) anything may have."""
        if ports is None:
            self._is_whole = True
            self._again_s = _AGAIN_FIRST_S
        else:
            self._ports |= ports

    def due(self) -> float:
        """When the next look is due."""
        by_itself = self._whole_due()
        return min(by_itself, self._not_before) if self._ports or self._is_whole else by_itself

    def _whole_due(self) -> float:
        return self._next if self._again_at is None else min(self._next, self._again_at)

    def take(self, now: float) -> Look:
        if self._ports and not self._is_whole and now < self._whole_due():
            ports, self._ports = frozenset(self._ports), set()
            return Look(ports)
        self._is_whole = False
        self._ports.clear()
        self._next = now + self._interval_s
        self._again_at = None
        return Look(None)

    def ended(self, begun: float, now: float) -> None:
        """A look has ended, with or without success."""
        self._not_before = now + min(_LOOK_GAP_MOST_S, _LOOK_GAP * (now - begun))

    def look_again(self, now: float) -> None:
        """Something is left to do. Failing calls do not postpone the look that is due for it."""
        if self._again_at is None:
            self._again_at = now + self._again_s
            self._again_s = min(_AGAIN_MOST_S, self._again_s * 2)

    def reset_delay(self) -> None:
        """The whole host is as it is to be: the next delay is the first one again."""
        self._again_s = _AGAIN_FIRST_S


class Schedule:
    """The work of one worker, in the order in which it is done."""

    def __init__(self, batch_size: int, interval_s: float, now: float) -> None:
        self.waiting: list[Call] = []
        self.jobs: deque[Job] = deque()
        self.looks = Looks(interval_s, now)
        self.sizes = BatchSizes.first(batch_size)
        #: By port; a call that waits for such a port is behind its retry.
        self._retries: dict[str, _Retry] = {}
        self._retried_last = False
        self._last_turn = Turn.LOOK

    def next(self, now: float) -> Work | None:
        """Take the work that is due next; None if there is none.

        Calls, jobs and looks rotate, so none of them waits for more than one of each other kind.
        """
        due = self._due(now)
        if not due:
            return None
        self._last_turn = min(due, key=lambda turn: (turn.value - self._last_turn.value - 1) % len(Turn))
        if self._last_turn is Turn.JOB:
            return self.jobs.popleft()
        return self._take_calls(now) if self._last_turn is Turn.CALLS else self.looks.take(now)

    def idle_s(self, now: float) -> float:
        """Seconds until work is due, if no other comes before that."""
        if self._due(now):
            return 0.0
        return min([self.looks.due(), *(retry.due for retry in self._retries.values())]) - now

    def retry(self, call: Call, now: float) -> None:
        """The host asks to retry this call."""
        retry = self._retries.setdefault(call.port_id, _Retry(call, now))
        retry.due = now + retry.pause_s
        retry.pause_s = min(2 * retry.pause_s, NEXT_TRY_S)

    def end_retry(self, call: Call) -> None:
        """This call is not retried any more."""
        self._retries.pop(call.port_id, None)

    def retried(self) -> list[Call]:
        """The calls that are being retried."""
        return [retry.call for retry in self._retries.values()]

    def _due(self, now: float) -> list[Turn]:
        kinds = {
            Turn.CALLS: self._ready() or self._due_again(now),
            Turn.JOB: self.jobs,
            Turn.LOOK: now >= self.looks.due(),
        }
        return [turn for turn, is_due in kinds.items() if is_due]

    def _ready(self) -> list[Call]:
        """What waits for no retry on the same port."""
        if not self._retries:
            return self.waiting
        return [call for call in self.waiting if call.port_id not in self._retries]

    def _due_again(self, now: float) -> list[Call]:
        """The retries that have been due for longest."""
        due = [retry for retry in self._retries.values() if retry.due <= now]
        return [retry.call for retry in sorted(due, key=lambda retry: retry.due)[:_RETRIES]]

    def _take_calls(self, now: float) -> CallBatch:
        due, ready = self._due_again(now), self._ready()
        self._retried_last = bool(due) and not (self._retried_last and ready)
        if self._retried_last:
            return CallBatch(due, is_retry=True)
        batch = next_batch(ready, self.sizes, now)
        taken = set(map(id, batch))
        self.waiting = [call for call in self.waiting if id(call) not in taken]
        return CallBatch(batch)


# -- how many ------------------------------------------------------------------------------------

# Target duration of a batch in seconds, of plugs as of removals. Shorter batches pay the round trip too
# often; all calls wait for a longer one.
_QUICK_S, _SLOW_S = 0.25, 0.5
_LEAST, _LEAST_REMOVALS, _MOST = 4, 16, 256
# A removal takes ovs-vswitchd several times as long as a plug (docs/scale.md), and no VM waits for
# one: a batch with plugs takes this part of the removals that a batch of their own would have.
_PART_WITH_PLUGS = 16
# Until the oldest has waited for so many seconds: plugs without end do not hold up removals.
_GIVES_WAY_S = 10.0


@dataclass(frozen=True)
class BatchSizes:
    """How many plugs and changes a batch has at most, and how many removals one without plugs."""

    plugs: int
    removals: int

    @classmethod
    def first(cls, size: int) -> BatchSizes:
        return cls(size, _LEAST_REMOVALS)

    def after(self, batch: Sequence[Call], took_s: float) -> BatchSizes:
        """The sizes after a batch that took so many seconds; one of both kinds says nothing of either."""
        if _is_removal(batch):
            return replace(self, removals=_next_size(self.removals, _LEAST_REMOVALS, len(batch), took_s))
        if any(call.kind == "delete" for call in batch):
            return self
        return replace(self, plugs=_next_size(self.plugs, _LEAST, len(batch), took_s))


def next_batch(waiting: Iterable[Call], sizes: BatchSizes, now: float) -> list[Call]:
    """The next operations: plugs and changes in their order, and with them some removals in theirs.

    A second operation on a port waits for the next batch. A group is taken as a whole, however large
    it is.
    """
    ready = _ready(waiting)
    plugs = [group for group in ready if not _is_removal(group)]
    removals = [group for group in ready if _is_removal(group)]
    if not plugs or not removals:
        return _first(plugs, sizes.plugs) + _first(removals, sizes.removals)
    late = now - removals[0][0].queued_at > _GIVES_WAY_S
    room = sizes.removals if late else max(1, sizes.removals // _PART_WITH_PLUGS)
    fits = late or len(removals[0]) <= room
    return _first(plugs, sizes.plugs) + (_first(removals, room) if fits else [])


def _ready(waiting: Iterable[Call]) -> list[list[Call]]:
    """The operations by group, without those behind another one on the same port."""
    ready: list[list[Call]] = []
    ports: set[str] = set()
    for _, together in groupby(waiting, key=lambda call: id(call if call.group is None else call.group)):
        group = list(together)
        own = {call.port_id for call in group}
        if ports.isdisjoint(own):
            ready.append(group)
        ports |= own
    return ready


def _first(groups: Sequence[list[Call]], room: int) -> list[Call]:
    """The first groups, at least one, with as many operations as there is room for."""
    taken: list[Call] = []
    for group in groups:
        if taken and len(taken) + len(group) > room:
            break
        taken += group
    return taken


def _is_removal(calls: Sequence[Call]) -> bool:
    return all(call.kind == "delete" for call in calls)


def _next_size(size: int, least: int, served: int, took_s: float) -> int:
    if took_s > _SLOW_S:
        return max(least, size // 2)
    if took_s < _QUICK_S and served == size:
        return max(size, min(_MOST, size * 2))
    return size

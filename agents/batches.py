"""Which of the calls that wait for a worker make the next batch (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from agents.ports.call import Call

# Target duration of a batch in seconds. Shorter batches pay the round trip too often; all calls wait
# for a longer one.
_QUICK_S, _SLOW_S = 0.25, 0.5
_LEAST, _LEAST_REMOVALS, _MOST = 4, 16, 256
# A removal takes ovs-vswitchd several times as long as a plug (docs/performance.md), and no VM waits for
# one: a batch with plugs takes this part of the removals that a batch of their own would have.
_BESIDE_PLUGS = 16
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
    room = sizes.removals if late else max(1, sizes.removals // _BESIDE_PLUGS)
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

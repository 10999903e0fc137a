"""How many ports one transaction adds or removes, so that vswitchd's main loop is not away for long (pure).

While vswitchd carries out a transaction, its main loop does nothing else: no LACP, no OpenFlow, no other
transaction. Each one looks at all ports. An added one takes a few milliseconds more, a removed one waits
twice until every PMD thread is quiescent (``xlate_txn_commit`` in ofproto/ofproto-dpif-xlate.c), 10 ms each
time (``PMD_RCU_QUIESCE_INTERVAL`` in lib/dpif-netdev.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from drivers.ovs.commands import (
    AddBeside,
    AddPort,
    AddUplink,
    RemoveBeside,
    RemovePort,
    RemoveUplink,
    RowChange,
)

#: Seconds: a transaction that takes longer halves the next ones, one that takes less doubles them.
_QUICK_S, _SLOW_S = 0.1, 0.25
#: Fewer ports would have most of the time spent on what each transaction takes without one.
_LEAST_ADDED, _LEAST_REMOVED = 16, 4
_MOST = 256

_ADDS = (AddPort, AddBeside, AddUplink)
_REMOVES = (RemovePort, RemoveBeside, RemoveUplink)


@dataclass(frozen=True)
class Pace:
    """How many ports a transaction adds, or removes, at most."""

    added: int = 64
    removed: int = 8

    def parts(self, changes: Sequence[RowChange]) -> list[list[RowChange]]:
        """The changes in their order, each part for one transaction.

        What is for one port alone and stands together is in one part.
        """
        parts: list[list[RowChange]] = [[]]
        for together in _by_port(changes):
            if self._share(together) and self._share([*parts[-1], *together]) > 1 and self._share(parts[-1]):
                parts.append([])
            parts[-1] += together
        return [part for part in parts if part]

    def after(self, changes: Sequence[RowChange], took_s: float) -> Pace:
        """The pace after a transaction of these changes that took so many seconds."""
        share = self._share(changes)
        if share and took_s > _SLOW_S:
            factor = 0.5
        elif share > 0.5 and took_s < _QUICK_S:
            factor = 2.0
        else:
            return self
        pace = self
        if any(isinstance(change, _ADDS) for change in changes):
            pace = replace(pace, added=_within(_LEAST_ADDED, self.added * factor))
        if any(isinstance(change, _REMOVES) for change in changes):
            pace = replace(pace, removed=_within(_LEAST_REMOVED, self.removed * factor))
        return pace

    def _share(self, changes: Iterable[RowChange]) -> float:
        """The part of a transaction that these changes fill."""
        return sum(
            1 / self.added if isinstance(change, _ADDS) else 1 / self.removed
            for change in changes
            if isinstance(change, (*_ADDS, *_REMOVES))
        )


def _within(least: int, size: float) -> int:
    return max(least, min(_MOST, int(size)))


def _by_port(changes: Sequence[RowChange]) -> list[list[RowChange]]:
    """Runs of changes that are for the same single port; the others are alone."""
    runs: list[list[RowChange]] = []
    for change in changes:
        if runs and len(change.ports) == 1 and change.ports == runs[-1][-1].ports:
            runs[-1].append(change)
        else:
            runs.append([change])
    return runs

"""How many ports one transaction adds or removes, so that vswitchd's main loop is not away for long (pure).

While vswitchd carries out a transaction, its main loop does nothing else: no LACP, no OpenFlow, no other
transaction. Each one looks at all ports. An added one takes a few milliseconds more, a removed one waits
twice until every PMD thread is quiescent (``xlate_txn_commit`` in ofproto/ofproto-dpif-xlate.c), 10 ms each
time (``PMD_RCU_QUIESCE_INTERVAL`` in lib/dpif-netdev.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from drivers.ovs.row_changes import AddPort, RemovePort, RowChange

#: Seconds: a transaction that takes longer halves the next ones, one that takes less doubles them.
_QUICK_S, _SLOW_S = 0.1, 0.25
#: Fewer ports would have most of the time spent on what each transaction takes without one.
_LEAST, _MOST = 32, 256
#: As many added ports take as long as a removed one.
_REMOVED = 8


@dataclass(frozen=True)
class Pace:
    """How many ports a transaction adds at most."""

    ports: int = 64

    def parts(self, changes: Sequence[RowChange]) -> list[list[RowChange]]:
        """The changes in their order, each part for one transaction.

        Consecutive changes of the same port are in one part.
        """
        parts: list[list[RowChange]] = [[]]
        filled = 0
        for alone, group in groupby(changes, lambda each: each.ports if len(each.ports) == 1 else None):
            for together in [[*group]] if alone else ([each] for each in group):
                size = _size(together)
                if filled and size and filled + size > self.ports:
                    parts.append([])
                    filled = 0
                parts[-1] += together
                filled += size
        return [part for part in parts if part]

    def after(self, changes: Sequence[RowChange], took_s: float) -> Pace:
        """The pace after a transaction of these changes that took so many seconds."""
        size = _size(changes)
        if size and took_s > _SLOW_S:
            return Pace(max(_LEAST, self.ports // 2))
        if took_s < _QUICK_S and size > self.ports / 2:
            return Pace(min(_MOST, self.ports * 2))
        return self


def _size(changes: Sequence[RowChange]) -> int:
    added = sum(isinstance(change, AddPort) for change in changes)
    return added + _REMOVED * sum(isinstance(change, RemovePort) for change in changes)

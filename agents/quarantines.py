"""When a thing in quarantine gets a new chance: by how it is seen to be, and by time (pure).

A NIC that is ill as a whole would put each of its virtual functions into quarantine, one plug after
the other. So a quarantine is short at first, and longer each time that it was ended in vain.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from netplugin.backend import Claim

#: At the end of a quarantine at worst one more plug fails.
FIRST_S, LONGEST_S = 60.0, 3600.0


@dataclass
class Quarantines:
    """What one process knows of them; another one begins anew, which only gives a chance earlier.

    For any thread: each backend's looks at the things that they share.
    """

    #: When a thing is tried again, in seconds of ``time.monotonic``.
    _until: dict[Claim, float] = field(default_factory=dict)
    _terms: dict[Claim, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(
        self,
        unfit: Collection[Claim],
        there: Collection[str],
        out_of_order: Collection[str],
        now: float,
    ) -> dict[Claim, str]:
        """Those of ``unfit`` that end now, each with why.

        ``there`` are the keys of the things that are there, and ``out_of_order`` of those that
        nobody could be served with now, whatever their own state.
        """
        with self._lock:
            self._until = {
                claim: self._until.get(claim, now + self._terms.setdefault(claim, FIRST_S))
                for claim in unfit
            }
            found: dict[Claim, str] = {}
            for claim in unfit:
                if claim.key not in there:
                    found[claim] = "it has gone, and may come again as another"
                    self._terms.pop(claim)
                elif claim.key in out_of_order:
                    # Its NIC is down, or being reset: when that is over it is tried again.
                    self._until[claim] = -math.inf
                elif now >= self._until[claim]:
                    found[claim] = "it is tried again"
                    self._terms[claim] = min(2 * self._terms[claim], LONGEST_S)
            for claim in found:
                del self._until[claim]
            return found

"""Decides when a quarantine ends: by the state of the resource, and by time (pure).

A NIC that fails as a whole would put all of its virtual functions into quarantine, one plug at a
time. Therefore a quarantine is short at first, and doubles each time the resource fails again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from netplugin.backend import Claim

#: Seconds. When a quarantine ends too early, at most one more plug fails.
FIRST_S, LONGEST_S = 60.0, 3600.0


@dataclass
class Quarantines:
    """The timers of one process. A restart resets them, which only ends quarantines earlier.

    Thread-safe: all backends that share the resources use one object.
    """

    #: When a quarantine ends, in seconds of ``time.monotonic``.
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
        """The quarantines among ``unfit`` that end now, with the reasons.

        ``there`` are the keys of existing resources; ``out_of_order`` are those that cannot be used
        now because their NIC has failed, whatever their own state.
        """
        with self._lock:
            self._until = {
                claim: self._until.get(claim, now + self._terms.setdefault(claim, FIRST_S)) for claim in unfit
            }
            found: dict[Claim, str] = {}
            for claim in unfit:
                if claim.key not in there:
                    found[claim] = "it has gone, and may come again as another"
                    self._terms.pop(claim)
                elif claim.key in out_of_order:
                    # The NIC is down or being reset: retry as soon as it recovers.
                    self._until[claim] = -math.inf
                elif now >= self._until[claim]:
                    found[claim] = "it is tried again"
                    self._terms[claim] = min(2 * self._terms[claim], LONGEST_S)
            for claim in found:
                del self._until[claim]
            return found

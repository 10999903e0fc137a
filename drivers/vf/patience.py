"""Bounded waiting for VFs whose NIC cannot serve requests at the moment."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

#: How long to wait, in seconds. ice waits 0.8 s for a VF reset, i40e 0.3 s (ice_wait_on_vf_reset,
#: i40e_check_vf_init_timeout); a whole NIC resets within seconds. After that, the change is retried
#: when the port is next checked.
PATIENCE_S = 10.0
#: A problem that did not recur for this many times ``PATIENCE_S`` counts as a new one.
_FORGOTTEN = 3


@dataclass
class Patience:
    """Problems of VFs by PCI address: when each began and when it was last seen."""

    _since: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def lasts(self, address: str) -> bool:
        """Record a problem; return whether it is still within ``PATIENCE_S``."""
        now = time.monotonic()
        if now - self._last.get(address, now) > _FORGOTTEN * PATIENCE_S:
            self.forget([address])
        self._last[address] = now
        return now - self._since.setdefault(address, now) < PATIENCE_S

    def forget(self, addresses: Collection[str]) -> None:
        """Forget the problems of these VFs."""
        for address in addresses:
            self._since.pop(address, None)
            self._last.pop(address, None)

    def known(self) -> frozenset[str]:
        """Return the VFs that have a problem."""
        return frozenset(self._since)

"""For how long a VF that its NIC cannot see to now is only waited for."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

#: ice waits for a VF's reset for 0.8 s, i40e for 0.3 s (ice_wait_on_vf_reset,
#: i40e_check_vf_init_timeout); a whole NIC is back within seconds. What takes longer is tried again
#: when the port is looked at the next time.
PATIENCE_S = 10.0
#: A trouble that was not seen for so many times as long is another one when it is seen again.
_FORGOTTEN = 3


@dataclass
class Patience:
    """Troubles of VFs by PCI address, each since when it lasts and when it was last seen."""

    _since: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def lasts(self, address: str) -> bool:
        """Take note of a trouble; whether it has not lasted for too long yet."""
        now = time.monotonic()
        if now - self._last.get(address, now) > _FORGOTTEN * PATIENCE_S:
            self.forget([address])
        self._last[address] = now
        return now - self._since.setdefault(address, now) < PATIENCE_S

    def forget(self, addresses: Collection[str]) -> None:
        """These have ended."""
        for address in addresses:
            self._since.pop(address, None)
            self._last.pop(address, None)

    def known(self) -> frozenset[str]:
        """The VFs that have a trouble."""
        return frozenset(self._since)

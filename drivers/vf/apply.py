"""Apply changes to VFs, and bound the wait for VFs whose NIC cannot serve requests now."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from drivers.vf.commands import SetVf, VfChange
from netplugin.api.errors import NetpluginError, OperationTimeout, Unsupported
from netplugin.backend import Change, Claim
from netplugin.host.vfs import VfBusy, VfRefuses

# -- Apply changes to VFs. A failure affects only the ports of the failed change. -----------------
# A driver temporarily refuses requests while the NIC or VF resets, or while it serves another request.
# The kernel sends no event when that ends, and waiting here would delay the ports on all other NICs.
# Such changes are therefore returned as ``busy`` for the caller to retry.


@dataclass
class Done:
    """The outcome of a batch of changes."""

    #: The error of each port that failed.
    failed: dict[str, NetpluginError] = field(default_factory=dict)
    #: VFs that refuse a setting that other VFs accept, each with the reason.
    unfit: dict[Claim, str] = field(default_factory=dict)
    #: Changes to retry, each with the reason.
    busy: dict[VfChange, VfBusy] = field(default_factory=dict)
    #: Optional changes that the NIC does not support, each with the reason.
    unsupported: dict[SetVf, str] = field(default_factory=dict)


def apply_changes(carry_out: Callable[[VfChange], None], changes: Sequence[Change], deadline: float) -> Done:
    """Apply the VF changes among ``changes`` once each, in order, until ``deadline`` (monotonic, seconds)."""
    done, stopped = Done(), set[str]()
    for change in changes:
        if not isinstance(change, VfChange) or stopped.issuperset(change.ports):
            continue
        try:
            if time.monotonic() >= deadline:
                raise OperationTimeout("the time for the operation is over", step="vf")
            carry_out(change)
        except VfBusy as busy:
            done.busy[change] = busy
            stopped.update(change.ports)
        except NetpluginError as error:
            if isinstance(error, Unsupported) and isinstance(change, SetVf) and change.optional:
                done.unsupported[change] = error.detail
                continue
            done.failed.update({port: error.for_port(port) for port in change.ports})
            stopped.update(change.ports)
            if isinstance(error, VfRefuses):
                done.unfit[change.thing] = error.detail
    return done


def touched(changes: Sequence[Change]) -> frozenset[str]:
    """Return the PCI addresses and interface names that the changes affect."""
    found: set[str] = set()
    for change in changes:
        if isinstance(change, VfChange):
            found.add(change.address)
        if isinstance(change, SetVf):
            found.add(change.pf)
    return frozenset(found)


# -- Bounded waiting for VFs whose NIC cannot serve requests at the moment. -----------------------


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

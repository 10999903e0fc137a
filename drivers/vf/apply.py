"""Apply changes to VFs. A failure affects only the ports of the failed change.

A driver temporarily refuses requests while the NIC or VF resets, or while it serves another request.
The kernel sends no event when that ends, and waiting here would delay the ports on all other NICs.
Such changes are therefore returned as ``busy`` for the caller to retry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drivers.vf.changes import SetVf, VfChange
from netplugin.backend import Change, Claim
from netplugin.errors import NetpluginError, OperationTimeout, Unsupported
from netplugin.host.vfs import VfBusy, VfRefuses


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


def apply_changes(
    carry_out: Callable[[VfChange], None], changes: Sequence[Change], deadline: float
) -> Done:
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

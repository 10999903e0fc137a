"""Carrying out changes on VFs: a port that fails holds up no other, and a VF that fails is reported.

A driver refuses for a moment what it takes a little later: while a NIC or a VF is being reset, and
while it carries out another request. There is no event to wait for, and to wait here would hold up
the ports on all other NICs: who asked tries again.
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
    """What became of changes."""

    #: The ports that failed.
    failed: dict[str, NetpluginError] = field(default_factory=dict)
    #: The VFs that refuse what others take, each with the reason.
    unfit: dict[Claim, str] = field(default_factory=dict)
    #: The changes that are to be tried again, each with the reason.
    busy: dict[VfChange, VfBusy] = field(default_factory=dict)
    #: What was optional and the NIC does not support, each with the reason.
    unsupported: dict[SetVf, str] = field(default_factory=dict)


def apply_changes(
    carry_out: Callable[[VfChange], None], changes: Sequence[Change], deadline: float
) -> Done:
    """Carry out those that are on VFs, each once, in order."""
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
    """The PCI addresses and interfaces that the changes have to do with."""
    found: set[str] = set()
    for change in changes:
        if isinstance(change, VfChange):
            found.add(change.address)
        if isinstance(change, SetVf):
            found.add(change.pf)
    return frozenset(found)

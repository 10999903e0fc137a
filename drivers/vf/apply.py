"""Carrying out changes on VFs: a port that fails holds up no other, and a VF that fails is reported.

A driver refuses for a moment what it takes a little later: while a NIC or a VF is being reset, and
while it carries out another request. There is no event to wait for: the change is tried again with
back-off, after the changes for other ports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from drivers.vf.changes import SetVf, VfChange
from netplugin.backend import Change, Claim
from netplugin.errors import NetpluginError, OperationTimeout, Unsupported
from netplugin.host.vfs import VfBusy, VfRefuses, VfStuck

#: ice waits for a VF's reset for 0.8 s, i40e for 0.3 s (ice_wait_on_vf_reset,
#: i40e_check_vf_init_timeout); a whole NIC is back within seconds. What takes longer is tried again
#: when the port is looked at the next time.
PATIENCE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


def pauses(deadline: float) -> Iterator[None]:
    """Sleep between two trials, longer each time, until the time is over (``time.monotonic``)."""
    until = min(deadline, time.monotonic() + PATIENCE_S)
    pause = _FIRST_PAUSE_S
    while time.monotonic() + pause < until:
        time.sleep(pause)
        yield
        pause = min(2 * pause, _LONGEST_PAUSE_S)


@dataclass
class Done:
    """What became of changes."""

    #: The ports that failed.
    failed: dict[str, NetpluginError] = field(default_factory=dict)
    #: The VFs that refuse what others take, each with the reason.
    unfit: dict[Claim, str] = field(default_factory=dict)
    #: What was to be put back and the NIC does not support, each with the reason.
    unsupported: dict[SetVf, str] = field(default_factory=dict)
    #: Ports of which a change is to be tried again, with the reason.
    busy: dict[str, VfBusy] = field(default_factory=dict)
    #: VFs that are not fit for use if this lasts, with the reason.
    stuck: dict[Claim, str] = field(default_factory=dict)


def apply_changes(
    carry_out: Callable[[VfChange], None], changes: Sequence[Change], deadline: float
) -> Done:
    """Carry out those that are on VFs."""
    done = Done()
    waiting = _try(carry_out, [c for c in changes if isinstance(c, VfChange)], deadline, done)
    is_patient = time.monotonic() + PATIENCE_S <= deadline
    for _ in pauses(deadline) if waiting else ():
        done.busy.clear()
        done.stuck.clear()
        waiting = _try(carry_out, waiting, deadline, done)
        if not waiting:
            break
    for port, busy in done.busy.items():
        error = OperationTimeout(f"{busy.detail}: it did not end in time", step=busy.step)
        done.failed[port] = error.for_port(port)
    if is_patient:  # otherwise the VF had too little time
        done.unfit.update(done.stuck)
    return done


def _try(
    carry_out: Callable[[VfChange], None],
    changes: Sequence[VfChange],
    deadline: float,
    done: Done,
) -> list[VfChange]:
    """Carry out each once, in order; the answer has those to try again."""
    again: list[VfChange] = []
    for change in changes:
        if all(port in done.failed for port in change.ports):
            continue
        if any(port in done.busy for port in change.ports):
            again.append(change)
            continue
        try:
            if time.monotonic() >= deadline:
                raise OperationTimeout("the time for the operation is over", step="vf")
            carry_out(change)
        except VfBusy as busy:
            done.busy.update(dict.fromkeys(change.ports, busy))
            if isinstance(busy, VfStuck):
                done.stuck[change.thing] = busy.detail
            again.append(change)
        except NetpluginError as error:
            if isinstance(error, Unsupported) and isinstance(change, SetVf) and change.restores:
                done.unsupported[change] = error.detail
                continue
            done.failed.update({port: error.for_port(port) for port in change.ports})
            if isinstance(error, VfRefuses):
                done.unfit[change.thing] = error.detail
    return again


def touched(changes: Sequence[Change]) -> frozenset[str]:
    """The PCI addresses and interfaces that the changes have to do with."""
    found: set[str] = set()
    for change in changes:
        if isinstance(change, VfChange):
            found.add(change.address)
        if isinstance(change, SetVf):
            found.add(change.pf)
    return frozenset(found)

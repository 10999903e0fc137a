"""Carrying out changes on VFs: a port that fails holds up no other, and a VF that fails is told."""

from __future__ import annotations

import time
from collections.abc import Sequence

from drivers.vf.changes import SetVf, VfChange
from drivers.vf.kernel import Kernel
from netplugin.backend import Change, Claim
from netplugin.errors import NetpluginError, OperationTimeout
from netplugin.host.vfs import VfRefuses


def apply_changes(
    kernel: Kernel, changes: Sequence[Change], deadline: float
) -> tuple[dict[str, NetpluginError], dict[Claim, str]]:
    """The ports that failed, and the VFs that refuse what others take."""
    failed: dict[str, NetpluginError] = {}
    unfit: dict[Claim, str] = {}
    for change in changes:
        if not isinstance(change, VfChange) or all(port in failed for port in change.ports):
            continue
        try:
            if time.monotonic() >= deadline:
                raise OperationTimeout("the time for the operation is over", step="vf")
            kernel.carry_out(change)
        except NetpluginError as error:
            failed.update({port: error.for_port(port) for port in change.ports})
            if isinstance(error, VfRefuses):
                unfit[change.thing] = error.detail
    return failed, unfit


def touched(changes: Sequence[Change]) -> frozenset[str]:
    """The PCI addresses and interfaces that the changes have to do with."""
    found: set[str] = set()
    for change in changes:
        if isinstance(change, VfChange):
            found.add(change.address)
        if isinstance(change, SetVf):
            found.add(change.pf)
    return frozenset(found)

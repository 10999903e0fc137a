"""The PMD cores of OVS-DPDK: which, how busy, which queues; and setting them, read back."""

from __future__ import annotations

import time
from functools import partial

from netplugin.errors import (
    BackendUnavailable,
    FieldError,
    HostError,
    InvalidRequest,
    NetpluginError,
)
from netplugin.host import cpus, ovs_commands
from netplugin.host.ovs import OvsHost
from netplugin.host.vswitchd import appctl, parse_pmd
from netplugin.models import PmdRequest, PmdState

_READ_S = 5.0
_MASK = "pmd-cpu-mask"
# What vswitchd says as long as it has no bridge, and so no threads either.
_NO_DATAPATH = "please specify an existing datapath"


def show(ovs: OvsHost) -> PmdState:
    """The PMD threads as vswitchd tells of them.

    Raises: BackendUnavailable, HostError, OperationTimeout.
    """
    _require(ovs)
    deadline = time.monotonic() + _READ_S
    rundir = ovs.settings.rundir
    try:
        queues = appctl(rundir, "dpif-netdev/pmd-rxq-show", deadline=deadline)
        load = appctl(rundir, "dpif-netdev/pmd-stats-show", deadline=deadline)
    except HostError as refused:
        if _NO_DATAPATH not in refused.detail:
            raise
        queues = load = ""
    mask = ovs.mirror.root.other_config.get(_MASK, "")
    return PmdState(cpus=cpus.format_list(cpus.from_mask(mask)), cores=parse_pmd(queues, load))


def set_cores(ovs: OvsHost, request: PmdRequest) -> PmdState:
    """Set the PMD cores, live, and read back what vswitchd made of it.

    ``count`` takes the highest CPUs that are on line: CPU 0 is the one Linux likes best for itself.

    Raises: InvalidRequest, and what ``show`` raises; the old mask is put back on an error.
    """
    _require(ovs)
    wanted = choose(request, cpus.online())
    before = ovs.mirror.root.other_config.get(_MASK)
    deadline = time.monotonic() + ovs.settings.timeout_s
    try:
        _write(ovs, cpus.to_mask(wanted), deadline)
        state = show(ovs)
        running = {core.cpu for core in state.cores}
        # Without a port that needs polling there are no PMD threads, and nothing to compare.
        if running and running != set(wanted):
            raise HostError(
                f"vswitchd runs PMD threads on {cpus.format_list(running)}, not on "
                f"{cpus.format_list(wanted)}", step="pmd-verify",
            )  # fmt: skip
    except NetpluginError:
        if before is not None:
            _write(ovs, before, time.monotonic() + ovs.settings.timeout_s)
        raise
    return state


def choose(request: PmdRequest, online: tuple[int, ...]) -> tuple[int, ...]:
    """The CPUs a request means (pure). Raises: InvalidRequest naming the field."""
    if request.count is not None:
        field, wanted = "count", online[-request.count :]
        if request.count > len(online):
            raise _invalid(field, f"{request.count} is more than the {len(online)} CPUs on line")
    else:
        field = "cpus"
        try:
            wanted = cpus.parse_list(str(request.cpus))
        except ValueError as wrong:
            raise _invalid(field, str(wrong)) from wrong
        offline = sorted(set(wanted) - set(online))
        if offline:
            raise _invalid(field, f"{cpus.format_list(offline)} is not on line")
    if set(wanted) == set(online):
        raise _invalid(field, "that would leave no CPU for anything but the PMD threads")
    return wanted


def _write(ovs: OvsHost, mask: str, deadline: float) -> None:
    ovs.write([partial(ovs_commands.SetOtherConfig, key=_MASK, value=mask)], deadline)


def _require(ovs: OvsHost) -> None:
    state = ovs.usable()
    if not state.usable:
        raise BackendUnavailable(str(state.reason), step=state.step, fix=state.fix)


def _invalid(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {message}", step="validate", errors=[FieldError(field=field, message=message)]
    )

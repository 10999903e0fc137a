"""Apply PMD settings in one transaction, verify them, and roll back on failure."""

from __future__ import annotations

import logging
import time
from functools import partial

from netplugin.errors import HostError, NetpluginError
from netplugin.host import cpus
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_commands import SetInterfaceConfig, SetOtherConfig
from netplugin.host.ovsdb import CommandFactory
from netplugin.models import PmdChoice, PmdRequest, PmdState
from netplugin.pmd.change import Change, change
from netplugin.pmd.read import look
from netplugin.pmd.settings import AFFINITY

LOG = logging.getLogger(__name__)


def set_pmd(ovs: OvsHost, request: PmdRequest, chosen: tuple[PmdChoice, ...] = ()) -> PmdState:
    """Apply the request live and return the resulting state. Not thread-safe: one call at a time.

    ``chosen`` are the CPUs that were selected for ``count``.

    Raises: InvalidRequest, Conflict, BackendUnavailable, HostError, OperationTimeout. The settings
    are rolled back before an error is raised.
    """
    ovs.usable().require()
    state = look(ovs).state
    interfaces = ovs.mirror.interfaces()
    affinities = {name: row.other_config.get(AFFINITY) for name, row in interfaces.items()}
    count = tuple(cpu for core in chosen for cpu in cpus.parse_list(core.cpus))
    wanted = change(request, state, affinities, cpus.online(), tuple(sorted(count)))
    known = ovs.mirror.root.other_config
    before = Change(
        {key: known.get(key) for key in wanted.other_config},
        {name: affinities[name] for name in wanted.affinity},
    )
    try:
        _write(ovs, wanted, before)
        found = look(ovs).state
        _verify(wanted, state, found)
    except NetpluginError as failed:
        try:
            _write(ovs, before, wanted)
        except NetpluginError as also:
            LOG.error("PMD settings could not be put back: %s (after: %s)", also, failed)
        raise
    return found.model_copy(update={"chosen": chosen})


def _write(ovs: OvsHost, wanted: Change, before: Change) -> None:
    """Write only differences: waiting for a transaction without changes would time out."""
    commands: list[CommandFactory] = [
        partial(SetOtherConfig, key=key, value=value)
        for key, value in wanted.other_config.items()
        if value != before.other_config[key]
    ]
    commands += [
        partial(SetInterfaceConfig, name=name, key=AFFINITY, value=value)
        for name, value in wanted.affinity.items()
        if value != before.affinity[name]
    ]
    if commands:
        ovs.write(commands, time.monotonic() + ovs.settings.timeout_s)


def _verify(wanted: Change, before: PmdState, found: PmdState) -> None:
    """Compare vswitchd's state with the change. Raises: HostError if it differs."""
    running = {core.cpu for core in found.cores}
    # Without a port that needs polling, OVS has no PMD threads to compare.
    if wanted.cores is not None and running and running != set(wanted.cores):
        raise HostError(
            f"vswitchd runs PMD threads on {cpus.format_list(running)}, not on "
            f"{cpus.format_list(wanted.cores)}", step="pmd-verify",
        )  # fmt: skip
    places = {(q.port, q.queue): core.cpu for core in found.cores for q in core.queues}
    for (port, queue), cpu in sorted(wanted.places.items()):
        there = places.get((port, queue))
        if there != cpu:
            where = "no PMD thread" if there is None else f"the PMD thread on CPU {there}"
            raise HostError(
                f"{port} queue {queue} is polled by {where}, not on CPU {cpu}", step="pmd-verify"
            )
    lost = [queue for queue in found.unpolled if queue not in before.unpolled]
    if lost:
        names = ", ".join(f"{one.port} queue {one.queue}" for one in lost[:5])
        raise HostError(f"no PMD thread polls {names}", step="pmd-verify")

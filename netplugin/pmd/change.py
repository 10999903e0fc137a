"""Change PMD settings: validate a request, apply it in one transaction, verify, roll back on failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from netplugin.api.errors import Conflict, HostError, InvalidRequest, NetpluginError, some
from netplugin.api.pmd_models import AutoLoadBalanceRequest, PmdChoice, PmdProposal, PmdRequest, PmdState
from netplugin.host import cpus
from netplugin.host.ovs import OvsHost
from netplugin.host.ovsdb_replica import SetOtherConfig
from netplugin.pmd.balance import Key
from netplugin.pmd.propose import is_measured, propose
from netplugin.pmd.read import look
from netplugin.pmd.settings import AFFINITY, AUTO_LB, MASK, affinity_text, masked, read_affinity

#: The value of ``pmd-rxq-affinity`` of each interface; None: not set.
Affinities = Mapping[str, str | None]


@dataclass(frozen=True)
class PmdChange:
    """Keys of ``other_config`` and affinities of interfaces to write; None: remove the key.

    ``cores`` are the CPUs that are to have PMD threads, if they change. ``places`` are the CPUs on
    which queues must be found afterwards.
    """

    other_config: Mapping[str, str | None] = field(default_factory=dict)
    affinity: Affinities = field(default_factory=dict)
    cores: tuple[int, ...] | None = None
    places: Mapping[Key, int] = field(default_factory=dict)


def change(
    request: PmdRequest,
    state: PmdState,
    affinities: Affinities,
    online: tuple[int, ...],
    chosen: tuple[int, ...] = (),
) -> PmdChange:
    """``affinities`` are of all interfaces of OVS, ``chosen`` are the CPUs selected for ``count``.

    Raises: InvalidRequest naming the field, Conflict.
    """
    other_config: dict[str, str | None] = {}
    affinity = {port: dict(queues) for port, queues in (request.affinity or {}).items()}
    if request.proposed:
        proposal = _proposal(state)
        other_config |= proposal.settings
        affinity = proposal.affinity
    if request.auto_load_balance is not None:
        other_config |= _auto_load_balance(request.auto_load_balance)
    cores = None
    if request.cpus is not None or request.count is not None:
        cores = chosen if request.count is not None else named(request, online)
        other_config[MASK] = cpus.to_mask(cores)
    before = {port: read_affinity(text) for port, text in affinities.items()}
    after = _pins(request, affinity, state, before)
    _refuse_lost_pins(request, state, cores, before, after)
    there = _threads(state, cores)
    asked = [(port, queue, cpu) for port, queues in affinity.items() for queue, cpu in queues.items()]
    places = {(port, int(queue)): cpu for port, queue, cpu in asked if cpu is not None}
    for (port, number), cpu in places.items():
        if cpu not in there:
            found = f"CPU {cpu} is not among those of PMD threads, {cpus.format_list(there)}"
            elsewhere = "and OVS would poll the queue elsewhere without a word"
            raise _invalid(f"affinity.{port}.{number}", f"{found}, {elsewhere}")
    if not request.proposed and (places or cores is not None):
        # OVS skips the CPUs of its mask that are not on line.
        running = there.intersection(core.cpu for core in state.cores)
        _refuse_unpolled(request, state, there if cores else running or there, after)
    texts = {port: affinity_text(pins) for port, pins in after.items() if pins != before[port]}
    return PmdChange(other_config, texts, cores, places)


def named(request: PmdRequest, online: tuple[int, ...]) -> tuple[int, ...]:
    """The CPUs that the request lists. Raises: InvalidRequest."""
    try:
        desired = cpus.parse_list(str(request.cpus))
    except ValueError as wrong:
        raise _invalid("cpus", str(wrong)) from wrong
    offline = sorted(set(desired) - set(online))
    if offline:
        raise _invalid("cpus", f"{cpus.format_list(offline)} is not on line")
    if set(desired) == set(online):
        raise _invalid("cpus", "that would leave no CPU for anything but the PMD threads")
    return desired


def _proposal(state: PmdState) -> PmdProposal:
    if is_measured(state):
        return propose(state)
    unknown = "OVS has not measured the load of all queues yet"
    raise Conflict(unknown, step="propose", fix="ask again in a minute")


def _auto_load_balance(request: AutoLoadBalanceRequest) -> dict[str, str | None]:
    given = ((key, getattr(request, name)) for name, key in AUTO_LB.items())
    return {key: str(value).lower() for key, value in given if value is not None}


def _pins(
    request: PmdRequest,
    affinity: Mapping[str, Mapping[str, int | None]],
    state: PmdState,
    before: Mapping[str, dict[int, int]],
) -> dict[str, dict[int, int]]:
    """The resulting pinnings of all interfaces. Queues that do not exist now keep theirs."""
    after = {port: dict(pins) for port, pins in before.items()}
    for number, port in enumerate(request.clear_affinity):
        if port not in after:
            raise _invalid(f"clear_affinity.{number}", f"OVS has no interface {port[:64]}")
    for port in after if request.clear_all_affinity else request.clear_affinity:
        after[port] = {}
    polled = [(queue.port, queue.queue) for core in state.cores for queue in core.queues]
    polled += [(queue.port, queue.queue) for queue in state.unpolled]
    for port, queues in affinity.items():
        there = sorted(queue for name, queue in polled if name == port)
        if not there:
            raise _invalid(f"affinity.{port}", "OVS has no such port that PMD threads poll")
        for queue, cpu in queues.items():
            if int(queue) not in there:
                has = f"the port has {len(there)} receive queues now, {cpus.format_list(there)}"
                raise _invalid(f"affinity.{port}.{queue}", has)
            after[port].pop(int(queue), None)
            if cpu is not None:
                after[port][int(queue)] = cpu
    return after


def _threads(state: PmdState, cores: tuple[int, ...] | None) -> frozenset[int]:
    """The CPUs of the PMD threads after the change. Without a mask, the CPUs that OVS has chosen."""
    running = (core.cpu for core in state.cores)
    return frozenset(cores or masked(state.settings.mask) or running)


def _refuse_lost_pins(
    request: PmdRequest,
    state: PmdState,
    cores: tuple[int, ...] | None,
    before: Mapping[str, dict[int, int]],
    after: Mapping[str, dict[int, int]],
) -> None:
    """Refuse to remove the PMD thread of a CPU that queues are pinned to."""
    if cores is None:
        return
    gone = _threads(state, None) - set(cores)
    for port, pins in sorted(after.items()):
        for queue, cpu in sorted(pins.items()):
            if cpu in gone and before[port].get(queue) == cpu:
                found = f"{port} queue {queue} is pinned to CPU {cpu}, which would have no PMD thread: "
                found += "clear or change the pinning in the same call"
                raise _invalid("cpus" if request.cpus is not None else "count", found)


def _refuse_unpolled(
    request: PmdRequest, state: PmdState, there: Collection[int], after: Mapping[str, dict[int, int]]
) -> None:
    """Refuse to isolate every thread: queues without a pinning, now or of a later port, need one."""
    pinned = {cpu for pins in after.values() for cpu in pins.values()}
    if state.settings.rxq_isolate and there and pinned.issuperset(there):
        name = "affinity" if request.affinity else "cpus" if request.cpus else "count"
        found = (
            f"every PMD thread (CPUs {cpus.format_list(there)}) would have pinned queues, and so none would "
        )
        found += "poll those that are not pinned, such as the next port's: leave one without, or let "
        found += "pinned queues share their thread (pmd-rxq-assign=group, pmd-rxq-isolate=false)"
        raise _invalid(name, found)


_invalid = InvalidRequest.of_field


LOG = logging.getLogger(__name__)


def set_pmd(ovs: OvsHost, request: PmdRequest, chosen: tuple[PmdChoice, ...] = ()) -> PmdState:
    """Apply the request live and return the resulting state. Not thread-safe: one call at a time.

    ``chosen`` are the CPUs that were selected for ``count``.

    Raises: InvalidRequest, Conflict, BackendUnavailable, HostError, OperationTimeout. The settings
    are rolled back before an error is raised.
    """
    ovs.usable().require()
    state = look(ovs).state
    interfaces = ovs.view.interfaces()
    affinities = {name: row.other_config.get(AFFINITY) for name, row in interfaces.items()}
    count = tuple(cpu for core in chosen for cpu in cpus.parse_list(core.cpus))
    desired = change(request, state, affinities, cpus.online(), tuple(sorted(count)))
    known = ovs.view.root.other_config
    config = {key: known.get(key) for key in desired.other_config}
    before = PmdChange(config, {name: affinities[name] for name in desired.affinity})
    try:
        _write(ovs, desired, before)
        found = look(ovs).state
        _verify(desired, state, found)
    except NetpluginError as failed:
        try:
            _write(ovs, before, desired)
        except NetpluginError as also:
            LOG.error("PMD settings could not be put back: %s (after: %s)", also, failed)
        raise
    return found.model_copy(update={"chosen": chosen})


def _write(ovs: OvsHost, desired: PmdChange, before: PmdChange) -> None:
    """Write only differences: waiting for a transaction without changes would time out."""
    config, pins = desired.other_config, desired.affinity
    writes = [SetOtherConfig(key, text) for key, text in config.items() if text != before.other_config[key]]
    changed = [name for name, text in pins.items() if text != before.affinity[name]]
    writes += [SetOtherConfig(AFFINITY, pins[name], interface=name) for name in changed]
    if writes:
        ovs.db.write(writes, time.monotonic() + ovs.settings.timeout_s)


def _verify(desired: PmdChange, before: PmdState, found: PmdState) -> None:
    """Compare vswitchd's state with the change. Raises: HostError if it differs."""
    running = {core.cpu for core in found.cores}
    # Without a port that needs polling, OVS has no PMD threads to compare.
    if desired.cores is not None and running and running != set(desired.cores):
        on, desired_on = cpus.format_list(running), cpus.format_list(desired.cores)
        raise HostError(f"vswitchd runs PMD threads on {on}, not on {desired_on}", step="pmd-verify")
    places = {(q.port, q.queue): core.cpu for core in found.cores for q in core.queues}
    for (port, queue), cpu in sorted(desired.places.items()):
        there = places.get((port, queue))
        if there != cpu:
            where = "no PMD thread" if there is None else f"the PMD thread on CPU {there}"
            raise HostError(f"{port} queue {queue} is polled by {where}, not on CPU {cpu}", step="pmd-verify")
    lost = [f"{one.port} queue {one.queue}" for one in found.unpolled if one not in before.unpolled]
    if lost:
        raise HostError(f"no PMD thread polls {some(lost)}", step="pmd-verify")

"""Read the PMD threads of a running OVS, from ovs-appctl and the database, into a PmdState."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from netplugin.errors import HostError
from netplugin.host import cpus
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovs_rows import OvsInterface
from netplugin.host.vswitchd import appctl
from netplugin.models import PmdCore, PmdState, RxQueue, UnpolledQueue
from netplugin.pmd.counters import Counters, parse_counters
from netplugin.pmd.settings import AFFINITY, masked, read_affinity, read_settings
from netplugin.pmd.threads import PolledQueue, Thread, Threads, parse_threads

READ_S = 5.0
#: OVS measures the usage of queues in steps of 5 s, up to one minute (PMD_INTERVAL_LEN, _MAX).
_STEP_S, _MOST_S = 5, 60
# The error text of vswitchd while it has no bridge, and so no PMD threads.
_NO_DATAPATH = "please specify an existing datapath"


@dataclass(frozen=True)
class Reading:
    """One reading. ``counters`` are by CPU, and grow until a thread ends or is cleared."""

    state: PmdState
    counters: Mapping[int, Counters]


def look(ovs: OvsHost, *, wait_s: float = READ_S, usage_s: float | None = None) -> Reading:
    """Read the agent's OVS; see ``read``. Raises: BackendUnavailable, HostError, OperationTimeout."""
    ovs.answers().require()
    return read(ovs.mirror, ovs.settings.rundir, time.monotonic() + wait_s, usage_s)


def read(mirror: Mirror, rundir: Path, deadline: float, usage_s: float | None = None) -> Reading:
    """Read the OVS of this database and run directory.

    The usage of queues covers the last ``usage_s`` seconds (rounded up to steps of 5), or the last
    minute.

    Raises: BackendUnavailable, HostError, OperationTimeout.
    """
    seconds = [] if usage_s is None else ["-secs", str(_steps(usage_s))]
    try:
        queues = appctl(rundir, "dpif-netdev/pmd-rxq-show", *seconds, deadline=deadline)
        # OVS 4.0 handles it like pmd-perf-show.
        counted = appctl(rundir, "dpif-netdev/pmd-stats-show", deadline=deadline)
    except HostError as refused:
        if _NO_DATAPATH not in refused.detail:
            raise
        queues = counted = ""
    counters = parse_counters(counted)
    other_config = mirror.root.other_config
    state = state_of(other_config, parse_threads(queues), counters, mirror.interfaces())
    return Reading(state, counters)


def state_of(
    other_config: Mapping[str, str],
    shown: Threads,
    counters: Mapping[int, Counters],
    interfaces: Mapping[str, OvsInterface],
) -> PmdState:
    """Build the state from its sources (pure)."""
    settings = read_settings(other_config)
    return PmdState(
        cpus=cpus.format_list(masked(settings.mask)),
        cores=tuple(_core(t, counters.get(t.cpu), interfaces) for t in shown.threads),
        settings=settings,
        usage_seconds=shown.seconds,
        unpolled=_unpolled(shown, interfaces),
    )


def between(before: Reading, after: Reading, interval_s: float) -> PmdState:
    """The state with the counters between two readings (pure); null for new threads."""
    cores = []
    for core in after.state.cores:
        then, now = before.counters.get(core.cpu), after.counters.get(core.cpu)
        grown = now.since(then) if now and then else None
        core = _counted(core, grown)
        if core.busy_percent is None and grown and grown.cycles:
            # The interval is too short for the rounded shares of OVS 4.0, so use the usage of the
            # queues.
            core = core.model_copy(update={"busy_percent": _usage(core)})
        cores.append(core)
    return after.state.model_copy(update={"cores": tuple(cores), "interval_s": interval_s})


def _core(
    thread: Thread, counters: Counters | None, interfaces: Mapping[str, OvsInterface]
) -> PmdCore:
    queues = (_queue(queue, thread, interfaces.get(queue.port)) for queue in thread.queues)
    core = PmdCore(
        cpu=thread.cpu,
        numa_node=thread.numa_node,
        isolated=thread.isolated,
        overhead_percent=thread.overhead_percent,
        queues=tuple(queues),
        busy_percent=None,
    )
    return _counted(core, counters)


def _counted(core: PmdCore, counted: Counters | None) -> PmdCore:
    names = (
        "busy_percent", "packets", "cycles_per_packet", "processing_cycles_per_packet", "upcalls",
        "lost_upcalls",
    )  # fmt: skip
    return core.model_copy(
        update={name: getattr(counted, name) if counted else None for name in names}
    )


def _queue(queue: PolledQueue, thread: Thread, interface: OvsInterface | None) -> RxQueue:
    node = interface.numa_node if interface else None
    pins = read_affinity(interface.other_config.get(AFFINITY)) if interface else {}
    return RxQueue(
        port=queue.port,
        queue=queue.queue,
        enabled=queue.enabled,
        usage_percent=queue.usage_percent,
        pinned_to=pins.get(queue.queue),
        port_numa_node=node,
        numa_mismatch=node is not None and node != thread.numa_node,
    )


def _unpolled(shown: Threads, interfaces: Mapping[str, OvsInterface]) -> tuple[UnpolledQueue, ...]:
    """Queues that no thread polls, because all threads are isolated and the queue is not pinned.

    vswitchd reports this only in its log ("This rx queue will not be polled").
    """
    if not shown.threads or not all(thread.isolated for thread in shown.threads):
        return ()
    polled = {(queue.port, queue.queue) for thread in shown.threads for queue in thread.queues}
    wanted = [
        (name, queue)
        for name, interface in sorted(interfaces.items())
        if interface.type.startswith("dpdk") and interface.works_at
        for queue in range(_count(interface))
    ]
    return tuple(UnpolledQueue(port=p, queue=q) for p, q in wanted if (p, q) not in polled)


def _count(interface: OvsInterface) -> int:
    """The number of receive queues as vswitchd reports it (for a NIC since 3.3), else as configured."""
    asked = interface.options.get("n_rxq", "1")
    return interface.queues or (int(asked) if asked.isdecimal() else 1) or 1


def _usage(core: PmdCore) -> float | None:
    shares = [queue.usage_percent for queue in core.queues] + [core.overhead_percent]
    known = [share for share in shares if share is not None]
    return float(min(100, sum(known))) if core.queues and len(known) == len(shares) else None


def _steps(seconds: float) -> int:
    return min(_MOST_S, max(1, math.ceil(seconds / _STEP_S)) * _STEP_S)

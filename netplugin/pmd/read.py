"""Read the PMD threads of a running OVS, from ovs-appctl and the database, into a PmdState."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from netplugin.api.errors import HostError
from netplugin.api.pmd_models import PmdCore, PmdState, RxQueue, UnpolledQueue
from netplugin.host import cpus
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import PORT_MARK, VM_ID, OvsInterface
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovs_view import OvsView
from netplugin.host.vswitchd import appctl
from netplugin.pmd.settings import AFFINITY, masked, read_affinity, read_settings

#: pmd_info_show_rxq in lib/dpif-netdev.c: the same format from OVS 3.1 to 4.0.
_SECONDS = re.compile(r"^Displaying last (\d{1,20}) seconds pmd usage %$")
_THREAD = re.compile(r"^pmd thread numa_id (\d{1,20}) core_id (\d{1,20}):$")
_ISOLATED = re.compile(r"^  isolated : (true|false)$")
_QUEUE = re.compile(
    r"^  port: (\S+)\s+queue-id:\s+(\d{1,20}) \((enabled|disabled)\)\s+"
    r"pmd usage:\s+(?:(\d{1,20}) %|NOT AVAIL)$"
)
_OVERHEAD = re.compile(r"^  overhead:\s+(\d{1,20}) %$")


@dataclass(frozen=True)
class PmdThreads:
    """All PMD threads as they are printed. ``seconds`` is the period that the usage covers."""

    threads: tuple[PmdCore, ...] = ()
    seconds: int | None = None


def parse_threads(text: str) -> PmdThreads:
    threads: list[PmdCore] = []
    seconds: int | None = None
    for line in text.splitlines():
        if shown := _SECONDS.match(line):
            seconds = int(shown[1])
        elif found := _THREAD.match(line):
            node, cpu = int(found[1]), int(found[2])
            threads.append(PmdCore(cpu=cpu, numa_node=node, isolated=False, busy_percent=None, queues=()))
        elif threads:
            threads[-1] = threads[-1].model_copy(update=_of_line(threads[-1], line))
    return PmdThreads(tuple(threads), seconds)


def _of_line(thread: PmdCore, line: str) -> dict[str, Any]:
    """What a line of a thread changes of it."""
    if found := _ISOLATED.match(line):
        return {"isolated": found[1] == "true"}
    if found := _OVERHEAD.match(line):
        return {"overhead_percent": int(found[1])}
    if found := _QUEUE.match(line):
        usage, is_enabled = int(found[4]) if found[4] else None, found[3] == "enabled"
        queue = RxQueue(port=found[1], queue=int(found[2]), enabled=is_enabled, usage_percent=usage)
        return {"queues": (*thread.queues, queue)}
    return {}


_COUNTED = re.compile(r"^pmd thread numa_id \d+ core_id (\d{1,20}):$")
#: pmd_info_show_stats in lib/dpif-netdev.c, OVS 3.1 to 3.7. The last two are missing without cycles.
_STATS = {
    "packets": re.compile(r"^  packets received: (\d{1,20})$"),
    "upcalls": re.compile(r"^  miss with success upcall: (\d{1,20})$"),
    "lost_upcalls": re.compile(r"^  miss with failed upcall: (\d{1,20})$"),
    "idle_cycles": re.compile(r"^  idle cycles: (\d{1,20}) "),
    "busy_cycles": re.compile(r"^  processing cycles: (\d{1,20}) "),
}
#: pmd_perf_format_overall_stats in lib/dpif-netdev-perf.c, which OVS 4.0 prints for both commands.
_PERF = {
    "packets": re.compile(r"^  Rx packets: +(\d{1,20})"),
    "upcalls": re.compile(r"^  - Upcalls: +(\d{1,20})"),
    "lost_upcalls": re.compile(r"^  - Lost upcalls: +(\d{1,20})"),
    "cycles": re.compile(r"^  - Used TSC cycles: +(\d{1,20})"),
    "busy_share": re.compile(r"^  - busy iterations: +\d+  \( *(\d{1,20}(?:\.\d+)?) % of used cycles\)"),
    "packet_cycles": re.compile(r"^  Rx packets: .* (\d{1,20}) cycles/pkt\)"),
}
#: A share of cycles with a larger relative error is not reported.
_CERTAIN = 0.05


@dataclass(frozen=True)
class PmdCounters:
    """Counters of one thread since it started or was cleared; cycles are TSC cycles.

    ``busy_cycles`` are those of polls that returned packets. OVS 4.0 prints them as a rounded
    share, so they may be off by ``busy_error``. A TSC that goes back makes either less than 0.
    """

    packets: int = 0
    cycles: int = 0
    busy_cycles: int = 0
    busy_error: int = 0
    upcalls: int = 0
    lost_upcalls: int = 0

    def since(self, before: PmdCounters) -> PmdCounters | None:
        """The difference to ``before``; None if the thread was restarted or cleared in between."""
        if self.packets < before.packets or self.cycles < before.cycles:
            return None
        grown = {f.name: max(0, getattr(self, f.name) - getattr(before, f.name)) for f in fields(self)}
        return PmdCounters(**grown | {"busy_error": self.busy_error + before.busy_error})

    @property
    def busy_percent(self) -> float | None:
        """The share of busy cycles in percent; None if unknown or too inaccurate."""
        if self.cycles <= 0 or self.busy_error > _CERTAIN * self.cycles:
            return None
        return round(100 * min(max(0, self.busy_cycles), self.cycles) / self.cycles, 2)

    @property
    def cycles_per_packet(self) -> float | None:
        return round(self.cycles / self.packets, 1) if self.packets and self.cycles > 0 else None

    @property
    def processing_cycles_per_packet(self) -> float | None:
        if not self.packets or self.cycles <= 0 or self.busy_error > _CERTAIN * self.busy_cycles:
            return None
        return round(min(self.busy_cycles, self.cycles) / self.packets, 1)


def _counters(shown: Mapping[str, float]) -> PmdCounters:
    found = {name: int(value) for name, value in shown.items()}
    counts = {name: found.get(name, 0) for name in ("packets", "upcalls", "lost_upcalls")}
    if "cycles" not in found:
        busy, idle = (_signed(found.get(name, 0)) for name in ("busy_cycles", "idle_cycles"))
        return PmdCounters(cycles=busy + idle, busy_cycles=busy, **counts)
    # OVS prints a share with one decimal and whole cycles per packet. Use the more accurate one.
    cycles, packets = found["cycles"], counts["packets"]
    choices = [(cycles // 2000, round(cycles * shown.get("busy_share", 0.0) / 100))]
    if "packet_cycles" in found:
        choices.append((packets // 2, packets * found["packet_cycles"]))
    error, busy = min(choices)
    return PmdCounters(cycles=cycles, busy_cycles=busy, busy_error=error, **counts)


def _signed(cycles: int) -> int:
    """OVS adds up differences of the TSC in 64 bits without a sign: where the TSC goes back, as in a VM when
    a thread changes its CPU, the sum of a thread that has just started may be below 0."""
    return cycles - (1 << 64) if cycles >= 1 << 63 else cycles


def parse_counters(text: str) -> dict[int, PmdCounters]:
    """Counters by CPU, without the main thread. A thread without any counter is left out."""
    sections: dict[int, dict[str, float]] = {}
    current: dict[str, float] | None = None
    for line in text.splitlines():
        if thread := _COUNTED.match(line):
            current = sections.setdefault(int(thread[1]), {})
        elif line.startswith("main thread"):
            current = None
        elif current is not None:
            for name, pattern in (*_STATS.items(), *_PERF.items()):
                if match := pattern.match(line):
                    current[name] = float(match[1]) if "." in match[1] else int(match[1])
    return {cpu: _counters(shown) for cpu, shown in sections.items() if shown}


READ_S = 5.0
#: OVS measures the usage of queues in steps of 5 s, up to one minute (PMD_INTERVAL_LEN, _MAX).
_STEP_S, _MOST_S = 5, 60
# The error text of vswitchd while it has no bridge, and so no PMD threads.
_NO_DATAPATH = "please specify an existing datapath"


@dataclass(frozen=True)
class PmdReading:
    """One reading. ``counters`` are by CPU, and grow until a thread ends or is cleared."""

    state: PmdState
    counters: Mapping[int, PmdCounters]


def look(ovs: OvsHost, *, wait_s: float = READ_S, usage_s: float | None = None) -> PmdReading:
    """Read the agent's OVS; see ``read``. Raises: BackendUnavailable, HostError, OperationTimeout."""
    ovs.answers().require()
    return read(ovs.caught_up(), ovs.settings.sockets, time.monotonic() + wait_s, usage_s)


def read(view: OvsView, sockets: OvsSockets, deadline: float, usage_s: float | None = None) -> PmdReading:
    """Read the OVS of this database and these sockets.

    The usage of queues covers the last ``usage_s`` seconds (rounded up to steps of 5), or the last minute.

    Raises: BackendUnavailable, HostError, OperationTimeout.
    """
    seconds = [] if usage_s is None else ["-secs", str(_steps(usage_s))]
    try:
        queues = appctl(sockets, "dpif-netdev/pmd-rxq-show", *seconds, deadline=deadline)
        # OVS 4.0 handles it like pmd-perf-show.
        counted = appctl(sockets, "dpif-netdev/pmd-stats-show", deadline=deadline)
    except HostError as refused:
        if _NO_DATAPATH not in refused.detail:
            raise
        queues = counted = ""
    counters = parse_counters(counted)
    other_config = view.root.other_config
    state = state_of(other_config, parse_threads(queues), counters, view.interfaces())
    return PmdReading(state, counters)


def state_of(
    other_config: Mapping[str, str],
    shown: PmdThreads,
    counters: Mapping[int, PmdCounters],
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


def between(before: PmdReading, after: PmdReading, interval_s: float) -> PmdState:
    """The state with the counters between two readings (pure); null for new threads."""
    cores = []
    for core in after.state.cores:
        then, now = before.counters.get(core.cpu), after.counters.get(core.cpu)
        grown = now.since(then) if now and then else None
        core = _counted(core, grown)
        if core.busy_percent is None and grown and grown.cycles:
            # The interval is too short for the rounded shares of OVS 4.0: use the usage of the queues.
            core = core.model_copy(update={"busy_percent": _usage(core)})
        cores.append(core)
    return after.state.model_copy(update={"cores": tuple(cores), "interval_s": interval_s})


def _core(thread: PmdCore, counters: PmdCounters | None, interfaces: Mapping[str, OvsInterface]) -> PmdCore:
    queues = tuple(_queue(queue, thread, interfaces.get(queue.port)) for queue in thread.queues)
    return _counted(thread.model_copy(update={"queues": queues}), counters)


#: What a thread shows of its counters.
_SHOWN = "busy_percent packets cycles_per_packet processing_cycles_per_packet upcalls lost_upcalls".split()


def _counted(core: PmdCore, counted: PmdCounters | None) -> PmdCore:
    return core.model_copy(update={name: getattr(counted, name) if counted else None for name in _SHOWN})


def _queue(queue: RxQueue, thread: PmdCore, interface: OvsInterface | None) -> RxQueue:
    """With what the database has of the interface."""
    node = interface.numa_node if interface else None
    pins = read_affinity(interface.other_config.get(AFFINITY)) if interface else {}
    known = {
        "pinned_to": pins.get(queue.queue),
        "port_numa_node": node,
        "numa_mismatch": node is not None and node != thread.numa_node,
    }
    return queue.model_copy(update=known | _owner(interface))


def _owner(interface: OvsInterface | None) -> dict[str, str | None]:
    """The port and the VM that an interface is of, by its marks."""
    marks = interface.external_ids if interface else {}
    return {"port_id": marks.get(PORT_MARK), "vm_id": marks.get(VM_ID)}


def _unpolled(shown: PmdThreads, interfaces: Mapping[str, OvsInterface]) -> tuple[UnpolledQueue, ...]:
    """Queues that no thread polls, because all threads are isolated and the queue is not pinned.

    vswitchd reports this only in its log ("This rx queue will not be polled").
    """
    if not shown.threads or not all(thread.isolated for thread in shown.threads):
        return ()
    polled = {(queue.port, queue.queue) for thread in shown.threads for queue in thread.queues}
    return tuple(
        UnpolledQueue(port=name, queue=queue, **_owner(interface))
        for name, interface in sorted(interfaces.items())
        if interface.type.startswith("dpdk") and interface.works_at
        for queue in range(_count(interface))
        if (name, queue) not in polled
    )


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

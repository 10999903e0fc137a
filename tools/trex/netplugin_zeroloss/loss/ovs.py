"""The component ``ovs``: drops of ports and of the datapath, and the load of the PMD threads."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from netplugin.api.errors import NetpluginError
from netplugin.host import vswitchd
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.processes import run
from netplugin.pmd.read import PmdCounters, parse_counters, parse_threads
from netplugin_zeroloss.loss.contract import AttributionError, CounterChanges, CounterReading, DropCounters

# -- Parsers for ovs-ofctl and ovs-appctl output on ports and drops (OVS 3.1 to 4.0).

_PORT = re.compile(r'^\s+port\s+"?([^":]+)"?:\s+rx\s+(.*)$')
_COUNT = re.compile(r"([a-z0-9_]+)=(\d{1,20})")
_COVERAGE = re.compile(r"^((?:datapath_drop|drop_action)_\w+)\s.*total: (\d{1,20})$")
_LOOKUPS = re.compile(r"^\s+lookups:.*\blost:(\d{1,20})$")


#: Reasons that ``drop`` of a DPDK port includes (netdev_dpdk_get_stats in lib/netdev-dpdk.c).
_NAMED = (
    "ovs_rx_qos_drops", "rx_missed_errors", "ovs_tx_failure_drops", "ovs_tx_mtu_exceeded_drops",
    "ovs_tx_qos_drops", "ovs_tx_invalid_hwol_drops",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OvsPortCounts:
    """Counters of one port: received, sent, and specific to the port type."""

    rx: Mapping[str, int] = field(default_factory=dict)
    tx: Mapping[str, int] = field(default_factory=dict)
    custom: Mapping[str, int] = field(default_factory=dict)


def parse_ports(text: str) -> dict[str, OvsPortCounts]:
    """Parse ``ovs-ofctl --names dump-ports`` (OpenFlow 1.4), by port name; skips unknown counts (``?``)."""
    found: dict[str, OvsPortCounts] = {}
    name = ""
    custom: dict[str, int] = {}
    for line in text.splitlines():
        if port := _PORT.match(line):
            name, custom = port[1], {}
            found[name] = OvsPortCounts(rx=_counts("pkts=" + port[2].partition("pkts=")[2]), custom=custom)
        elif name and line.strip().startswith("tx pkts="):
            found[name] = OvsPortCounts(found[name].rx, _counts(line), custom)
        elif name and "duration=" not in line:
            custom.update(_counts(line))
    return found


def _counts(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in _COUNT.findall(text)}


def lost_at(port: OvsPortCounts) -> dict[str, int]:
    """Return the frames lost at a port, each counted once (pure).

    What ``drop`` has beyond the named reasons is ``rx_dropped`` and ``tx_dropped``. A failed mbuf allocation
    is not a lost frame by itself: the NIC counts the missed frame.
    """
    lost = {name: port.custom.get(name, 0) for name in _NAMED}
    named_rx = lost["ovs_rx_qos_drops"] + lost["rx_missed_errors"]
    named_rx += port.custom.get("rx_mbuf_allocation_errors", 0)
    named_tx = sum(count for name, count in lost.items() if name.startswith("ovs_tx_"))
    lost["rx_dropped"] = max(0, port.rx.get("drop", 0) - named_rx)
    lost["tx_dropped"] = max(0, port.tx.get("drop", 0) - named_tx)
    lost["rx_errors"] = port.rx.get("errs", 0)
    lost["tx_errors"] = port.tx.get("errs", 0)
    return lost


def parse_drops(coverage_show: str) -> dict[str, int]:
    """Parse ``coverage/show``: drops of the datapath and the pipeline, by reason."""
    found = (_COVERAGE.match(line) for line in coverage_show.splitlines())
    return {line[1]: int(line[2]) for line in found if line}


def parse_upcalls_lost(dpctl_show: str) -> int:
    """Parse ``dpctl/show``: frames lost because an upcall failed."""
    return sum(int(found[1]) for found in map(_LOOKUPS.match, dpctl_show.splitlines()) if found)


# -- The component ``ovs`` --------------------------------------------------------------------------

#: Reported twice: as lost lookups and as a coverage counter (dp_netdev_pmd in lib/dpif-netdev.c).
_UPCALL = "datapath_drop_upcall_error"
#: Commands of vswitchd; ``reading`` takes what they print.
_ASKED = ("coverage/show", "dpctl/show", "dpif-netdev/pmd-stats-show", "dpif-netdev/pmd-rxq-show")
#: Only vhost-user ports have this counter.
_RETRIES = "ovs_tx_retries"
_LOCAL = "LOCAL"
#: Frames of a receive queue, of a NIC or of a vhost-user port. Queues come and go with the guest's driver.
_QUEUE = re.compile(r"rx_q(\d+)_(?:good_)?packets")
#: OVS 4.0 prints busy cycles rounded: from which share of them an error is too large.
_CERTAIN = 0.05


@dataclass(frozen=True, slots=True)
class OvsThreads:
    """The PMD threads by their CPU, and the CPU of the thread that polls a queue."""

    pmds: Mapping[int, PmdCounters] = field(default_factory=dict)
    placement: Mapping[str, float] = field(default_factory=dict)


class OvsCounters(DropCounters):
    """Open vSwitch with the userspace datapath; ``bridges`` are those on the path of the frames."""

    name = "ovs"

    def __init__(
        self, rundir: Path, bridges: Sequence[str], vhost_ports: Sequence[str], timeout_s: float
    ) -> None:
        """``vhost_ports``: the vhost-user ports of the test.

        Ports of other VMs receive copies of flooded frames, and their drops must not count.
        """
        self._sockets, self._bridges, self._timeout_s = OvsSockets.below(rundir), tuple(bridges), timeout_s
        self._vhost_ports = frozenset(vhost_ports)

    def read(self) -> CounterReading:
        deadline = time.monotonic() + self._timeout_s
        try:
            ports = [self._ports(bridge, deadline) for bridge in self._bridges]
            texts = [vswitchd.appctl(self._sockets, command, deadline=deadline) for command in _ASKED]
        except NetpluginError as error:
            raise AttributionError(f"ovs: {error}") from error
        counts = {n: c for text in ports for n, c in parse_ports(text).items() if self._means(n, c)}
        return reading(counts, *texts)

    def _means(self, name: str, port: OvsPortCounts) -> bool:
        """Whether the drops of a port count. The local port gets copies, and drops them while down."""
        return name != _LOCAL and (_RETRIES not in port.custom or name in self._vhost_ports)

    def _ports(self, bridge: str, deadline: float) -> str:
        """The counters of ports, which are current; those in the database are up to seconds old."""
        target = f"unix:{self._sockets.management(bridge)}"
        command = ["ovs-ofctl", "-O", "OpenFlow14", "--names", "dump-ports", target]
        return run(command, step="openflow", deadline=deadline)

    def between(self, before: CounterReading, after: CounterReading, elapsed_s: float) -> CounterChanges:
        found = super().between(before, after, elapsed_s)
        earlier: OvsThreads = before.details
        later: OvsThreads = after.details
        for cpu in earlier.pmds.keys() - later.pmds.keys():
            raise AttributionError(f"ovs: pmd{cpu} is not counted any more: it went during the trial")
        grown = {
            f"pmd{cpu}.": _since(f"pmd{cpu}", earlier.pmds.get(cpu, PmdCounters()), pmd)
            for cpu, pmd in later.pmds.items()
        }
        readings = {**found.readings, **later.placement}
        if grown:
            readings["pmd_cores"] = len(grown)
            sums = {f.name: sum(getattr(one, f.name) for one in grown.values()) for f in fields(PmdCounters)}
            grown["pmd_"] = PmdCounters(**sums)
        for begin, pmd in grown.items():
            readings |= {f"{begin}{what}": value for what, value in _load(pmd).items()}
        return CounterChanges(found.lost, readings)


def reading(
    ports: Mapping[str, OvsPortCounts], drops: str, lookups: str, load: str, queues: str
) -> CounterReading:
    """Build a reading from the output of the OVS commands (pure)."""
    lost: dict[str, int] = {}
    counters: dict[str, float] = {}
    loose: dict[str, float] = {}
    for name, counts in ports.items():
        lost |= {f"{name}.{what}": count for what, count in lost_at(counts).items()}
        if _RETRIES in counts.custom:
            counters[f"{name}.tx_retries"] = counts.custom[_RETRIES]
        for key, packets in counts.custom.items():
            if queue := _QUEUE.fullmatch(key):
                loose[f"{name}.rxq{queue[1]}.packets"] = packets
    lost |= parse_drops(drops) | {_UPCALL: parse_upcalls_lost(lookups)}
    placement = {
        f"{queue.port}.rxq{queue.queue}.pmd": thread.cpu
        for thread in parse_threads(queues).threads
        for queue in thread.queues
        if queue.enabled
    }
    return CounterReading(lost, counters, loose, OvsThreads(parse_counters(load), placement))


def _since(thread: str, before: PmdCounters, after: PmdCounters) -> PmdCounters:
    """Return what was counted since. Raises: AttributionError if it went back by more than rounding."""
    busy, error = before.busy_cycles - after.busy_cycles, before.busy_error + after.busy_error
    for what, back, most in (
        ("packets", before.packets - after.packets, 0),
        ("busy_cycles", busy, error),
        ("idle_cycles", before.cycles - after.cycles - busy, error),
    ):
        if back > most:
            raise AttributionError(f"ovs: {thread}.{what} went back by {back} during the trial")
    return after.since(before) or PmdCounters()


def _load(pmd: PmdCounters) -> dict[str, float]:
    """Return the load of a PMD thread, or of all (pure).

    ``cycles_per_packet`` counts busy iterations only. A frame that crosses OVS twice, to the VNF and
    back, counts twice. Both are left out where the rounding of OVS makes them too inaccurate.
    """
    found: dict[str, float] = {"packets": pmd.packets}
    if pmd.busy_error > _CERTAIN * pmd.busy_cycles:
        return found
    if pmd.cycles:
        found["busy_share"] = pmd.busy_cycles / pmd.cycles
    if pmd.packets:
        found["cycles_per_packet"] = pmd.busy_cycles / pmd.packets
    return found

"""The component ``ovs``: drops of ports and of the datapath, and the load of the PMD threads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from netplugin.acceptance.evidence.contract import EvidenceError, Found, Place, Reading
from netplugin.acceptance.evidence.ovs_text import (
    OvsPortCounts,
    lost_at,
    parse_drops,
    parse_pmd,
    parse_ports,
    parse_upcalls_lost,
)
from netplugin.errors import NetpluginError
from netplugin.host import vswitchd
from netplugin.host.openflow import OpenFlow
from netplugin.pmd.threads import parse_threads

#: Reported twice: as lost lookups and as a coverage counter (dp_netdev_pmd in lib/dpif-netdev.c).
_UPCALL = "datapath_drop_upcall_error"
#: Suffix of readings that are not counters: the CPU of the PMD thread that polls an rxq.
_PLACEMENT = ".pmd"
#: Only vhost-user ports have this counter.
_RETRIES = "ovs_tx_retries"
_LOCAL = "LOCAL"


class Ovs(Place):
    """Open vSwitch with the userspace datapath; ``bridges`` are those on the path of the frames."""

    def __init__(
        self,
        rundir: Path,
        bridges: Sequence[str],
        vhost_ports: Sequence[str] | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """``vhost_ports``: the vhost-user ports of the test; None: all.

        Ports of other VMs receive copies of flooded frames, and their drops must not count.
        """
        self._rundir, self._bridges, self._timeout_s = rundir, tuple(bridges), timeout_s
        self._vhost_ports = None if vhost_ports is None else frozenset(vhost_ports)
        self._flows = OpenFlow(rundir)

    @property
    def name(self) -> str:
        return "ovs"

    def read(self) -> Reading:
        deadline = time.monotonic() + self._timeout_s
        try:
            ports = [self._flows.dump_ports(bridge, deadline) for bridge in self._bridges]
            drops = self._ask("coverage/show", deadline)
            lookups = self._ask("dpctl/show", deadline)
            load = self._ask("dpif-netdev/pmd-stats-show", deadline)
            queues = self._ask("dpif-netdev/pmd-rxq-show", deadline)
        except NetpluginError as error:
            raise EvidenceError(f"ovs: {error}") from error
        counts = {n: c for text in ports for n, c in parse_ports(text).items() if self._means(n, c)}
        return reading(counts, drops, lookups, load, queues)

    def _means(self, name: str, port: OvsPortCounts) -> bool:
        """Whether the drops of a port count. The local port gets copies, and drops them while down."""
        if name == _LOCAL:
            return False
        is_vhost = _RETRIES in port.custom
        return not is_vhost or self._vhost_ports is None or name in self._vhost_ports

    def _ask(self, command: str, deadline: float) -> str:
        return vswitchd.appctl(self._rundir, command, deadline=deadline)

    def between(self, before: Reading, after: Reading, elapsed_s: float) -> Found:
        found = super().between(_growing(before), _growing(after), elapsed_s)
        placement = {n: value for n, value in after.counters.items() if n.endswith(_PLACEMENT)}
        return Found(found.lost, {**_loads(found.readings), **placement})


def reading(
    ports: Mapping[str, OvsPortCounts], drops: str, lookups: str, load: str, queues: str
) -> Reading:
    """Build a reading from the output of the OVS commands (pure)."""
    lost: dict[str, int] = {}
    counters: dict[str, float] = {}
    for name, counts in ports.items():
        lost |= {f"{name}.{what}": count for what, count in lost_at(counts).items()}
        if _RETRIES in counts.custom:
            counters[f"{name}.tx_retries"] = counts.custom[_RETRIES]
    lost |= parse_drops(drops) | {_UPCALL: parse_upcalls_lost(lookups)}
    for cpu, pmd in parse_pmd(load).items():
        counters[f"pmd{cpu}.packets"] = pmd.packets
        counters[f"pmd{cpu}.busy_cycles"] = pmd.busy_cycles
        counters[f"pmd{cpu}.idle_cycles"] = pmd.idle_cycles
    for thread in parse_threads(queues).threads:
        for queue in thread.queues:
            if queue.enabled:
                counters[f"{queue.port}.rxq{queue.queue}.pmd"] = thread.cpu
    return Reading(lost, counters)


def _growing(reading: Reading) -> Reading:
    """Drop the readings that are not counters (rxq placement)."""
    counters = {n: value for n, value in reading.counters.items() if not n.endswith(_PLACEMENT)}
    return Reading(reading.lost, counters)


def _loads(grown: Mapping[str, float]) -> dict[str, float]:
    """Convert cycles to shares, per PMD thread and for all threads together (pure).

    ``cycles_per_packet`` counts busy iterations only. A frame that crosses OVS twice, to the VNF and
    back, counts twice.
    """
    found = {name: value for name, value in grown.items() if not name.startswith("pmd")}
    threads = sorted(name.partition(".")[0] for name in grown if name.endswith(".busy_cycles"))
    total = {"packets": 0.0, "busy_cycles": 0.0, "idle_cycles": 0.0}
    for thread in threads:
        own = {what: grown[f"{thread}.{what}"] for what in total}
        found |= {f"{thread}.{what}": value for what, value in _load(own).items()}
        total = {what: total[what] + own[what] for what in total}
    if threads:
        found |= {f"pmd_{what}": value for what, value in _load(total).items()}
        found["pmd_cores"] = len(threads)
    return found


def _load(counts: Mapping[str, float]) -> dict[str, float]:
    cycles = counts["busy_cycles"] + counts["idle_cycles"]
    found = {"packets": counts["packets"]}
    if cycles:
        found["busy_share"] = counts["busy_cycles"] / cycles
    if counts["packets"]:
        found["cycles_per_packet"] = counts["busy_cycles"] / counts["packets"]
    return found

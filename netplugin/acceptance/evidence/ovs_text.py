"""Parsers for ovs-ofctl and ovs-appctl output on ports, PMD threads and drops (OVS 3.1 to 3.5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_PORT = re.compile(r'^\s+port\s+"?([^":]+)"?:\s+rx\s+(.*)$')
_COUNT = re.compile(r"([a-z0-9_]+)=(\d+)")
_THREAD = re.compile(r"^pmd thread numa_id \d+ core_id (\d+):$")
_PMD_COUNT = re.compile(r"^\s+(packets received|idle cycles|processing cycles): (\d+)")
_COVERAGE = re.compile(r"^((?:datapath_drop|drop_action)_\w+)\s.*total: (\d+)$")
_LOOKUPS = re.compile(r"^\s+lookups:.*\blost:(\d+)$")


@dataclass(frozen=True, slots=True)
class OvsPortCounts:
    """Counters of one port: received, sent, and specific to the port type."""

    rx: Mapping[str, int] = field(default_factory=dict)
    tx: Mapping[str, int] = field(default_factory=dict)
    custom: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PmdCounts:
    """Counters of one PMD thread since it started: received frames, and TSC cycles."""

    packets: int
    idle_cycles: int
    busy_cycles: int


def parse_ports(text: str) -> dict[str, OvsPortCounts]:
    """Parse ``ovs-ofctl --names dump-ports`` (OpenFlow 1.4), by port name; skips unknown counts (``?``)."""
    found: dict[str, OvsPortCounts] = {}
    name = ""
    custom: dict[str, int] = {}
    for line in text.splitlines():
        if port := _PORT.match(line):
            name, custom = port[1], {}
            found[name] = OvsPortCounts(
                rx=_counts("pkts=" + port[2].split("pkts=", 1)[1]), custom=custom
            )
        elif name and line.strip().startswith("tx pkts="):
            found[name] = OvsPortCounts(found[name].rx, _counts(line), custom)
        elif name and "duration=" not in line:
            custom.update(_counts(line))
    return found


def _counts(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in _COUNT.findall(text)}


def lost_at(port: OvsPortCounts) -> dict[str, int]:
    """Return the frames lost at a port, each counted once (pure).

    ``drop`` of a DPDK port includes the named reasons (netdev_dpdk_get_stats in lib/netdev-dpdk.c); the
    remainder is ``rx_dropped`` and ``tx_dropped``. A failed mbuf allocation is not a lost frame by
    itself: the NIC counts the missed frame.
    """
    lost = {
        name: port.custom.get(name, 0)
        for name in (
            "ovs_rx_qos_drops", "rx_missed_errors", "ovs_tx_failure_drops",
            "ovs_tx_mtu_exceeded_drops", "ovs_tx_qos_drops", "ovs_tx_invalid_hwol_drops",
        )
    }  # fmt: skip
    named_rx = lost["ovs_rx_qos_drops"] + lost["rx_missed_errors"]
    named_rx += port.custom.get("rx_mbuf_allocation_errors", 0)
    named_tx = sum(count for name, count in lost.items() if name.startswith("ovs_tx_"))
    lost["rx_dropped"] = max(0, port.rx.get("drop", 0) - named_rx)
    lost["tx_dropped"] = max(0, port.tx.get("drop", 0) - named_tx)
    lost["rx_errors"] = port.rx.get("errs", 0)
    lost["tx_errors"] = port.tx.get("errs", 0)
    return lost


def parse_pmd(stats_show: str) -> dict[int, PmdCounts]:
    """Parse ``dpif-netdev/pmd-stats-show``, by CPU; skips the main thread."""
    found: dict[int, PmdCounts] = {}
    cpu: int | None = None
    counts: dict[str, int] = {}
    for line in stats_show.splitlines():
        if not line.startswith(" "):
            thread = _THREAD.match(line)
            cpu, counts = (int(thread[1]) if thread else None), {}
        elif cpu is not None and (count := _PMD_COUNT.match(line)):
            counts[count[1]] = int(count[2])
            if count[1] == "processing cycles":  # the last of them
                found[cpu] = PmdCounts(
                    counts["packets received"], counts["idle cycles"], counts["processing cycles"]
                )
    return found


def parse_drops(coverage_show: str) -> dict[str, int]:
    """Parse ``coverage/show``: drops of the datapath and the pipeline, by reason."""
    found = (_COVERAGE.match(line) for line in coverage_show.splitlines())
    return {line[1]: int(line[2]) for line in found if line}


def parse_upcalls_lost(dpctl_show: str) -> int:
    """Parse ``dpctl/show``: frames lost because an upcall failed."""
    return sum(int(found[1]) for found in map(_LOOKUPS.match, dpctl_show.splitlines()) if found)

"""The component ``host``: CPU time of a trial in the kernel and in the processes of the data path."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from netplugin_zeroloss.loss.contract import AttributionError, CounterChanges, CounterReading, DropCounters

#: Columns of a CPU line in /proc/stat (proc(5)), in clock ticks.
_KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
#: Columns of a CPU line in /proc/net/softnet_stat (net/core/net-procfs.c): backlog drops, and polls that
#: ended with work left.
_SOFTNET = {"softnet_dropped": 1, "softnet_squeezed": 2}
#: Monotonic time of the reading.
_CLOCK = "clock_s"
#: CPU time that the traffic causes in the kernel.
_CAUSED = ("softirq", "irq", "system")
#: What is reported. The others may go back (proc(5) on iowait).
_USED = (*_CAUSED, "user", "steal")
#: Processes of the data path: name in the report, and prefix of the process name.
PROCESSES: Mapping[str, str] = {"vswitchd": "ovs-vswitchd", "qemu": "qemu", "vhost": "vhost-"}


class HostCounters(DropCounters):
    """CPU time of the whole machine: run no other work on it, and the generator on another machine.

    ``softnet_dropped`` is a reading, not a loss: the kernel also counts such a frame at its device
    (``enqueue_to_backlog`` in net/core/dev.c), where the component ``links`` reads it.
    """

    name = "host"

    def __init__(self, root: Path = Path("/proc"), processes: Mapping[str, str] = PROCESSES) -> None:
        self._root, self._processes = root, dict(processes)
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def read(self) -> CounterReading:
        try:
            counters = parse_cpus((self._root / "stat").read_text(), self._tick_s)
            softnet = self._root / "net/softnet_stat"
            if softnet.exists():
                rows = [line.split() for line in softnet.read_text().splitlines()]
                counters |= {name: sum(int(row[n], 16) for row in rows) for name, n in _SOFTNET.items()}
            counters[_CLOCK] = time.monotonic()
            return CounterReading({}, counters, dict(self._process_times()))
        except (OSError, ValueError, IndexError) as error:
            raise AttributionError(f"host: {self._root}: {error!r}") from error

    def between(self, before: CounterReading, after: CounterReading, elapsed_s: float) -> CounterChanges:
        found = super().between(before, after, elapsed_s)
        return CounterChanges({}, figures(found.readings, elapsed_s))

    def _process_times(self) -> Iterator[tuple[str, float]]:
        for entry in self._root.glob("[0-9]*"):
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended since
            # The name may contain blanks and brackets; then the times in user and kernel mode.
            name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 1 :].split()
            seconds = (int(rest[11]) + int(rest[12])) * self._tick_s
            for group, begin in self._processes.items():
                if name.startswith(begin):
                    yield f"process.{group}.{entry.name}", seconds


def parse_cpus(stat: str, tick_s: float) -> dict[str, float]:
    """Parse ``/proc/stat``: seconds of each used kind per CPU, as ``cpu0.softirq``."""
    found: dict[str, float] = {}
    for line in stat.splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            seconds = {kind: int(count) * tick_s for kind, count in zip(_KINDS, ticks, strict=False)}
            found |= {f"{name}.{kind}": seconds.get(kind, 0.0) for kind in _USED}
    return found


def figures(grown: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Return the CPUs used by each kind of work (pure).

    Kernel work caused by the traffic is divided by the seconds of traffic: there is none while the
    generator starts and drains. Programs also poll then, so their time is divided by the seconds
    between the readings. A program that polls by system calls makes kernel work all the time: the
    kernel work of a CPU counts as one CPU at most. The two busiest CPUs are reported with the sum:
    softirq that fills one CPU is a bottleneck, the same amount spread over ten is not.
    """
    found = {n: grown[n] for n in _SOFTNET if n in grown}
    between_s = grown.get(_CLOCK, elapsed_s)
    if elapsed_s <= 0 or between_s <= 0:
        return found
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    seconds: dict[str, float] = defaultdict(float)
    for name, value in grown.items():
        first, _, rest = name.partition(".")
        if first.startswith("cpu"):
            shares[first][rest] = value
        elif first == "process" and not name.endswith(".unusable"):
            seconds[rest.partition(".")[0]] += value
    for spent in shares.values():
        busy_s = sum(spent[kind] for kind in _CAUSED)
        for kind in _USED:
            spent[kind] /= max(elapsed_s, busy_s) if kind in _CAUSED else between_s
            found[f"{kind}_cpus"] = found.get(f"{kind}_cpus", 0.0) + spent[kind]
    busiest = sorted(shares, key=lambda cpu: shares[cpu]["softirq"], reverse=True)[:2]
    for cpu in busiest:
        found[f"{cpu}.softirq_share"] = shares[cpu]["softirq"]
        found.setdefault("softirq_busiest_share", shares[cpu]["softirq"])
    return found | {f"{group}_cpus": spent_s / between_s for group, spent_s in seconds.items()}

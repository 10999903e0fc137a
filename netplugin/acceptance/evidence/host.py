"""The place ``host``: what the trial took from the machine's CPUs, in the kernel and in its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from netplugin.acceptance.evidence.contract import EvidenceError, Found, Place, Reading

#: Columns of a CPU's line in /proc/stat (proc(5)), in ticks of the clock.
_KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
#: Columns of a CPU's line in /proc/net/softnet_stat (net/core/net-procfs.c).
_DROPPED, _SQUEEZED = 1, 2
#: When the reading was taken.
_CLOCK = "clock_s"
#: What the traffic causes in the kernel; the rest runs anyway, or may.
_CAUSED = ("softirq", "irq", "system")
#: What the host gives a VM's network beside the kernel, by how the names of the processes begin.
PROCESSES: Mapping[str, str] = {"vswitchd": "ovs-vswitchd", "qemu": "qemu", "vhost": "vhost-"}


class Host(Place):
    """CPU time of the whole machine: keep it free of other work, the generator's included.

    ``softnet_dropped`` is a reading and no loss of its own: the kernel counts such a frame at its
    device too (``enqueue_to_backlog`` in net/core/dev.c), where the place ``links`` finds it.
    """

    def __init__(
        self, root: Path = Path("/proc"), processes: Mapping[str, str] = PROCESSES
    ) -> None:
        self._root, self._processes = root, dict(processes)
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")

    @property
    def name(self) -> str:
        return "host"

    def read(self) -> Reading:
        try:
            counters = parse_cpus((self._root / "stat").read_text(), self._tick_s)
            softnet = self._root / "net/softnet_stat"
            if softnet.exists():
                counters |= parse_softnet(softnet.read_text())
            counters[_CLOCK] = time.monotonic()
            return Reading({}, counters | dict(self._process_times()))
        except (OSError, ValueError, IndexError) as error:
            raise EvidenceError(f"host: {self._root}: {error!r}") from error

    def between(self, before: Reading, after: Reading, elapsed_s: float) -> Found:
        # A process that came or went during the trial has no difference.
        stayed = before.counters.keys() & after.counters.keys()
        gone = {n for n in before.counters if n.startswith("process.")} - stayed
        counters = {n: value for n, value in before.counters.items() if n not in gone}
        later = {n: after.counters[n] for n in counters if n in after.counters}
        found = super().between(Reading({}, counters), Reading({}, later), elapsed_s)
        return Found({}, figures(found.readings, elapsed_s))

    def _process_times(self) -> Iterator[tuple[str, float]]:
        for entry in self._root.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended since
            name, seconds = parse_process(text, self._tick_s)
            for group, begin in self._processes.items():
                if name.startswith(begin):
                    yield f"process.{group}.{entry.name}", seconds


def parse_cpus(stat: str, tick_s: float) -> dict[str, float]:
    """Seconds of each kind for each CPU, from ``/proc/stat``: ``cpu0.softirq_s``."""
    found: dict[str, float] = {}
    for line in stat.splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            for kind, count in zip(_KINDS, ticks, strict=False):
                found[f"{name}.{kind}_s"] = int(count) * tick_s
    return found


def parse_softnet(softnet_stat: str) -> dict[str, float]:
    """Over all CPUs: frames dropped before a CPU's backlog, and polls that ended with work left."""
    rows = [[int(word, 16) for word in line.split()] for line in softnet_stat.splitlines()]
    return {
        "softnet_dropped": sum(row[_DROPPED] for row in rows),
        "softnet_squeezed": sum(row[_SQUEEZED] for row in rows),
    }


def parse_process(stat: str, tick_s: float) -> tuple[str, float]:
    """Name, and seconds in user and kernel mode, from ``/proc/PID/stat`` (the name may have blanks)."""
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    rest = stat[stat.rindex(")") + 1 :].split()
    return name, (int(rest[11]) + int(rest[12])) * tick_s


def figures(grown: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """How many CPUs each kind of work took (pure).

    What the traffic causes in the kernel is seconds for each second of traffic: there is none of it
    while the generator starts and drains. Programs poll then too: theirs are seconds for each second
    between the readings. The busiest CPU stands beside the sum: softirq that fills one CPU is a limit,
    spread over ten it is none.
    """
    found = {n: grown[n] for n in ("softnet_dropped", "softnet_squeezed") if n in grown}
    between_s = grown.get(_CLOCK, elapsed_s)
    if elapsed_s <= 0 or between_s <= 0:
        return found
    for kind in (*_CAUSED, "user", "steal"):
        seconds = [
            value
            for name, value in grown.items()
            if name.startswith("cpu") and name.endswith(f".{kind}_s")
        ]
        found[f"{kind}_cpus"] = sum(seconds) / (elapsed_s if kind in _CAUSED else between_s)
        if kind == "softirq":
            found["softirq_busiest_share"] = min(1.0, max(seconds, default=0.0) / elapsed_s)
    groups = sorted({name.split(".")[1] for name in grown if name.startswith("process.")})
    for group in groups:
        seconds = [value for n, value in grown.items() if n.startswith(f"process.{group}.")]
        found[f"{group}_cpus"] = sum(seconds) / between_s
    return found

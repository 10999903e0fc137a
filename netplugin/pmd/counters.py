"""Parse the counters of PMD threads: ``pmd-stats-show`` of OVS 3, ``pmd-perf-show`` of OVS 4 (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_THREAD = re.compile(r"^pmd thread numa_id \d+ core_id (\d+):$")
#: pmd_info_show_stats in lib/dpif-netdev.c, OVS 3.1 to 3.7. The last two are missing without
#: cycles.
_STATS = {
    "packets": re.compile(r"^  packets received: (\d+)$"),
    "upcalls": re.compile(r"^  miss with success upcall: (\d+)$"),
    "lost_upcalls": re.compile(r"^  miss with failed upcall: (\d+)$"),
    "idle_cycles": re.compile(r"^  idle cycles: (\d+) "),
    "busy_cycles": re.compile(r"^  processing cycles: (\d+) "),
}
#: pmd_perf_format_overall_stats in lib/dpif-netdev-perf.c, which OVS 4.0 prints for both commands.
_PERF = {
    "packets": re.compile(r"^  Rx packets: +(\d+)"),
    "upcalls": re.compile(r"^  - Upcalls: +(\d+)"),
    "lost_upcalls": re.compile(r"^  - Lost upcalls: +(\d+)"),
    "cycles": re.compile(r"^  - Used TSC cycles: +(\d+)"),
    "busy_share": re.compile(r"^  - busy iterations: +\d+  \( *([\d.]+) % of used cycles\)"),
    "packet_cycles": re.compile(r"^  Rx packets: .* (\d+) cycles/pkt\)"),
}
#: A share of cycles with a larger relative error is not reported.
_CERTAIN = 0.05


@dataclass(frozen=True)
class Counters:
    """Counters of one thread since it started or was cleared; cycles are TSC cycles.

    ``busy_cycles`` are those of polls that returned packets. OVS 4.0 prints them as a rounded
    share, so they may be off by ``busy_error``.
    """

    packets: int = 0
    cycles: int = 0
    busy_cycles: int = 0
    busy_error: int = 0
    upcalls: int = 0
    lost_upcalls: int = 0

    def since(self, before: Counters) -> Counters | None:
        """The difference to ``before``; None if the thread was restarted or cleared in between."""
        if self.packets < before.packets or self.cycles < before.cycles:
            return None
        return Counters(
            self.packets - before.packets,
            self.cycles - before.cycles,
            max(0, self.busy_cycles - before.busy_cycles),
            self.busy_error + before.busy_error,
            max(0, self.upcalls - before.upcalls),
            max(0, self.lost_upcalls - before.lost_upcalls),
        )

    @property
    def busy_percent(self) -> float | None:
        """The share of busy cycles in percent; None if unknown or too inaccurate."""
        if not self.cycles or self.busy_error > _CERTAIN * self.cycles:
            return None
        return round(100 * min(self.busy_cycles, self.cycles) / self.cycles, 2)

    @property
    def cycles_per_packet(self) -> float | None:
        return round(self.cycles / self.packets, 1) if self.packets and self.cycles else None

    @property
    def processing_cycles_per_packet(self) -> float | None:
        if not self.packets or not self.cycles or self.busy_error > _CERTAIN * self.busy_cycles:
            return None
        return round(self.busy_cycles / self.packets, 1)


@dataclass
class _Section:
    """The counters of one thread, collected line by line."""

    found: dict[str, float] = field(default_factory=dict)

    def take(self, line: str) -> None:
        for name, pattern in (*_STATS.items(), *_PERF.items()):
            if match := pattern.match(line):
                self.found[name] = float(match[1]) if "." in match[1] else int(match[1])

    def counters(self) -> Counters:
        found = {name: int(value) for name, value in self.found.items()}
        counts = {name: found.get(name, 0) for name in ("packets", "upcalls", "lost_upcalls")}
        if "cycles" not in found:
            busy = found.get("busy_cycles", 0)
            return Counters(cycles=busy + found.get("idle_cycles", 0), busy_cycles=busy, **counts)
        # OVS prints a share with one decimal and whole cycles per packet. Use the more accurate
        # one.
        cycles, packets = found["cycles"], counts["packets"]
        share = self.found.get("busy_share", 0.0) / 100
        choices = [(cycles // 2000, round(cycles * share))]
        if "packet_cycles" in found:
            choices.append((packets // 2, packets * found["packet_cycles"]))
        error, busy = min(choices)
        return Counters(cycles=cycles, busy_cycles=busy, busy_error=error, **counts)


def parse_counters(text: str) -> dict[int, Counters]:
    """Counters by CPU, without the main thread. A thread without any counter is left out."""
    sections: dict[int, _Section] = {}
    current: _Section | None = None
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            current = sections.setdefault(int(thread[1]), _Section())
        elif line.startswith("main thread"):
            current = None
        elif current is not None:
            current.take(line)
    return {cpu: section.counters() for cpu, section in sections.items() if section.found}

"""What a process takes of the machine, from /proc: memory, CPU time, threads, descriptors."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Taken:
    rss_mb: float
    threads: int
    descriptors: int


def taken(pid: int) -> Taken:
    """Raises: OSError if there is no such process."""
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.split()
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Taken(round(int(fields["VmRSS"][0]) / 1024, 2), int(fields["Threads"][0]), descriptors)


def cpu_ms(pid: int) -> float:
    """CPU time of all its threads that run now. It does not depend on what else the machine does.

    That of threads that have ended is not in it: take differences around what ends none.
    """
    return sum(_thread_ms(task) for task in Path(f"/proc/{pid}/task").iterdir())


def main_thread_cpu_ms(pid: int) -> float:
    """CPU time of the first thread: of ovs-vswitchd without the PMD threads, which poll."""
    return _thread_ms(Path(f"/proc/{pid}/task/{pid}"))


def _thread_ms(task: Path) -> float:
    # Documentation/scheduler/sched-stats.rst: time on a CPU, in nanoseconds.
    with suppress(FileNotFoundError, ProcessLookupError):
        return int((task / "schedstat").read_text().split()[0]) / 1e6
    return 0.0

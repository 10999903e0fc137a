"""Parse ``dpif-netdev/pmd-rxq-show``: which PMD thread polls which queue (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: pmd_info_show_rxq in lib/dpif-netdev.c: the same format from OVS 3.1 to 4.0.
_SECONDS = re.compile(r"^Displaying last (\d+) seconds pmd usage %$")
_THREAD = re.compile(r"^pmd thread numa_id (\d+) core_id (\d+):$")
_ISOLATED = re.compile(r"^  isolated : (true|false)$")
_QUEUE = re.compile(
    r"^  port: (\S+)\s+queue-id:\s+(\d+) \((enabled|disabled)\)\s+pmd usage:\s+(?:(\d+) %|NOT AVAIL)$"
)
_OVERHEAD = re.compile(r"^  overhead:\s+(\d+) %$")


@dataclass(frozen=True)
class PolledQueue:
    """A receive queue. ``usage_percent`` is None until OVS has measured it."""

    port: str
    queue: int
    enabled: bool
    usage_percent: int | None


@dataclass(frozen=True)
class Thread:
    cpu: int
    numa_node: int
    isolated: bool = False
    overhead_percent: int | None = None
    queues: tuple[PolledQueue, ...] = ()


@dataclass(frozen=True)
class Threads:
    """All PMD threads. ``seconds`` is the period that the usage covers."""

    threads: tuple[Thread, ...] = ()
    seconds: int | None = None


def parse_threads(text: str) -> Threads:
    threads: list[Thread] = []
    seconds: int | None = None
    for line in text.splitlines():
        if shown := _SECONDS.match(line):
            seconds = int(shown[1])
        elif thread := _THREAD.match(line):
            threads.append(Thread(cpu=int(thread[2]), numa_node=int(thread[1])))
        elif threads:
            threads[-1] = _with(threads[-1], line)
    return Threads(tuple(threads), seconds)


def _with(thread: Thread, line: str) -> Thread:
    isolated, overhead, queues = thread.isolated, thread.overhead_percent, thread.queues
    if found := _ISOLATED.match(line):
        isolated = found[1] == "true"
    elif found := _OVERHEAD.match(line):
        overhead = int(found[1])
    elif found := _QUEUE.match(line):
        usage = int(found[4]) if found[4] else None
        queues += (PolledQueue(found[1], int(found[2]), found[3] == "enabled", usage),)
    return Thread(thread.cpu, thread.numa_node, isolated, overhead, queues)

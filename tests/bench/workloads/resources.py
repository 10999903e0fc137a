"""What the agent takes of the machine: memory, threads, descriptors, and CPU time when nobody calls."""

from __future__ import annotations

import time

from tests.bench.lab import Lab
from tests.bench.names import RESOURCES
from tests.bench.process import cpu_ms, taken
from tests.bench.recorder import Recorder


def measure(lab: Lab, record: Recorder, idle_s: float) -> None:
    pid = lab.agent.daemon.pid
    before_ms = cpu_ms(pid)
    start = time.monotonic()
    time.sleep(idle_s)  # what is measured is that nothing happens
    idle_percent = (cpu_ms(pid) - before_ms) / (time.monotonic() - start) / 10
    note(lab, record)
    record.add(RESOURCES, "idle CPU", idle_percent, ports=lab.ports, unit="%")


def note(lab: Lab, record: Recorder) -> None:
    """Without waiting."""
    now = taken(lab.agent.daemon.pid)
    record.add(RESOURCES, "RSS", now.rss_mb, ports=lab.ports, unit="MB")
    record.add(RESOURCES, "threads", now.threads, ports=lab.ports, unit="")
    record.add(RESOURCES, "descriptors", now.descriptors, ports=lab.ports, unit="")

"""From the death of ovs-vswitchd until the last port has its filter; its frames are dropped meanwhile."""

from __future__ import annotations

import re
import time

from tests.bench.lab import PEERS, OvsLab
from tests.bench.names import RECOVERY
from tests.bench.recorder import Recorder
from tests.lab.processes import wait_for

#: For all flows, after vswitchd has its ports again; on a busy machine too.
DEADLINE_S = 120.0
_COUNT = re.compile(r"flow_count=(\d+)")


def measure(lab: OvsLab, record: Recorder, rounds: int) -> None:
    """vswitchd is killed and started at once. It has its default log afterwards."""
    for _ in range(rounds):
        before = _flows(lab)
        start = time.perf_counter()
        lab.ovs.kill_vswitchd()
        lab.ovs.start_vswitchd()
        configured = time.perf_counter() - start
        wait_for(lambda desired=before: _flows(lab) == desired, DEADLINE_S, "all filters are back")
        record.add(RECOVERY, "to all ports", configured, way="ovs-vswitchd", ports=lab.ports, unit="s")
        record.add(RECOVERY, "to all filters", time.perf_counter() - start, ports=lab.ports, unit="s")


def _flows(lab: OvsLab) -> int:
    """The number of flows of the agent's bridges."""
    bridges = [name for name in lab.ovs.vsctl("list-br").split() if name != PEERS]
    shown = [
        lab.ovs.ofctl("-O", "OpenFlow14", "dump-aggregate", f"unix:{lab.ovs.rundir / name}.mgmt")
        for name in bridges
    ]
    return sum(int(found[1]) for text in shown if (found := _COUNT.search(text)))

"""One port on OVS-DPDK, beside os-vif and the usual tools, on a host with more and more ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.bench.lab import PEERS, OvsLab
from tests.bench.names import DEFAULT_LOG, ONE_PORT
from tests.bench.process import cpu_ms, main_thread_cpu_ms
from tests.bench.recorder import Recorder
from tests.bench.sizes import Sizes
from tests.bench.stalls import Stalls
from tests.bench.ways import Way
from tests.bench.ways.agent import ByAgent
from tests.bench.ways.peer import Peer
from tests.bench.ways.vsctl import ByVsctl
from tests.bench.workloads.in_turn import Turns


def measure(lab: OvsLab, record: Recorder, sizes: Sizes, ports: int, paths: Sequence[Path]) -> None:
    """``paths`` have os-vif and ovsdbapp; without any they are left out."""
    lab.fill(ports)
    with ExitStack() as stack:
        ways: list[Way] = [ByAgent(lab.agent, addresses) for addresses in sizes.addresses]
        for name in ("os-vif", "ovsdbapp", "usual-tools") if paths else ():
            ways.append(stack.enter_context(Peer(name, lab.ovs.connection, PEERS, paths)))
        ways.append(ByVsctl(lab.ovs, PEERS))
        stalls = stack.enter_context(Stalls(lab.ovs))
        Turns(ONE_PORT, record, ports, _clocks(lab)).run(ways, sizes.turns[ports])
    record.add(ONE_PORT, "longest stall", stalls.longest_ms, way="ovs-vswitchd", ports=ports)


def measure_default_log(lab: OvsLab, record: Recorder, sizes: Sizes) -> None:
    ports = 0
    lab.fill(ports)
    lab.log_queues(True)
    try:
        ways = [ByAgent(lab.agent, 1), ByVsctl(lab.ovs, PEERS)]
        Turns(DEFAULT_LOG, record, ports, _clocks(lab)).run(ways, sizes.default_log_turns)
    finally:
        lab.log_queues(False)


def _clocks(lab: OvsLab) -> Mapping[str, Callable[[], float]]:
    return {
        "agent's CPU": partial(cpu_ms, lab.agent.daemon.pid),
        "vswitchd's CPU": partial(main_thread_cpu_ms, lab.ovs.vswitchd.pid),
    }

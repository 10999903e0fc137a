"""One port on a Linux bridge, beside libvirt's own, os-vif's plug-in and iproute2."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.bench.lab import PEERS, Lab
from tests.bench.names import LINUXBRIDGE
from tests.bench.process import cpu_ms
from tests.bench.recorder import Recorder
from tests.bench.sizes import Sizes
from tests.bench.ways import Way
from tests.bench.ways.agent import ByAgent
from tests.bench.ways.iproute import ByIproute
from tests.bench.ways.libvirt_bridge import ByLibvirt
from tests.bench.ways.peer import Peer
from tests.bench.workloads.in_turn import Turns
from tests.functional.conftest import BASE
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.processes import LabError


def measure(lab: Lab, record: Recorder, sizes: Sizes, paths: Sequence[Path]) -> None:
    """``paths`` have an os-vif with the plug-in for Linux bridges."""
    with ExitStack() as stack:
        others: list[Way] = [ByIproute(PEERS)]
        if paths:
            others.append(stack.enter_context(Peer("os-vif-bridge", "", PEERS, paths)))
        else:
            record.note(f"{LINUXBRIDGE}: os-vif with the plug-in for Linux bridges is not there")
        try:
            daemons = stack.enter_context(PrivateLibvirt(BASE / "libvirt"))
            others.append(stack.enter_context(ByLibvirt(daemons, PEERS)))
        except LabError as wrong:
            record.note(f"{LINUXBRIDGE}: libvirt does not run here: {str(wrong).splitlines()[0]}")
        for ports, turns in sizes.bridge_turns.items():
            lab.fill(ports)
            ways = [*(ByAgent(lab.agent, addresses, lab.backend) for addresses in sizes.addresses), *others]
            clocks = {"agent's CPU": partial(cpu_ms, lab.agent.daemon.pid)}
            Turns(LINUXBRIDGE, record, ports, clocks).run(ways, turns)

"""Hosts whose places are known: two nodes of SMT cores, and one node of single CPUs."""

from __future__ import annotations

from netplugin.tuning.placing.capacity import HostCapacity, NodeGround
from tests.unit.tuning.placing.strategies import with_memory

#: 4 cores a node for VMs, of CPUs n and n + 10; node 0 has the NIC.
TWO_NODES = with_memory(
    HostCapacity(
        nodes=(
            NodeGround(0, ((2, 12), (3, 13), (4, 14), (5, 15)), frozenset((6, 16)), {}),
            NodeGround(1, ((22, 32), (23, 33), (24, 34), (25, 35)), frozenset((26, 36)), {}, away=1),
        ),
        page_kb=1048576,
        pmd=frozenset((1, 11)),
        housekeeping=frozenset((0, 10, 20, 30)),
        realtime=True,
    ),
    16384,
)
#: CPU 0 is for all else, QEMU's own threads too.
SMALL = with_memory(
    HostCapacity(
        nodes=(NodeGround(0, ((1,), (2,), (3,)), frozenset((0,)), {}),),
        page_kb=2048,
        housekeeping=frozenset((0,)),
    ),
    1024,
)

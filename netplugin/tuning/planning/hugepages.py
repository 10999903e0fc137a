"""Hugepages of each node (pure): the buffers of OVS by the MTUs in use, and the memory of VMs.

Sizes and counts are those of OVS (Documentation/topics/dpdk/memory.rst and ``dpdk_buf_size`` in
lib/netdev-dpdk.c): MTUs that round to the same buffer share a pool on each node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import PAGE_1G, PAGE_2M, Intent
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.planning.refused import impossible, needed
from netplugin.tuning.root import known

#: Ethernet header and checksum and two VLAN tags, bytes.
_FRAME = 26
#: What a buffer's data is rounded up to, and what stands before it, bytes.
_ALIGN, _OVERHEAD = 1024, 960
#: Buffers of a pool; OVS halves them down to the least while memory is short.
MOST_MBUFS, LEAST_MBUFS = 262144, 16384
#: Beside the buffers: rings of NICs and vhost, DPDK's own, MB.
_DPDK_MB = 512
#: Never taken from a node: what Linux itself needs, as a share of the node and at least, KB.
_SYSTEM_SHARE, _SYSTEM_KB = 0.1, 512 * 1024
#: A node needs so many pages of 1 GB before they are worth their waste.
_ROOM_FOR_1G = 16


@dataclass(frozen=True)
class NodePages:
    """One node: ``pages`` of ``size_kb``; ``mbufs`` are those that OVS can have of each pool."""

    node: int
    size_kb: int
    pages: int
    ovs_mb: int
    vm_mb: int
    mbufs: int


def buffer_bytes(mtu: int) -> int:
    """The size of one buffer: 3,008 for an MTU of 1,500, 10,176 for 9,000."""
    return -(-(mtu + _FRAME) // _ALIGN) * _ALIGN + _OVERHEAD


def pools_mb(mtus: tuple[int, ...], mbufs: int) -> int:
    """The pools of all these MTUs on one node, MB (2^20 bytes), rounded up."""
    sizes: dict[int, int] = {}
    for mtu in mtus:
        # Small frames start with the small pool.
        count = mbufs if mtu >= 1500 else LEAST_MBUFS
        sizes[buffer_bytes(mtu)] = max(count, sizes.get(buffer_bytes(mtu), 0))
    return -(-sum(size * count for size, count in sizes.items()) // (1 << 20))


def page_size(facts: Facts, intent: Intent) -> int:
    """KB. Raises: HostError, InvalidRequest."""
    sizes = needed(facts.memory.sizes_kb)
    if intent.hugepage_kb is not None:
        if intent.hugepage_kb not in sizes:
            have = " and ".join(map(str, sizes)) or "no hugepages"
            raise impossible("hugepage_kb", f"CPU and kernel have {have} KB", "choose one of those")
        return intent.hugepage_kb
    large = PAGE_1G in sizes and all(
        node.total_kb >= _ROOM_FOR_1G * PAGE_1G for node in needed(facts.memory.nodes)
    )
    if not large and PAGE_2M not in sizes:
        raise impossible("hugepage_kb", "the kernel has no hugepages of 2 MB", "use another kernel")
    return PAGE_1G if large else PAGE_2M


def plan_pages(facts: Facts, partition: Partition, intent: Intent) -> tuple[NodePages, ...]:
    """For each node with memory. Raises: HostError, InvalidRequest."""
    size = page_size(facts, intent)
    room = _room_kb(facts, size)
    vm = _vm_mb(partition, intent, room)
    # vhost-user buffers are on the node of the VM's memory, those of a NIC on the NIC's.
    with_ovs = {*partition.pmd_nodes, *vm, *partition.vm_nodes} if intent.pmd_cores else set()
    return tuple(
        _node(node, size, room[node], vm.get(node, 0), node in with_ovs, intent)
        for node in sorted(room)
    )


def _room_kb(facts: Facts, size_kb: int) -> dict[int, int]:
    """What each node can give, KB: without what Linux needs and what pages of other sizes hold."""
    room = {}
    for memory in needed(facts.memory.nodes):
        other = sum(
            pool.size_kb * known(pool.total, 0)
            for pool in needed(facts.memory.pools)
            if pool.node == memory.node and pool.size_kb != size_kb
        )
        system = max(_SYSTEM_KB, int(memory.total_kb * _SYSTEM_SHARE))
        room[memory.node] = max(0, memory.total_kb - system - other)
    return room


def _vm_mb(partition: Partition, intent: Intent, room: Mapping[int, int]) -> dict[int, int]:
    """The VMs' memory by node, in the proportion of their cores; without such, where the NIC is."""
    if not intent.vm_memory_mb:
        return {}
    weights = {s.node: len(s.vm) for s in partition.nodes if s.vm and s.node in room}
    if not weights:
        weights = dict.fromkeys((n for n in partition.pmd_nodes if n in room), 1)
    weights = weights or {min(room): 1}
    whole = sum(weights.values())
    return {node: -(-intent.vm_memory_mb * weight // whole) for node, weight in weights.items()}


def _node(
    node: int, size_kb: int, room_kb: int, vm_mb: int, with_ovs: bool, intent: Intent
) -> NodePages:
    room = room_kb // size_kb
    vm_pages = _pages(vm_mb, size_kb)
    if not with_ovs:
        if vm_pages > room:
            raise _too_much(node, size_kb, room, vm_mb)
        return NodePages(node, size_kb, vm_pages, 0, vm_mb, 0)
    for mbufs in _halved():
        ovs_pages = _pages(pools_mb(intent.mtus, mbufs) + _DPDK_MB, size_kb)
        if ovs_pages + vm_pages <= room:
            ovs_mb = ovs_pages * size_kb // 1024
            return NodePages(node, size_kb, ovs_pages + vm_pages, ovs_mb, vm_mb, mbufs)
    raise _too_much(node, size_kb, room - ovs_pages, vm_mb)


def _halved() -> Iterator[int]:
    mbufs = MOST_MBUFS
    while mbufs >= LEAST_MBUFS:
        yield mbufs
        mbufs //= 2


def _pages(mb: int, size_kb: int) -> int:
    return -(-mb * 1024 // size_kb)


def _too_much(node: int, size_kb: int, pages: int, vm_mb: int) -> Exception:
    most = max(0, pages) * size_kb // 1024
    if vm_mb and pages > 0:
        return impossible(
            "vm_memory_mb", f"{vm_mb} MB of it fall to NUMA node {node}, which has {most} MB for them",
            "ask for less, or spread the VM cores over more nodes",
        )  # fmt: skip
    return impossible(
        "mtus", f"NUMA node {node} has no room for the smallest buffer pools of OVS",
        "use fewer or smaller MTUs, pages of 2 MB, or a host with more memory",
    )  # fmt: skip

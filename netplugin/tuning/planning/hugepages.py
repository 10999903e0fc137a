"""Plan hugepages per NUMA node (pure): buffers of OVS and memory of VMs.

Sizes and counts follow OVS (Documentation/topics/dpdk/memory.rst; ``dpdk_buf_size`` and
``dpdk_calculate_mbufs`` in lib/netdev-dpdk.c). With shared memory, MTUs that round to the same buffer size
share one mempool per node; with ``per-port-memory`` each port has its own mempool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from netplugin.tuning.facts import Facts, HostNic, Live
from netplugin.tuning.intent import PAGE_1G, PAGE_2M, HostIntent
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.root import known
from netplugin.tuning.steps import impossible, needed

#: Ethernet header, FCS and two VLAN tags, bytes.
_FRAME = 26
#: Alignment of a buffer's data, and overhead in front of it, bytes.
_ALIGN, _OVERHEAD = 1024, 960
#: Buffers in a mempool; if memory is short, OVS halves the number down to the minimum.
MOST_MBUFS, LEAST_MBUFS = 262144, 16384
#: Default descriptors per queue (NIC_PORT_DEFAULT_RXQ_SIZE, _TXQ_SIZE), packets
#: per burst (NETDEV_MAX_BURST), and the limit of queues counted with a burst (RTE_MAX_LCORE).
_DESCRIPTORS, _BURST, _MOST_LCORES = 2048, 32, 128
#: Memory in addition to the buffers, for NIC and vhost rings and DPDK itself, MB.
_DPDK_MB = 512
#: Reserved for Linux on each node: a share of its memory, and the minimum in KB.
_SYSTEM_SHARE, _SYSTEM_KB = 0.1, 512 * 1024
#: Minimum number of large pages that must fit on a node; with fewer, rounding wastes too much.
_ROOM_FOR_LARGE = 16


@dataclass(frozen=True)
class NodePages:
    """Plan of one node: ``pages`` of ``size_kb``. ``mbufs`` is the number of buffers in each shared pool, or
    with ``per_port`` in the pools of all ``ports``. ``beyond`` are existing pages above the plan, which are
    kept, at boot too, because they may be in use; 0 on a node without planned pages."""

    node: int
    size_kb: int
    pages: int
    ovs_mb: int
    vm_mb: int
    mbufs: int
    ports: int = 0
    per_port: bool = False
    beyond: int = 0

    @property
    def reserved(self) -> int:
        """Pages to reserve, now and at boot."""
        return self.pages + self.beyond


@dataclass(frozen=True)
class _Pools:
    """Mempools of OVS on one node. ``ports``: buffers of each port's pool; None: pools are shared."""

    mtus: tuple[int, ...]
    ports: tuple[int, ...] | None

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Possible sizes as (MB, buffers), largest first; OVS halves a shared pool if memory is short."""
        if self.ports is not None:
            count = sum(self.ports)
            yield -(-count * buffer_bytes(max(self.mtus)) // (1 << 20)), count
            return
        mbufs = MOST_MBUFS
        while mbufs >= LEAST_MBUFS:
            yield pools_mb(self.mtus, mbufs), mbufs
            mbufs //= 2


def buffer_bytes(mtu: int) -> int:
    """Size of one buffer, bytes: 3,008 for MTU 1,500, 10,176 for MTU 9,000."""
    return -(-(mtu + _FRAME) // _ALIGN) * _ALIGN + _OVERHEAD


def pools_mb(mtus: tuple[int, ...], mbufs: int) -> int:
    """Size of the shared pools of all these MTUs on one node, MB (2^20 bytes), rounded up."""
    sizes: dict[int, int] = {}
    for mtu in mtus:
        # For an MTU below 1500, OVS starts with the minimum.
        count = mbufs if mtu >= 1500 else LEAST_MBUFS
        sizes[buffer_bytes(mtu)] = max(count, sizes.get(buffer_bytes(mtu), 0))
    return -(-sum(size * count for size, count in sizes.items()) // (1 << 20))


def port_mbufs(rxqs: int, txqs: int) -> int:
    """Buffers of a port's pool with ``per-port-memory``: 22,560 for one rxq and one PMD thread."""
    return (rxqs + txqs) * _DESCRIPTORS + min(_MOST_LCORES, rxqs) * _BURST + LEAST_MBUFS


def page_size(facts: Facts, intent: HostIntent) -> int:
    """Choose the hugepage size, KB. Raises: HostError, InvalidRequest."""
    sizes = needed(facts.memory.sizes_kb)
    if intent.hugepage_kb is not None:
        if intent.hugepage_kb not in sizes:
            have = " and ".join(map(str, sizes)) or "no hugepages"
            raise impossible("hugepage_kb", f"CPU and kernel have {have} KB", "choose one of those")
        return intent.hugepage_kb
    fit = [size for size in sizes if PAGE_2M <= size <= PAGE_1G]
    if not fit:
        raise impossible("hugepage_kb", "the kernel has no hugepages of 2 MB to 1 GB", "use another kernel")
    # ARM has more than two sizes; they depend on the kernel's base page size.
    least = min(node.total_kb for node in needed(facts.memory.nodes))
    return max((size for size in fit if least >= _ROOM_FOR_LARGE * size), default=min(fit))


def plan_pages(
    facts: Facts, partition: Partition, intent: HostIntent, nics: tuple[HostNic, ...], live: Live
) -> tuple[NodePages, ...]:
    """Plan the pages of each node with memory. Raises: HostError, InvalidRequest."""
    size = page_size(facts, intent)
    room = _room_kb(facts, size)
    weights = _weights(partition, room)
    pools = _pools(partition, intent, nics, live, weights)
    vm = _vm_mb(intent, weights, room, pools, size)
    # vhost-user buffers are on the node of the VM's memory, a NIC's buffers on the NIC's node.
    with_ovs = {*partition.pmd_nodes, *vm, *partition.vm_nodes} if intent.pmd_cores else set()
    plans = (
        _node(node, size, room[node], vm.get(node, 0), pools(node) if node in with_ovs else None)
        for node in sorted(room)
    )
    there = {(p.node, p.size_kb): known(p.total, 0) for p in needed(facts.memory.pools)}
    return tuple(
        replace(plan, beyond=max(0, there.get((plan.node, size), 0) - plan.pages)) if plan.pages else plan
        for plan in plans
    )


def _weights(partition: Partition, room: Mapping[int, int]) -> dict[int, int]:
    """Number of VM cores of each node with memory; without VM cores, weight 1 for each PMD node."""
    weights = {s.node: len(s.vm) for s in partition.nodes if s.vm and s.node in room}
    if not weights:
        weights = dict.fromkeys((n for n in partition.pmd_nodes if n in room), 1)
    return weights or {min(room): 1}


def _pools(
    partition: Partition,
    intent: HostIntent,
    nics: tuple[HostNic, ...],
    live: Live,
    weights: Mapping[int, int],
) -> Callable[[int], _Pools]:
    """Return a function from node to pools. VM ports are spread by VM cores, as their node is not known."""
    if not is_per_port(live):
        return lambda node: _Pools(intent.mtus, None)
    cores = sum(len(share.vm) for share in partition.nodes)
    count = max(cores, _vhost_ports(live)) if intent.vm_ports is None else intent.vm_ports
    first = partition.pmd_nodes[:1]
    homes = [known(nic.node, None) for nic in nics]
    # A NIC has one txq per PMD thread plus one; a vhost-user port has as many as its VM.
    nic = port_mbufs(intent.queues, len(partition.polling) + 1)
    vhost = port_mbufs(intent.queues, intent.queues)
    whole = sum(weights.values())

    def pools(node: int) -> _Pools:
        uplinks = sum(node == home or (home is None and node in first) for home in homes)
        vms = -(-count * weights.get(node, 0) // whole)
        return _Pools(intent.mtus, (nic,) * uplinks + (vhost,) * vms)

    return pools


def is_per_port(live: Live) -> bool:
    """True if OVS uses one pool per port (``per-port-memory`` in ovs-vswitchd.conf.db(5))."""
    ovs = known(live.ovs, None)
    return ovs is not None and ovs.other_config.get("per-port-memory", "").lower() == "true"


def _vhost_ports(live: Live) -> int:
    ovs = known(live.ovs, None)
    return sum(port.type.startswith("dpdkvhostuser") for port in ovs.ports) if ovs else 0


def _room_kb(facts: Facts, size_kb: int) -> dict[int, int]:
    """Memory of each node for hugepages, KB, minus the reserve for Linux and pages of other sizes."""
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


def _vm_mb(
    intent: HostIntent,
    weights: Mapping[int, int],
    room: Mapping[int, int],
    pools: Callable[[int], _Pools],
    size_kb: int,
) -> dict[int, int]:
    """VM memory by node, MB; in units of whole VMs if ``vm_size_mb`` is set, as a VM uses one node."""
    if not intent.vm_memory_mb:
        return {}
    if not intent.vm_size_mb:
        whole = sum(weights.values())
        return {node: -(-intent.vm_memory_mb * w // whole) for node, w in weights.items()}
    vm_kb = _pages(intent.vm_size_mb, size_kb) * size_kb
    most = {
        node: max(0, room[node] - (_least_mb(pools(node)) * 1024 if intent.pmd_cores else 0)) // vm_kb
        for node in weights
    }
    count = -(-intent.vm_memory_mb // intent.vm_size_mb)
    if count > sum(most.values()):
        raise impossible(
            "vm_memory_mb",
            f"{count} VMs of {intent.vm_size_mb} MB, but the nodes with VM cores have room "
            f"for {sum(most.values())}",
            "ask for less, or spread the VM cores over more nodes",
        )
    given = dict.fromkeys(weights, 0)
    for _ in range(count):
        # Choose the node with the fewest VMs per core, including the new one. A node with few cores may get
        # none, because its share would be missing on nodes with more cores. The check reports that.
        open_nodes = (node for node in given if given[node] < most[node])
        node = min(open_nodes, key=lambda n: ((given[n] + 1) / weights[n], n))
        given[node] += 1
    return {node: number * vm_kb // 1024 for node, number in given.items()}


def _least_mb(pools: _Pools) -> int:
    """Minimum memory of OVS on a node, MB."""
    return min(mb for mb, _ in pools.sizes()) + _DPDK_MB


def _node(node: int, size_kb: int, room_kb: int, vm_mb: int, pools: _Pools | None) -> NodePages:
    room = room_kb // size_kb
    vm_pages = _pages(vm_mb, size_kb)
    if pools is None:
        if vm_pages > room:
            raise _too_much(node, size_kb, room, vm_mb)
        return NodePages(node, size_kb, vm_pages, 0, vm_mb, 0)
    for mb, mbufs in pools.sizes():
        ovs_pages = _pages(mb + _DPDK_MB, size_kb)
        if ovs_pages + vm_pages <= room:
            ovs_mb = ovs_pages * size_kb // 1024
            return NodePages(
                node,
                size_kb,
                ovs_pages + vm_pages,
                ovs_mb,
                vm_mb,
                mbufs,
                ports=len(pools.ports or ()),
                per_port=pools.ports is not None,
            )
    raise _too_much(node, size_kb, room - ovs_pages, vm_mb)


def _pages(mb: int, size_kb: int) -> int:
    return -(-mb * 1024 // size_kb)


def _too_much(node: int, size_kb: int, pages: int, vm_mb: int) -> Exception:
    most = max(0, pages) * size_kb // 1024
    if vm_mb and pages > 0:
        return impossible(
            "vm_memory_mb",
            f"{vm_mb} MB of it fall to NUMA node {node}, which has {most} MB for them",
            "ask for less, or spread the VM cores over more nodes",
        )
    return impossible(
        "mtus",
        f"NUMA node {node} has no room for the smallest buffer pools of OVS",
        "use fewer or smaller MTUs, pages of 2 MB, or a host with more memory",
    )

"""Plan hugepages per NUMA node (pure): buffers of OVS and memory of VMs.

Sizes and counts follow OVS (Documentation/topics/dpdk/memory.rst; ``dpdk_buf_size`` and
``dpdk_calculate_mbufs`` in lib/netdev-dpdk.c). With shared memory, MTUs that round to the same buffer size
share one mempool per node; with ``per-port-memory`` each port has its own mempool.

A port's buffers are on its own node, and OVS does not open the port if that has none left: DPDK takes memory
of another node only if the caller names no node (dpdk_mp_create in lib/netdev-dpdk.c; malloc_heap_alloc in
DPDK's lib/eal/common/malloc_heap.c). Nodes without CPUs have no memory for DPDK (rte_eal_cpu_init in
eal_common_lcore.c). In ``dpdk-socket-mem`` the position is the node's number (eal_parse_socket_arg in
eal_common_options.c): numbers that do not exist count, with 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from netplugin.tuning.facts import Facts, HostNic, Live
from netplugin.tuning.intent import PAGE_1G, PAGE_2M, HostIntent
from netplugin.tuning.planning.partition import Partition, nearest
from netplugin.tuning.read.cpus import ARM, X86
from netplugin.tuning.root import Unknown, known
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
#: Reserved for Linux on each node or cell: a share of its memory, and the minimum in KB.
_SYSTEM_SHARE, _SYSTEM_KB = 0.1, 512 * 1024
#: Minimum number of large pages that must fit on a node; with fewer, rounding wastes too much.
_ROOM_FOR_LARGE = 16
#: Number of nodes that DPDK can use, from 0 (RTE_MAX_NUMA_NODES in config/x86, and in config/arm of the
#: generic build, which distributions have); 16 elsewhere (config/ppc).
_DPDK_NODES = {X86: 32, ARM: 4}
_ByNode: TypeAlias = Mapping[int, int]


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
    """Choose the hugepage size, KB; 0 if there is none and none is needed. Raises: HostError,
    InvalidRequest."""
    sizes = needed(facts.memory.sizes_kb)
    if intent.hugepage_kb is not None:
        if intent.hugepage_kb not in sizes:
            have = f"pages of {' and '.join(map(str, sizes))} KB" if sizes else "no hugepages"
            raise impossible("hugepage_kb", f"CPU and kernel have {have}", "choose another one, or none")
        return intent.hugepage_kb
    fit = [size for size in sizes if PAGE_2M <= size <= PAGE_1G]
    if not fit:
        for field, count in (("pmd_cores", intent.pmd_cores), ("vm_memory_mb", intent.vm_memory_mb)):
            if count:
                what = f"{count}, and the kernel has no hugepages of 2 MB to 1 GB"
                raise impossible(field, what, "ask for none (0), or use another kernel")
        return 0
    # ARM has more than two sizes; they depend on the kernel's base page size.
    nodes = _able(facts, intent, min(fit))
    least = min((node.total_kb for node in needed(facts.memory.nodes) if node.node in nodes), default=0)
    return max((size for size in fit if least >= _ROOM_FOR_LARGE * size), default=min(fit))


def able_nodes(facts: Facts, intent: HostIntent) -> tuple[int, ...]:
    """Nodes that can have PMD threads and VMs: with CPUs, and memory for what the intent has there. Raises:
    HostError; InvalidRequest if there is none and the intent needs one."""
    size = page_size(facts, intent)
    able = _able(facts, intent, size)
    if able or not (intent.pmd_cores or intent.vm_memory_mb):
        return able
    most = max(_room_kb(facts, size).values(), default=0) >> 10
    if not intent.pmd_cores:
        what = f"{intent.vm_memory_mb} MB, and no NUMA node with CPUs has memory for a page of {size} KB"
        raise impossible("vm_memory_mb", what, "ask for none (0), or boot with numa=off")
    what = f"no NUMA node with CPUs has room for the smallest buffer pools of OVS: the largest has {most} MB"
    mtu, has_2m = min(intent.mtus), PAGE_2M in needed(facts.memory.sizes_kb)
    pages = [("hugepage_kb", PAGE_2M, f"choose pages of {PAGE_2M} KB")] if has_2m else []
    for field, value, fix in (("mtus", (mtu,), f"use the MTU {mtu} alone"), *pages):
        asked = intent.model_copy(update={field: value})
        if _able(facts, asked, page_size(facts, asked)):
            raise impossible(field, what, f"{fix}, or a host with more memory")
    fix = "ask for none (0), or boot with numa=off if the memory is on nodes without CPUs"
    raise impossible("pmd_cores", f"{intent.pmd_cores} whole cores, and {what}", fix)


def _able(facts: Facts, intent: HostIntent, size_kb: int) -> tuple[int, ...]:
    with_cpus = {core.node for core in needed(facts.cpus.cores)}
    if not intent.pmd_cores and not intent.vm_memory_mb:
        return tuple(n.node for n in needed(facts.memory.nodes) if n.total_kb and n.node in with_cpus)
    least, nodes = 1, with_cpus
    if intent.pmd_cores:
        least = _pages(_least_mb(_Pools(intent.mtus, None)), size_kb)
        nodes = {node for node in nodes if node < _dpdk_nodes(facts)}
    there = {pool.node for pool in needed(facts.memory.pools) if pool.size_kb == size_kb}
    room = _room_kb(facts, size_kb)
    return tuple(sorted(n for n in nodes & there & room.keys() if room[n] // size_kb >= least))


def _dpdk_nodes(facts: Facts) -> int:
    return _DPDK_NODES.get(known(facts.cpus.arch, ""), 16)


def plan_pages(
    facts: Facts,
    partition: Partition,
    able: tuple[int, ...],
    intent: HostIntent,
    nics: tuple[HostNic, ...],
    live: Live,
) -> tuple[NodePages, ...]:
    """Plan the pages of each node with memory; ``able`` nodes may get some. Raises: HostError,
    InvalidRequest."""
    size = page_size(facts, intent)
    if not size:
        return ()
    room = _room_kb(facts, size)
    if intent.pmd_cores:  # a position in dpdk-socket-mem beyond these is refused
        room = {node: kb for node, kb in room.items() if node < _dpdk_nodes(facts)}
    weights = {s.node: len(s.vm) for s in partition.nodes if s.vm}
    # Without VM cores, the memory of VMs is on PMD nodes.
    weights = weights or dict.fromkeys(partition.pmd_nodes or able[:1], 1)
    distances = known(facts.cpus.distances, {})
    homes = tuple(nearest(known(nic.node, None), able, distances) for nic in nics)
    # vhost-user buffers are on the node of the VM's memory, a NIC's buffers on the NIC's node.
    with_ovs = {*partition.pmd_nodes, *partition.vm_nodes} if intent.pmd_cores else set()
    usable = {node: room[node] // size * size for node in with_ovs}
    pools = _pools(partition, intent, homes, live, weights, usable)
    vm = _vm_mb(intent, weights, room, pools, size)
    there = {p.node: known(p.total, 0) for p in needed(facts.memory.pools) if p.size_kb == size}
    plans = []
    for node in sorted(room):
        plan = _node(node, size, room[node], vm.get(node, 0), pools(node) if node in with_ovs else None)
        plans.append(replace(plan, beyond=max(0, there.get(node, 0) - plan.pages)) if plan.pages else plan)
    return tuple(plans)


def _pools(
    partition: Partition,
    intent: HostIntent,
    homes: tuple[int | None, ...],
    live: Live,
    weights: _ByNode,
    room: _ByNode,
) -> Callable[[int], _Pools]:
    """Return a function from node to pools. ``homes`` are the nodes of the NICs, ``room`` the pages that OVS
    could have on each of its nodes, by KB. VM ports are spread by VM cores, as their node is not known.
    Raises: InvalidRequest if the pools of all ports do not fit."""
    if isinstance(live.ovs, Unknown) or not is_per_port(live):
        return lambda node: _Pools(intent.mtus, None)
    cores = sum(len(share.vm) for share in partition.nodes)
    plugged = sum(port.type.startswith("dpdkvhostuser") for port in live.ovs.ports)
    asked = max(cores, plugged) if intent.vm_ports is None else intent.vm_ports
    first = partition.pmd_nodes[:1]
    # A NIC has one txq per PMD thread plus one; a vhost-user port has as many as its VM.
    nic = port_mbufs(intent.queues, len(partition.polling) + 1)
    vhost = port_mbufs(intent.queues, intent.queues)
    whole = sum(weights.values())

    def pools(node: int, count: int = asked) -> _Pools:
        uplinks = sum(node == home or (home is None and node in first) for home in homes)
        vms = -(-count * weights.get(node, 0) // whole)
        return _Pools(intent.mtus, (nic,) * uplinks + (vhost,) * vms)

    def fit(count: int) -> bool:
        return all(_least_mb(pools(node, count)) * 1024 <= kb for node, kb in room.items())

    if not fit(asked):
        most = next(filter(fit, range(asked - 1, -1, -1)), None)
        fix = "ask for none (0)" if most is None else f"ask for at most {most}"
        what = f"the buffer pools of {asked} ports of VMs (per-port-memory) have no room on each node"
        field = "pmd_cores" if most is None else "vm_ports"
        raise impossible(field, what, f"{fix}, or set per-port-memory=false in OVS")
    return pools


def is_per_port(live: Live) -> bool:
    """True if OVS uses one pool per port (``per-port-memory`` in ovs-vswitchd.conf.db(5))."""
    ovs = known(live.ovs, None)
    return ovs is not None and ovs.other_config.get("per-port-memory", "").lower() == "true"


def _room_kb(facts: Facts, size_kb: int) -> dict[int, int]:
    """Memory of each node with memory for hugepages, KB, minus the reserve for Linux and pages of other
    sizes."""
    room = {node.node: usable_kb(node.total_kb) for node in needed(facts.memory.nodes) if node.total_kb}
    for pool in needed(facts.memory.pools):
        if pool.node in room and pool.size_kb != size_kb:
            room[pool.node] = max(0, room[pool.node] - pool.size_kb * known(pool.total, 0))
    return room


def usable_kb(total_kb: int) -> int:
    """Memory of a node or cell that may be in hugepages, KB."""
    return max(0, total_kb - max(_SYSTEM_KB, int(total_kb * _SYSTEM_SHARE)))


def _vm_mb(
    intent: HostIntent, weights: _ByNode, room: _ByNode, pools: Callable[[int], _Pools], size_kb: int
) -> dict[int, int]:
    """VM memory by node, MB; in units of whole VMs if ``vm_size_mb`` is set, as a VM uses one node."""
    if not intent.vm_memory_mb:
        return {}
    free = {node: room[node] // size_kb for node in weights}
    if intent.pmd_cores:
        free = {node: pages - _pages(_least_mb(pools(node)), size_kb) for node, pages in free.items()}
    if not intent.vm_size_mb:
        whole = sum(weights.values())
        shares = {node: -(-intent.vm_memory_mb * w // whole) for node, w in weights.items()}
        mb = {node: pages * size_kb // 1024 for node, pages in free.items()}
        if short := [node for node in shares if shares[node] > mb[node]]:
            node, most_mb = short[0], min(mb[node] * whole // weights[node] for node in weights)
            what = f"{shares[node]} MB of it fall to NUMA node {node}, which has {mb[node]} MB for them"
            fix = f"ask for at most {most_mb}, or spread the VM cores over more nodes"
            raise impossible("vm_memory_mb", what, fix)
        return shares
    per_vm = _pages(intent.vm_size_mb, size_kb)
    most = {node: pages // per_vm for node, pages in free.items()}
    count, all_vms = -(-intent.vm_memory_mb // intent.vm_size_mb), sum(most.values())
    if count > all_vms:
        what = f"{count} VMs of {intent.vm_size_mb} MB, but the nodes with VM cores have room for {all_vms}"
        fix = f"ask for at most {all_vms * intent.vm_size_mb}, or spread the VM cores over more nodes"
        raise impossible("vm_memory_mb", what, fix)
    given = dict.fromkeys(weights, 0)
    for _ in range(count):
        # Choose the node with the fewest VMs per core, including the new one. A node with few cores may get
        # none, because its share would be missing on nodes with more cores. The check reports that.
        open_nodes = (node for node in given if given[node] < most[node])
        given[min(open_nodes, key=lambda n: ((given[n] + 1) / weights[n], n))] += 1
    return {node: number * per_vm * size_kb // 1024 for node, number in given.items()}


def _least_mb(pools: _Pools) -> int:
    """Minimum memory of OVS on a node, MB."""
    return min(mb for mb, _ in pools.sizes()) + _DPDK_MB


def _node(node: int, size_kb: int, room_kb: int, vm_mb: int, pools: _Pools | None) -> NodePages:
    vm_pages = _pages(vm_mb, size_kb)
    if pools is None:
        return NodePages(node, size_kb, vm_pages, 0, vm_mb, 0)
    sizes = ((_pages(mb + _DPDK_MB, size_kb), mbufs) for mb, mbufs in pools.sizes())
    ovs_pages, mbufs = next(found for found in sizes if found[0] + vm_pages <= room_kb // size_kb)
    ports, per_port = len(pools.ports or ()), pools.ports is not None
    ovs_mb = ovs_pages * size_kb // 1024
    return NodePages(node, size_kb, ovs_pages + vm_pages, ovs_mb, vm_mb, mbufs, ports, per_port)


def _pages(mb: int, size_kb: int) -> int:
    return -(-mb * 1024 // size_kb)

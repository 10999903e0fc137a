"""Partition the cores (pure): disjoint housekeeping, PMD, emulator and VM cores that cover all CPUs.

Roles get whole cores, because SMT siblings share execution units and L1/L2 caches: anything on its sibling
slows a PMD thread down. PMD cores are on the NIC's node, because OVS assigns a queue to a thread on its
port's node, and to another node only if that has none (sched_numa_list_schedule in OVS's
lib/dpif-netdev.c); threads on another node would not poll the NIC. For the same reason each other node with
VM cores gets PMD cores: a vhost-user port is on the node of its VM's memory.

A node without memory that they can use has housekeeping cores only. PMD threads and VMs get performance cores
first, housekeeping and emulator threads efficiency cores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from netplugin.tuning.facts import EFFICIENCY, NODELESS, PERFORMANCE, Cache, Core, Cpus
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.steps import impossible

T = TypeVar("T")
Distances: TypeAlias = Mapping[int, Mapping[int, int]]
FAST_FIRST, SLOW_FIRST = (PERFORMANCE, EFFICIENCY), (EFFICIENCY, PERFORMANCE)
#: The kernel's distances without a firmware table (LOCAL_DISTANCE, REMOTE_DISTANCE in linux/topology.h).
_LOCAL, _REMOTE = 10, 20


@dataclass(frozen=True)
class NodeShare:
    """Cores of one node by role."""

    node: int
    housekeeping: tuple[Core, ...]
    pmd: tuple[Core, ...] = ()
    emulator: tuple[Core, ...] = ()
    vm: tuple[Core, ...] = ()

    @property
    def cores(self) -> tuple[Core, ...]:
        return (*self.housekeeping, *self.pmd, *self.emulator, *self.vm)

    @property
    def cpus(self) -> Cpus:
        return cpus_of(self.cores)


@dataclass(frozen=True)
class Partition:
    """``nodes`` are sorted by number. ``polling`` are the CPUs with a PMD thread, ``vcpus`` those for vCPUs:
    all CPUs of their cores, or one per core with ``idle_siblings``."""

    nodes: tuple[NodeShare, ...]
    polling: Cpus
    vcpus: Cpus

    @property
    def housekeeping(self) -> Cpus:
        return cpus_of(core for share in self.nodes for core in share.housekeeping)

    @property
    def pmd(self) -> Cpus:
        return cpus_of(core for share in self.nodes for core in share.pmd)

    @property
    def emulator(self) -> Cpus:
        return cpus_of(core for share in self.nodes for core in share.emulator)

    @property
    def vm(self) -> Cpus:
        return cpus_of(core for share in self.nodes for core in share.vm)

    @property
    def isolated(self) -> Cpus:
        """CPUs to isolate from the kernel's own work. Emulator cores are not: without load balancing, all
        threads would stay on one CPU."""
        return self.pmd | self.vm

    def housekeeping_of(self, node: int) -> Cpus:
        return cpus_of(c for share in self.nodes if share.node == node for c in share.housekeeping)

    def near(self, cpus: Cpus) -> Cpus:
        """Housekeeping CPUs of the nodes of these CPUs; all housekeeping CPUs if those have none."""
        nodes = (share for share in self.nodes if share.cpus & cpus)
        return cpus_of(core for share in nodes for core in share.housekeeping) or self.housekeeping

    def polling_on(self, nodes: Collection[int]) -> Cpus:
        """CPUs with a PMD thread on these nodes."""
        shares = (share for share in self.nodes if share.node in nodes)
        return self.polling & cpus_of(core for share in shares for core in share.pmd)

    @property
    def pmd_nodes(self) -> tuple[int, ...]:
        return tuple(share.node for share in self.nodes if share.pmd)

    @property
    def vm_nodes(self) -> tuple[int, ...]:
        return tuple(share.node for share in self.nodes if share.vm)


def cpus_of(cores: Iterable[Core]) -> Cpus:
    return frozenset(cpu for core in cores for cpu in core.cpus)


def divide(
    cores: tuple[Core, ...],
    l3: tuple[Cpus, ...],
    order: tuple[int, ...],
    nic_nodes: tuple[int, ...],
    intent: HostIntent,
    *,
    sure: bool,
) -> Partition:
    """Partition the cores. ``order`` has the nodes that can have PMD threads and VMs, nearest to the NICs
    first, ``nic_nodes`` those of them whose threads poll the NICs; ``l3`` are the L3 caches.

    ``sure``: the NICs are configured, so each of their nodes must get a PMD core. Otherwise a node without
    one is only a finding, because the plan must not fail depending on which links are up.

    Raises: InvalidRequest naming the field that requests too many cores.
    """
    kept = kept_cores(cores, intent.housekeeping_cores)
    free = {node: _Free([c for c in cores if c.node == node and c not in kept[node]], l3) for node in kept}
    pmd = _pmd(free, {node: len(kept[node]) for node in nic_nodes}, intent, sure)
    served = tuple(node for node in nic_nodes if pmd.get(node))
    counts = _vms(free, order, served, intent)
    shares = []
    for node in sorted(kept):
        vms, left = counts.get(node, 0), free[node]
        polling = (*pmd.get(node, ()), *left.take(_relay_cores(node, served, intent) if vms else 0))
        emulator = left.take(intent.emulator_cores if vms else 0, SLOW_FIRST)
        vm = left.take(vms)
        # Unassigned cores are housekeeping.
        shares.append(NodeShare(node, (*kept[node], *left.cores), polling, emulator, vm))
    return Partition(
        tuple(shares),
        polling=_busy((core for share in shares for core in share.pmd), intent),
        vcpus=_busy((core for share in shares for core in share.vm), intent),
    )


def kept_cores(cores: Collection[Core], count: int) -> dict[int, tuple[Core, ...]]:
    """Housekeeping cores of each node: the one that Linux booted on, which cannot be isolated, then
    efficiency cores, lowest first; ``count`` cores, and in addition those of no node."""
    boot = min((core.first for core in cores), default=0)
    order = (*SLOW_FIRST, NODELESS)
    ranked = sorted(cores, key=lambda core: (core.first != boot, order.index(core.kind), core.first))
    kept = {}
    for node in {core.node for core in cores}:
        mine = [core for core in ranked if core.node == node]
        kept[node] = (*mine[:count], *(core for core in mine[count:] if core.kind == NODELESS))
    return kept


class _Free:
    """Unassigned cores of one node."""

    def __init__(self, cores: Iterable[Core], l3: tuple[Cpus, ...]) -> None:
        self.cores = sorted(cores, key=lambda core: core.first)
        self._l3 = l3

    def __len__(self) -> int:
        return len(self.cores)

    def take(self, count: int, kinds: tuple[str, ...] = FAST_FIRST) -> tuple[Core, ...]:
        """Take ``count`` cores, of one kind before the next, from as few L3 caches as possible."""
        taken: list[Core] = []
        for kind in kinds:
            cores = [core for core in self.cores if core.kind == kind]
            groups = grouped(cores, [core.cpus for core in cores], self._l3)
            taken += together(groups, count - len(taken))
        self.cores = [core for core in self.cores if core not in taken]
        return tuple(sorted(taken, key=lambda core: core.first))


def _busy(cores: Iterable[Core], intent: HostIntent) -> Cpus:
    return frozenset(core.first for core in cores) if intent.idle_siblings else cpus_of(cores)


def _pmd(
    free: dict[int, _Free], kept: Mapping[int, int], intent: HostIntent, sure: bool
) -> dict[int, tuple[Core, ...]]:
    """Spread PMD cores evenly over the NIC nodes, the keys of ``kept``, which has their number of
    housekeeping cores; with ``sure``, at least one on each, because OVS polls a NIC on a node without PMD
    thread from another node and only logs that (sched_numa_list_schedule)."""
    room = {node: len(free[node]) for node in kept}
    where = ", ".join(map(str, room))
    full = [node for node in room if not room[node]] if sure else []
    asked, most, housekeeping = intent.pmd_cores, sum(room.values()), intent.housekeeping_cores
    near = "OVS polls a NIC on its own node"
    if asked > most:
        what = f"{asked} whole cores, but NUMA node {where} of the NIC has {most} with {housekeeping} a node"
        fewer = ", or for fewer housekeeping cores" if housekeeping > 1 else ""
        fix = f"ask for at most {0 if full else most}{fewer}"
        raise impossible("pmd_cores", f"{what} for housekeeping, and {near}", fix)
    if asked and full:
        what = f"{housekeeping} whole cores a node for housekeeping leave no core for a PMD thread"
        field, less = "pmd_cores", "no PMD cores: 0"
        if all(kept[node] > 1 for node in full):
            field, less = "housekeeping_cores", "fewer: 1"
        fix = f"name the NICs that OVS has on other nodes (nics), or ask for {less}"
        raise impossible(field, f"{what} on NUMA node {full[0]}, which has a NIC", fix)
    if sure and 0 < asked < len(room):
        what = f"{asked} whole cores, and there are NICs on the NUMA nodes {where}: {near}"
        fix = f"ask for at least {len(room)}, or name the NICs that OVS has (nics)"
        raise impossible("pmd_cores", what, fix)
    counts = dict.fromkeys(room, 0)
    for _ in range(asked):
        counts[min((n for n in room if counts[n] < room[n]), key=lambda n: counts[n])] += 1
    return {node: free[node].take(count) for node, count in counts.items()}


def _relay_cores(node: int, served: tuple[int, ...], intent: HostIntent) -> int:
    """PMD cores for vhost-user ports on a node without PMD cores for a NIC."""
    return intent.vm_pmd_cores if intent.pmd_cores and node not in served else 0


def _vms(
    free: dict[int, _Free], order: tuple[int, ...], served: tuple[int, ...], intent: HostIntent
) -> dict[int, int]:
    """Number of VM cores of each node; fills the nodes nearest to the NICs first."""
    room = {
        node: max(0, len(free[node]) - intent.emulator_cores - _relay_cores(node, served, intent))
        for node in order
    }
    most = sum(room.values())
    left = most if intent.vm_cores is None else intent.vm_cores
    if left > most:
        what = (
            f"{left} whole cores, but {most} are left after housekeeping, PMD cores and "
            f"{intent.emulator_cores} emulator cores a node"
        )
        raise impossible("vm_cores", what, f"ask for at most {most}, or for fewer of the others")
    counts = {}
    for node in order:
        counts[node] = min(left, room[node])
        left -= counts[node]
    return counts


def l3_caches(caches: Iterable[Cache]) -> tuple[Cpus, ...]:
    """CPUs of each L3 cache, a CCX on AMD, a cluster on ARM; empty if the machine reports none. The threads
    of a VM, and the PMD threads that serve it, exchange data through it; between two of them, data crosses
    the fabric (SUSE Best Practices, "Optimizing Linux for AMD EPYC")."""
    return tuple(cache.cpus for cache in caches if cache.level == 3)


def grouped(cores: Sequence[T], cpus: Sequence[Cpus], l3: Sequence[Cpus]) -> list[list[T]]:
    """Group cores by L3 cache, keeping their order; ``cpus`` are the CPUs of each core."""
    groups: dict[int, list[T]] = {}
    for core, mine in zip(cores, cpus, strict=True):
        home = next((number for number, cache in enumerate(l3) if mine & cache), -1)
        groups.setdefault(home, []).append(core)
    return list(groups.values())


def together(groups: Iterable[Sequence[T]], count: int) -> list[T]:
    """Take ``count`` cores from as few groups as possible, best fit and then first; all if too few."""
    left = [list(group) for group in groups if group]
    taken: list[T] = []
    while left and len(taken) < count:
        desired = count - len(taken)
        fitting = [group for group in left if len(group) >= desired]
        best = min(fitting, key=len) if fitting else max(left, key=len)
        taken += best[:desired]
        left.remove(best)
    return taken


def nearest(node: int | None, nodes: Collection[int], distances: Distances) -> int | None:
    """The node itself if it is one of ``nodes``, or else the nearest of them; None if there is none, or if
    the firmware does not report the node."""
    if node is None or node in nodes:
        return node
    return min(nodes, key=lambda each: (distances.get(node, {}).get(each, _REMOTE), each), default=None)


def ranks(cores: tuple[Core, ...], nic_nodes: tuple[int, ...], distances: Distances) -> dict[int, int]:
    """Rank of each node: 0 for NIC nodes, then 1 and up; equally distant nodes share a rank. With SNC (Intel)
    or NPS (AMD) a package has several nodes, nearer to each other than to the other package. If the firmware
    reports one distance for all other nodes, the package decides."""
    packages: dict[int, set[int]] = {}
    for core in cores:
        packages.setdefault(core.node, set()).add(core.package)
    near = [node for node in nic_nodes if node in packages]
    home = {package for node in near for package in packages[node]}

    def away(node: int) -> tuple[int, bool]:
        rows = [distances.get(nic, {}).get(node, _REMOTE) for nic in near]
        return min(rows, default=_LOCAL), not packages[node] & home

    rest = {node: away(node) for node in packages if node not in near}
    order = sorted(set(rest.values()))
    return dict.fromkeys(near, 0) | {node: 1 + order.index(far) for node, far in rest.items()}

"""Which core does what (pure): housekeeping, PMD, emulator and VM cores, disjoint, covering all CPUs.

Whole cores, because SMT siblings share the core's execution units and first caches: a PMD thread
beside anything else loses to it. PMD cores are on their NIC's node, because each packet would cross
the link between the nodes twice otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from netplugin.tuning.facts import Core, Cpus
from netplugin.tuning.intent import Intent
from netplugin.tuning.planning.refused import impossible


@dataclass(frozen=True)
class NodeShare:
    """The whole cores of one node by what they do."""

    node: int
    housekeeping: tuple[Core, ...]
    pmd: tuple[Core, ...] = ()
    emulator: tuple[Core, ...] = ()
    vm: tuple[Core, ...] = ()

    @property
    def cpus(self) -> Cpus:
        return cpus_of((*self.housekeeping, *self.pmd, *self.emulator, *self.vm))


@dataclass(frozen=True)
class Partition:
    """``nodes`` in their order. ``polling`` are the CPUs with a PMD thread, ``vcpus`` those for vCPUs:
    all of their cores, or one of each while its siblings idle."""

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
        """What is kept free of the kernel's own work.

        Emulator cores are not: without the scheduler's balancing all threads would stay on one CPU.
        """
        return self.pmd | self.vm

    def housekeeping_of(self, node: int) -> Cpus:
        return cpus_of(c for share in self.nodes if share.node == node for c in share.housekeeping)

    def near(self, cpus: Cpus) -> Cpus:
        """The housekeeping CPUs of the nodes that have these; all, if none has."""
        nodes = [s for s in self.nodes if s.cpus & cpus]
        return cpus_of(core for share in nodes for core in share.housekeeping) or self.housekeeping

    @property
    def pmd_nodes(self) -> tuple[int, ...]:
        return tuple(share.node for share in self.nodes if share.pmd)

    @property
    def vm_nodes(self) -> tuple[int, ...]:
        return tuple(share.node for share in self.nodes if share.vm)


def cpus_of(cores: Iterable[Core]) -> Cpus:
    return frozenset(cpu for core in cores for cpu in core.cpus)


def divide(cores: tuple[Core, ...], nic_nodes: tuple[int, ...], intent: Intent) -> Partition:
    """Raises: InvalidRequest naming the field that asks for more cores than there are."""
    free = {node: list(_of_node(cores, node)) for node in sorted({core.node for core in cores})}
    kept = {node: _take(free[node], intent.housekeeping_cores) for node in free}
    pmd = _pmd(free, nic_nodes, intent)
    order = [*(n for n in nic_nodes if n in free), *(n for n in free if n not in nic_nodes)]
    emulator, vm = _vms(free, order, intent)
    shares = tuple(
        # What nobody asked for goes back to everything else.
        NodeShare(
            node,
            housekeeping=(*kept[node], *free[node]),
            pmd=tuple(pmd[node]),
            emulator=tuple(emulator[node]),
            vm=tuple(vm[node]),
        )
        for node in free
    )
    return Partition(
        shares,
        polling=_busy((core for share in shares for core in share.pmd), intent),
        vcpus=_busy((core for share in shares for core in share.vm), intent),
    )


def _busy(cores: Iterable[Core], intent: Intent) -> Cpus:
    return frozenset(core.first for core in cores) if intent.idle_siblings else cpus_of(cores)


def _of_node(cores: tuple[Core, ...], node: int) -> Iterator[Core]:
    """Lowest first: so the first CPU that Linux booted on, which cannot be isolated, is housekeeping."""
    yield from sorted((core for core in cores if core.node == node), key=lambda core: core.first)


def _take(cores: list[Core], count: int) -> list[Core]:
    taken, cores[:] = cores[:count], cores[count:]
    return taken


def _pmd(
    free: dict[int, list[Core]], nodes: tuple[int, ...], intent: Intent
) -> dict[int, list[Core]]:
    """Evenly over the nodes that have a NIC."""
    taken: dict[int, list[Core]] = {node: [] for node in free}
    room = sum(len(free.get(node, ())) for node in nodes)
    if intent.pmd_cores > room:
        where = ", ".join(map(str, nodes))
        raise impossible(
            "pmd_cores",
            f"{intent.pmd_cores} whole cores, but NUMA node {where} of the NIC has {room} beside "
            f"{intent.housekeeping_cores} a node for housekeeping",
            f"ask for at most {room}, or for fewer housekeeping cores",
        )
    for _ in range(intent.pmd_cores):
        node = min((n for n in nodes if free.get(n)), key=lambda n: len(taken[n]))
        taken[node] += _take(free[node], 1)
    return taken


def _vms(
    free: dict[int, list[Core]], order: list[int], intent: Intent
) -> tuple[dict[int, list[Core]], dict[int, list[Core]]]:
    """Emulator and VM cores, on the NIC's node first, and on as few nodes as will do."""
    emulator: dict[int, list[Core]] = {node: [] for node in free}
    vm: dict[int, list[Core]] = {node: [] for node in free}
    room = {node: max(0, len(free[node]) - intent.emulator_cores) for node in order}
    left = sum(room.values()) if intent.vm_cores is None else intent.vm_cores
    if left > sum(room.values()):
        raise impossible(
            "vm_cores",
            f"{left} whole cores, but {sum(room.values())} are left beside housekeeping, "
            f"{intent.pmd_cores} PMD cores and {intent.emulator_cores} emulator cores a node",
            f"ask for at most {sum(room.values())}, or for fewer of the others",
        )
    for node in order:
        count = min(left, room[node])
        if count:
            emulator[node] = _take(free[node], intent.emulator_cores)
            vm[node] = _take(free[node], count)
            left -= count
    return emulator, vm

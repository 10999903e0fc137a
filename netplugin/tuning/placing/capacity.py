"""Host capacity for VMs by NUMA node, from the host's plan, and what other VMs use of it (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from netplugin.api.errors import BackendUnavailable, HostError
from netplugin.libvirt.pins import Placement
from netplugin.tuning.facts import EFFICIENCY, Cpus, DomainLive, Facts, Live
from netplugin.tuning.planning.partition import cpus_of, l3_caches, ranks
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import Unknown, known


@dataclass(frozen=True)
class NodeGround:
    """Capacity of one NUMA node. ``cores`` are the CPUs for vCPUs, grouped by core; ``emulator`` the CPUs for
    QEMU's other threads; ``memory_kb`` maps a hugepage size to the memory for VMs, both in KB; ``l3`` the
    CPUs of each L3 cache, ``slow`` those of efficiency cores; ``away`` is 0 on NIC nodes and grows with the
    distance from them."""

    node: int
    cores: tuple[tuple[int, ...], ...]
    emulator: Cpus
    memory_kb: Mapping[int, int]
    away: int = 0
    l3: tuple[Cpus, ...] = ()
    slow: Cpus = frozenset()

    @property
    def cpus(self) -> Cpus:
        return frozenset(cpu for core in self.cores for cpu in core)


@dataclass(frozen=True)
class HostCapacity:
    """Capacity of all nodes with CPUs. ``page_kb`` is the plan's hugepage size, KB."""

    nodes: tuple[NodeGround, ...]
    page_kb: int
    pmd: Cpus = frozenset()
    housekeeping: Cpus = frozenset()
    realtime: bool = False

    def node(self, number: int) -> NodeGround | None:
        return next((each for each in self.nodes if each.node == number), None)

    def node_of(self, cpu: int) -> int | None:
        """The NUMA node of a CPU for vCPUs; None for any other CPU."""
        return next((each.node for each in self.nodes if cpu in each.cpus), None)

    @property
    def cpus(self) -> Cpus:
        return frozenset(cpu for each in self.nodes for cpu in each.cpus)

    @property
    def emulator(self) -> Cpus:
        return frozenset(cpu for each in self.nodes for cpu in each.emulator)

    @property
    def with_cores(self) -> tuple[NodeGround, ...]:
        return tuple(each for each in self.nodes if each.cores)


@dataclass(frozen=True)
class Held:
    """Resources in use by other VMs: CPUs, and memory in KB by (node, page size in KB)."""

    cpus: Cpus = frozenset()
    memory_kb: Mapping[tuple[int, int], int] = field(default_factory=dict)


def ground_of(plan: TuningPlan, facts: Facts) -> HostCapacity:
    """Derive the capacity from plan and facts. Memory: the existing hugepages minus the plan's OVS share."""
    partition = plan.partition
    away = ranks(known(facts.cpus.cores, ()), plan.nic_nodes, known(facts.cpus.distances, {}))
    ovs_kb = {(pages.node, pages.size_kb): pages.ovs_mb << 10 for pages in plan.pages}
    pools = [(p.node, p.size_kb, known(p.total, 0) * p.size_kb) for p in known(facts.memory.pools, ())]
    nodes = tuple(
        NodeGround(
            node=share.node,
            cores=tuple(cpus for core in share.vm if (cpus := tuple(sorted(core.cpus & partition.vcpus)))),
            emulator=frozenset(cpu for core in share.emulator for cpu in core.cpus)
            or partition.housekeeping_of(share.node),
            memory_kb={
                size: max(0, kb - ovs_kb.get((node, size), 0))
                for node, size, kb in pools
                if node == share.node
            },
            away=away.get(share.node, 0),
            l3=l3_caches(known(facts.cpus.caches, ())),
            slow=cpus_of(core for core in share.vm if core.kind == EFFICIENCY),
        )
        for share in partition.nodes
    )
    sizes = [pages.size_kb for pages in plan.pages]
    page_kb = sizes[0] if sizes else 0
    return HostCapacity(nodes, page_kb, partition.pmd, partition.housekeeping, plan.intent.realtime)


def held(placements: Iterable[Placement], live: Cpus = frozenset()) -> Held:
    """Sum up placements. ``live`` adds the CPUs that running domains are pinned to, by any tool."""
    cpus = set(live)
    memory: dict[tuple[int, int], int] = {}
    for placement in placements:
        cpus |= placement.cpus
        for cell in placement.cells:
            key = (cell.node, placement.page_kb)
            memory[key] = memory.get(key, 0) + placement.paged_kb(cell)
    return Held(frozenset(cpus), memory)


def running(live: Live, step: str) -> tuple[DomainLive, ...]:
    """The running domains; none if libvirt does not run.

    Raises: BackendUnavailable if libvirt runs but does not answer, HostError if a package is missing to
    query it. An empty answer would be unsafe: its VMs may use any core.
    """
    if not isinstance(live.domains, Unknown):
        return live.domains
    if live.domains.missing:
        return ()
    why = f"libvirt runs here and does not say which CPUs its VMs have: {live.domains.reason}"
    if live.domains.fix:
        raise HostError(why, step=step, fix=live.domains.fix)
    fix = "see that `virsh list` answers, and that the agent may connect"
    raise BackendUnavailable(why, step=step, fix=fix)


def pinned_by_others(domains: Iterable[DomainLive], every: Cpus, name: str | None) -> Cpus:
    """CPUs of the pinned vCPUs of running domains; vCPUs that may run on ``every`` CPU do not count.

    ``name`` is the domain to place; its own CPUs are left out.
    """
    vcpus = (vcpu for domain in domains if domain.name != name for vcpu in domain.vcpus)
    return frozenset().union(*(vcpu for vcpu in vcpus if not vcpu >= every))

"""What rules are about: a node, a bridge, a domain, each with what belongs to it alone (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from netplugin.api.pmd_models import PmdState
from netplugin.pmd.settings import MASK, masked, read_settings
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import (
    PERFORMANCE,
    CpuFacts,
    Cpus,
    DomainLive,
    HostNic,
    HugepagePool,
    IommuFacts,
    Irq,
    KernelFacts,
    Limit,
    OvsLive,
    PowerFacts,
)
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.partition import NodeShare, cpus_of
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import Group, Step


@dataclass(frozen=True)
class Host:
    """``hugepages`` of all nodes, None if unknown; ``vf_nics``: NICs that support VFs; ``vm_cores``: planned;
    ``homeless``: no NIC of the plan says which of several nodes it is on."""

    unread: tuple[Unknown, ...]
    cpus: CpuFacts
    power: PowerFacts
    kernel: KernelFacts
    irqs: tuple[Irq, ...]
    iommu: IommuFacts
    hugepages: int | None
    vf_nics: tuple[HostNic, ...]
    intent: HostIntent | None
    vm_cores: int
    homeless: bool


def hosts(scene: Scene) -> Iterator[Host]:
    facts, plan = scene.facts, scene.plan
    pools = known(facts.memory.pools, None)
    shares = plan.partition.nodes if plan else ()
    nics = plan.nics if plan else ()
    yield Host(
        unread=tuple(dict.fromkeys((*facts.unknown(), *scene.live.unanswered()))),
        cpus=facts.cpus,
        power=facts.power,
        kernel=facts.kernel,
        irqs=known(facts.interrupts.irqs, ()),
        iommu=facts.iommu,
        hugepages=None if pools is None else sum(known(pool.total, 0) for pool in pools),
        vf_nics=tuple(nic for nic in known(facts.network.nics, ()) if known(nic.total_vfs, None)),
        intent=plan.intent if plan else None,
        vm_cores=sum(len(share.vm) for share in shares),
        homeless=len(shares) > 1 and all(known(nic.node, None) is None for nic in nics),
    )


@dataclass(frozen=True)
class StepGroup:
    """The steps of the plan that belong together."""

    group: Group
    steps: tuple[Step, ...]


def step_groups(scene: Scene) -> Iterator[StepGroup]:
    """Without hugepages, which the rules of a node are about."""
    steps = scene.plan.steps if scene.plan else ()
    for group in Group:
        if group is not Group.HUGEPAGES and (own := tuple(step for step in steps if step.group is group)):
            yield StepGroup(group, own)


@dataclass(frozen=True)
class Cgroup:
    """A control group with limits, and what the plan needs in it: CPUs, and MB in pages of each size.

    systemd runs vswitchd in system.slice, libvirt runs VMs in machine.slice.
    """

    limit: Limit
    online: Cpus
    memory_bytes: int
    needs_cpus: Cpus
    needs_mb: Mapping[int, int]


def cgroups(scene: Scene) -> Iterator[Cgroup]:
    memory = sum(node.total_kb for node in known(scene.facts.memory.nodes, ())) * 1024
    for limit in scene.facts.limits:
        cpus: Cpus = frozenset()
        sizes: dict[int, int] = defaultdict(int)
        has_ovs, has_vms = (limit.group.startswith(f"/{name}.slice") for name in ("system", "machine"))
        if scene.plan and (has_ovs or has_vms):
            part = scene.plan.partition
            cpus = part.pmd if has_ovs else part.vm | part.emulator
            for pages in scene.plan.pages:
                sizes[pages.size_kb] += pages.ovs_mb if has_ovs else pages.vm_mb
        yield Cgroup(limit, known(scene.facts.cpus.online, frozenset()), memory, cpus, sizes)


@dataclass(frozen=True)
class Node:
    """``share``, ``pages`` and ``polling`` (PMD CPUs) are planned; ``nics`` are those of the plan that are on
    this node and polled here, ``near`` the nodes on which the plan's NICs are polled. ``ports`` of OVS and
    running VMs (``domains``) have their memory here; ``threads`` are the CPUs of PMD threads, if no port is
    known. ``idle``: neither OVS-DPDK nor a VM runs; ``runs``: OVS-DPDK does. ``megabytes`` of hugepages, None
    if unknown; ``elsewhere``: other nodes have some. ``socket_mb``: its entry of ``dpdk-socket-mem``;
    ``free_mb``: what DPDK can take of those that are free, after OVS has started."""

    number: int
    pools: tuple[HugepagePool, ...] | None
    pages: NodePages | None
    share: NodeShare | None
    polling: Cpus
    nics: tuple[HostNic, ...]
    near: tuple[int, ...]
    intent: HostIntent | None
    ports: tuple[str, ...]
    threads: Cpus
    domains: tuple[str, ...]
    idle: bool
    runs: bool
    megabytes: int | None
    elsewhere: bool
    socket_mb: int | None
    free_mb: int


def nodes(scene: Scene) -> Iterator[Node]:
    facts, plan, ovs = scene.facts, scene.plan, known(scene.live.ovs, None)
    pools, domains = known(facts.memory.pools, None), known(scene.live.domains, ())
    cores, queues = known(facts.cpus.cores, ()), [q for pmd in (ovs.pmds if ovs else ()) for q in pmd.queues]
    shares = {share.node: share for share in plan.partition.nodes} if plan else {}
    pages = {one.node: one for one in plan.pages} if plan else {}
    nics, polled = plan.nics if plan and plan.intent.pmd_cores else (), _polled(scene)
    homes = {nic.address: known(nic.node, None) for nic in nics}
    numbers = {core.node for core in cores} | shares.keys() | pages.keys()
    numbers |= {pool.node for pool in pools or ()} | {node.node for node in known(facts.memory.nodes, ())}
    near = plan.nic_nodes if plan and nics else ()
    sizes, free = defaultdict[int, int](int), defaultdict[int, int](int)
    for pool in pools or ():
        sizes[pool.node] += known(pool.total, 0) * pool.size_kb >> 10
        free[pool.node] += known(pool.free, 0) * pool.size_kb >> 10
    if ovs and "--legacy-mem" in ovs.other_config.get("dpdk-extra", ""):
        free.clear()
    for number in sorted(numbers):
        yield Node(
            number=number,
            pools=None if pools is None else tuple(pool for pool in pools if pool.node == number),
            pages=pages.get(number),
            share=shares.get(number),
            polling=plan.partition.polling_on({number}) if plan else frozenset(),
            nics=tuple(nic for nic in nics if number in near and homes[nic.address] == number),
            near=near,
            intent=plan.intent if plan else None,
            ports=tuple(dict.fromkeys(f"port {q.port}" for q in queues if q.port_numa_node == number)),
            threads=polled & cpus_of(core for core in cores if core.node == number)
            if not queues
            else frozenset(),
            domains=tuple(f"VM {domain.name}" for domain in domains if number in domain.memory_nodes),
            idle=not domains and not (ovs and ovs.dpdk_initialized),
            runs=bool(ovs and ovs.dpdk_initialized and ovs.silent is None),
            megabytes=None if pools is None else sizes[number],
            elsewhere=any(size for node, size in sizes.items() if node != number),
            socket_mb=_socket_mb(ovs, number),
            free_mb=free[number],
        )


def _socket_mb(ovs: OvsLive | None, node: int) -> int | None:
    """None without a list; nodes that it does not reach get none (vswitch.xml, dpdk-socket-mem)."""
    parts = [p.strip() for p in (ovs.other_config.get("dpdk-socket-mem", "") if ovs else "").split(",")]
    mine = parts[node] if node < len(parts) else ""
    return None if not any(parts) else int(mine) if mine.isdecimal() else 0  # as eal_parse_socket_arg


@dataclass(frozen=True)
class Nic:
    """A NIC. ``planned``: PMD threads of the plan serve it, on the nodes ``served``; ``named``: the operator
    names the NICs for DPDK."""

    nic: HostNic
    planned: bool
    named: bool
    served: tuple[int, ...]


def nics(scene: Scene) -> Iterator[Nic]:
    plan = scene.plan
    served = plan.nic_nodes if plan and plan.intent.pmd_cores else ()
    for nic in known(scene.facts.network.nics, ()):
        yield Nic(nic, plan is not None and nic in plan.nics, bool(plan and plan.intent.nics), served)


@dataclass(frozen=True)
class Ovs:
    """An OVS with DPDK. ``mask`` has the CPUs of ``pmd-cpu-mask``, None if it cannot be parsed; ``pmds``
    those of the threads that run, ``planned`` those of the plan's PMD cores."""

    settings: Mapping[str, str]
    mask: Cpus | None
    pmds: Cpus
    isolated: Cpus | None
    online: Cpus | None
    planned: Cpus


def switches(scene: Scene) -> Iterator[Ovs]:
    """None if OVS was not queried or has no DPDK."""
    ovs = known(scene.live.ovs, None)
    if ovs is None or not ovs.dpdk_initialized:
        return
    written = ovs.other_config.get(MASK, "")
    mask = frozenset(masked(written)) if masked(written) or not written.strip("0x") else None
    cpus, planned = scene.facts.cpus, scene.plan.partition.pmd if scene.plan else frozenset()
    isolated, online = known(cpus.isolated, None), known(cpus.online, None)
    yield Ovs(ovs.other_config, mask, scene.running_pmds, isolated, online, planned)


def pmd_states(scene: Scene) -> Iterator[PmdState]:
    """None if OVS was not queried or has no PMD threads."""
    ovs = known(scene.live.ovs, None)
    if ovs is not None and ovs.pmds:
        settings = read_settings(ovs.other_config)
        yield PmdState(cpus="", cores=ovs.pmds, settings=settings, unpolled=ovs.unpolled)


@dataclass(frozen=True)
class PmdThread:
    """A PMD thread that runs, or that pmd-cpu-mask asks for. ``kind`` is that of its core; ``fast`` are the
    CPUs of performance cores on its node."""

    cpu: int
    runs: bool
    kind: str
    fast: Cpus


def _polled(scene: Scene) -> Cpus:
    """CPUs of the PMD threads that run, or that pmd-cpu-mask asks for."""
    ovs = known(scene.live.ovs, None)
    mask = frozenset(masked(ovs.other_config.get(MASK))) if ovs and ovs.dpdk_initialized else frozenset()
    return scene.running_pmds | mask


def pmd_threads(scene: Scene) -> Iterator[PmdThread]:
    cores, polled = known(scene.facts.cpus.cores, ()), _polled(scene)
    for core in cores:
        fast = cpus_of(one for one in cores if one.node == core.node and one.kind == PERFORMANCE)
        for cpu in sorted(core.cpus & polled):
            yield PmdThread(cpu, cpu in scene.running_pmds, core.kind, fast)


@dataclass(frozen=True)
class Domain:
    """A running VM; ``nodes`` are those of the CPUs that its vCPUs may run on, ``near`` those of its memory
    that have CPUs: no vCPU can be next to HBM or CXL memory of its own node. ``siblings`` are the siblings of
    PMD threads."""

    live: DomainLive
    nodes: frozenset[int]
    near: frozenset[int]
    isolated: Cpus
    polling: Cpus
    siblings: Cpus


def domains(scene: Scene) -> Iterator[Domain]:
    """None if libvirt was not queried or runs no domain."""
    isolated = known(scene.facts.cpus.isolated, None) or frozenset()
    cores, polling = known(scene.facts.cpus.cores, ()), scene.polling
    homes = {cpu: core.node for core in cores for cpu in core.cpus}
    siblings = cpus_of(core for core in cores if core.cpus & polling) - polling
    for live in known(scene.live.domains, ()):
        at = frozenset(homes[cpu] for cpus in live.vcpus for cpu in cpus if cpu in homes)
        near = live.memory_nodes.intersection(homes.values()) if homes else live.memory_nodes
        yield Domain(live, at, near, isolated, polling, siblings)


@dataclass(frozen=True)
class PinnedCpu:
    """A CPU, and the vCPUs that may run on no other."""

    cpu: int
    vcpus: tuple[str, ...]


def pinned_cpus(scene: Scene) -> Iterator[PinnedCpu]:
    users: dict[int, list[str]] = defaultdict(list)
    for domain in known(scene.live.domains, ()):
        for number, cpus in enumerate(domain.vcpus):
            if len(cpus) == 1:
                users[min(cpus)].append(f"vCPU {number} of {domain.name}")
    yield from (PinnedCpu(cpu, tuple(vcpus)) for cpu, vcpus in sorted(users.items()))

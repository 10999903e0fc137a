"""What rules are about: a node, a bridge, a domain, each with what belongs to it alone (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from netplugin.host.cpus import from_mask
from netplugin.pmd.settings import MASK
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import (
    CpuFacts,
    Cpus,
    DomainLive,
    HostNic,
    HugepagePool,
    InterfaceFacts,
    IommuFacts,
    Irq,
    KernelFacts,
    Limit,
    OvsLive,
    OvsPortLive,
    PowerFacts,
)
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.network import nodes_of
from netplugin.tuning.planning.partition import NodeShare
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import Group, Step

# -- The host: what there is once. ----------------------------------------------------------------


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


# -- A NUMA node: its memory and cores, and of the plan and of what runs that which is there. -----


@dataclass(frozen=True)
class Node:
    """``share``, ``pages`` and ``polling`` (PMD CPUs) are planned; ``nics`` are those of the plan on this
    node, ``near`` the nodes of all of them, ``served`` whether the plan polls NICs here. ``pmds`` are CPUs of
    running threads, ``domains`` running VMs whose memory is here. ``idle``: no program of the host uses
    hugepages. ``socket_mb`` is its entry of ``dpdk-socket-mem``, None if that is not set."""

    number: int
    pools: tuple[HugepagePool, ...] | None
    pages: NodePages | None
    share: NodeShare | None
    polling: Cpus
    nics: tuple[HostNic, ...]
    near: tuple[int, ...]
    served: bool
    queues: int
    vm_memory: bool
    pmds: Cpus
    domains: tuple[str, ...]
    idle: bool
    socket_mb: int | None


def nodes(scene: Scene) -> Iterator[Node]:
    facts, plan, ovs = scene.facts, scene.plan, known(scene.live.ovs, None)
    pools, domains = known(facts.memory.pools, None), known(scene.live.domains, ())
    cores, threads = known(facts.cpus.cores, ()), ovs.pmds if ovs else ()
    shares = {share.node: share for share in plan.partition.nodes} if plan else {}
    pages = {one.node: one for one in plan.pages} if plan else {}
    nics = plan.nics if plan and plan.intent.pmd_cores else ()
    homes = {nic.address: known(nic.node, None) for nic in nics}
    near = tuple(sorted({node for node in homes.values() if node is not None}))
    numbers = {core.node for core in cores} | shares.keys() | pages.keys()
    numbers |= {pool.node for pool in pools or ()} | {node.node for node in known(facts.memory.nodes, ())}
    served = nodes_of(nics, tuple(sorted(shares))) if nics else ()
    for number in sorted(numbers | {thread.numa_node for thread in threads}):
        yield Node(
            number=number,
            pools=None if pools is None else tuple(pool for pool in pools if pool.node == number),
            pages=pages.get(number),
            share=shares.get(number),
            polling=plan.partition.polling_on({number}) if plan else frozenset(),
            nics=tuple(nic for nic in nics if homes[nic.address] == number),
            near=near,
            served=number in served,
            queues=plan.intent.queues if plan else 0,
            vm_memory=bool(plan and plan.intent.vm_memory_mb),
            pmds=frozenset(thread.cpu for thread in threads if thread.numa_node == number),
            domains=tuple(domain.name for domain in domains if number in domain.memory_nodes),
            idle=not domains and not (ovs and ovs.dpdk_initialized),
            socket_mb=_socket_mb(ovs, number),
        )


def _socket_mb(ovs: OvsLive | None, node: int) -> int | None:
    """The entry of a node; nodes that the list does not reach get none (vswitch.xml, dpdk-socket-mem)."""
    listed = (ovs.other_config.get("dpdk-socket-mem") if ovs else None) or ""
    sizes = [int(part) for part in listed.split(",") if part.strip().isdecimal()]
    return None if not sizes else sizes[node] if node < len(sizes) else 0


# -- NICs, kernel interfaces and bridges: the MTU of each, and of what is below or beyond it. ------


@dataclass(frozen=True)
class Hop:
    """An interface that frames pass, and its MTU."""

    name: str
    mtu: int


@dataclass(frozen=True)
class Nic:
    """A NIC of the plan with its interfaces, and the largest MTU that is planned."""

    interfaces: tuple[Hop, ...]
    desired: int


def nics(scene: Scene) -> Iterator[Nic]:
    mtus = _mtus(known(scene.facts.network.interfaces, ()))
    if scene.plan is not None:
        for nic in scene.plan.nics:
            hops = tuple(mtus[name] for name in nic.interfaces if name in mtus)
            yield Nic(hops, max(scene.plan.intent.mtus))


def _mtus(interfaces: Collection[InterfaceFacts]) -> dict[str, Hop]:
    return {i.name: Hop(i.name, i.mtu) for i in interfaces if not isinstance(i.mtu, Unknown)}


@dataclass(frozen=True)
class Link:
    """A kernel interface and those right below it: the NIC of a bond, the bond of a bridge."""

    own: Hop
    below: tuple[Hop, ...]


def links(scene: Scene) -> Iterator[Link]:
    interfaces = known(scene.facts.network.interfaces, ())
    mtus = _mtus(interfaces)
    for one in interfaces:
        lowers = {*one.lowers, *(lower.name for lower in interfaces if lower.master == one.name)}
        if one.name in mtus:
            yield Link(mtus[one.name], tuple(mtus[name] for name in sorted(lowers) if name in mtus))


@dataclass(frozen=True)
class Bond:
    """``hashing``: the kernel or OVS spreads flows by a hash, and it is of layer 2 alone."""

    name: str
    what: str
    coarse: bool
    fix: str


def bonds(scene: Scene) -> Iterator[Bond]:
    for bond in scene.facts.network.bonds:
        mode, policy = known(bond.mode, ""), known(bond.hash_policy, "")
        coarse = mode in ("balance-xor", "802.3ad") and policy in ("layer2", "vlan+srcmac")
        fix = f"ip link set {bond.name} type bond xmit_hash_policy layer3+4"
        yield Bond(bond.name, f"{mode} with xmit_hash_policy {policy}", coarse, fix)
    ovs = known(scene.live.ovs, None)
    modes = {port.port: port.bond_mode for port in (ovs.ports if ovs else ()) if port.bond_mode}
    for name, mode in sorted(modes.items()):
        fix = f"ovs-vsctl set Port {name} bond_mode=balance-tcp lacp=active, with LACP on the switch"
        yield Bond(name, f"{mode}, which spreads by MAC and VLAN", mode == "balance-slb", fix)


@dataclass(frozen=True)
class Bridge:
    """``ports`` are those of VMs; ``out`` is the way out of the bridge for them, None if there is none."""

    name: str
    ports: tuple[Hop, ...]
    out: Hop | None


def bridges(scene: Scene) -> Iterator[Bridge]:
    ovs = known(scene.live.ovs, None)
    grouped: dict[str, list[OvsPortLive]] = defaultdict(list)
    for port in ovs.ports if ovs else ():
        grouped[port.bridge or ""].append(port)
    for name, ports in sorted(grouped.items()):
        hops = {port.name: Hop(port.name, port.mtu) for port in ports if port.mtu}
        uplinks = [hops.pop(port.name) for port in ports if port.type == "dpdk" and port.name in hops]
        yield Bridge(name, tuple(hops.values()), min(uplinks, key=lambda hop: hop.mtu, default=None))


# -- OVS as it runs, and domains. -----------------------------------------------------------------


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
    mask: Cpus | None
    try:
        mask = frozenset(from_mask(ovs.other_config.get(MASK, "")))
    except ValueError:
        mask = None
    cpus, planned = scene.facts.cpus, scene.plan.partition.pmd if scene.plan else frozenset()
    isolated, online = known(cpus.isolated, None), known(cpus.online, None)
    yield Ovs(ovs.other_config, mask, scene.running_pmds, isolated, online, planned)


@dataclass(frozen=True)
class Domain:
    """A running VM; ``nodes`` are those of the CPUs that its vCPUs may run on."""

    live: DomainLive
    nodes: frozenset[int]
    isolated: Cpus
    polling: Cpus


def domains(scene: Scene) -> Iterator[Domain]:
    """None if libvirt was not queried or runs no domain."""
    isolated = known(scene.facts.cpus.isolated, None) or frozenset()
    homes = {cpu: core.node for core in known(scene.facts.cpus.cores, ()) for cpu in core.cpus}
    for live in known(scene.live.domains, ()):
        at = frozenset(homes[cpu] for cpus in live.vcpus for cpu in cpus if cpu in homes)
        yield Domain(live, at, isolated, scene.polling)


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

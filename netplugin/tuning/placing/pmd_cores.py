"""Choose cores for PMD threads (pure): on the nodes of NICs and VMs, never on a core of a VM.

OVS assigns a receive queue to a PMD thread on its port's NUMA node, and to one on another node only if
that node has none (sched_numa_list_schedule in OVS's lib/dpif-netdev.c). A NIC's port is on the NIC's
node, a vhost-user port on the node of its VM's memory. So each NIC node gets a thread, each VM node gets
one, and the rest go to the NIC nodes; for a node without CPUs or memory, the nearest node with both.
Performance cores come first. The host's plan follows the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from netplugin.api.errors import Conflict, InvalidRequest, NetpluginError, some
from netplugin.api.pmd_models import PmdChoice
from netplugin.host.cpus import format_list
from netplugin.host.ovs_rows import OvsInterface
from netplugin.libvirt.pins import Placement
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import EFFICIENCY, Core, Cpus, DomainLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.placing.capacity import running
from netplugin.tuning.planning.network import chosen_nics
from netplugin.tuning.planning.partition import (
    FAST_FIRST,
    cpus_of,
    grouped,
    kept_cores,
    l3_caches,
    nearest,
    together,
)
from netplugin.tuning.root import known
from netplugin.tuning.steps import needed

STEP = "pmd-cores"


@dataclass(frozen=True)
class PmdHost:
    """``nics`` and ``vms`` map a NUMA node to names; ``users`` maps a CPU to the VM that uses it.

    ``ranks`` are sets of CPUs in order of preference, each with a description; other CPUs are not used.
    ``bare`` are the nodes without memory, which get no threads.
    """

    cores: tuple[Core, ...]
    nics: Mapping[int, tuple[str, ...]]
    vms: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    users: Mapping[int, str] = field(default_factory=dict)
    ranks: tuple[tuple[Cpus, str], ...] = ()
    l3: tuple[Cpus, ...] = ()
    bare: frozenset[int] = frozenset()

    def vms_on(self, cpus: Iterable[int]) -> tuple[str, ...]:
        """VMs that use any CPU on the cores of these CPUs."""
        whole = cpus_of(core for core in self.cores if core.cpus & frozenset(cpus)) | frozenset(cpus)
        return tuple(sorted({self.users[cpu] for cpu in whole if cpu in self.users}))


def host_of(
    scene: Scene, placements: Mapping[str, Placement], interfaces: Collection[OvsInterface]
) -> PmdHost:
    """Collect the input from facts, placements and OVS ``interfaces``.

    Raises: HostError if the core topology is unknown, BackendUnavailable if the CPUs of VMs are.
    """
    cores = needed(scene.facts.cpus.cores)
    bare = frozenset(node.node for node in known(scene.facts.memory.nodes, ()) if not node.total_kb)
    nodes = {core.node for core in cores} - bare
    if not nodes:  # then none is better than another
        nodes, bare = {core.node for core in cores}, frozenset()
    distances = known(scene.facts.cpus.distances, {})

    def by_node(found: Iterable[tuple[int | None, str]]) -> dict[int, tuple[str, ...]]:
        homes = ((node, nearest(node, nodes, distances), name) for node, name in found)
        return _by_node((h, name if h == n else f"{name} (nearest to its node {n})") for n, h, name in homes)

    nics = by_node((i.numa_node, i.name) for i in interfaces if i.type == "dpdk")
    if not nics:
        any_nics = HostIntent.model_validate({"pmd_cores": 0})
        planned = scene.plan.nics if scene.plan else chosen_nics(scene.facts, any_nics)
        nics = by_node((known(nic.node, None), nic.address) for nic in planned)
    vms = [(i.numa_node, i.name) for i in interfaces if i.type.startswith("dpdkvhostuser")]
    vms += [(node, vm) for vm, placement in placements.items() for node in placement.nodes]
    users = {cpu: vm for vm, placement in placements.items() for cpu in _held(placement)}
    kept = _kept(scene, cores)
    for domain in running(scene.live, STEP):
        users = dict.fromkeys(_used(domain, cpus_of(cores), kept), domain.name) | users
    ranks, l3 = tuple(_ranks(scene, cores, kept)), l3_caches(known(scene.facts.cpus.caches, ()))
    return PmdHost(cores, nics, by_node(vms), users, ranks, l3, bare)


def choose_cores(count: int, siblings: bool, host: PmdHost) -> tuple[PmdChoice, ...]:
    """Choose cores for ``count`` PMD threads: one per core, or one per CPU with ``siblings``.

    Raises: Conflict if VMs use the cores needed, InvalidRequest if the nodes have too few cores or
    ``count`` is too small for one thread on each NIC node.
    """
    free = _free(host, frozenset(host.users))
    chosen = _chosen(count, siblings, host, free)
    if chosen is None:
        raise _too_few(count, siblings, host, free)
    served = {core.numa_node for core in chosen}
    if bare := sorted(set(host.nics) - served):
        raise _nic_without_thread(count, siblings, host, bare)
    if away := {node: names for node, names in host.vms.items() if node not in served}:
        last = chosen[-1]
        without = "; ".join(f"node {node} ({_some(names)})" for node, names in away.items())
        more = f"none is left for the VMs of NUMA {without}: OVS polls their ports from here"
        chosen[-1] = last.model_copy(update={"reason": f"{last.reason}; {more}"})
    return tuple(chosen)


def refuse_cores_of_vms(cpus: Collection[int], running: Collection[int], host: PmdHost) -> None:
    """Refuse PMD threads on cores of VMs, except on CPUs that run one already. Raises: Conflict."""
    taken = frozenset(cpus) - frozenset(running)
    if vms := host.vms_on(taken):
        found = f"CPUs {format_list(taken)} are on cores of the VMs {', '.join(vms[:5])}"
        fix = 'name other CPUs, or let the agent choose: PUT /v1/pmd {"count": N}'
        raise Conflict(found, step=STEP, fix=fix)


def _held(placement: Placement) -> Cpus:
    return placement.cpus | frozenset(placement.emulator if placement.emulator_alone else ())


def _used(domain: DomainLive, every: Cpus, kept: Cpus) -> Cpus:
    """CPUs that a running domain uses. Not counted: vCPUs that may run on every CPU, and QEMU's other threads
    if they may run on a housekeeping core (``kept``)."""
    vcpus = (cpus for cpus in domain.vcpus if not cpus >= every)
    others = (cpus for cpus in (domain.emulator, *domain.iothreads) if not cpus & kept)
    return frozenset().union(*vcpus, *others)


def _by_node(found: Iterable[tuple[int | None, str]]) -> dict[int, tuple[str, ...]]:
    nodes: dict[int, tuple[str, ...]] = {}
    for node, name in sorted(found, key=lambda each: (each[0] is None, each)):
        if node is not None:
            nodes[node] = (*nodes.get(node, ()), name)
    return nodes


def _kept(scene: Scene, cores: tuple[Core, ...]) -> Cpus:
    """CPUs left for housekeeping on each node: as many cores as the plan keeps, or one without a plan."""
    if len(cores) == 1:  # with a single core, only its first CPU is kept
        return frozenset((cores[0].first,))
    count = scene.plan.intent.housekeeping_cores if scene.plan else 1
    return cpus_of(core for mine in kept_cores(cores, count).values() for core in mine)


def _ranks(scene: Scene, cores: tuple[Core, ...], kept: Cpus) -> Iterator[tuple[Cpus, str]]:
    every = cpus_of(cores)
    if scene.plan is not None:
        partition = scene.plan.partition
        yield partition.pmd, "a PMD core of the host's plan"
        yield partition.housekeeping - kept, "the plan has it for no PMD thread and no VM"
        yield partition.vm, "the plan has it for VMs, and none is there"
        return
    isolated = known(scene.facts.cpus.isolated, None) or frozenset()
    yield (every & isolated) - kept, "isolated by the kernel"
    yield (every & scene.polling) - kept, "it has a PMD thread now"
    yield every - kept, "free; the lowest core of each node is left for everything else"


def _free(host: PmdHost, held: Cpus) -> dict[int, list[tuple[Core, str]]]:
    """Available cores of each node in order of preference, with their description.

    Performance cores come before efficiency cores of any rank. Within a rank, cores that share an L3 cache
    come together.
    """
    held = cpus_of(core for core in host.cores if core.cpus & held)
    found: dict[int, list[tuple[Core, str]]] = {
        core.node: [] for core in host.cores if core.node not in host.bare
    }
    for kind in FAST_FIRST:
        seen: Cpus = held
        alike = [core for core in sorted(host.cores, key=lambda core: core.first) if core.kind == kind]
        for cpus, what in host.ranks:
            for node, mine in found.items():
                cores = [
                    replace(core, cpus=core.cpus & cpus)
                    for core in alike
                    if core.node == node and core.cpus & cpus and not core.cpus & seen
                ]
                groups = grouped(cores, [core.cpus for core in cores], host.l3)
                reason = f"{what}; an efficiency core" if kind == EFFICIENCY else what
                mine += [(core, reason) for core in together(groups, len(cores))]
            seen |= cpus
    return found


def _chosen(
    count: int, siblings: bool, host: PmdHost, free: Mapping[int, list[tuple[Core, str]]]
) -> list[PmdChoice] | None:
    left = {node: list(cores) for node, cores in free.items()}
    chosen: list[PmdChoice] = []
    threads = 0
    for node, why in _turns(host, left):
        core, what = left[node].pop(0)
        cpus = sorted(core.cpus)[: count - threads if siblings else 1]
        chosen.append(PmdChoice(cpus=format_list(cpus), numa_node=node, reason=f"{why}; {what}"))
        threads += len(cpus)
        if threads == count:
            return chosen
    return None


def _turns(host: PmdHost, left: Mapping[int, list[tuple[Core, str]]]) -> Iterator[tuple[int, str]]:
    """Yield the node to take the next core from, and the reason, until no node has cores left."""
    nics = dict(host.nics) or {min(left): ()}
    others = [node for node in sorted(host.vms) if node not in nics]
    rounds: list[list[int]] = [sorted(nics) + others]
    # OVS would not let threads of the others poll the NIC; they serve vhost-user ports.
    for nodes in (sorted(nics), others):
        rounds += [nodes] * max((len(left[node]) for node in nodes), default=0)
    for node in (node for nodes in rounds for node in nodes):
        if left[node]:
            yield node, _why(node, host)


def _why(node: int, host: PmdHost) -> str:
    if node in host.nics:
        return f"NUMA node {node} has the NIC {_some(host.nics[node])}"
    if node in host.vms:
        return f"NUMA node {node} has VMs ({_some(host.vms[node])})"
    return f"NUMA node {node} is the first, as no NIC says where it is"


def _too_few(
    count: int, siblings: bool, host: PmdHost, free: Mapping[int, list[tuple[Core, str]]]
) -> NetpluginError:
    nodes = sorted({*host.nics, *host.vms} or {min(free)})
    have = "; ".join(f"NUMA node {node} has {len(free[node])}" for node in nodes)
    each = "on both CPUs of a core" if siblings else "one on each core"
    what = f"{count} PMD threads, {each}, on the nodes of NICs and VMs: {have} cores that can be had"
    if _chosen(count, siblings, host, _free(host, frozenset())) is not None:
        vms = sorted(set(host.users.values()))
        found = f"{what}, and the others that it takes are of the VMs {', '.join(vms[:5])}"
        return Conflict(found, step=STEP, fix="ask for fewer, or move or stop a VM")
    hint = "" if siblings else ", or for siblings, which puts a thread on both CPUs of a core"
    return _invalid(what, f"ask for fewer{hint}")


def _nic_without_thread(count: int, siblings: bool, host: PmdHost, bare: Sequence[int]) -> NetpluginError:
    """The error for a NIC node without a PMD thread: OVS would poll it cross-NUMA and only log that."""
    node = bare[0]
    what = f"no PMD thread on NUMA node {node}, which has the NIC {_some(host.nics[node])}"
    if _free(host, frozenset(host.users))[node]:
        each = max(len(core.cpus) for core in host.cores) if siblings else 1
        return _invalid(f"{count} PMD threads leave {what}", f"ask for at least {each * len(host.nics)}")
    by_name = 'name the CPUs: PUT /v1/pmd {"cpus": "LIST"}'
    if _free(host, frozenset())[node]:
        there = cpus_of(core for core in host.cores if core.node == node)
        fix = f"move or stop a VM, or {by_name}"
        return Conflict(f"{what}: its cores are of the VMs {_some(host.vms_on(there))}", step=STEP, fix=fix)
    fix = f"plan fewer [host] housekeeping_cores, or {by_name}"
    return _invalid(f"{what}: all of its cores are for everything else", fix)


def _invalid(what: str, fix: str) -> InvalidRequest:
    return InvalidRequest.of_field("count", what, step=STEP, fix=fix)


def _some(names: Collection[str]) -> str:
    return some(list(names), 3)

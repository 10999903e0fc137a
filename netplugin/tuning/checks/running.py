"""Check what runs: PMD threads and receive queues of OVS, and the CPU affinity of VMs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdState
from netplugin.host.cpus import format_list, from_mask
from netplugin.pmd.findings import findings
from netplugin.pmd.settings import read_settings
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Cpus, DomainLive, OvsLive
from netplugin.tuning.root import Unknown, known

# -- Check a running OVS-DPDK: PMD threads on isolated and planned CPUs, and enough for the queues.


def ovs(scene: Scene) -> Iterator[Finding]:
    """OVS findings; none if OVS was not queried or has no DPDK."""
    live = scene.live.ovs
    if isinstance(live, Unknown) or not live.dpdk_initialized:
        return
    yield from _lcores(live)
    try:
        mask = frozenset(from_mask(live.other_config.get("pmd-cpu-mask", "")))
    except ValueError:
        yield Finding(
            id="pmd-mask",
            status="fail",
            found=f"pmd-cpu-mask is {live.other_config['pmd-cpu-mask']!r}",
            expected="a hexadecimal mask of CPUs",
            fix="netplugin host plan has one",
        )
        return
    if not mask:
        yield Finding(
            id="pmd-mask",
            status="warn",
            found="pmd-cpu-mask is not set: one PMD thread a node, where OVS likes",
            expected="whole isolated cores of the NIC's node",
            fix="netplugin host plan has a mask",
        )
        return
    yield from _mask(scene, mask)
    yield from _queues(live, mask)


def _lcores(live: OvsLive) -> Iterator[Finding]:
    """With the mask, all non-PMD threads of OVS share one CPU (ovs-vswitchd.conf.db(5), dpdk-lcore-mask)."""
    mask = live.other_config.get("dpdk-lcore-mask")
    if mask:
        yield Finding(
            id="lcore-mask",
            status="warn",
            found=f"dpdk-lcore-mask is {mask}: it pins OVS's main, handler "
            "and revalidator threads to one CPU",
            expected="no dpdk-lcore-mask: OVS uses its own CPUs",
            fix="ovs-vsctl remove Open_vSwitch . other_config dpdk-lcore-mask, then restart OVS",
        )


def _mask(scene: Scene, mask: Cpus) -> Iterator[Finding]:
    facts = scene.facts.cpus
    isolated = known(facts.isolated, None)
    bare = mask - (isolated or frozenset())
    if isolated is not None:
        fix = f"boot with these in isolcpus: {format_list(mask)}"
        yield Finding(
            id="pmd-isolated",
            status="warn" if bare else "ok",
            found=f"PMD threads on CPUs {format_list(mask)}, isolated are {format_list(isolated) or 'none'}",
            expected="all CPUs of pmd-cpu-mask isolated",
            fix=fix if bare else None,
        )
    gone = mask - known(facts.online, mask)
    if gone:
        yield Finding(
            id="pmd-mask",
            status="fail",
            found=f"CPUs {format_list(gone)} of pmd-cpu-mask are not on line",
            expected="CPUs that are on line",
            fix="netplugin host plan has a mask",
        )
    if scene.plan and scene.plan.partition.pmd:
        away = mask - scene.plan.partition.pmd
        if away:
            yield Finding(
                id="pmd-cores",
                status="warn",
                found=f"PMD threads on CPUs {format_list(mask)}",
                expected=f"within the plan's PMD cores {format_list(scene.plan.partition.pmd)}",
                fix="ovs-vsctl set Open_vSwitch . other_config:pmd-cpu-mask=... as planned",
            )


def _queues(live: OvsLive, mask: Cpus) -> Iterator[Finding]:
    """Two queues of one port on the same PMD thread add a poll and no throughput."""
    queues = Counter(queue.port for pmd in live.pmds for queue in pmd.queues if queue.enabled)
    for port, count in sorted(queues.items()):
        if count > len(mask):
            yield Finding(
                id="queues",
                status="warn",
                found=f"{port} has {count} receive queues for {len(mask)} PMD threads",
                expected="no more queues than PMD threads",
                fix=f"ovs-vsctl set Interface {port} options:n_rxq={len(mask)}, or fewer queues in the VM",
            )


# -- Check receive queues on PMD threads: NUMA node, load balance, unpolled queues. ---------------


def pmd(scene: Scene) -> Iterator[Finding]:
    """PMD findings; none if OVS was not queried or has no PMD threads."""
    live = scene.live.ovs
    if not isinstance(live, Unknown):
        settings = read_settings(live.other_config)
        yield from findings(PmdState(cpus="", cores=live.pmds, settings=settings, unpolled=live.unpolled))


# -- Check the CPU affinity of running VMs against isolated CPUs, PMD threads and each other. -----


def domains(scene: Scene) -> Iterator[Finding]:
    """Findings per running domain; none if libvirt was not queried or runs no domain."""
    running = known(scene.live.domains, ())
    isolated = known(scene.facts.cpus.isolated, None) or frozenset()
    homes = {cpu: core.node for core in known(scene.facts.cpus.cores, ()) for cpu in core.cpus}
    for domain in running:
        yield from _on_pmd(domain, scene.polling)
        yield from _floating(domain, isolated)
        yield from _memory(domain, homes)
        yield from _emulator(domain, isolated, scene.polling)
    yield from _shared(running)


def _on_pmd(domain: DomainLive, polling: Cpus) -> Iterator[Finding]:
    """A vCPU on a PMD CPU: each takes time from the other, and a PMD thread polls all the time."""
    vcpus = [number for number, cpus in enumerate(domain.vcpus) if cpus & polling]
    if vcpus:
        on = frozenset().union(*(domain.vcpus[number] for number in vcpus)) & polling
        yield Finding(
            id="domain-pmd",
            status="fail",
            found=f"{domain.name}: vCPUs {format_list(vcpus)} may run "
            f"on CPUs {format_list(on)} of PMD threads",
            expected="vCPUs and PMD threads on CPUs of their own",
            fix=f"virsh vcpupin {domain.name} {vcpus[0]} CPU --live --config, and so on",
        )


def _floating(domain: DomainLive, isolated: Cpus) -> Iterator[Finding]:
    """The scheduler does not balance isolated CPUs (Documentation/admin-guide/kernel-parameters.rst)."""
    vcpus = [n for n, cpus in enumerate(domain.vcpus) if cpus & isolated and len(cpus) > 1]
    if vcpus:
        on = frozenset().union(*(domain.vcpus[number] for number in vcpus)) & isolated
        yield Finding(
            id="domain-floating",
            status="warn",
            found=f"{domain.name}: vCPUs {format_list(vcpus)} may "
            f"run on isolated CPUs {format_list(on)} and are not pinned to one each: nothing moves them",
            expected="a CPU for each vCPU, or none that is isolated",
            fix=f"virsh vcpupin {domain.name} {vcpus[0]} CPU --live --config, and so on",
        )


def _memory(domain: DomainLive, homes: dict[int, int]) -> Iterator[Finding]:
    nodes = {homes[cpu] for cpus in domain.vcpus for cpu in cpus if cpu in homes}
    if nodes and domain.memory_nodes and nodes != domain.memory_nodes:
        yield Finding(
            id="domain-memory",
            status="warn",
            found=f"{domain.name}: memory on NUMA node {format_list(domain.memory_nodes)}, vCPUs on "
            f"{format_list(nodes)}",
            expected="memory and vCPUs on the same nodes",
            fix="pin the vCPUs to CPUs of the memory's node, or start it with another numatune",
        )


def _emulator(domain: DomainLive, isolated: Cpus, polling: Cpus) -> Iterator[Finding]:
    """Emulator threads on isolated or PMD CPUs; IO threads may have an isolated CPU of their own."""
    for what, cpus, kept, tool in (
        ("emulator threads", domain.emulator, isolated | polling, "emulatorpin"),
        ("IO threads", frozenset().union(*domain.iothreads), polling, "iothreadpin"),
    ):
        if cpus & kept:
            yield Finding(
                id="domain-emulator",
                status="warn",
                found=f"{domain.name}: {what} may run on isolated "
                f"CPUs or those of PMD threads: {format_list(cpus & kept)}",
                expected=f"{what} on emulator or housekeeping cores",
                fix=f"virsh {tool} with {domain.name}, the CPUs, and --live --config",
            )


def _shared(running: Iterable[DomainLive]) -> Iterator[Finding]:
    """vCPUs that are pinned to the same single CPU."""
    users: dict[int, list[str]] = defaultdict(list)
    for domain in running:
        for number, cpus in enumerate(domain.vcpus):
            if len(cpus) == 1:
                users[min(cpus)].append(f"vCPU {number} of {domain.name}")
    for cpu, vcpus in sorted(users.items()):
        if len(vcpus) > 1:
            yield Finding(
                id="domain-shared",
                status="warn",
                found=f"CPU {cpu} is the only one of {' and '.join(vcpus)}",
                expected="a CPU for each pinned vCPU",
                fix="pin them to other CPUs: virsh vcpupin DOMAIN VCPU CPU --live --config",
            )

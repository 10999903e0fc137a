"""Check the CPU affinity of running VMs against isolated CPUs, PMD threads and each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Cpus
from netplugin.tuning.live import DomainLive
from netplugin.tuning.root import known


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

"""Rules of what runs: PMD threads of OVS, and the CPU affinity of VMs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.scopes import Domain, Ovs, PinnedCpu

# -- OVS-DPDK: PMD threads on isolated and planned CPUs. ------------------------------------------


def lcores(ovs: Ovs) -> Iterator[Finding]:
    """With the mask, all non-PMD threads of OVS share one CPU (ovs-vswitchd.conf.db(5), dpdk-lcore-mask)."""
    if mask := ovs.settings.get("dpdk-lcore-mask"):
        yield warn(
            "lcore-mask",
            f"dpdk-lcore-mask is {mask}: it pins OVS's main, handler and revalidator threads to one CPU",
            "no dpdk-lcore-mask: OVS uses its own CPUs",
            "ovs-vsctl remove Open_vSwitch . other_config dpdk-lcore-mask, then restart OVS",
        )


def mask(ovs: Ovs) -> Iterator[Finding]:
    has_one = "netplugin host plan has a mask"
    if ovs.mask is None:
        written = f"pmd-cpu-mask is {ovs.settings['pmd-cpu-mask']!r}"
        yield fail("pmd-mask", written, "a hexadecimal mask of CPUs", has_one)
    elif not ovs.mask:
        yield warn(
            "pmd-mask",
            "pmd-cpu-mask is not set: one PMD thread a node, where OVS likes",
            "whole isolated cores of the NIC's node",
            has_one,
        )
    elif ovs.online is not None and (gone := ovs.mask - ovs.online):
        found = f"CPUs {format_list(gone)} of pmd-cpu-mask are not on line"
        yield fail("pmd-mask", found, "CPUs that are on line", has_one)
    elif ovs.pmds and (idle := ovs.mask - ovs.pmds):
        yield warn(
            "pmd-mask",
            f"CPUs {format_list(idle)} of pmd-cpu-mask have no PMD thread, CPUs {format_list(ovs.pmds)} have",
            "a PMD thread on each CPU of the mask",
            "look into the log of ovs-vswitchd for what it says of PMD threads",
        )


def masked(ovs: Ovs) -> Iterator[Finding]:
    if not ovs.mask:
        return
    cpus = format_list(ovs.mask)
    if ovs.isolated is not None:
        yield warn(
            "pmd-isolated",
            f"PMD threads on CPUs {cpus}, isolated are {format_list(ovs.isolated) or 'none'}",
            "all CPUs of pmd-cpu-mask isolated",
            f"boot with these in isolcpus: {cpus}" if ovs.mask - ovs.isolated else None,
        )
    if ovs.planned and ovs.mask - ovs.planned:
        yield warn(
            "pmd-cores",
            f"PMD threads on CPUs {cpus}",
            f"within the plan's PMD cores {format_list(ovs.planned)}",
            "ovs-vsctl set Open_vSwitch . other_config:pmd-cpu-mask=... as planned",
        )


# -- The CPU affinity of a running VM against isolated CPUs, PMD threads and other VMs. -----------


def on_pmd(domain: Domain) -> Iterator[Finding]:
    """A vCPU on a PMD CPU: each takes time from the other, and a PMD thread polls all the time."""
    vcpus = {number: cpus & domain.polling for number, cpus in enumerate(domain.live.vcpus)}
    if struck := [number for number, cpus in vcpus.items() if cpus]:
        yield fail(
            "domain-pmd",
            f"{domain.live.name}: vCPUs {format_list(struck)} may run on CPUs "
            f"{format_list(frozenset().union(*vcpus.values()))} of PMD threads",
            "vCPUs and PMD threads on CPUs of their own",
            f"virsh vcpupin {domain.live.name} {struck[0]} CPU --live --config, and so on",
        )


def floating(domain: Domain) -> Iterator[Finding]:
    """The scheduler does not balance isolated CPUs (Documentation/admin-guide/kernel-parameters.rst)."""
    vcpus = {n: cpus & domain.isolated for n, cpus in enumerate(domain.live.vcpus) if len(cpus) > 1}
    if loose := [number for number, cpus in vcpus.items() if cpus]:
        yield warn(
            "domain-floating",
            f"{domain.live.name}: vCPUs {format_list(loose)} may run on isolated CPUs "
            f"{format_list(frozenset().union(*vcpus.values()))} and are not pinned to one each: "
            "nothing moves them",
            "a CPU for each vCPU, or none that is isolated",
            f"virsh vcpupin {domain.live.name} {loose[0]} CPU --live --config, and so on",
        )


def memory(domain: Domain) -> Iterator[Finding]:
    nodes = domain.live.memory_nodes
    if domain.nodes and nodes and domain.nodes != nodes:
        yield warn(
            "domain-memory",
            f"{domain.live.name}: memory on NUMA node {format_list(nodes)}, vCPUs on "
            f"{format_list(domain.nodes)}",
            "memory and vCPUs on the same nodes",
            "pin the vCPUs to CPUs of the memory's node, or start it with another numatune",
        )


def emulator(domain: Domain) -> Iterator[Finding]:
    """Emulator threads on isolated or PMD CPUs; IO threads may have an isolated CPU of their own."""
    live = domain.live
    for what, cpus, kept, tool in (
        ("emulator threads", live.emulator, domain.isolated | domain.polling, "emulatorpin"),
        ("IO threads", frozenset().union(*live.iothreads), domain.polling, "iothreadpin"),
    ):
        if cpus & kept:
            yield warn(
                "domain-emulator",
                f"{live.name}: {what} may run on isolated CPUs or those of PMD threads: "
                f"{format_list(cpus & kept)}",
                f"{what} on emulator or housekeeping cores",
                f"virsh {tool} with {live.name}, the CPUs, and --live --config",
            )


def shared(cpu: PinnedCpu) -> Iterator[Finding]:
    if len(cpu.vcpus) > 1:
        yield warn(
            "domain-shared",
            f"CPU {cpu.cpu} is the only one of {' and '.join(cpu.vcpus)}",
            "a CPU for each pinned vCPU",
            "pin them to other CPUs: virsh vcpupin DOMAIN VCPU CPU --live --config",
        )

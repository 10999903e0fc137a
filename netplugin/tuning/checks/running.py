"""Rules of what runs: PMD threads of OVS, and the CPU affinity of VMs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.scopes import Domain, Ovs, PinnedCpu, PmdThread
from netplugin.tuning.facts import EFFICIENCY


def lcores(ovs: Ovs) -> Iterator[Finding]:
    """With the mask, all non-PMD threads of OVS share one CPU (ovs-vswitchd.conf.db(5), dpdk-lcore-mask)."""
    if mask := ovs.settings.get("dpdk-lcore-mask"):
        found = f"dpdk-lcore-mask is {mask}: it pins OVS's main, handler and revalidator threads to one CPU"
        fix = "ovs-vsctl remove Open_vSwitch . other_config dpdk-lcore-mask, then restart OVS"
        yield warn("lcore-mask", found, "no dpdk-lcore-mask: OVS uses its own CPUs", fix)


def mask(ovs: Ovs) -> Iterator[Finding]:
    fix = "netplugin host plan has a mask"
    if ovs.mask is None:
        found = f"pmd-cpu-mask is {ovs.settings['pmd-cpu-mask']!r}"
        yield fail("pmd-mask", found, "a hexadecimal mask of CPUs", fix)
    elif not ovs.mask and ovs.settings.get("pmd-cpu-mask"):
        found = f"pmd-cpu-mask is {ovs.settings['pmd-cpu-mask']}, without a CPU: OVS starts no PMD thread"
        yield fail("pmd-mask", found, "a mask with CPUs, or none", fix)  # reconfigure_pmd_threads
    elif not ovs.mask:
        found = "pmd-cpu-mask is not set: one PMD thread a node, where OVS likes"
        yield warn("pmd-mask", found, "whole isolated cores of the NIC's node", fix)
    elif ovs.online is not None and (gone := ovs.mask - ovs.online):
        found = f"CPUs {format_list(gone)} of pmd-cpu-mask are not on line"
        yield fail("pmd-mask", found, "CPUs that are on line", fix)
    elif ovs.pmds and (idle := ovs.mask - ovs.pmds):
        have = format_list(ovs.pmds)
        found = f"CPUs {format_list(idle)} of pmd-cpu-mask have no PMD thread, CPUs {have} have"
        fix = "look into the log of ovs-vswitchd for what it says of PMD threads"
        yield warn("pmd-mask", found, "a PMD thread on each CPU of the mask", fix)


def masked(ovs: Ovs) -> Iterator[Finding]:
    if not ovs.mask:
        return
    cpus = format_list(ovs.mask)
    if ovs.isolated is not None:
        found = f"PMD threads on CPUs {cpus}, isolated are {format_list(ovs.isolated) or 'none'}"
        fix = f"boot with these in isolcpus: {cpus}" if ovs.mask - ovs.isolated else None
        yield warn("pmd-isolated", found, "all CPUs of pmd-cpu-mask isolated", fix)
    if ovs.planned and ovs.mask - ovs.planned:
        expected = f"within the plan's PMD cores {format_list(ovs.planned)}"
        fix = "ovs-vsctl set Open_vSwitch . other_config:pmd-cpu-mask=... as planned"
        yield warn("pmd-cores", f"PMD threads on CPUs {cpus}", expected, fix)


def slow_core(thread: PmdThread) -> Iterator[Finding]:
    if thread.kind == EFFICIENCY:
        what = "a PMD thread runs" if thread.runs else "pmd-cpu-mask has a PMD thread"
        found = f"{what} on CPU {thread.cpu}, which is on an efficiency core"
        fix = "its node has no performance core on line: expect fewer packets, or take CPUs on line"
        if thread.fast:
            fix = f"put it on one of the CPUs {format_list(thread.fast)}: netplugin host plan has a mask"
        yield warn("pmd-efficiency", found, "PMD threads on performance cores", fix)


def on_pmd(domain: Domain) -> Iterator[Finding]:
    """A vCPU on a PMD CPU: each takes time from the other, and a PMD thread polls all the time."""
    vcpus = {number: cpus & domain.polling for number, cpus in enumerate(domain.live.vcpus)}
    if struck := [number for number, cpus in vcpus.items() if cpus]:
        on = format_list(frozenset().union(*vcpus.values()))
        found = f"{domain.live.name}: vCPUs {format_list(struck)} may run on CPUs {on} of PMD threads"
        yield fail("domain-pmd", found, "vCPUs and PMD threads on CPUs of their own", _pin(domain, struck[0]))


def by_pmd(domain: Domain) -> Iterator[Finding]:
    """A PMD thread and a vCPU that is pinned to the other thread of its core slow each other down."""
    pinned = {number: cpus for number, cpus in enumerate(domain.live.vcpus) if len(cpus) == 1}
    if struck := [number for number, cpus in pinned.items() if cpus <= domain.siblings]:
        on = format_list(frozenset().union(*(pinned[number] for number in struck)))
        found = f"{domain.live.name}: vCPUs {format_list(struck)} are on CPUs {on}, siblings of PMD threads"
        yield warn("domain-pmd", found, "whole cores for PMD threads", _pin(domain, struck[0]))


def _pin(domain: Domain, vcpu: int) -> str:
    return f"virsh vcpupin {domain.live.name} {vcpu} CPU --live --config, and so on"


def floating(domain: Domain) -> Iterator[Finding]:
    """The scheduler does not balance isolated CPUs (Documentation/admin-guide/kernel-parameters.rst)."""
    vcpus = {n: cpus & domain.isolated for n, cpus in enumerate(domain.live.vcpus) if len(cpus) > 1}
    if loose := [number for number, cpus in vcpus.items() if cpus]:
        on = format_list(frozenset().union(*vcpus.values()))
        found = f"{domain.live.name}: vCPUs {format_list(loose)} may run on isolated CPUs {on} and are "
        found += "not pinned to one each: nothing moves them"
        expected = "a CPU for each vCPU, or none that is isolated"
        yield warn("domain-floating", found, expected, _pin(domain, loose[0]))


def memory(domain: Domain) -> Iterator[Finding]:
    nodes, name = domain.near, domain.live.name
    if domain.nodes and nodes and domain.nodes != nodes:
        found = f"{name}: memory on NUMA node {format_list(nodes)}, vCPUs on {format_list(domain.nodes)}"
        fix = "pin the vCPUs to CPUs of the memory's node, or start it with another numatune"
        yield warn("domain-memory", found, "memory and vCPUs on the same nodes", fix)


def emulator(domain: Domain) -> Iterator[Finding]:
    """Emulator threads on isolated or PMD CPUs; IO threads may have an isolated CPU of their own."""
    name, live, polling = domain.live.name, domain.live, domain.polling
    for what, cpus, tool in (
        ("emulator threads", live.emulator & (domain.isolated | polling), "emulatorpin"),
        ("IO threads", frozenset().union(*live.iothreads) & polling, "iothreadpin"),
    ):
        if cpus:
            found = f"{name}: {what} may run on isolated CPUs or those of PMD threads: {format_list(cpus)}"
            fix = f"virsh {tool} with {name}, the CPUs, and --live --config"
            yield warn("domain-emulator", found, f"{what} on emulator or housekeeping cores", fix)


def shared(cpu: PinnedCpu) -> Iterator[Finding]:
    if len(cpu.vcpus) > 1:
        found = f"CPU {cpu.cpu} is the only one of {' and '.join(cpu.vcpus)}"
        fix = "pin them to other CPUs: virsh vcpupin DOMAIN VCPU CPU --live --config"
        yield warn("domain-shared", found, "a CPU for each pinned vCPU", fix)

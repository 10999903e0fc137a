"""Plan the kernel command line (pure). Source: Documentation/admin-guide/kernel-parameters.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from netplugin.host.cpus import format_list
from netplugin.tuning import steps
from netplugin.tuning.command_line import CommandLine, Hugepages, Machine, page_name, parse_cpus
from netplugin.tuning.facts import Cpus, Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.read.cpus import ARM
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import BootPages, Effect, File, Group, KernelArgument, Step, needed

INTEL, AMD = "GenuineIntel", "AuthenticAMD"
_PARAMETERS = steps.KERNEL_PARAMETERS
_PARTITIONING = f"{_PARAMETERS}; {steps.TUNED_PARTITIONING}"
_NONE: Cpus = frozenset()


class Argument(NamedTuple):
    name: str
    desired: str | None
    why: str
    source: str = _PARAMETERS


def kernel_arguments(
    facts: Facts, partition: Partition, pages: tuple[NodePages, ...], intent: HostIntent
) -> Iterator[Step]:
    machine, line = _machine(facts), facts.kernel.arguments
    reserved = Hugepages() if isinstance(line, Unknown) else line.hugepages(machine)
    own = {} if isinstance(line, Unknown) else {**_cpus(facts, line, machine), **_pages_now(reserved, pages)}
    arguments = [*_hugepages(facts, pages, reserved), *_iommu(facts, known(line, None))]
    if partition.isolated:
        arguments += _isolation(facts, partition)
        if intent.realtime and known(facts.cpus.arch, "") != ARM:
            arguments += _realtime(facts)
    for name, desired, why, source in arguments:
        now: Fact[str | None] = line if isinstance(line, Unknown) else None
        if isinstance(line, CommandLine):
            now = desired if desired and line.gives(name, desired) else line.value(name)
        if desired is not None and name in own:
            now = own[name]
        yield Step(Group.KERNEL_ARGUMENTS, KernelArgument(name), now, desired, Effect.REBOOT, why, source)


def _machine(facts: Facts) -> Machine:
    online = needed(facts.cpus.online)
    return Machine(
        cpu_ids=max(online | known(facts.cpus.offline, _NONE)) + 1,
        cpus=online,
        sizes_kb=needed(facts.memory.sizes_kb),
        nodes=tuple(memory.node for memory in needed(facts.memory.nodes) if memory.total_kb),
        node_limit=_node_limit(facts),
    )


def _cpus(facts: Facts, line: CommandLine, machine: Machine) -> dict[str, str | None]:
    """Values of arguments with CPUs. What the running kernel reports as isolated goes before what the line
    has: the kernel may have refused that, or have it from elsewhere."""
    written = line.isolation(machine)
    domain, nohz = (
        written.get(kind, _NONE) if (cpus := known(fact, None)) is None else cpus
        for kind, fact in (("domain", facts.cpus.isolated), ("nohz", facts.cpus.nohz_full))
    )
    managed = written.get("managed_irq", _NONE)
    both = managed == domain
    flagged = [("managed_irq,domain", domain)] if both else [("managed_irq", managed), ("", domain)]
    isolated = [f"{flags},{format_list(cpus)}".removeprefix(",") for flags, cpus in flagged if cpus]
    affinity = line.value("irqaffinity")
    with suppress(ValueError):  # the CPU that boots is added
        affinity = affinity and format_list(parse_cpus(affinity, machine.cpu_ids) | {min(machine.cpus)})
    return {
        "isolcpus": " ".join(isolated) or None,
        "nohz_full": format_list(nohz) or None,
        "rcu_nocbs": format_list(line.rcu_nocbs(machine, nohz)) or None,
        "irqaffinity": affinity,
    }


def _pages_now(reserved: Hugepages, pages: tuple[NodePages, ...]) -> dict[str, str | None]:
    if not pages:
        return {}
    size, default = pages[0].size_kb, reserved.default_kb
    named = size if size in reserved.sizes_kb else min(reserved.sizes_kb, default=None)
    counted = [_counted(reserved.pages.get(size, {}), pages), *_other_sizes(reserved, pages)]
    return {
        "default_hugepagesz": page_name(default) if default else None,
        "hugepagesz": page_name(named) if named else None,
        "hugepages": " ".join(filter(None, counted)) or None,
    }


def _counted(counts: Mapping[int, int], pages: tuple[NodePages, ...]) -> str | None:
    return _text(counts) if len(pages) > 1 or not counts else str(sum(counts.values()))


def _other_sizes(reserved: Hugepages, pages: tuple[NodePages, ...]) -> list[str]:
    """Arguments for pages of sizes that are not planned, which the plan leaves room for."""
    return [
        f"hugepagesz={page_name(size)} hugepages={_counted(counts, pages)}"
        for size, counts in sorted(reserved.pages.items())
        if size != pages[0].size_kb
    ]


def release(facts: Facts) -> tuple[int, int]:
    """Kernel version (major, minor); (0, 0) if unknown, so that no newer feature is assumed."""
    found = re.match(r"(\d+)\.(\d+)", known(facts.kernel.release, ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def counts_by_node(facts: Facts, pages: tuple[NodePages, ...]) -> bool:
    """True if the command line can set the number of hugepages per node. ``hugepages=0:29,1:40`` needs Linux
    5.16 (commit b5389086ad7b); an older kernel cannot parse it and reserves nothing. A plain number is spread
    evenly over all nodes."""
    return len(pages) == 1 or max((plan.node for plan in pages), default=0) < _node_limit(facts)


def _node_limit(facts: Facts) -> int:
    """Before Linux 5.19 (commit 0a7a0f6f7f36), a node's number must be below how many are on line."""
    if release(facts) >= (5, 19):
        return 1024  # MAX_NUMNODES of distributions on x86
    return len(needed(facts.memory.nodes)) if release(facts) >= (5, 16) else 0


def _iommu(facts: Facts, line: CommandLine | None) -> Iterator[Argument]:
    why = "the host's own devices pass the IOMMU untranslated, VMs' do not"
    if known(facts.cpus.arch, "") == ARM:
        yield Argument("iommu.passthrough", "1", why)
        return
    yield Argument("iommu", "pt", why)
    given = "VFs are given to VMs and to DPDK through the IOMMU"
    if known(facts.cpus.vendor, "") == INTEL:  # AMD's is on by default; amd_iommu=on does not exist
        yield Argument("intel_iommu", "on", given)
    elif line and line.gives("amd_iommu", "off"):
        yield Argument("amd_iommu", None, given)


def _hugepages(facts: Facts, pages: tuple[NodePages, ...], reserved: Hugepages) -> Iterator[Argument]:
    """In the order in which the kernel has to read them."""
    planned = {plan.node: plan.reserved for plan in pages if plan.pages}
    if not planned:
        return
    size = page_name(pages[0].size_kb)
    yield Argument("default_hugepagesz", size, "what a mount of hugetlbfs has without a size")
    if not counts_by_node(facts, pages):  # a BootPages step reserves them
        line = facts.kernel.arguments
        names = () if isinstance(line, Unknown) else (name for name, _ in line.arguments)
        # Before any hugepagesz=, hugepages= counts pages of the default size.
        first = next((name for name in names if name in ("hugepages", "hugepagesz")), None)
        if first == "hugepages" and reserved.default_kb != pages[0].size_kb:
            why = f"it counts pages of the default size, which is {size} from then on"
            why += "; a unit reserves what each node needs"
            yield Argument("hugepages", None, why, f"{_PARAMETERS}; {steps.HUGETLB}")
        return
    count = " ".join([_counted(planned, pages) or "", *_other_sizes(reserved, pages)])
    source = f"{steps.HUGETLB}; {steps.NODE_PAGES}" if len(pages) > 1 else steps.HUGETLB
    where = "on the node that needs them, " if len(pages) > 1 else ""
    yield Argument("hugepagesz", size, "the size that the next argument counts")
    yield Argument("hugepages", count, f"reserved {where}before memory is in pieces", source)


def _isolation(facts: Facts, partition: Partition) -> Iterator[Argument]:
    cpus = format_list(partition.isolated)
    flags = "managed_irq,domain," if release(facts) >= (5, 6) else ""
    source = f"{_PARAMETERS}; {steps.MANAGED_IRQ}" if flags else _PARAMETERS
    why = (
        "the scheduler puts nothing there by itself: PMD threads and pinned vCPUs alone run there, "
        "and a VM that may run there must be pinned"
    )
    yield Argument("isolcpus", flags + cpus, why, source)
    yield Argument("nohz_full", cpus, "no timer tick while one thread runs on a CPU", _PARTITIONING)
    yield Argument("rcu_nocbs", cpus, "RCU's callbacks run elsewhere", _PARTITIONING)
    housekeeping, why = format_list(partition.housekeeping), "interrupts start on housekeeping"
    yield Argument("irqaffinity", housekeeping, why, f"{_PARAMETERS}; {steps.TUNED_HOST}")


def _realtime(facts: Facts) -> Iterator[Argument]:
    """Real-time arguments; x86 only."""
    vendor, source = known(facts.cpus.vendor, ""), f"{_PARAMETERS}; {steps.TUNED_LATENCY}"
    why = "no polling for errors that were corrected; those that were not still stop the machine"
    yield Argument("mce", "ignore_ce", why, f"{steps.BOOT_OPTIONS}; {steps.TUNED_REALTIME} (ignore_ce)")
    yield Argument("tsc", "reliable", "no watchdog that checks the clock", source)
    if not any(len(core.cpus) > 1 for core in known(facts.cpus.cores, ())):
        why = "a CPU that polls wakes at once; it draws full power"
        yield Argument("idle", "poll", why, steps.BOOT_OPTIONS)
    else:
        why = "no sleep that takes microseconds to wake from; polling would take from SMT siblings"
        if known(facts.power.idle_driver, None) == "intel_idle":
            yield Argument("intel_idle.max_cstate", "1", why, steps.INTEL_IDLE)
        yield Argument("processor.max_cstate", "1", why)
    why = "the frequency does not move by itself"
    if vendor == INTEL:
        yield Argument("intel_pstate", "disable", why, f"{_PARAMETERS}; {steps.TUNED_REALTIME}")
    if vendor == AMD and release(facts) >= (6, 1):
        yield Argument("amd_pstate", "disable", why, f"{steps.AMD_PSTATE}; {steps.TUNED_REALTIME}")
    # Not pcie_aspm=off, which keeps the firmware's settings.
    yield Argument("pcie_aspm.policy", "performance", "links to NICs do not sleep", steps.ASPM)


def page_steps(facts: Facts, pages: tuple[NodePages, ...]) -> Iterator[Step]:
    """Steps that reserve hugepages on each node: now, and at boot if the command line cannot."""
    pools = {(pool.node, pool.size_kb): pool for pool in needed(facts.memory.pools)}
    for plan in (plan for plan in pages if plan.pages):
        pool = pools.get((plan.node, plan.size_kb))
        if pool is None:  # the node has no pages of this size; the hugepages check reports that
            continue
        now = pool.total if isinstance(pool.total, Unknown) else str(pool.total)
        buffers = f"{plan.mbufs} buffers for {f'{plan.ports} ports' if plan.per_port else 'each size'}"
        why = (
            f"{plan.ovs_mb} MB for OVS ({buffers}) and {plan.vm_mb} MB for VMs. "
            "A running kernel gives what is not in pieces: read it back, or reserve at boot"
        )
        target, source = File(pool.path), f"{steps.OVS_MEMORY}; {steps.HUGETLB}"
        yield Step(Group.HUGEPAGES, target, now, str(plan.reserved), Effect.LIVE, why, source)
    counts = {plan.node: plan.reserved for plan in pages if plan.pages}
    if not counts or counts_by_node(facts, pages):
        return
    size, found = pages[0].size_kb, facts.memory.at_boot
    reserved = found if isinstance(found, Unknown) else _text((found or {}).get(size))
    why = (
        "this kernel's command line cannot say how many on which node: a unit writes them before OVS and "
        "libvirt start, while memory is whole (netplugin host plan -f ansible makes it)"
    )
    source = f"{steps.HUGETLB}; counts by node: {steps.NODE_PAGES}"
    yield Step(Group.HUGEPAGES, BootPages(size), reserved, _text(counts), Effect.REBOOT, why, source)


def _text(counts: Mapping[int, int] | None) -> str | None:
    """Page counts as the kernel command line has them: ``0:46,1:14``."""
    return ",".join(f"{node}:{number}" for node, number in sorted(counts.items())) if counts else None

"""Plan the kernel command line (pure). Source: Documentation/admin-guide/kernel-parameters.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from netplugin.host.cpus import format_list
from netplugin.tuning import steps
from netplugin.tuning.facts import CommandLine, Facts
from netplugin.tuning.intent import PAGE_1G, HostIntent
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.read.cpus import ARM
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import BootPages, Effect, File, Group, KernelArgument, Step, needed

_CPU_LISTS = ("isolcpus", "nohz_full", "rcu_nocbs", "irqaffinity")
INTEL, AMD = "GenuineIntel", "AuthenticAMD"
_PARAMETERS = steps.KERNEL_PARAMETERS


class Argument(NamedTuple):
    name: str
    desired: str | None
    why: str
    source: str = _PARAMETERS


def kernel_arguments(
    facts: Facts, partition: Partition, pages: tuple[NodePages, ...], intent: HostIntent
) -> Iterator[Step]:
    now = facts.kernel.arguments
    for name, desired, why, source in _desired(facts, partition, pages, intent):
        have = now if isinstance(now, Unknown) else _now(now, name)
        yield Step(Group.KERNEL_ARGUMENTS, KernelArgument(name), have, desired, Effect.REBOOT, why, source)


def _now(line: CommandLine, name: str) -> str | None:
    """Current value, with CPU lists normalised so that ``2,3,4`` equals ``2-4``."""
    value = line.value(name)
    if not value or name not in _CPU_LISTS:
        return value
    try:
        flags = [word for word in value.split(",") if not word[:1].isdigit()]
        return ",".join((*flags, format_list(line.cpus(name))))
    except ValueError:  # forms like 0-30:1/2, which netplugin does not write
        return value


def release(facts: Facts) -> tuple[int, int]:
    """Kernel version (major, minor); (0, 0) if unknown, so that no newer feature is assumed."""
    found = re.match(r"(\d+)\.(\d+)", known(facts.kernel.release, ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def counts_by_node(facts: Facts, pages: tuple[NodePages, ...]) -> bool:
    """True if the command line can set the number of hugepages per node.

    ``hugepages=0:29,1:40`` needs Linux 5.16 (commit b5389086ad7b); an older kernel cannot parse it and
    reserves nothing. A plain number is spread evenly over all nodes.
    """
    return len(pages) == 1 or release(facts) >= (5, 16)


def _desired(
    facts: Facts, partition: Partition, pages: tuple[NodePages, ...], intent: HostIntent
) -> Iterator[Argument]:
    yield from _hugepages(facts, pages)
    yield from _iommu(facts)
    if partition.isolated:
        yield from _isolation(facts, partition)
        if intent.realtime and known(facts.cpus.arch, "") != ARM:
            yield from _realtime(facts)


def _iommu(facts: Facts) -> Iterator[Argument]:
    why = "the host's own devices pass the IOMMU untranslated, VMs' do not"
    if known(facts.cpus.arch, "") == ARM:
        yield Argument("iommu.passthrough", "1", why)
        return
    yield Argument("iommu", "pt", why)
    # AMD's is on by default; amd_iommu=on does not exist.
    if known(facts.cpus.vendor, "") == INTEL:
        yield Argument("intel_iommu", "on", "VFs are given to VMs and to DPDK through the IOMMU")


def page_name(size_kb: int) -> str:
    """Page size in the notation of ``hugepagesz``: ``1G``, ``512M``, ``64K``."""
    for unit, kb in (("G", PAGE_1G), ("M", 1024)):
        if size_kb % kb == 0:
            return f"{size_kb // kb}{unit}"
    return f"{size_kb}K"


def _hugepages(facts: Facts, pages: tuple[NodePages, ...]) -> Iterator[Argument]:
    total = sum(plan.reserved for plan in pages)
    if not total:
        return
    size = page_name(pages[0].size_kb)
    yield Argument("default_hugepagesz", size, "what a mount of hugetlbfs has without a size")
    if not counts_by_node(facts, pages):  # a BootPages step reserves them
        if _counts_default(facts.kernel.arguments, size):
            yield Argument(
                "hugepages",
                None,
                f"it counts pages of the default size, which is {size} from then on; a "
                "unit reserves what each node needs",
                f"{_PARAMETERS}; {steps.HUGETLB}",
            )
        return
    count = str(total)
    if len(pages) > 1:
        count = ",".join(f"{plan.node}:{plan.reserved}" for plan in pages if plan.pages)
    source = f"{steps.HUGETLB}; {steps.NODE_PAGES}" if len(pages) > 1 else steps.HUGETLB
    where = "on the node that needs them, " if len(pages) > 1 else ""
    yield Argument("hugepagesz", size, "the size that the next argument counts")
    yield Argument("hugepages", count, f"reserved {where}before memory is in pieces", source)


def _counts_default(line: Fact[CommandLine], size: str) -> bool:
    """True if changing the default page size to ``size`` would change the meaning of ``hugepages=``, which
    has no ``hugepagesz`` before it (hugepages_setup in mm/hugetlb.c)."""
    if isinstance(line, Unknown) or line.value("default_hugepagesz") == size:
        return False
    names = [name for name, _ in line.arguments if name in ("hugepages", "hugepagesz")]
    return names[:1] == ["hugepages"]


def _isolation(facts: Facts, partition: Partition) -> Iterator[Argument]:
    cpus = format_list(partition.isolated)
    flags = "managed_irq,domain," if release(facts) >= (5, 6) else ""
    yield Argument(
        "isolcpus",
        flags + cpus,
        "the scheduler puts nothing there by itself: PMD threads and pinned vCPUs alone run there, "
        "and a VM that may run there must be pinned",
        f"{_PARAMETERS}; {steps.MANAGED_IRQ}" if flags else _PARAMETERS,
    )
    yield Argument(
        "nohz_full",
        cpus,
        "no timer tick while one thread runs on a CPU",
        f"{_PARAMETERS}; {steps.TUNED_PARTITIONING}",
    )
    yield Argument(
        "rcu_nocbs",
        cpus,
        "RCU's callbacks run elsewhere",
        f"{_PARAMETERS}; {steps.TUNED_PARTITIONING}",
    )
    yield Argument(
        "irqaffinity",
        format_list(partition.housekeeping),
        "interrupts start on housekeeping",
        f"{_PARAMETERS}; {steps.TUNED_HOST}",
    )


def _realtime(facts: Facts) -> Iterator[Argument]:
    """Real-time arguments; x86 only."""
    vendor = known(facts.cpus.vendor, "")
    yield Argument(
        "mce",
        "ignore_ce",
        "no polling for errors that were corrected; those that were not still stop the machine",
        f"{steps.of_argument('mce')}; {steps.TUNED_REALTIME} (ignore_ce)",
    )
    yield Argument(
        "tsc",
        "reliable",
        "no watchdog that checks the clock",
        f"{_PARAMETERS}; {steps.TUNED_LATENCY}",
    )
    yield from _idle(facts)
    if vendor == INTEL:
        yield Argument(
            "intel_pstate",
            "disable",
            "the frequency does not move by itself",
            f"{_PARAMETERS}; {steps.TUNED_REALTIME}",
        )
    if vendor == AMD and release(facts) >= (6, 1):
        yield Argument(
            "amd_pstate",
            "disable",
            "the frequency does not move by itself",
            f"{steps.AMD_PSTATE}; {steps.TUNED_REALTIME}",
        )
    # Not pcie_aspm=off, which keeps the firmware's settings.
    yield Argument(
        "pcie_aspm.policy",
        "performance",
        "links to NICs do not sleep",
        steps.ASPM,
    )


def _idle(facts: Facts) -> Iterator[Argument]:
    """Idle polling without SMT; with SMT, C1 at most, because polling slows the sibling down."""
    if not any(len(core.cpus) > 1 for core in known(facts.cpus.cores, ())):
        yield Argument(
            "idle",
            "poll",
            "a CPU that polls wakes at once; it draws full power",
            steps.of_argument("idle"),
        )
        return
    why = "no sleep that takes microseconds to wake from; polling would take from SMT siblings"
    if known(facts.power.idle_driver, None) == "intel_idle":
        yield Argument("intel_idle.max_cstate", "1", why, steps.INTEL_IDLE)
    yield Argument("processor.max_cstate", "1", why)


# -- Steps that reserve hugepages on each node: now, and at boot if the command line cannot (pure).


def page_steps(facts: Facts, pages: tuple[NodePages, ...]) -> Iterator[Step]:
    pools = {(pool.node, pool.size_kb): pool for pool in needed(facts.memory.pools)}
    for plan in (plan for plan in pages if plan.pages):
        pool = pools.get((plan.node, plan.size_kb))
        if pool is None:  # the node has no pages of this size; the hugepages check reports that
            continue
        now = pool.total
        buffers = (
            f"{plan.mbufs} buffers for {plan.ports} ports"
            if plan.per_port
            else (f"{plan.mbufs} buffers for each size")
        )
        yield Step(
            Group.HUGEPAGES,
            File(pool.path),
            now if isinstance(now, Unknown) else str(now),
            str(plan.reserved),
            Effect.LIVE,
            f"{plan.ovs_mb} MB for OVS ({buffers}) and {plan.vm_mb} MB for VMs. "
            "A running kernel gives what is not in pieces: read it back, or reserve at boot",
            f"{steps.OVS_MEMORY}; {steps.HUGETLB}",
        )
    yield from _at_boot(facts, pages)


def _at_boot(facts: Facts, pages: tuple[NodePages, ...]) -> Iterator[Step]:
    counts = {plan.node: plan.reserved for plan in pages if plan.pages}
    if not counts or counts_by_node(facts, pages):
        return
    size, found = pages[0].size_kb, facts.memory.at_boot
    now: Fact[str | None] = found if isinstance(found, Unknown) else _text((found or {}).get(size))
    yield Step(
        Group.HUGEPAGES,
        BootPages(size),
        now,
        _text(counts),
        Effect.REBOOT,
        "this kernel's command line cannot say how many on which node: a unit writes them before OVS and "
        "libvirt start, while memory is whole (netplugin host plan -f ansible makes it)",
        f"{steps.HUGETLB}; counts by node: {steps.NODE_PAGES}",
    )


def _text(counts: Mapping[int, int] | None) -> str | None:
    return by_node(counts) if counts else None


def by_node(counts: Mapping[int, int]) -> str:
    """Format page counts for the kernel command line: ``0:46,1:14``."""
    return ",".join(f"{node}:{number}" for node, number in sorted(counts.items()))

"""The kernel's command line (pure). Rules: Documentation/admin-guide/kernel-parameters.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from netplugin.host.cpus import format_list
from netplugin.tuning.command_line import CommandLine
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import PAGE_1G, Intent
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import Effect, Group, KernelArgument, Step

_CPU_LISTS = ("isolcpus", "nohz_full", "rcu_nocbs", "irqaffinity")
INTEL, AMD = "GenuineIntel", "AuthenticAMD"


def kernel_arguments(
    facts: Facts, partition: Partition, pages: tuple[NodePages, ...], intent: Intent
) -> Iterator[Step]:
    now = facts.kernel.arguments
    for name, wanted, why in _wanted(facts, partition, pages, intent):
        have = now if isinstance(now, Unknown) else _now(now, name)
        yield Step(Group.KERNEL_ARGUMENTS, KernelArgument(name), have, wanted, Effect.REBOOT, why)


def _now(line: CommandLine, name: str) -> str | None:
    """CPUs in the shortest form, so that ``2,3,4`` and ``2-4`` are the same."""
    value = line.value(name)
    if not value or name not in _CPU_LISTS:
        return value
    try:
        flags = [word for word in value.split(",") if not word[:1].isdigit()]
        return ",".join((*flags, format_list(line.cpus(name))))
    except ValueError:  # forms such as 0-30:1/2, which are not written here
        return value


def release(facts: Facts) -> tuple[int, int]:
    """Major and minor; (0, 0) if they are not known, so that nothing new is counted on."""
    found = re.match(r"(\d+)\.(\d+)", known(facts.kernel.release, ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _wanted(
    facts: Facts, partition: Partition, pages: tuple[NodePages, ...], intent: Intent
) -> Iterator[tuple[str, str, str]]:
    yield from _hugepages(facts, pages)
    vendor = known(facts.cpus.vendor, "")
    yield "iommu", "pt", "the host's own devices pass the IOMMU untranslated, VMs' do not"
    if vendor == INTEL:
        yield "intel_iommu", "on", "VFs are given to VMs and to DPDK through the IOMMU"
    if vendor == AMD:
        yield (
            "amd_iommu",
            "on",
            "AMD's is on by itself unless told otherwise: this says that it stays",
        )
    if partition.isolated:
        yield from _isolation(facts, partition)
        if intent.realtime:
            yield from _realtime(vendor)


def _hugepages(facts: Facts, pages: tuple[NodePages, ...]) -> Iterator[tuple[str, str, str]]:
    total = sum(plan.pages for plan in pages)
    if not total:
        return
    size = "1G" if pages[0].size_kb == PAGE_1G else "2M"
    counts = {plan.node: plan.pages for plan in pages if plan.pages}
    if len(pages) > 1 and release(facts) >= (5, 15):
        count = ",".join(f"{node}:{number}" for node, number in counts.items())
        why = "reserved on the node that needs them, before memory is in pieces"
    else:
        # Before 5.15 the kernel spreads them evenly: each node's number has to be set once it is up.
        count = str(total)
        why = "reserved before memory is in pieces"
        if len(pages) > 1:
            why += "; spread evenly, so that each node's pages have to be set once it is up"
    yield "default_hugepagesz", size, "what a mount of hugetlbfs has without a size"
    yield "hugepagesz", size, "the size that the next argument counts"
    yield "hugepages", count, why


def _isolation(facts: Facts, partition: Partition) -> Iterator[tuple[str, str, str]]:
    cpus = format_list(partition.isolated)
    flags = "managed_irq,domain," if release(facts) >= (5, 6) else ""
    yield (
        "isolcpus",
        flags + cpus,
        (
            "the scheduler puts nothing there by itself: PMD threads and pinned vCPUs alone run there, "
            "and a VM that may run there must be pinned"
        ),
    )
    yield "nohz_full", cpus, "no timer tick while one thread runs on a CPU"
    yield "rcu_nocbs", cpus, "RCU's callbacks run elsewhere"
    yield "irqaffinity", format_list(partition.housekeeping), "interrupts start on housekeeping"


def _realtime(vendor: str) -> Iterator[tuple[str, str, str]]:
    yield (
        "mce",
        "ignore_ce",
        ("no polling for errors that were corrected; those that were not still stop the machine"),
    )
    yield "tsc", "reliable", "no watchdog that checks the clock"
    yield "idle", "poll", "a CPU that polls wakes at once; it draws full power"
    yield "processor.max_cstate", "1", "no sleep that takes microseconds to wake from"
    if vendor == INTEL:
        yield "intel_pstate", "disable", "the frequency does not move by itself"
    yield "pcie_aspm", "off", "links to NICs do not sleep"

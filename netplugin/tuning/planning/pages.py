"""Steps that reserve hugepages on each node: now, and at boot if the command line cannot (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from netplugin.tuning.facts import Facts
from netplugin.tuning.planning import sources
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.kernel_arguments import counts_by_node
from netplugin.tuning.planning.refused import needed
from netplugin.tuning.root import Fact, Unknown
from netplugin.tuning.steps import BootPages, Effect, File, Group, Step


def page_steps(facts: Facts, pages: tuple[NodePages, ...]) -> Iterator[Step]:
    pools = {(pool.node, pool.size_kb): pool for pool in needed(facts.memory.pools)}
    for plan in (plan for plan in pages if plan.pages):
        pool = pools.get((plan.node, plan.size_kb))
        if pool is None:  # the node has no pages of this size; the hugepages check reports that
            continue
        now = pool.total
        buffers = f"{plan.mbufs} buffers for {plan.ports} ports" if plan.per_port else (
            f"{plan.mbufs} buffers for each size"
        )  # fmt: skip
        yield Step(
            Group.HUGEPAGES, File(pool.path), now if isinstance(now, Unknown) else str(now),
            str(plan.reserved), Effect.LIVE,
            f"{plan.ovs_mb} MB for OVS ({buffers}) and {plan.vm_mb} MB for VMs. "
            "A running kernel gives what is not in pieces: read it back, or reserve at boot",
            f"{sources.OVS_MEMORY}; {sources.HUGETLB}",
        )  # fmt: skip
    yield from _at_boot(facts, pages)


def _at_boot(facts: Facts, pages: tuple[NodePages, ...]) -> Iterator[Step]:
    counts = {plan.node: plan.reserved for plan in pages if plan.pages}
    if not counts or counts_by_node(facts, pages):
        return
    size, found = pages[0].size_kb, facts.memory.at_boot
    now: Fact[str | None] = found if isinstance(found, Unknown) else _text((found or {}).get(size))
    yield Step(
        Group.HUGEPAGES, BootPages(size), now, _text(counts), Effect.REBOOT,
        "this kernel's command line cannot say how many on which node: a unit writes them before OVS and "
        "libvirt start, while memory is whole (netplugin host plan -f ansible makes it)",
        f"{sources.HUGETLB}; counts by node: {sources.NODE_PAGES}",
    )  # fmt: skip


def _text(counts: Mapping[int, int] | None) -> str | None:
    return by_node(counts) if counts else None


def by_node(counts: Mapping[int, int]) -> str:
    """Format page counts for the kernel command line: ``0:46,1:14``."""
    return ",".join(f"{node}:{number}" for node, number in sorted(counts.items()))

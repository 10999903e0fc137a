"""Steps that reserve hugepages now, on each node (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.facts import Facts
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.refused import needed
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import Effect, File, Group, Step


def page_steps(facts: Facts, pages: tuple[NodePages, ...]) -> Iterator[Step]:
    """Pages that are there beyond the plan are left: somebody may use them."""
    pools = {(pool.node, pool.size_kb): pool for pool in needed(facts.memory.pools)}
    for plan in (plan for plan in pages if plan.pages):
        pool = pools.get((plan.node, plan.size_kb))
        if pool is None:  # the node has no such pages; the check of hugepages says so
            continue
        now = pool.total
        yield Step(
            Group.HUGEPAGES, File(pool.path), now if isinstance(now, Unknown) else str(now),
            str(max(plan.pages, known(now, 0))), Effect.LIVE,
            f"{plan.ovs_mb} MB for OVS ({plan.mbufs} buffers for each size) and {plan.vm_mb} MB for VMs. "
            "A running kernel gives what is not in pieces: read it back, or reserve at boot",
        )  # fmt: skip

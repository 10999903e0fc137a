"""Check for missing hugepages and for cgroup memory limits below what the plan needs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import HugepagePool
from netplugin.tuning.root import Unknown, known

#: Hugepage sizes as the cgroup hugetlb controller names them, KB.
_NAMES = {"2MB": 2048, "1GB": 1048576}


def memory(scene: Scene) -> Iterator[Finding]:
    yield from _hugepages(scene)
    yield from _without_memory(scene)
    yield from _limits(scene)


def _hugepages(scene: Scene) -> Iterator[Finding]:
    pools = scene.facts.memory.pools
    if isinstance(pools, Unknown):
        return
    if scene.plan is None:
        if not any(known(pool.total, 0) for pool in pools):
            yield Finding(
                id="hugepages",
                status="warn",
                found="no hugepages are reserved",
                expected="hugepages on each node with PMD threads or VMs",
                fix="netplugin host plan says how many",
            )
        return
    have = {(pool.node, pool.size_kb): pool for pool in pools}
    for plan in scene.plan.pages:
        pool = have.get((plan.node, plan.size_kb))
        total = known(pool.total, 0) if pool else 0
        if plan.pages:
            short = total < plan.pages
            yield Finding(
                id="hugepages",
                status="fail" if short else "ok",
                found=f"NUMA node {plan.node} has {total} pages of {plan.size_kb} KB",
                expected=f"{plan.pages}: {plan.ovs_mb} MB for OVS, {plan.vm_mb} MB for VMs",
                fix=_fix(plan.pages, pool) if short else None,
            )


def _without_memory(scene: Scene) -> Iterator[Finding]:
    """Nodes with VM cores but no hugepages for VMs in the plan; no VM can be placed there. Whether a node
    has enough memory for a VM is not checked."""
    plan = scene.plan
    if plan is None or not plan.intent.vm_memory_mb:
        return
    given = {pages.node for pages in plan.pages if pages.vm_mb}
    bare = [node for node in plan.partition.vm_nodes if node not in given]
    if bare:
        yield Finding(
            id="vm-memory",
            status="warn",
            found=f"VM cores and no memory for VMs on NUMA node {', '.join(map(str, bare))}",
            expected="memory for a VM on each node with VM cores",
            fix="plan more vm_memory_mb, a smaller vm_size_mb, or fewer vm_cores",
        )


def _fix(pages: int, pool: HugepagePool | None) -> str:
    if pool is None:
        return "choose another size of pages: this node has none of this"
    return f"echo {pages} > {pool.path}; what cannot be had now, reserve at boot"


def _limits(scene: Scene) -> Iterator[Finding]:
    total = sum(node.total_kb for node in known(scene.facts.memory.nodes, ())) * 1024
    for limit in scene.facts.limits:
        most = known(limit.memory_bytes, None)
        if most is not None and most < total:
            yield Finding(
                id="cgroup-memory",
                status="warn",
                found=f"control group {limit.group} may use {most >> 20} MB of memory",
                expected=f"no limit: the machine has {total >> 20} MB",
                fix="take MemoryMax= out of the unit or slice, or leave the container",
            )
        for size, pages in limit.hugepages.items():
            need = scene.hugepages_mb(limit.group, _NAMES[size])
            most = known(pages, None)
            if most is not None and most >> 20 < need:
                yield Finding(
                    id="cgroup-hugepages",
                    status="fail",
                    found=f"control group {limit.group} may use {most >> 20} MB of {size} pages",
                    expected=f"{need} MB",
                    fix=f"set hugetlb.{size}.max of the group to max",
                )

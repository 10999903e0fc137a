"""Check a machine's CPUs, real-time settings, cores for its links, hugepages and cgroup limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Cpus, HugepagePool, Irq
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.read.cpus import CPU
from netplugin.tuning.root import Unknown, known


def cpus(scene: Scene) -> Iterator[Finding]:
    yield from _offline(scene)
    yield from _limited(scene)
    yield from _isolation(scene)
    if scene.realtime:
        yield from _latency(scene)


def _offline(scene: Scene) -> Iterator[Finding]:
    offline = known(scene.facts.cpus.offline, frozenset())
    # Only present CPUs count: hot-pluggable ones have no directory in sysfs.
    if offline:
        yield Finding(
            id="cpu-offline",
            status="warn",
            found=f"CPUs {format_list(offline)} are off line",
            expected="all CPUs on line; a plan leaves out those that are not",
            fix=f"echo 1 > {CPU}/cpu{min(offline)}/online, and so on; or SMT is off: cat {CPU}/smt/control",
        )


def _limited(scene: Scene) -> Iterator[Finding]:
    online = known(scene.facts.cpus.online, frozenset())
    for limit in scene.facts.limits:
        allowed = known(limit.cpus, None)
        if allowed and online - allowed:
            short = scene.cpus_of(limit.group) - allowed
            lacks = f", not on {format_list(short)} of the plan" if short else ""
            yield Finding(
                id="cgroup-cpus",
                status="fail" if short else "warn",
                found=f"control group {limit.group} may run on CPUs {format_list(allowed)}{lacks}",
                expected=f"CPUs {format_list(online)}",
                fix="take AllowedCPUs= out of the unit or slice, or leave the container",
            )


def _isolation(scene: Scene) -> Iterator[Finding]:
    isolated = known(scene.facts.cpus.isolated, None)
    ticks = known(scene.facts.cpus.nohz_full, None)
    cores = known(scene.facts.cpus.cores, ())
    if not isolated:
        return
    if ticks is not None and ticks != isolated:
        yield Finding(
            id="isolation-ticks",
            status="warn",
            found=f"isolcpus has CPUs {format_list(isolated)}, nohz_full {format_list(ticks) or 'none'}",
            expected="the same CPUs in isolcpus, nohz_full and rcu_nocbs",
            fix=f"boot with nohz_full={format_list(isolated)} rcu_nocbs={format_list(isolated)}",
        )
    split = [core for core in cores if core.cpus & isolated and core.cpus - isolated]
    struck = [irq for irq in known(scene.facts.interrupts.irqs, ()) if _goes_to(irq, isolated)]
    if struck:
        yield Finding(
            id="isolation-irqs",
            status="warn",
            found=f"interrupts {format_list(irq.number for irq in struck)} go to isolated CPUs",
            expected="interrupts on housekeeping CPUs alone",
            fix="netplugin host plan has their masks; some the kernel moves only with "
            "isolcpus=managed_irq,domain,...",
        )
    if split:
        shared = format_list(cpu for core in split for cpu in core.cpus - isolated)
        yield Finding(
            id="isolation-siblings",
            status="warn",
            found=f"CPUs {shared} are not isolated and share their core with one that is",
            expected="whole cores isolated",
            fix="add them to isolcpus, nohz_full and rcu_nocbs",
        )


def _goes_to(irq: Irq, cpus: Cpus) -> bool:
    return bool((known(irq.effective, None) or frozenset()) & cpus)


def _latency(scene: Scene) -> Iterator[Finding]:
    facts = scene.facts
    assert scene.plan is not None
    if known(facts.kernel.realtime, None) is False:
        yield Finding(
            id="realtime-kernel",
            status="warn",
            found=f"kernel {known(facts.kernel.release, '?')} has no PREEMPT_RT",
            expected="a kernel with PREEMPT_RT",
            fix="install one (Debian: linux-image-rt-amd64)",
        )
    both = known(facts.cpus.smt, None) and not scene.plan.intent.idle_siblings
    if both:
        yield Finding(
            id="smt",
            status="warn",
            found="SMT is on: two threads share each core",
            expected="one thread a core where latency counts",
            fix=f"plan with --idle-siblings, or echo off > {CPU}/smt/control",
        )
    if known(facts.power.turbo, None):
        yield Finding(
            id="turbo",
            status="warn",
            found="turbo is on: the frequency moves with load and heat",
            expected="turbo off where latency counts",
            fix=f"echo 1 > {CPU}/intel_pstate/no_turbo, or echo 0 > {CPU}/cpufreq/boost",
        )


# -- Check that a plan has enough cores for its links, and that VMs are on the NUMA node of the NIC.


#: Whole cores per 10 Gbit/s, for the switch and again for the guests (SPARC VM Server guide).
CORES_PER_10G = 2


def budget(scene: Scene) -> Iterator[Finding]:
    plan = scene.plan
    if plan is None or not plan.intent.pmd_cores:
        return
    yield from _cores(plan)
    yield from _places(scene, plan)
    near = {node for nic in plan.nics if (node := known(nic.node, None)) is not None}
    polling = plan.partition.polling_on(near or set(plan.partition.pmd_nodes))
    if plan.intent.queues > len(polling):
        yield Finding(
            id="queues",
            status="warn",
            found=f"{plan.intent.queues} receive queues a port for "
            f"{len(polling)} PMD threads on the NIC's node",
            expected="no more queues than PMD threads",
            fix="ask for fewer queues or more PMD cores",
        )


def _cores(plan: TuningPlan) -> Iterator[Finding]:
    desired = CORES_PER_10G * math.ceil(plan.intent.links * plan.intent.link_gbps / 10)
    vm = sum(len(share.vm) for share in plan.partition.nodes)
    for what, have in (("PMD", plan.intent.pmd_cores), ("VM", vm)):
        short = have < desired
        yield Finding(
            id=f"budget-{what.lower()}",
            status="warn" if short else "ok",
            found=f"{have} whole {what} cores for {plan.intent.links} x {plan.intent.link_gbps:g} Gbit/s",
            expected=f"at least {desired}: {CORES_PER_10G} whole cores for each 10 Gbit/s",
            fix=f"plan more {what} cores, or expect less than line rate" if short else None,
        )


def _places(scene: Scene, plan: TuningPlan) -> Iterator[Finding]:
    if not any(known(nic.node, None) is not None for nic in plan.nics):
        if len(plan.partition.nodes) > 1:
            yield Finding(
                id="nic-node",
                status="warn",
                found="no NIC says which NUMA node it is on",
                expected="a NIC of a known node",
                fix="look into the firmware's settings, or name --nic",
            )
        return
    near = {known(nic.node, None) for nic in plan.nics}
    yield from _unserved(plan)
    away = [node for node in plan.partition.vm_nodes if node not in near]
    if away:
        bare = [node for node in away if node not in plan.partition.pmd_nodes]
        without = ""
        if bare:
            without = f"; no PMD thread on node {', '.join(map(str, bare))} for vhost-user ports of VMs there"
        where = ", ".join(str(node) for node in sorted(node for node in near if node is not None))
        yield Finding(
            id="vm-node",
            status="warn",
            found=f"VM cores on NUMA node {', '.join(map(str, away))}, NIC on node {where}{without}",
            expected="VMs with much traffic on the NIC's node",
            fix="ask for fewer VM cores, or keep those of the other node for VMs with little traffic"
            + ("; vm_pmd_cores = 1 gives their ports PMD threads" if bare else ""),
        )


def _unserved(plan: TuningPlan) -> Iterator[Finding]:
    """NICs without a PMD thread on their node. For NICs that are named or bound to a DPDK driver, planning
    fails instead."""
    nodes = {share.node for share in plan.partition.nodes} - set(plan.partition.pmd_nodes)
    bare = [nic for nic in plan.nics if known(nic.node, None) in nodes]
    if bare:
        named = ", ".join(f"{nic.address} on NUMA node {known(nic.node, None)}" for nic in bare)
        yield Finding(
            id="nic-node",
            status="warn",
            found=f"no PMD thread on the node of the NIC {named}",
            expected="a PMD core on each node of a NIC that OVS has: it is polled from another one otherwise",
            fix="name the NICs that OVS has (nics), or plan more pmd_cores",
        )


# -- Check for missing hugepages and for cgroup memory limits below what the plan needs. ----------


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

"""Check that a plan has enough cores for its links, and that VMs are on the NUMA node of the NIC."""

from __future__ import annotations

import math
from collections.abc import Iterator

from netplugin.models import Finding
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.planning.plan import Plan
from netplugin.tuning.root import known

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
            id="queues", status="warn", found=f"{plan.intent.queues} receive queues a port for "
            f"{len(polling)} PMD threads on the NIC's node", expected="no more queues than PMD threads",
            fix="ask for fewer queues or more PMD cores",
        )  # fmt: skip


def _cores(plan: Plan) -> Iterator[Finding]:
    wanted = CORES_PER_10G * math.ceil(plan.intent.links * plan.intent.link_gbps / 10)
    vm = sum(len(share.vm) for share in plan.partition.nodes)
    for what, have in (("PMD", plan.intent.pmd_cores), ("VM", vm)):
        short = have < wanted
        yield Finding(
            id=f"budget-{what.lower()}", status="warn" if short else "ok",
            found=f"{have} whole {what} cores for {plan.intent.links} x {plan.intent.link_gbps:g} Gbit/s",
            expected=f"at least {wanted}: {CORES_PER_10G} whole cores for each 10 Gbit/s",
            fix=f"plan more {what} cores, or expect less than line rate" if short else None,
        )  # fmt: skip


def _places(scene: Scene, plan: Plan) -> Iterator[Finding]:
    if not any(known(nic.node, None) is not None for nic in plan.nics):
        if len(plan.partition.nodes) > 1:
            yield Finding(
                id="nic-node", status="warn", found="no NIC says which NUMA node it is on",
                expected="a NIC of a known node", fix="look into the firmware's settings, or name --nic",
            )  # fmt: skip
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
            id="vm-node", status="warn",
            found=f"VM cores on NUMA node {', '.join(map(str, away))}, NIC on node {where}{without}",
            expected="VMs with much traffic on the NIC's node",
            fix="ask for fewer VM cores, or keep those of the other node for VMs with little traffic"
            + ("; vm_pmd_cores = 1 gives their ports PMD threads" if bare else ""),
        )  # fmt: skip


def _unserved(plan: Plan) -> Iterator[Finding]:
    """NICs without a PMD thread on their node. For NICs that are named or bound to a DPDK driver, planning
    fails instead."""
    nodes = {share.node for share in plan.partition.nodes} - set(plan.partition.pmd_nodes)
    bare = [nic for nic in plan.nics if known(nic.node, None) in nodes]
    if bare:
        named = ", ".join(f"{nic.address} on NUMA node {known(nic.node, None)}" for nic in bare)
        yield Finding(
            id="nic-node", status="warn", found=f"no PMD thread on the node of the NIC {named}",
            expected="a PMD core on each node of a NIC that OVS has: it is polled from another one otherwise",
            fix="name the NICs that OVS has (nics), or plan more pmd_cores",
        )  # fmt: skip

"""Rules of one NUMA node: hugepages for those who use them there, PMD threads for its NICs and VMs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.scopes import Node
from netplugin.tuning.root import known


def hugepages(node: Node) -> Iterator[Finding]:
    """Of the plan; what nobody has a use for yet must also be free."""
    plan = node.pages
    if plan is None or not plan.pages or node.pools is None:
        return
    pool = next((pool for pool in node.pools if pool.size_kb == plan.size_kb), None)
    total = known(pool.total, 0) if pool else 0
    free = known(pool.free, total) if pool and node.idle else total
    found = f"NUMA node {node.number} has {total} pages of {plan.size_kb} KB"
    fix = "choose another size of pages: this node has none of this"
    if pool is not None:
        fix = f"echo {plan.pages} > {pool.path}; what cannot be had now, reserve at boot"
    if free < plan.pages <= total:
        found += f", of which {free} are free, while neither OVS nor a VM has them"
        fix = "look for files that hold them: grep huge /proc/mounts"
    yield fail(
        "hugepages",
        found,
        f"{plan.pages}: {plan.ovs_mb} MB for OVS, {plan.vm_mb} MB for VMs",
        fix if min(total, free) < plan.pages else None,
    )


def bare(node: Node) -> Iterator[Finding]:
    """Without a plan: none on this node for those that run on it."""
    users = (*node.ports, *node.domains)
    if node.pages is None and node.elsewhere and users and node.megabytes == 0:
        yield warn(
            "hugepages",
            f"no hugepages are reserved on NUMA node {node.number}, which has {some(users)}",
            "hugepages on each node with ports of OVS or VMs",
            "netplugin host plan says how many",
        )


def socket_memory(node: Node) -> Iterator[Finding]:
    """DPDK takes this much when OVS starts, or OVS does not start; 0 is none (vswitch.xml)."""
    asked, have = node.socket_mb, node.megabytes
    if asked is None or have is None:
        return
    if asked > have:
        yield fail(
            "socket-memory",
            f"dpdk-socket-mem has {asked} MB for NUMA node {node.number}, whose hugepages are {have} MB",
            "as much as there is in hugepages of the node",
            "netplugin host plan says how much; OVS takes it when it starts",
        )
    elif not asked and (users := (*node.ports, *(f"NIC {nic.address}" for nic in node.nics))):
        yield warn(
            "socket-memory",
            f"dpdk-socket-mem has nothing for NUMA node {node.number}, which has {some(users)}",
            "memory on each node with ports or NICs of OVS",
            "netplugin host plan says how much; OVS takes it when it starts",
        )


def vm_memory(node: Node) -> Iterator[Finding]:
    """VM cores without hugepages for VMs in the plan; no VM can be placed there. Whether a node has enough
    memory for a VM is not checked."""
    if node.vm_memory and node.share and node.share.vm and not (node.pages and node.pages.vm_mb):
        yield warn(
            "vm-memory",
            f"VM cores and no memory for VMs on NUMA node {node.number}",
            "memory for a VM on each node with VM cores",
            "plan more vm_memory_mb, a smaller vm_size_mb, or fewer vm_cores",
        )


def nics(node: Node) -> Iterator[Finding]:
    """For NICs that are named or bound to a DPDK driver, planning fails instead."""
    if node.nics and node.share and not node.share.pmd:
        named = ", ".join(f"{nic.address} on NUMA node {node.number}" for nic in node.nics)
        yield warn(
            "nic-node",
            f"no PMD thread on the node of the NIC {named}",
            "a PMD core on each node of a NIC that OVS has: it is polled from another one otherwise",
            "name the NICs that OVS has (nics), or plan more pmd_cores",
        )


def queues(node: Node) -> Iterator[Finding]:
    if node.served and node.queues > len(node.polling):
        yield warn(
            "queues",
            f"{node.queues} receive queues a port for {len(node.polling)} PMD threads on the NIC's node, "
            f"{node.number}",
            "no more queues than PMD threads",
            "ask for fewer queues or more PMD cores",
        )


def vms(node: Node) -> Iterator[Finding]:
    """VM cores where no NIC is, while NICs of the plan are elsewhere."""
    if not (node.near and node.share and node.share.vm) or node.number in node.near:
        return
    bare = not node.share.pmd
    without = f"; no PMD thread on node {node.number} for vhost-user ports of VMs there" if bare else ""
    where = ", ".join(map(str, node.near))
    yield warn(
        "vm-node",
        f"VM cores on NUMA node {node.number}, NIC on node {where}{without}",
        "VMs with much traffic on the NIC's node",
        "ask for fewer VM cores, or keep those of the other node for VMs with little traffic"
        + ("; vm_pmd_cores = 1 gives their ports PMD threads" if bare else ""),
    )

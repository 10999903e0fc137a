"""Rules of one NUMA node: hugepages for those who use them there, PMD threads for its NICs and VMs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.scopes import Node
from netplugin.tuning.planning.hugepages import LEAST_MBUFS, pools_mb
from netplugin.tuning.root import known

#: The smallest pool of buffers that OVS opens a port with, MB.
_LEAST_MB = pools_mb((1500,), LEAST_MBUFS)


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
    expected = f"{plan.pages}: {plan.ovs_mb} MB for OVS, {plan.vm_mb} MB for VMs"
    yield fail("hugepages", found, expected, fix if min(total, free) < plan.pages else None)


def _threads(node: Node) -> Iterator[str]:
    if node.threads:
        yield f"PMD threads on CPUs {format_list(node.threads)}"


def bare(node: Node) -> Iterator[Finding]:
    """Without a plan: none on this node for those that run on it."""
    users = (*node.ports, *_threads(node), *node.domains)
    if node.pages is None and node.elsewhere and users and node.megabytes == 0:
        found = f"no hugepages are reserved on NUMA node {node.number}, which has {some(users)}"
        fix = "netplugin host plan says how many"
        yield warn("hugepages", found, "hugepages on each node with ports of OVS or VMs", fix)


def socket_memory(node: Node) -> Iterator[Finding]:
    """OVS does not start with DPDK if it cannot have this much then. With 0 for a node (vswitch.xml), DPDK
    takes free pages there once a port needs some: 0 is no limit (hugepage_init_internal in DPDK's
    eal_common_dynmem.c), and OVS sets none (NEWS, v2.17.0)."""
    asked, have, fix = node.socket_mb, node.megabytes, "netplugin host plan says how much, for the next start"
    users = (*node.ports, *_threads(node), *(f"NIC {nic.address}" for nic in node.nics))
    if asked is not None and have is not None and asked > have:
        found = f"dpdk-socket-mem has {asked} MB for NUMA node {node.number}, whose hugepages are {have} MB"
        say = warn if node.runs else fail
        yield say("socket-memory", found, "as much as there is in hugepages of the node", fix)
    elif asked == 0 and users and node.free_mb < _LEAST_MB:
        found = f"dpdk-socket-mem has nothing for NUMA node {node.number}, which has {some(users)}"
        found += f", and DPDK can take {node.free_mb} MB there later"
        yield warn("socket-memory", found, "memory on each node with ports or NICs of OVS", fix)


def vm_memory(node: Node) -> Iterator[Finding]:
    """VM cores without hugepages for VMs in the plan; no VM can be placed there. Whether a node has enough
    memory for a VM is not checked."""
    desired = node.intent is not None and node.intent.vm_memory_mb > 0
    if desired and node.share and node.share.vm and not (node.pages and node.pages.vm_mb):
        found = f"VM cores and no memory for VMs on NUMA node {node.number}"
        fix = "plan more vm_memory_mb, a smaller vm_size_mb, or fewer vm_cores"
        yield warn("vm-memory", found, "memory for a VM on each node with VM cores", fix)


def nics(node: Node) -> Iterator[Finding]:
    """For NICs that are named or bound to a DPDK driver, planning fails instead."""
    if node.nics and node.share and not node.share.pmd:
        named = ", ".join(f"{nic.address} on NUMA node {node.number}" for nic in node.nics)
        expected = "a PMD core on each node of a NIC that OVS has: it is polled from another one otherwise"
        fix = "name the NICs that OVS has (nics), or plan more pmd_cores"
        yield warn("nic-node", f"no PMD thread on the node of the NIC {named}", expected, fix)


def queues(node: Node) -> Iterator[Finding]:
    if node.number in node.near and node.intent and node.intent.queues > len(node.polling):
        threads = f"{len(node.polling)} PMD threads on the NIC's node, {node.number}"
        found = f"{node.intent.queues} receive queues a port for {threads}"
        fix = "ask for fewer queues or more PMD cores"
        yield warn("queues", found, "no more queues than PMD threads", fix)


def vms(node: Node) -> Iterator[Finding]:
    """VM cores where no NIC is, while NICs of the plan are elsewhere."""
    if not (node.near and node.share and node.share.vm) or node.number in node.near:
        return
    found = f"VM cores on NUMA node {node.number}, NIC on node {', '.join(map(str, node.near))}"
    fix = "ask for fewer VM cores, or keep those of the other node for VMs with little traffic"
    if not node.share.pmd:
        found += f"; no PMD thread on node {node.number} for vhost-user ports of VMs there"
        fix += "; vm_pmd_cores = 1 gives their ports PMD threads"
    yield warn("vm-node", found, "VMs with much traffic on the NIC's node", fix)

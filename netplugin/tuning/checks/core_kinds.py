"""Check that PMD threads are on performance cores, and NICs on nodes where DPDK has memory (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.pmd.settings import MASK, masked
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import EFFICIENCY, PERFORMANCE, Cpus
from netplugin.tuning.planning.partition import cpus_of
from netplugin.tuning.root import known


def core_kinds(scene: Scene) -> Iterator[Finding]:
    """Bind the rules below to the PMD threads of a host (running, or in pmd-cpu-mask), and to its NICs."""
    cores = known(scene.facts.cpus.cores, ())
    ovs = known(scene.live.ovs, None)
    threads = scene.running_pmds
    if ovs is not None and ovs.dpdk_initialized:
        threads |= frozenset(masked(ovs.other_config.get(MASK)))
    for core in cores:
        alike = cpus_of(c for c in cores if c.node == core.node and c.kind == PERFORMANCE)
        for cpu in sorted(core.cpus & threads):
            yield from slow_core(cpu, core.kind, cpu in scene.running_pmds, alike)
    if scene.plan and scene.plan.intent.pmd_cores:
        for nic in scene.plan.nics:
            yield from nic_memory(nic.address, known(nic.node, None), scene.plan.nic_nodes)


def slow_core(cpu: int, kind: str, running: bool, fast: Cpus) -> Iterator[Finding]:
    """The finding for one PMD thread; ``fast`` are the CPUs of performance cores on its node."""
    if kind == EFFICIENCY:
        what = "a PMD thread runs" if running else "pmd-cpu-mask has a PMD thread"
        yield Finding(
            id="pmd-efficiency",
            status="warn",
            found=f"{what} on CPU {cpu}, which is on an efficiency core",
            expected="PMD threads on performance cores",
            fix=f"put it on one of the CPUs {format_list(fast)}: netplugin host plan has a mask"
            if fast
            else "its node has no performance core on line: expect fewer packets, or take CPUs on line",
        )


def nic_memory(address: str, node: int | None, served: tuple[int, ...]) -> Iterator[Finding]:
    """The finding for one NIC on a node that can have no PMD threads; ``served`` are the nodes whose threads
    poll the NICs. DPDK has no memory there, and OVS takes a port's buffers from no other node: see
    ``netplugin.tuning.planning.hugepages``. It takes the node from the file ``numa_node``, which root may
    write (numa_node_store in drivers/pci/pci-sysfs.c)."""
    if node is not None and node not in served:
        yield Finding(
            id="nic-memory",
            status="warn",
            found=f"{address} is on NUMA node {node}, which has no CPUs or too little memory for DPDK, or a "
            "number that DPDK does not have: OVS opens no port there",
            expected=f"NICs of OVS on a node with CPUs and memory, such as {format_list(served)}",
            fix=f"move it or memory to another slot, or echo {served[0]} > "
            f"/sys/bus/pci/devices/{address}/numa_node before OVS starts, at each boot",
        )
